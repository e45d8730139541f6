"""The shape of a sweep: one row a run, its settings, what was measured before its first update, and how it ended.

A sweep without the outcomes is a set of *cases*: what is known before training starts, and all that a risk model sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import SchemaError
from workbench.schema.runs import SPECTRA, Variable

if TYPE_CHECKING:
    from collections.abc import Iterable

    import xarray as xr

SWEEP_VERSION = 1

_RUN = ("run",)


def _number(long_name: str, meaning: str, units: str = "1", kind: str = "f") -> Variable:
    return Variable(_RUN, kind, long_name, units, meaning)


def _text(long_name: str, meaning: str) -> Variable:
    return Variable(_RUN, "U", long_name, "", meaning)


#: Known from the settings alone; coordinates.
SETTINGS: dict[str, Variable] = {
    "study": _text("study", "label given by the designer; empty: none"),
    "architecture": _text("architecture", "what the designer calls the model"),
    "configuration": _text("configuration", "stands for the model without its seed; empty: not part of a design"),
    "cell": _text("cell", "stands for all settings but learning rate and seed; empty: not part of a design"),
    "family": _text("family", "of the zoo; empty: a model from elsewhere"),
    "norm": _text("norm", "of the zoo; empty: a model from elsewhere"),
    "initialization": _text("initialization", "of the zoo; empty: a model from elsewhere"),
    "init_std": _number("init scale", "standard deviation of the initial weights; NaN: not known"),
    "d_model": _number("width", "of the residual stream", kind="i"),
    "n_layers": _number("layers", "blocks of the residual stream", kind="i"),
    "n_weights": _number("weights", "numbers in the model", kind="i"),
    "task": _text("task", "what is learned"),
    "batch_size": _number("batch size", "rows of a batch", "row", kind="i"),
    "n_tokens": _number("tokens of a batch", "targets of a batch, those left out included", "token", kind="i"),
    "learning_rate": _number("learning rate", "peak rate"),
    "warmup": _number("warm-up", "steps in which the rate rises", "step", kind="i"),
    "schedule": _text("schedule", "what follows the warm-up"),
    "mean_rate_share": _number("mean share of the rate", "mean over the steps of the rate over its peak"),
    "optimizer": _text("optimizer", "name of its class; empty: not known"),
    "momentum": _number("momentum", "of SGD or RMSprop, beta1 of Adam; 0: none"),
    "weight_decay": _number("weight decay", "of the optimizer; 0: none"),
    "clip_norm": _number("clip norm", "largest norm of all gradients together; NaN: no clipping"),
    "n_steps": _number("steps", "planned updates", "step", kind="i"),
    "seed": _number("seed", "of weights, data and training", kind="i"),
    "settings": _text("settings", "everything that decides the run, as JSON"),
}

_OF_SPECTRA = (
    "near_unit_mass", "expansive_mass", "contractive_mass", "intermediate_mass", "spectral_radius",
    "eigenvector_condition", "nonlinearity_ratio", "kreiss_constant", "rank", "energy_gain", "update_norm",
    "is_informative",
)  # fmt: skip

#: Measured on the fresh model. The spectra's numbers are floats here, as NaN stands for a layer that a run lacks.
MEASURES: dict[str, Variable] = {
    "eigenvalue": Variable(("run", "layer", "mode"), "c", "eigenvalue", "1", SPECTRA["eigenvalue"].meaning),
    **{
        name: Variable(("run", "layer"), "f", SPECTRA[name].long_name, SPECTRA[name].units, SPECTRA[name].meaning)
        for name in _OF_SPECTRA
    },
    "initial_loss": _number("initial loss", "of the first batch", "nat"),
    "initial_accuracy": _number("initial accuracy", "on the first batch; NaN: means nothing"),
    "logit_std": _number("spread of the logits", "standard deviation over classes, mean over tokens"),
    "scale_response": _number(
        "scale response", "powers of two by which the logits spread as the stream entering the first block doubles"
    ),
    "stream_rms_first": _number("stream RMS, first", "of the states that enter the first block"),
    "stream_rms_last": _number("stream RMS, last", "of the states that leave the last block"),
    "initial_grad_norm": _number("initial gradient norm", "of all gradients together; NaN: not measured"),
    "overshoot_rate": _number(
        "overshoot rate", "rate at which the first update alone makes its batch's loss rise; inf: none; NaN: unknown"
    ),
    "breaking_rate": _number(
        "breaking rate", "rate at which the first update alone counts as divergence; inf: none; NaN: unknown"
    ),
    "unit_change_rate": _number(
        "unit-change rate", "rate at which the first update alone changes the logits by 1 nat; inf: none; NaN: unknown"
    ),
    "rehearsed_rate": _number(
        "rehearsed rate", "constant rate at which a copy diverges within ten updates; inf: none; NaN: not rehearsed"
    ),
}

#: Results of training. The first three are predictors of RKSP Table 2 that need some of it.
OUTCOMES: dict[str, Variable] = {
    "grad_norm_step_100": _number("gradient norm at step 100", "or at the last step of a shorter run"),
    "grad_norm_variance": _number("gradient variance", "variance of the gradient norm over steps 1 to 100, or fewer"),
    "n_loss_spikes": _number(
        "loss spikes", "steps among the first 500 whose loss stands out of those before", kind="i"
    ),
    "has_diverged": _number("diverged", "loss above 50, gradient norm above 500, or not finite", "", kind="b"),
    "cause": _text("cause", "of the divergence: loss, grad_norm, non-finite; empty: none"),
    "divergence_step": _number("step of the divergence", "updates before it; NaN: none", "step"),
    "final_loss": _number("final loss", "of the last batch; NaN: not finite", "nat"),
    "accuracy": _number("accuracy", "mean over the last eighth of the steps; NaN: diverged, or means nothing"),
    "seconds": _number("duration", "of the run; differs from making to making", "s"),
}

#: Updates in a window of the training loss.
LOSS_WINDOW = 10
#: Losses along the updates of a run.
CURVES: dict[str, Variable] = {
    "training_loss": Variable(
        ("run", "window"),
        "f",
        "training loss",
        "nat",
        "mean over each window of 10 updates; inf: not finite; NaN: after the end",
    ),
    "held_out_loss": Variable(
        ("run", "evaluation"),
        "f",
        "held-out loss",
        "nat",
        "on the same held-out batch each time; inf: not finite; NaN: after the end",
    ),
    "trivial_loss": _number("trivial loss", "of the predictor that knows the frequencies of the targets alone", "nat"),
    "evaluation_step": Variable(
        ("run", "evaluation"), "f", "step of the evaluation", "step", "updates before it; NaN: after the end"
    ),
}


def dtype_of(name: str, kind: str) -> type:
    """The encoding of a variable of a sweep: settings in full precision, measures in single."""
    if kind == "f" and name in SETTINGS:
        return np.float64
    return {"f": np.float32, "c": np.complex64, "i": np.int64, "b": np.bool_, "U": np.str_}[kind]


def require(data: xr.Dataset, names: Iterable[str]) -> None:
    """Refuse a dataset that lacks what is about to be used.

    Raises:
        SchemaError: If the dimension ``run`` or one of the variables is missing, or there is no run.
    """
    missing = [name for name in names if name not in data.variables]
    if missing or "run" not in data.dims:
        lacks = ", ".join(missing[:3]) or "the dimension run"
        raise SchemaError(f"The dataset is no sweep: it lacks {lacks}; take one from wb.open_sweep or wb.sweeps.run.")
    if not data.sizes["run"]:
        raise SchemaError("The sweep has no run; select less narrowly.")
