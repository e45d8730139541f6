"""Variables of a sweep: for each run, its settings, the measurements before its first update, and its outcome.

A sweep without outcomes is a set of *cases*: the information available before training, on which risk models are based.
"""

from __future__ import annotations

import numpy as np

from workbench.schema.runs import SPECTRA, Variable

SWEEP_VERSION = 1

_RUN = ("run",)


def _number(long_name: str, meaning: str, units: str = "1", kind: str = "f") -> Variable:
    return Variable(_RUN, kind, long_name, units, meaning)


def _text(long_name: str, meaning: str) -> Variable:
    return Variable(_RUN, "U", long_name, "", meaning)


#: Settings, stored as coordinates.
SETTINGS: dict[str, Variable] = {
    "study": _text("study", "label of the study; empty if there is none"),
    "architecture": _text("architecture", "label of the model"),
    "configuration": _text("configuration", "identifies the model without its seed; empty if not part of a design"),
    "cell": _text("cell", "identifies all settings except learning rate and seed; empty if not part of a design"),
    "family": _text("family", "family of the zoo; empty for other models"),
    "norm": _text("norm", "normalization of the zoo; empty for other models"),
    "initialization": _text("initialization", "initialization of the zoo; empty for other models"),
    "init_std": _number("init scale", "standard deviation of the initial weights; NaN if unknown"),
    "d_model": _number("width", "width of the residual stream", kind="i"),
    "n_layers": _number("layers", "number of blocks", kind="i"),
    "n_weights": _number("parameters", "number of parameter values", kind="i"),
    "task": _text("task", "name of the task"),
    "batch_size": _number("batch size", "examples of a batch", "example", kind="i"),
    "n_tokens": _number("tokens per batch", "targets of a batch, including ignored ones", "token", kind="i"),
    "learning_rate": _number("learning rate", "peak rate"),
    "warmup": _number("warm-up", "steps in which the rate increases", "step", kind="i"),
    "schedule": _text("schedule", "schedule of the rate after the warm-up"),
    "mean_rate_share": _number("mean relative rate", "mean over the steps of the rate over its peak"),
    "optimizer": _text("optimizer", "name of its class; empty if unknown"),
    "momentum": _number("momentum", "of SGD or RMSprop, beta1 of Adam; 0 if there is none"),
    "weight_decay": _number("weight decay", "of the optimizer; 0 if there is none"),
    "clip_norm": _number("clip norm", "largest norm of all gradients together; NaN without clipping"),
    "n_steps": _number("steps", "planned updates", "step", kind="i"),
    "seed": _number("seed", "of parameters, data and training", kind="i"),
    "settings": _text("settings", "all settings that determine the run, as JSON"),
}

_OF_SPECTRA = (
    "near_unit_mass", "expansive_mass", "contractive_mass", "intermediate_mass", "spectral_radius",
    "eigenvector_condition", "nonlinearity_ratio", "kreiss_constant", "rank", "energy_gain", "update_norm",
    "is_informative",
)  # fmt: skip

#: Measurements of the model at initialization. All are floats, as NaN marks layers that a run does not have.
MEASURES: dict[str, Variable] = {
    "eigenvalue": Variable(("run", "layer", "mode"), "c", "eigenvalue", "1", SPECTRA["eigenvalue"].meaning),
    **{
        name: Variable(("run", "layer"), "f", SPECTRA[name].long_name, SPECTRA[name].units, SPECTRA[name].meaning)
        for name in _OF_SPECTRA
    },
    "initial_loss": _number("initial loss", "of the first batch", "nat"),
    "initial_accuracy": _number("initial accuracy", "on the first batch; NaN if not defined"),
    "logit_std": _number("logit standard deviation", "standard deviation over classes, mean over tokens"),
    "scale_response": _number(
        "scale response", "log2 of the factor of the logit scale when the stream entering the first block doubles"
    ),
    "stream_rms_first": _number("stream RMS, first block", "of the states that enter the first block"),
    "stream_rms_last": _number("stream RMS, last block", "of the states that leave the last block"),
    "initial_grad_norm": _number("initial gradient norm", "of all gradients together; NaN if not measured"),
    "overshoot_rate": _number(
        "overshoot rate",
        "rate at which the first update increases the loss of its batch; inf if there is none, NaN if unknown",
    ),
    "breaking_rate": _number(
        "one-update divergence rate", "rate at which the first update diverges; inf if there is none, NaN if unknown"
    ),
    "unit_change_rate": _number(
        "unit-change rate",
        "rate at which the first update changes the logits by 1 nat; inf if there is none, NaN if unknown",
    ),
    "rehearsed_rate": _number(
        "ten-update divergence rate",
        "constant rate at which a copy diverges within ten updates; inf if there is none, NaN if not tried",
    ),
}

#: Results of training. The first three are predictors of RKSP Table 2 that need a part of the run.
OUTCOMES: dict[str, Variable] = {
    "grad_norm_step_100": _number("gradient norm at step 100", "or at the last step of a shorter run"),
    "grad_norm_variance": _number(
        "gradient norm variance", "variance of the gradient norm over steps 1 to 100, or fewer"
    ),
    "n_loss_spikes": _number(
        "loss spikes", "steps among the first 500 whose loss is an outlier among the previous ones", kind="i"
    ),
    "has_diverged": _number("diverged", "loss above 50, gradient norm above 500, or not finite", "", kind="b"),
    "cause": _text("cause", "of the divergence: loss, grad_norm, non-finite; empty if there is none"),
    "divergence_step": _number("divergence step", "updates before the divergence; NaN if there is none", "step"),
    "final_loss": _number("final loss", "of the last batch; NaN if not finite", "nat"),
    "accuracy": _number("accuracy", "mean over the last eighth of the steps; NaN if diverged or not defined"),
    "seconds": _number("duration", "of the run; not reproducible", "s"),
}

#: Updates in a window of the training loss.
LOSS_WINDOW = 10
#: Losses over the updates of a run.
CURVES: dict[str, Variable] = {
    "training_loss": Variable(
        ("run", "window"),
        "f",
        "training loss",
        "nat",
        "mean over each window of 10 updates; inf if not finite, NaN after the end",
    ),
    "held_out_loss": Variable(
        ("run", "evaluation"),
        "f",
        "held-out loss",
        "nat",
        "on the same held-out batch each time; inf if not finite, NaN after the end",
    ),
    "trivial_loss": _number("trivial loss", "of the predictor that knows the frequencies of the targets alone", "nat"),
    "evaluation_step": Variable(
        ("run", "evaluation"), "f", "evaluation step", "step", "updates before the evaluation; NaN after the end"
    ),
}


def dtype_of(name: str, kind: str) -> type:
    """Return the type in which a variable of a sweep is stored: settings in double precision, measures in single."""
    if kind == "f" and name in SETTINGS:
        return np.float64
    return {"f": np.float32, "c": np.complex64, "i": np.int64, "b": np.bool_, "U": np.str_}[kind]
