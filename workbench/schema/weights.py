"""Variables of a dataset of weight spectra: dimensions, units, meaning, and their validation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.errors import SchemaError
from workbench.schema.runs import CONCAT_DIMS, check_variables, check_version, variables

if TYPE_CHECKING:
    import xarray as xr

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
