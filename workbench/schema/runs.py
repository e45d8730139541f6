"""The shape of the data: every dimension, coordinate, variable and unit, and the check that a dataset follows it.

Saved files and users' notebooks depend on these names. Adding a variable keeps ``SCHEMA_VERSION``; renaming or
redefining one raises it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import SchemaError

if TYPE_CHECKING:
    import xarray as xr

SCHEMA_VERSION = 1

#: Dimensions along which whole spectra datasets may be concatenated.
CONCAT_DIMS = ("step", "run", "architecture")


@dataclass(frozen=True)
class Variable:
    """One variable of a schema.

    Attributes:
        dims: Dimensions it always has; concatenation dimensions may come before them.
        kind: NumPy kinds allowed: ``f`` float, ``c`` complex, ``b`` bool, ``i`` integer, ``U`` and ``T`` text.
        long_name: Label of the axis of a plot.
        units: ``"1"`` for dimensionless.
        meaning: One line for people.

    Example:
        >>> import workbench as wb
        >>> variable = wb.schema.MONITORS["loss"]
        >>> variable.dims, variable.units
        (('step',), 'nat')
    """

    dims: tuple[str, ...]
    kind: str
    long_name: str
    units: str
    meaning: str

    @property
    def attrs(self) -> dict[str, str]:
        """The attributes of an array of this variable."""
        return {"long_name": self.long_name, "units": self.units, "meaning": self.meaning}


SPECTRA: dict[str, Variable] = {
    "eigenvalue": Variable(
        ("layer", "mode"),
        "c",
        "eigenvalue",
        "1",
        "Koopman eigenvalue, sorted by falling modulus; NaN: no such mode",
    ),
    "residual": Variable(("layer", "mode"), "f", "residual r_j", "1", "residual of the mode on the snapshots"),
    "is_reliable": Variable(("layer", "mode"), "b", "reliable", "1", "residual at most the threshold"),
    "near_unit_mass": Variable(("layer",), "f", "near-unit mass M", "1", "fraction of modes near the unit circle"),
    "expansive_mass": Variable(("layer",), "f", "expansive mass", "1", "fraction of modes clearly outside the circle"),
    "contractive_mass": Variable(("layer",), "f", "contractive mass", "1", "fraction of modes well inside the circle"),
    "intermediate_mass": Variable(("layer",), "f", "intermediate mass", "1", "fraction of the remaining modes"),
    "spectral_radius": Variable(("layer",), "f", "spectral radius", "1", "largest modulus"),
    "eigenvector_condition": Variable(
        ("layer",),
        "f",
        "eigenvector condition",
        "1",
        "kappa(V) of the unit right eigenvectors; inf: defective",
    ),
    "nonlinearity_ratio": Variable(
        ("layer",), "f", "nonlinearity ratio", "1", "share of the whitened update that no linear map explains"
    ),
    "kreiss_constant": Variable(
        ("layer",),
        "f",
        "Kreiss constant",
        "1",
        "lower bound of K(A); inf where the spectral radius exceeds 1",
    ),
    "rank": Variable(("layer",), "i", "rank", "1", "modes used: numerical rank of the state covariance"),
    "energy_gain": Variable(("layer",), "f", "energy gain", "1", "E|Yw|^2 / E|Xw|^2 in the span of the states"),
    "update_norm": Variable(("layer",), "f", "update norm", "1", "|Yw - Xw|_F / sqrt(N m) in the span of the states"),
    "is_informative": Variable(("layer",), "b", "informative", "1", "update large enough to say anything"),
    "covariance_condition": Variable(
        ("layer",), "f", "covariance condition", "1", "largest over smallest covariance eigenvalue used"
    ),
    "significant_digits": Variable(
        ("layer",),
        "f",
        "significant digits",
        "1",
        "digits of lambda / rho that survive float64 moments",
    ),
}

#: Present only where layers were measured on different numbers of states, because depth depends on the data.
SPECTRA_COUNTS: dict[str, Variable] = {
    "layer_snapshots": Variable(("layer",), "i", "snapshots of the layer", "1", "token states that reached the layer"),
}

MONITORS: dict[str, Variable] = {
    "loss": Variable(("step",), "f", "loss", "nat", "loss of the step's batch, without auxiliary terms"),
    "auxiliary_loss": Variable(
        ("step",), "f", "auxiliary loss", "nat", "weighted auxiliary terms; NaN: there are none"
    ),
    "accuracy": Variable(("step",), "f", "accuracy", "1", "share of the batch's targets that were most likely"),
    "grad_norm": Variable(("step",), "f", "gradient norm", "1", "norm of all gradients together, before clipping"),
    "learning_rate": Variable(("step",), "f", "learning rate", "1", "largest rate of the optimizer's groups"),
    "batch_size": Variable(("step",), "f", "batch size", "row", "rows that the model was trained on in this update"),
    "n_tokens": Variable(
        ("step",), "f", "tokens", "token", "tokens of the batch, padding left out; NaN: its rows are no sequences"
    ),
    "token_entropy": Variable(
        ("step",), "f", "entropy of the tokens", "nat", "of the distribution of the batch's token ids; NaN: no ids"
    ),
    "label_entropy": Variable(
        ("step",), "f", "entropy of the labels", "nat", "of the distribution of the batch's labels; NaN: not seen"
    ),
    "label_agreement": Variable(
        ("step",), "f", "agreement of the labels", "1", "share of labels that are tokens of their inputs; NaN: not seen"
    ),
    "largest_losses": Variable(
        ("step",), "f", "largest token losses", "nat", "mean of the largest eighth of the token losses; NaN: not seen"
    ),
    "repeated_examples": Variable(
        ("step",), "f", "repeated examples", "1", "share of the batch's examples that were there in recent batches"
    ),
    "update_ratio": Variable(
        ("step",), "f", "update ratio", "1", "RMS(dw) / RMS(w) of this update, over a fixed sample of all weights"
    ),
    "spike_score": Variable(
        ("step",), "f", "spike score", "1", "share of losses so far far from the last 1,000; NaN: too few to judge"
    ),
    "kss_enabled": Variable(("step",), "b", "KSS on", "1", "whether Koopman Spectral Shaping was switched on"),
    "kss_strength": Variable(("step",), "f", "KSS strength", "1", "weight of the spectral penalty"),
    "kss_interval": Variable(("step",), "i", "KSS interval", "step", "steps between two applications of the penalty"),
    "kss_gamma": Variable(("step",), "f", "KSS target", "1", "near-unit mass that the penalty aims at"),
    "kss_penalty": Variable(("step",), "f", "KSS penalty", "1", "mean over the layers looked at; NaN: none were"),
    "kss_spectral_radius": Variable(
        ("step",), "f", "spectral radius under KSS", "1", "largest over the layers that KSS looked at; NaN: none"
    ),
    "kss_near_unit_mass": Variable(
        ("step",), "f", "near-unit mass under KSS", "1", "mean over the layers that KSS looked at; NaN: none"
    ),
    "kss_acting": Variable(("step",), "i", "layers shaped", "1", "layers whose penalty reached the weights"),
    "kss_update_size": Variable(
        ("step",), "f", "update size", "1", "share of the optimizer's own update; below 1 in a trust region"
    ),
    "kss_skipped": Variable(("step",), "i", "layers left out", "1", "layers that were due but gave no usable gradient"),
}

_SPECTRUM = ("step", "layer", "head", "term")
_HEAD = ("step", "layer", "head")
_LAYER = ("step", "layer")
_MODULE = ("step", "module")

#: Per head, of W = Wq Wk' and of its change over the part's cadence: "D2", "D3", "dWq", "dWk" and "W".
ATTENTION: dict[str, Variable] = {
    "frobenius_norm": Variable(
        _SPECTRUM, "f", "Frobenius norm", "1", "of the matrix; NaN: weights unreadable or not finite, or no such head"
    ),
    "stable_rank": Variable(
        _SPECTRUM, "f", "stable rank", "1", "|M|_F^2 / |M|_2^2; NaN: no such matrix, or it is zero"
    ),
    "effective_rank": Variable(
        _SPECTRUM, "f", "effective rank", "1", "exp of the spectral entropy; NaN: no such matrix, or it is zero"
    ),
    "spectral_entropy": Variable(
        _SPECTRUM, "f", "spectral entropy", "nat", "of s^alpha / sum s^alpha; NaN: no such matrix, or it is zero"
    ),
    "attention_logit_max": Variable(
        _HEAD, "f", "largest attention logit", "1", "over the probe tokens; NaN: scores that cannot be seen"
    ),
    "attention_entropy": Variable(
        _HEAD, "f", "attention entropy", "nat", "mean over the probe tokens; NaN: scores that cannot be seen"
    ),
    "attention_entropy_share": Variable(
        _HEAD,
        "f",
        "attention entropy share",
        "1",
        "entropy over log(visible), mean over tokens that see several",
    ),
}

ROUTER: dict[str, Variable] = {
    "router_similarity": Variable(
        _LAYER, "f", "router similarity", "1", "mean cosine of the rows of two experts; NaN: one expert"
    ),
    "router_conditioning": Variable(
        _LAYER, "f", "router conditioning", "1", "largest distance of a row from the mean row, over its norm"
    ),
    "routing_entropy": Variable(
        _LAYER, "f", "routing entropy", "nat", "of the full softmax, mean over the probe tokens; NaN: logits not seen"
    ),
    "routing_entropy_share": Variable(
        _LAYER, "f", "routing entropy share", "1", "over log(experts); NaN: one expert, or logits not seen"
    ),
    "max_violation": Variable(
        _LAYER, "f", "MaxVio", "1", "(largest - mean) / mean of the load on the probe; NaN: choices not seen"
    ),
    "dead_experts": Variable(
        _LAYER, "f", "dead experts", "1", "experts that no probe token goes to; NaN: choices not seen"
    ),
    "routing_change": Variable(
        _LAYER, "f", "routing change", "1", "share of the probe's choices that are new since the last look; NaN: first"
    ),
    "expert_load": Variable(
        ("step", "layer", "expert"), "f", "expert load", "1", "share of the probe's choices; NaN: no such expert"
    ),
}

#: Per module: each block, then "outside", which holds all other weights.
OPTIMIZER: dict[str, Variable] = {
    "module_grad_norm": Variable(
        _MODULE, "f", "gradient norm", "1", "of the module's gradients as the optimizer gets them; NaN: it has none"
    ),
    "module_weight_norm": Variable(_MODULE, "f", "weight norm", "1", "of the module's weights before the update"),
    "update_ratio": Variable(_MODULE, "f", "update ratio", "1", "RMS(dw) / RMS(w) of this one update; NaN: no weights"),
    "unchanged_share": Variable(
        _MODULE,
        "f",
        "share of unchanged weights",
        "1",
        "of the weights whose gradient is not 0, those that this update left as they were; NaN: none, or a rate of 0",
    ),
    "adam_staleness": Variable(
        _MODULE, "f", "Adam staleness", "1", "sqrt(mean g^2 / max(v, eps^2)); NaN: the optimizer keeps no second moment"
    ),
    "gradient_rms": Variable(_MODULE, "f", "gradient RMS", "1", "root mean square of the module's gradients"),
    "gradient_rms_over_eps": Variable(
        _MODULE, "f", "gradient RMS over eps", "1", "NaN: the optimizer keeps no second moment"
    ),
    "gradient_signal_share": Variable(
        _MODULE,
        "f",
        "signal share of the gradient",
        "1",
        "of the mean squared gradient, common to successive batches; NaN: the optimizer keeps no two moments",
    ),
}

#: Variables of the residual stream that leaves each block, on the probe.
ACTIVATIONS: dict[str, Variable] = {
    "activation_max": Variable(_LAYER, "f", "largest activation", "1", "largest magnitude; NaN: not finite"),
    "outlier_ratio": Variable(_LAYER, "f", "outlier ratio", "1", "largest over median magnitude; NaN: not finite"),
    "kurtosis": Variable(_LAYER, "f", "kurtosis", "1", "of all entries, 3 for a normal distribution; NaN: not finite"),
    "state_norm": Variable(_LAYER, "f", "state norm", "1", "mean over tokens; NaN: not finite"),
    "log_z": Variable(
        ("step",), "f", "log Z", "nat", "rms over tokens of log sum exp of the output logits; NaN: there are none"
    ),
}

CURVATURE: dict[str, Variable] = {
    "sharpness": Variable(
        ("step",), "f", "sharpness", "1", "largest eigenvalue of the loss's Hessian on the probe; NaN: not found"
    ),
    "sharpness_rate": Variable(
        ("step",), "f", "sharpness times rate", "1", "largest eigenvalue times learning rate; plain descent breaks at 2"
    ),
    "preconditioned_sharpness": Variable(
        ("step",), "f", "preconditioned sharpness", "1", "of the Hessian as Adam scales it; NaN: no second moment kept"
    ),
    "preconditioned_sharpness_rate": Variable(
        ("step",), "f", "preconditioned sharpness times rate", "1", "Adam at beta1 = .9 breaks at 38; NaN as before"
    ),
}

#: Errors of the run's own arithmetic, see `workbench.probes.precision_errors`.
PRECISION: dict[str, Variable] = {
    "output_error": Variable(_LAYER, "f", "error of the output", "1", "relative error of the block's output"),
    "gradient_error": Variable(
        _LAYER, "f", "error of the gradient", "1", "relative error of the gradient of all of the block's parameters"
    ),
    "error_excess": Variable(
        _LAYER, "f", "excess of error", "1", "largest error of output or a gradient over what rounding explains"
    ),
    "query_gradient_error": Variable(
        _HEAD, "f", "error of the query gradient", "1", "relative error of the gradient of a head's query weights"
    ),
    "query_error_excess": Variable(
        _HEAD, "f", "excess of error of the query gradient", "1", "its error over what rounding explains"
    ),
    "query_gradient_bias": Variable(
        _HEAD, "f", "bias of the query gradient", "1", "part of its error along the right gradient, over its length"
    ),
    "excess_limit": Variable(
        ("step",), "f", "limit of the excess", "1", "excess that rounding does not reach in the run's number format"
    ),
    "broken_rank": Variable(
        ("step",), "f", "broken rank", "1", "first rank that computes wrongly while others do not; NaN: all, or none"
    ),
}

#: Whether the optimizer gets the gradients that were computed, see `workbench.probes.compare_gradients`.
REDUCTION: dict[str, Variable] = {
    "gradient_verdict": Variable(
        ("step",), "f", "verdict on the gradients", "1", "severity of the `GradientVerdict`; -1: not measured"
    ),
    "wrong_parameters": Variable(
        ("step",), "f", "wrong parameters", "1", "share of the parameters that get other gradients; NaN: not measured"
    ),
    "significant_bits": Variable(
        ("step",), "f", "significant bits", "1", "of gradients that arrive in low precision; NaN: they do not"
    ),
    "missing_rank": Variable(("step",), "f", "missing rank", "1", "first rank whose gradients are missing; NaN: none"),
    "missing_pass": Variable(
        ("step",), "f", "missing pass", "1", "first backward pass of the step whose gradients are missing; NaN: none"
    ),
    "receiving_rank": Variable(
        ("step",), "f", "receiving rank", "1", "first rank whose optimizer gets wrong ones; NaN: all, or none"
    ),
}

#: The effect of one update on the loss of fixed examples, see `workbench.probes.update_effect`.
UPDATE: dict[str, Variable] = {
    "loss_change": Variable(("step",), "f", "change of the loss", "nat", "on fixed examples, by this one update"),
    "predicted_loss_change": Variable(
        ("step",), "f", "predicted change of the loss", "nat", "gradient on these examples times the change of weights"
    ),
}

#: What the alarms make of the watched signals, every 10 updates and at each alarm; see `workbench.Alarms`.
EVIDENCE: dict[str, Variable] = {
    "evidence": Variable(
        ("step", "signal"),
        "f",
        "evidence of a change over that of an alarm",
        "1",
        "largest since the last row, 1: an alarm; inf: not finite any more; NaN: not measured, or not judged yet",
    ),
}

#: Parts of a run besides the scalars of each update; each part has its own steps. Alarms write the last one.
PARTS: dict[str, dict[str, Variable]] = {
    "attention": ATTENTION,
    "router": ROUTER,
    "optimizer": OPTIMIZER,
    "activations": ACTIVATIONS,
    "curvature": CURVATURE,
    "precision": PRECISION,
    "reduction": REDUCTION,
    "update": UPDATE,
    "evidence": EVIDENCE,
}

EVENTS: dict[str, Variable] = {
    "step": Variable(("event",), "i", "step", "1", "updates before the event"),
    "kind": Variable(
        ("event",),
        "UT",
        "kind",
        "",
        "what happened: divergence, started, finished, stopped, resumed, no spectra, kss, fault, setting, alarm, "
        "attribution, action, not recorded, not finite, gap",
    ),
    "source": Variable(("event",), "UT", "source", "", "what showed it: loss, grad_norm, non-finite; or empty"),
    "score": Variable(("event",), "f", "score", "1", "value that showed it; NaN: none"),
    "message": Variable(("event",), "UT", "message", "", "one sentence for people"),
}

#: Place of an event; stores of older versions lack it.
EVENT_PLACES: dict[str, Variable] = {
    "layer": Variable(("event",), "i", "layer", "1", "block that it is about; -1: none in particular"),
    "head": Variable(("event",), "i", "head", "1", "attention head that it is about; -1: none in particular"),
}

_INTEGER = (int, np.integer)
_FLOAT = (float, np.floating)
_KIND_WORDS = {str: "text", _INTEGER: "an integer", _FLOAT: "a floating-point number"}

#: Attributes that every spectra dataset carries, with the Python types they may have.
SPECTRA_ATTRS: dict[str, type | tuple[type, ...]] = {
    "schema_version": _INTEGER,
    "subject": str,
    "n_snapshots": _INTEGER,
    "token_selection": str,
    "near_unit_lower": _FLOAT,
    "near_unit_upper": _FLOAT,
    "contractive_upper": _FLOAT,
    "reliable_residual": _FLOAT,
    "informative_update": _FLOAT,
    "ridge": _FLOAT,
    "ridge_kind": str,
    "operator": str,
    "dtype": str,
    "seed": _INTEGER,
    "versions": str,
    "created": str,
}


def validate_spectra(spectra: xr.Dataset) -> xr.Dataset:
    """Check that a dataset is a spectra dataset, and hand it back.

    Args:
        spectra: Dims ``layer`` and ``mode``, possibly preceded by ``step``, ``run`` or ``architecture``.

    Returns:
        The same object, so that the call can be chained.

    Raises:
        SchemaError: If a variable, dimension or attribute is missing or of another kind, if the schema is newer
            than this version of the workbench, or if masses do not add up to one.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> states = np.random.default_rng(0).normal(size=(64, 4))
        >>> spectra = wb.koopman.whitened_dmd(states, 0.9 * states)
        >>> wb.schema.validate_spectra(spectra) is spectra
        True
    """
    check_version(spectra)
    missing = [name for name in SPECTRA if name not in spectra]
    if missing:
        raise SchemaError(
            f"This dataset is no spectra dataset: it lacks {', '.join(missing)}; make one with wb.profile() or "
            "wb.koopman.whitened_dmd()."
        )
    optional = {name: rule for name, rule in SPECTRA_COUNTS.items() if name in spectra}
    check_variables(spectra, SPECTRA | optional, CONCAT_DIMS)
    for name, kind in SPECTRA_ATTRS.items():
        if name not in spectra.attrs:
            raise SchemaError(f"The spectra carry no attribute '{name}'; keep the attributes that wb.profile() wrote.")
        if not isinstance(spectra.attrs[name], kind):
            found, wanted = type(spectra.attrs[name]).__name__, _KIND_WORDS[kind]
            raise SchemaError(
                f"Attribute '{name}' is of type {found}, expected {wanted}; keep it as wb.profile() wrote it."
            )
    if "layer_name" not in spectra.coords:
        raise SchemaError("The spectra have no coordinate 'layer_name'; assign one name per layer.")
    masses = [spectra[f"{name}_mass"] for name in ("near_unit", "expansive", "contractive", "intermediate")]
    total = np.asarray(sum(masses))
    if not np.allclose(total[np.isfinite(total)], 1.0, atol=1e-9):
        raise SchemaError("The four mass fractions of a layer do not add up to 1; recompute them with wb.remeasure().")
    return spectra


def validate_monitors(monitors: xr.Dataset) -> xr.Dataset:
    """Check that a dataset holds the monitors of one training run, and hand it back.

    Args:
        monitors: Dim ``step``: variables of ``MONITORS``, as many as were recorded, and any others.

    Returns:
        The same object.

    Raises:
        SchemaError: If a known variable is of another kind, the coordinate ``step`` is missing, or steps do not rise.

    Example:
        >>> import workbench as wb
        >>> import xarray as xr
        >>> monitors = xr.Dataset({"loss": ("step", [2.0, 1.5])}, {"step": [0, 1]})
        >>> wb.schema.validate_monitors(monitors) is monitors
        True
    """
    check_version(monitors)
    if "step" not in monitors.coords:
        raise SchemaError("The monitors have no coordinate 'step'; assign the step of each row.")
    _check_rows(monitors, MONITORS)
    return monitors


def validate_part(part: str, data: xr.Dataset) -> xr.Dataset:
    """Check that a dataset holds one of the parts that a recorder looks at, and hand it back.

    Args:
        part: A name in ``PARTS``.
        data: Dim ``step`` and those of the part: its variables, as many as were recorded, and any others.

    Returns:
        The same object.

    Raises:
        SchemaError: If a known variable is of another kind, the coordinate ``step`` is missing, or steps do not rise.

    Example:
        >>> import workbench as wb
        >>> import xarray as xr
        >>> part = xr.Dataset({"sharpness": ("step", [2.0])}, {"step": [0]})
        >>> wb.schema.validate_part("curvature", part) is part
        True
    """
    check_version(data)
    if "step" not in data.coords:
        raise SchemaError(f"The part '{part}' has no coordinate 'step'; assign the step of each row.")
    _check_rows(data, PARTS[part])
    return data


def validate_events(events: xr.Dataset) -> xr.Dataset:
    """Check that a dataset holds the events of one training run, and hand it back.

    Args:
        events: Dim ``event``: every variable of ``EVENTS``, and those of ``EVENT_PLACES`` where there are any.

    Returns:
        The same object.

    Raises:
        SchemaError: If a variable is missing or of another kind.

    Example:
        >>> import workbench as wb
        >>> events = wb.open_run(wb.samples.failed_run("architecture"))["events"].to_dataset()
        >>> wb.schema.validate_events(events) is events
        True
    """
    check_version(events)
    missing = [name for name in EVENTS if name not in events]
    if missing:
        raise SchemaError(f"The events lack {', '.join(missing)}; add them, with empty text or NaN where unknown.")
    check_variables(events, EVENTS | {name: rule for name, rule in EVENT_PLACES.items() if name in events})
    return events


def _check_rows(data: xr.Dataset, rules: Mapping[str, Variable]) -> None:
    """Known variables follow their rules, and steps rise."""
    check_variables(data, {name: rule for name, rule in rules.items() if name in data})
    if (np.diff(data["step"].values) <= 0).any():
        raise SchemaError("The steps of the monitors do not rise; sort the rows and drop repeated ones.")


def check_variables(data: xr.Dataset, rules: Mapping[str, Variable], extra_dims: tuple[str, ...] = ()) -> None:
    """Variables follow their rules, perhaps along further dimensions.

    Raises:
        SchemaError: If one has other dimensions or another kind.
    """
    for name, rule in rules.items():
        variable = data[name]
        core = tuple(dim for dim in variable.dims if dim not in extra_dims)
        if core != rule.dims:
            after = f" (after any of {extra_dims})" if extra_dims else ""
            raise SchemaError(
                f"Variable '{name}' has dims {variable.dims}, expected {rule.dims}{after}; rename or transpose it."
            )
        if variable.dtype.kind not in rule.kind:
            raise SchemaError(
                f"Variable '{name}' has dtype {variable.dtype}, expected kind '{rule.kind}'; convert it with astype()."
            )


def check_version(data: xr.Dataset | xr.DataTree) -> None:
    """Refuse data that a newer version of the workbench wrote.

    Raises:
        SchemaError: If the data carry a higher schema version than ``SCHEMA_VERSION``.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("architecture"))
        >>> wb.schema.check_version(run)  # no error
        >>> bool(run.attrs["schema_version"] <= wb.schema.SCHEMA_VERSION)
        True
    """
    version = data.attrs.get("schema_version")
    if version is not None and int(version) > SCHEMA_VERSION:
        raise SchemaError(
            f"The data follow schema version {int(version)}, this workbench reads up to {SCHEMA_VERSION}; "
            "update the workbench."
        )
