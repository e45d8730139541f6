"""Variables of runs, flows and weight spectra: dimensions, coordinates and units, and their validation.

Saved files and notebooks depend on the names of the variables. Adding a variable keeps ``SCHEMA_VERSION``; renaming or
redefining one increases it.
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
#: Attribute of a store in which every chunk is on disk, so that a missing one is lost, and not full of the fill value.
ALL_CHUNKS = "has_all_chunks"
#: Attribute of a store that no other has, by which a reader sees that it was replaced, and a writer that another began.
IDENTITY = "identity"

#: Dimensions along which spectra datasets may be concatenated.
CONCAT_DIMS = ("step", "run", "architecture")


@dataclass(frozen=True)
class Variable:
    """Variable of a schema.

    Attributes:
        dims: Dimensions that it always has; concatenation dimensions may precede them.
        kind: Allowed NumPy kinds: ``f`` float, ``c`` complex, ``b`` bool, ``i`` integer, ``U`` and ``T`` text.
        long_name: Label of the axis of a plot.
        units: Unit; ``"1"`` if dimensionless.
        meaning: Definition in one line.

    Example:
        >>> import workbench as wb
        >>> variable = wb.schema.MONITORS["loss"]
        >>> variable.dims, variable.units
        (('step',), 'nat')

    See Also:
        `workbench.schema`: Lists all variables.
    """

    dims: tuple[str, ...]
    kind: str
    long_name: str
    units: str
    meaning: str

    @property
    def attrs(self) -> dict[str, str]:
        """Attributes of a data array of this variable."""
        return {"long_name": self.long_name, "units": self.units, "meaning": self.meaning}


def variables(table: str) -> dict[str, Variable]:
    """Return the variables of a table, a line for each: name, dimensions, kind, label, units and meaning."""
    rows = [[cell.strip() for cell in line.split("|", 5)] for line in table.strip().splitlines()]
    return {name: Variable(tuple(dims.split()), *cells) for name, dims, *cells in rows}


SPECTRA = variables("""
eigenvalue | layer mode | c | eigenvalue | 1 | Koopman eigenvalue, modulus decreasing; NaN where the layer has fewer \
modes
residual | layer mode | f | residual r_j | 1 | residual of the mode on the snapshots
is_reliable | layer mode | b | reliable | 1 | residual at most the threshold
near_unit_mass | layer | f | near-unit mass M | 1 | fraction of modes near the unit circle
expansive_mass | layer | f | expansive mass | 1 | fraction of modes outside the unit circle
contractive_mass | layer | f | contractive mass | 1 | fraction of modes inside the unit circle
intermediate_mass | layer | f | intermediate mass | 1 | fraction of the remaining modes
spectral_radius | layer | f | spectral radius | 1 | largest modulus
eigenvector_condition | layer | f | eigenvector condition | 1 | kappa(V) of the unit right eigenvectors; inf if \
defective
nonlinearity_ratio | layer | f | nonlinearity ratio | 1 | norm of the update that no linear map explains, over that of \
the update
kreiss_constant | layer | f | Kreiss constant | 1 | lower bound of K(A); inf where the spectral radius exceeds 1
rank | layer | i | rank | 1 | number of modes: numerical rank of the state covariance
energy_gain | layer | f | energy gain | 1 | E|Yw|^2 / E|Xw|^2 in the span of the states
update_norm | layer | f | update norm | 1 | |Yw - Xw|_F / sqrt(N m) in the span of the states
is_informative | layer | b | informative | 1 | update norm above its threshold
covariance_condition | layer | f | covariance condition | 1 | largest over smallest eigenvalue of the state covariance \
in use
significant_digits | layer | f | significant digits | 1 | digits of lambda / rho that float64 moments keep
""")

#: Present only if the number of states differs between layers, because depth depends on the data.
SPECTRA_COUNTS = variables("""
layer_snapshots | layer | i | snapshots of the layer | 1 | token states that reached the layer
""")

MONITORS = variables("""
loss | step | f | loss | nat | loss of the batch, without auxiliary terms
auxiliary_loss | step | f | auxiliary loss | nat | weighted auxiliary terms; NaN if there are none
accuracy | step | f | accuracy | 1 | fraction of targets with the largest probability
grad_norm | step | f | gradient norm | 1 | norm of all gradients together, before clipping
learning_rate | step | f | learning rate | 1 | largest rate of the optimizer's groups
batch_size | step | f | batch size | example | examples of this update on all ranks
n_tokens | step | f | tokens | token | tokens of the batch without padding; NaN if its examples are not sequences
token_entropy | step | f | token entropy | nat | of the distribution of token ids in the batch; NaN without ids
label_entropy | step | f | label entropy | nat | of the distribution of labels in the batch; NaN if not available
label_agreement | step | f | label agreement | 1 | fraction of labels that occur in their inputs; NaN if not available
largest_losses | step | f | largest token losses | nat | mean of the largest eighth of the token losses; NaN if unknown
ignored_labels | step | f | ignored labels | 1 | fraction of labels that the loss ignores; NaN if not available
repeated_examples | step | f | repeated examples | 1 | fraction of examples of the batch that occurred in recent batches
loss_weight | step | f | weight of the losses | 1 | of the losses in the outputs within those differentiated, summed, \
without loss scale: 1 for their mean, n for the sum of n batches; NaN if the model returns no loss
is_training | step | f | training mode | 1 | fraction of modules in training mode in the forward pass: 1 all, 0 none
loss_scale | step | f | loss scale | 1 | factor of a gradient scaler on the loss; NaN without one
examined | step | f | examined update | 1 | 2 if alarms and the contents of the batch were evaluated at this update, 1 \
if only the alarms on the loss, 0 if the budget left both out; absent if there was no budget
is_skipped | step | f | skipped update | 1 | 1 if gradients were computed but no update was made, else 0
repeated_batch | step | f | repeated batch | 1 | 1 if every batch of the update equals one of the eight before it
lookahead | step | f | lookahead | 1 | difference of outputs between examples that begin with the same token, over \
that between two positions; 0 if no position depends on later tokens, NaN with dropout or without such examples
update_ratio | step | f | update ratio | 1 | RMS(dw) / RMS(w) of this update, over a fixed sample of all parameters
spike_score | step | f | spike score | 1 | fraction of losses so far that are outliers of the last 1,000; NaN at first
kss_enabled | step | b | KSS enabled | 1 | whether Koopman Spectral Shaping is enabled
kss_strength | step | f | KSS strength | 1 | weight of the spectral penalty
kss_interval | step | i | KSS interval | step | steps between two applications of the penalty
kss_gamma | step | f | KSS target | 1 | target of the near-unit mass
kss_penalty | step | f | KSS penalty | 1 | mean over the measured layers; NaN if there are none
kss_spectral_radius | step | f | spectral radius under KSS | 1 | largest over the measured layers; NaN if there are none
kss_near_unit_mass | step | f | near-unit mass under KSS | 1 | mean over the measured layers; NaN if there are none
kss_acting | step | i | regularized layers | 1 | layers whose penalty contributed a gradient
kss_update_size | step | f | update size | 1 | fraction of the optimizer's update; below 1 in a trust region
kss_skipped | step | i | skipped layers | 1 | layers that were due but had no usable gradient
""")

#: Measures of each head, of W = Wq Wk' and of its change over the cadence: "D2", "D3", "dWq", "dWk" and "W".
ATTENTION = variables("""
frobenius_norm | step layer head term | f | Frobenius norm | 1 | of the matrix; NaN if unreadable or not finite, or \
there is no such head
stable_rank | step layer head term | f | stable rank | 1 | |M|_F^2 / |M|_2^2; NaN if there is no such matrix, or it is \
zero
effective_rank | step layer head term | f | effective rank | 1 | exp of the spectral entropy; NaN if undefined
spectral_entropy | step layer head term | f | spectral entropy | nat | of s^alpha / sum s^alpha; NaN if undefined
attention_logit_max | step layer head | f | largest attention logit | 1 | over the probe tokens; NaN if not observable
attention_entropy | step layer head | f | attention entropy | nat | mean over the probe tokens; NaN if not observable
attention_entropy_share | step layer head | f | normalized attention entropy | 1 | entropy over log(visible tokens), \
mean over tokens that attend to several
""")

ROUTER = variables("""
router_similarity | step layer | f | router similarity | 1 | mean cosine of the rows of two experts; NaN with one expert
router_conditioning | step layer | f | router conditioning | 1 | largest distance of a row from the mean row, over its \
norm
routing_entropy | step layer | f | routing entropy | nat | of the full softmax, mean over the probe tokens; NaN if not \
observable
routing_entropy_share | step layer | f | normalized routing entropy | 1 | over log(experts); NaN with one expert, or \
if not observable
max_violation | step layer | f | MaxVio | 1 | (largest - mean) / mean of the load on the probe; NaN if not observable
dead_experts | step layer | f | dead experts | 1 | experts that receive no probe token; NaN if not observable
routing_change | step layer | f | routing change | 1 | fraction of choices on the probe that changed since the last \
measurement
expert_load | step layer expert | f | expert load | 1 | fraction of choices on the probe; NaN if no such expert
""")

#: Measures of each module: each block, then "outside", which holds all other parameters.
OPTIMIZER = variables("""
module_grad_norm | step module | f | gradient norm | 1 | of the gradients that the optimizer receives; NaN if there \
are none
module_weight_norm | step module | f | parameter norm | 1 | of the parameters before the update
update_ratio | step module | f | update ratio | 1 | RMS(dw) / RMS(w) of this update; NaN without parameters
unchanged_share | step module | f | unchanged fraction | 1 | of the parameters whose gradient is not 0, those that the \
update did not change; NaN if none, or rate 0
adam_staleness | step module | f | Adam staleness | 1 | sqrt(mean g^2 / max(v, eps^2)); NaN without second moments
gradient_rms | step module | f | gradient RMS | 1 | root mean square of the gradients of the module
gradient_rms_over_eps | step module | f | gradient RMS over eps | 1 | gradient RMS over eps of Adam; NaN without \
second moments
gradient_signal_share | step module | f | gradient signal fraction | 1 | of the mean squared gradient, common to \
successive batches; NaN without first and second moments
""")

#: Measures of the residual stream that leaves each block, on the probe.
ACTIVATIONS = variables("""
activation_max | step layer | f | largest activation | 1 | largest magnitude; NaN if not finite
outlier_ratio | step layer | f | outlier ratio | 1 | largest over median magnitude; NaN if not finite
kurtosis | step layer | f | kurtosis | 1 | of all entries, 3 for a normal distribution; NaN if not finite
state_norm | step layer | f | state norm | 1 | mean over tokens; NaN if not finite
log_z | step | f | log Z | nat | RMS over tokens of log sum exp of the output logits; NaN without logits
""")

CURVATURE = variables("""
sharpness | step | f | sharpness | 1 | largest eigenvalue of the Hessian of the loss on the probe; NaN if not found
sharpness_rate | step | f | sharpness times learning rate | 1 | largest eigenvalue times learning rate; gradient \
descent diverges above 2
preconditioned_sharpness | step | f | preconditioned sharpness | 1 | of the Hessian as scaled by Adam; NaN without \
second moments
preconditioned_sharpness_rate | step | f | preconditioned sharpness times learning rate | 1 | Adam with beta1 = 0.9 \
diverges above 38; NaN without second moments
""")

#: Errors of the arithmetic of the run, see `workbench.probes.precision_errors`.
PRECISION = variables("""
output_error | step layer | f | output error | 1 | relative error of the output of the block
gradient_error | step layer | f | gradient error | 1 | relative error of the gradient of all parameters of the block
error_excess | step layer | f | excess of error | 1 | largest error of the output or a gradient over that of rounding
query_gradient_error | step layer head | f | query gradient error | 1 | relative error of the gradient of the query \
weights of a head
query_error_excess | step layer head | f | excess of query gradient error | 1 | error of the query gradient over that \
of rounding
query_gradient_bias | step layer head | f | query gradient bias | 1 | part of the error along the exact gradient, over \
its norm
excess_limit | step | f | excess limit | 1 | excess that rounding does not reach in the number format of the run
broken_rank | step | f | faulty rank | 1 | first rank with errors while others have none; NaN if all or none
""")

#: Whether the optimizer receives the gradients that were computed, see `workbench.probes.compare_gradients`.
REDUCTION = variables("""
gradient_verdict | step | f | gradient verdict | 1 | severity of the `GradientVerdict`; -1 if not measured
wrong_parameters | step | f | wrong parameters | 1 | fraction of those measured in this step; NaN if none are
significant_bits | step | f | significant bits | 1 | of gradients received in low precision; NaN if none are
missing_rank | step | f | missing rank | 1 | first rank whose gradients are missing; NaN if there is none
missing_pass | step | f | missing backward pass | 1 | first one of the step whose gradients are missing; NaN if none
receiving_rank | step | f | receiving rank | 1 | first rank that receives wrong gradients; NaN if all or none
""")

#: Effect of one update on the loss of fixed examples, see `probes.update.update_effect`.
UPDATE = variables("""
loss_change | step | f | loss change | nat | change on fixed examples by this update
predicted_loss_change | step | f | predicted loss change | nat | gradient on these examples times the change of the \
parameters
""")

#: Evidence of the alarms for a change of each signal, every 10 updates and at each alarm; see `workbench.Alarms`.
EVIDENCE = variables("""
evidence | step signal | f | evidence relative to an alarm | 1 | largest since the last row; 1 is an alarm, inf if the \
signal is not finite, NaN if not evaluated
""")

#: Parts of a run in addition to the scalars of each update. Each part has its own steps; alarms write ``evidence``.
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

EVENTS = variables("""
step | event | i | step | 1 | updates before the event
kind | event | UT | kind | | one of divergence, started, finished, stopped, resumed, no spectra, kss, fault, setting, \
alarm, attribution, blame, action, not recorded, not finite, gap
source | event | UT | source | | its source, such as loss, grad_norm, non-finite; may be empty
score | event | f | score | 1 | value that caused it; NaN if there is none
message | event | UT | message | | one readable sentence
""")

#: Place of an event; stores of older versions lack it.
EVENT_PLACES = variables("""
layer | event | i | layer | 1 | layer of the event; -1 if there is none
head | event | i | head | 1 | attention head of the event; -1 if there is none
""")

_INTEGER = (int, np.integer)
_FLOAT = (float, np.floating)
_KIND_WORDS = {str: "text", _INTEGER: "an integer", _FLOAT: "a floating-point number"}

#: Attributes of every spectra dataset and their Python types.
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
    """Validate a spectra dataset and return it."""
    check_version(spectra)
    missing = [name for name in SPECTRA if name not in spectra]
    if missing:
        raise SchemaError(f"The spectra lack {', '.join(missing)}; compute them with wb.profile().")
    optional = {name: rule for name, rule in SPECTRA_COUNTS.items() if name in spectra}
    check_variables(spectra, SPECTRA | optional, CONCAT_DIMS)
    for name, kind in SPECTRA_ATTRS.items():
        if name not in spectra.attrs:
            raise SchemaError(f"The spectra have no attribute '{name}'; keep the attributes that wb.profile() wrote.")
        if not isinstance(spectra.attrs[name], kind):
            found, expected = type(spectra.attrs[name]).__name__, _KIND_WORDS[kind]
            raise SchemaError(f"Attribute '{name}' is of type {found}, expected {expected}; keep that of wb.profile().")
    if "layer_name" not in spectra.coords:
        raise SchemaError("The spectra have no coordinate 'layer_name'; assign one name per layer.")
    names = [f"{name}_mass" for name in ("near_unit", "expansive", "contractive", "intermediate")]
    total = np.asarray(sum(spectra[name] for name in names))
    total = total[np.isfinite(total)]
    if not np.allclose(total, 1.0, atol=1e-9):
        raise SchemaError("The four masses of a layer do not sum to 1; recompute them with wb.remeasure().")
    return spectra


def validate_monitors(monitors: xr.Dataset) -> xr.Dataset:
    """Validate the monitors of a run and return them."""
    _check_rows("monitors", monitors, MONITORS)
    return monitors


def validate_part(part: str, data: xr.Dataset) -> xr.Dataset:
    """Validate a part of a run and return it."""
    _check_rows(part, data, PARTS[part])
    return data


def validate_events(events: xr.Dataset) -> xr.Dataset:
    """Validate the events of a run and return them."""
    check_version(events)
    missing = [name for name in EVENTS if name not in events]
    if missing:
        raise SchemaError(f"The events lack {', '.join(missing)}; add them, with empty text or NaN where unknown.")
    check_variables(events, EVENTS | {name: rule for name, rule in EVENT_PLACES.items() if name in events})
    return events


def _check_rows(part: str, data: xr.Dataset, rules: Mapping[str, Variable]) -> None:
    """Raise if known variables do not follow their rules, or the steps do not increase."""
    check_version(data)
    if "step" not in data.coords:
        raise SchemaError(f"The part '{part}' has no coordinate 'step'; assign the step of each row.")
    check_variables(data, {name: rule for name, rule in rules.items() if name in data})
    if (np.diff(data["step"].values) <= 0).any():
        raise SchemaError(f"The steps of the part '{part}' do not increase; sort the rows and drop repeated ones.")


def check_variables(data: xr.Dataset, rules: Mapping[str, Variable], extra_dims: tuple[str, ...] = ()) -> None:
    """Raise if a variable has other dimensions than its rule, except for ``extra_dims``, or another kind."""
    for name, rule in rules.items():
        variable = data[name]
        core = tuple(dim for dim in variable.dims if dim not in extra_dims)
        if core != rule.dims:
            after = f" (after any of {extra_dims})" if extra_dims else ""
            raise SchemaError(f"Variable '{name}' has dims {variable.dims}, expected {rule.dims}{after}; transpose it.")
        if variable.dtype.kind not in rule.kind:
            raise SchemaError(f"Variable '{name}' has dtype {variable.dtype}, expected '{rule.kind}'; use astype().")


def check_version(data: xr.Dataset | xr.DataTree) -> None:
    """Raise if data were written by a newer version of the workbench."""
    version = data.attrs.get("schema_version")
    if version is not None and int(version) > SCHEMA_VERSION:
        raise SchemaError(f"The data follow schema {int(version)}, this workbench {SCHEMA_VERSION}; update it.")


#: Measures of a weight matrix W with longer side N and shorter side M; eigenvalues are those of W'W / N.
WEIGHTS = variables("""
singular_value | matrix value | f | singular value | 1 | of W, largest first; NaN beyond the shorter side of W
frobenius_norm | matrix | f | Frobenius norm | 1 | root of the sum of squares of all entries
spectral_norm | matrix | f | spectral norm | 1 | largest singular value
stable_rank | matrix | f | stable rank | 1 | |W|_F^2 / |W|_2^2; NaN if W is zero
effective_rank | matrix | f | effective rank | 1 | exp of the entropy of s / sum s; NaN if W is zero
alpha | matrix | f | power-law exponent alpha | 1 | of the tail of the eigenvalue density; NaN if fewer than 50 \
eigenvalues are positive, or all are equal
alpha_error | matrix | f | standard error of alpha | 1 | (alpha - 1) / sqrt(n_tail); NaN where alpha is
ks_distance | matrix | f | Kolmogorov-Smirnov distance D | 1 | between tail and fitted power law; NaN where alpha is
tail_start | matrix | f | start of the tail | 1 | smallest eigenvalue of the tail; NaN where alpha is
n_tail | matrix | f | eigenvalues in the tail | 1 | from tail_start on; NaN where alpha is
bulk_variance | matrix | f | bulk variance | 1 | variance of the entries of a random matrix with the same median \
eigenvalue; NaN if there are fewer than 50 eigenvalues, or W is zero
bulk_edge | matrix | f | edge of the bulk | 1 | 99 % quantile of the largest eigenvalue of such a random matrix; NaN \
where bulk_variance is
n_spikes | matrix | f | spikes | 1 | eigenvalues above the edge of the bulk; NaN where bulk_variance is
""")

#: Present only if the spectra are those of the difference of two checkpoints.
WEIGHT_CHANGES = variables("""
relative_change | matrix | f | relative change | 1 | |W - W_ref|_F / |W_ref|_F; NaN if W_ref is zero
""")

#: Coordinates of the matrices; ``matrix`` itself is the name of the tensor, with [i] for expert i of a stack.
WEIGHT_COORDS = variables("""
matrix | matrix | UT | matrix | | name of the tensor; with [i] for matrix i of a stack of experts
layer | matrix | i | layer | 1 | index of the layer in the name; -1 if there is none
role | matrix | UT | role | | role according to the name, such as attention query; empty if unknown
n_rows | matrix | i | rows | 1 | of the matrix, a convolution flattened to (out, in * kernel)
n_columns | matrix | i | columns | 1 | of the matrix, a convolution flattened to (out, in * kernel)
""")


def validate_weights(weights: xr.Dataset) -> xr.Dataset:
    """Validate a dataset of weight spectra and return it."""
    check_version(weights)
    missing = [name for name in (*WEIGHTS, *WEIGHT_COORDS) if name not in weights.variables]
    if missing:
        raise SchemaError(f"The weight spectra lack {', '.join(missing)}; compute them by wb.weights.weight_spectra().")
    optional = {name: rule for name, rule in WEIGHT_CHANGES.items() if name in weights}
    check_variables(weights, WEIGHTS | WEIGHT_COORDS | optional, CONCAT_DIMS)
    return weights


#: Measures of the states between blocks, of blocks and of sublayers; NaN where they do not exist or cannot be measured.
FLOW = variables("""
state_rms | boundary | f | state RMS | 1 | root mean square of the residual stream's entries
gradient_norm | boundary | f | gradient norm | 1 | norm of the loss's gradient with respect to all states of the \
boundary
token_cosine | boundary | f | token cosine | 1 | mean cosine of two tokens of a sequence; 1 if all are parallel
effective_rank | boundary | f | relative effective rank | 1 | exp of the entropy of the singular values of the states, \
over the largest possible rank
signal_gain | layer | f | signal gain | 1 | RMS of the states leaving over RMS of those entering
gradient_gain | layer | f | gradient gain | 1 | norm of the gradient at the input of the block over that at its output
sublayer_signal_gain | layer sublayer | f | signal gain | 1 | RMS of the stream after the sublayer over that before it
sublayer_gradient_gain | layer sublayer | f | gradient gain | 1 | norm of the gradient before the sublayer over that \
after it
branch_ratio | layer sublayer | f | branch ratio | 1 | RMS of the branch over RMS of the stream that it is added to
block_singular_value | layer singular | f | block singular value | 1 | of the Jacobian of the block, largest first
block_singular_mean | layer | f | RMS singular value | 1 | root mean square of all singular values of the Jacobian of \
the block
end_to_end_singular_value | singular | f | end-to-end singular value | 1 | of the Jacobian of all blocks in sequence, \
largest first
end_to_end_singular_mean | | f | RMS end-to-end singular value | 1 | root mean square of all singular values of all \
blocks in sequence
attention_entropy_share | layer head | f | normalized attention entropy | 1 | entropy over log(visible tokens), mean \
over tokens that attend to several
attention_logit_std | layer head | f | attention logit scale | 1 | standard deviation of the logits of a token, RMS \
over tokens
attention_logit_max | layer head | f | largest attention logit | 1 | over all tokens
sink_share | layer head | f | attention sink fraction | 1 | attention to the first token of the sequence, mean over \
tokens that can attend to others
routing_entropy_share | layer | f | normalized routing entropy | 1 | entropy of the full softmax over log(experts), \
mean over tokens
max_violation | layer | f | MaxVio | 1 | (largest - mean) / mean of the load of the experts
routing_margin | layer | f | routing margin | 1 | probability of the last chosen expert less that of the first \
rejected, mean over tokens
""")
