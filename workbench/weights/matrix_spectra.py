"""Spectra of all weight matrices of a model or of a checkpoint on disk, one matrix at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from workbench.errors import CheckpointError, OptionError
from workbench.io.progress import Progress
from workbench.io.provenance import versions
from workbench.models.calling import bare
from workbench.models.lazy_state import lazy_state
from workbench.models.parametrizations import is_parametrized
from workbench.models.state_files import LazyTensor
from workbench.models.subject import Subject
from workbench.monitors.matrices import effective_rank, frobenius_norm, singular_values, stable_rank, without_rounding
from workbench.option_checks import checked
from workbench.option_kinds import PositiveInt
from workbench.schema.runs import SCHEMA_VERSION, WEIGHT_CHANGES, WEIGHT_COORDS, WEIGHTS, validate_weights
from workbench.zoo.module_of import module_of

#: Number of rows that are converted to float64 at a time.
_ROWS = 8192


@checked
def weight_spectra(
    source: Subject | nn.Module | str | os.PathLike[str],
    *,
    reference: Subject | nn.Module | str | os.PathLike[str] | None = None,
    layers: Collection[int] | None = None,
    min_size: PositiveInt = 8,
    progress: bool | Callable[[str], None] = True,
) -> xr.Dataset:
    """Compute the singular values of every weight matrix, with ranks, norms, heavy tails and spikes.

    Matrices are read one at a time, so that a checkpoint need not fit into memory, and computed in float64 on the
    device where they are. A stack of experts (three dimensions, "experts" or "exps" in its name) counts as one matrix
    per expert, and the kernel of a convolution as the matrix (out, in * kernel) that acts on a patch. Embeddings and
    heads are included. Weights that share one parameter appear once. A matrix that packs several maps, such as query,
    key and value, is measured as one matrix.

    With N the longer side of a matrix W, its eigenvalues are those of W'W / N. The exponent alpha of their tail is that
    of `power_law_tail`, as in WeightWatcher (Martin and Mahoney 2021, arXiv:1810.01075); spikes are the eigenvalues
    beyond a `random_bulk`; the effective rank is that of Roy and Vetterli (2007), exp of the entropy of s / sum s.
    A power law is always fitted, even if there is none: untrained matrices of 192 to 2,304 rows and columns have an
    alpha of 3 to 37, a ``ks_distance`` near 0.13, and hardly any spike. Interpret alpha together with these.

    Singular values of matrices stored in 32 bits or less are square roots of the eigenvalues of W'W, which is about
    twice as fast as a singular value decomposition. Their error is at most about 1e-7 of the largest one, the rounding
    of float32, and values below sqrt(M * 2.2e-16) of the largest are set to 0, where M is the shorter side. For
    matrices in float64 a singular value decomposition is computed.

    Args:
        source: Subject from `open_checkpoint`, any module, or the path of a checkpoint, which is not loaded as a model.
        reference: Source with the same names and shapes. The spectra are then those of the difference, source minus
            reference, with ``relative_change``.
        layers: Numbers of the layers to measure; None for all, including matrices that belong to no layer.
        min_size: Minimum length of the shorter side of a matrix; smaller ones are left out.
        progress: Whether to show progress; or a function that receives each progress text, whose exceptions abort the
            computation.

    Returns:
        Dataset with dims ``matrix`` and ``value``; see `schema.WEIGHTS` for the variables and the meaning of NaN.
        The attribute ``left_out`` lists each tensor of two or more dimensions that is left out, with the reason.

    Raises:
        CheckpointError: If a file cannot be read, a matrix contains a value that is not finite, the reference does not
            match, or there is no matrix to measure.
        OptionError: If ``min_size`` is not a positive integer, a layer does not exist, or the weights of a module are
            parametrized.
        AnatomyError: If the source is neither a model nor a path.

    Example:
        >>> import workbench as wb
        >>> model = wb.samples.load("pre_ln")
        >>> spectra = wb.weights.weight_spectra(model, layers=[0], progress=False)
        >>> spectra["role"].values[:4].tolist()
        ['attention query', 'attention key', 'attention value', 'attention output']
        >>> bool((spectra["stable_rank"] <= spectra["effective_rank"]).all())
        True

    See Also:
        `workbench.weights.power_law_tail`: Fits one tail.
        `workbench.plots.weight_spectra`: Draws the spectra.
    """
    state, described = _state_of(source)
    before, described_before = (None, "") if reference is None else _state_of(reference)
    planned, left_out = _planned(state, layers, min_size)
    if not planned:
        raise CheckpointError(f"{described} has no matrix with a shorter side of {min_size}; pass a smaller min_size.")
    if before is not None:
        others = [stack for stack in _planned(before, None, min_size)[0] if layers is None or stack.layer in layers]
        _require_same(planned, others, described_before)
    rows = []
    with Progress(progress, "measured", total=sum(stack.n for stack in planned), unit="weight") as bar:
        for stack in planned:
            for row in stack.measured(state, before):
                rows.append(row)
                bar.update()
    attrs = {
        "schema_version": SCHEMA_VERSION,
        "subject": source.name if isinstance(source, Subject) else described,
        "source": described,
        "reference": described_before,
        "min_size": min_size,
        "left_out": "\n".join(left_out),
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return _as_dataset(rows, attrs)


@dataclass(frozen=True)
class _Stack:
    """A tensor that contains one matrix, or several along its first dimension."""

    name: str
    shape: tuple[int, ...]
    layer: int
    role: str

    @property
    def is_one(self) -> bool:
        return len(self.shape) == 2 or not is_of_experts(self.name)

    @property
    def n(self) -> int:
        return 1 if self.is_one else self.shape[0]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Shape of each matrix; the kernel of a convolution is flattened."""
        shape = self.shape if self.is_one else self.shape[1:]
        return shape[0], int(np.prod(shape[1:]))

    def measured(self, state: dict[str, LazyTensor], before: dict[str, LazyTensor] | None) -> Iterator[dict[str, Any]]:
        """Yield all variables and coordinates of each matrix; the tensor is read once and released at the end."""
        shape = (self.n, *self.matrix_shape)
        matrices = state[self.name].read().reshape(shape)
        others = None if before is None else before[self.name].read().reshape(shape)
        for i in range(self.n):
            name = self.name if self.is_one else f"{self.name}[{i}]"
            coords = {"matrix": name, "layer": self.layer, "role": self.role, "n_rows": shape[1], "n_columns": shape[2]}
            yield coords | _measured(name, matrices[i], None if others is None else others[i])


def _state_of(source: Any) -> tuple[dict[str, LazyTensor], str]:
    """Return the parameters of a model or the tensors of a checkpoint by name, and a description of the source."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source).expanduser()
        return lazy_state(path), str(path)
    model = bare(module_of(source))
    described = source.source if isinstance(source, Subject) else f"module {type(model).__qualname__}"
    if is_parametrized(model):
        raise OptionError(f"The weights of {type(model).__name__} are parametrized; use wb.baselines.plain_copy().")
    state = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise CheckpointError(
                f"The parameter {name} has no values (it is on the meta device); pass the path of the checkpoint, or a "
                "model with its weights in memory."
            )
        tensor = parameter.detach()
        if type(tensor) is not Tensor:  # sharded over ranks, or quantized: its entries are not the weight's
            raise CheckpointError(
                f"The parameter {name} is a {type(tensor).__name__}, expected an ordinary tensor; pass the path of the "
                "checkpoint, or a model that is neither sharded nor quantized."
            )
        state[name] = LazyTensor.of(tensor)
    return state, described


def _planned(
    state: dict[str, LazyTensor], layers: Collection[int] | None, min_size: int
) -> tuple[list[_Stack], list[str]]:
    """Return the tensors to measure, and a line for each tensor of two or more dimensions that is left out."""
    stacks = [
        _Stack(name, tuple(tensor.shape), layer_of(name), role_of(name, state))
        for name, tensor in state.items()
        if len(tensor.shape) >= 2
    ]
    known = {stack.layer for stack in stacks} - {-1}
    if layers is not None and (unknown := sorted(set(layers) - known)):
        numbers = f"from {min(known)} to {max(known)}" if known else "None, because no name contains a layer number"
        raise OptionError.of("layers", unknown[0], numbers)
    planned, left_out = [], []
    for stack in stacks:
        if layers is not None and stack.layer not in layers:
            continue
        reason = _reason_against(stack, state[stack.name].dtype, min_size)
        if reason:
            left_out.append(f"{stack.name}: {reason}")
        else:
            planned.append(stack)
    return planned, left_out


def _reason_against(stack: _Stack, dtype: torch.dtype, min_size: int) -> str:
    """Return the reason why a tensor is not measured; empty if it is measured."""
    if not dtype.is_floating_point:
        return f"values of type {str(dtype).removeprefix('torch.')}, which do not represent weights without scales"
    if dtype.itemsize < 2:
        return f"values of type {str(dtype).removeprefix('torch.')} without their scales"
    if stack.name.endswith("bias"):
        return "a bias"
    if len(stack.shape) == 3 and stack.is_one and "conv" not in stack.name.lower():
        return "three dimensions, neither a stack of experts nor a convolution by its name"
    if min(stack.matrix_shape) < min_size:
        return f"shorter side of {min(stack.matrix_shape)}, below min_size"
    return ""


def _require_same(planned: list[_Stack], others: list[_Stack], described: str) -> None:
    """Raise CheckpointError if the matrices of source and reference differ in names or shapes."""
    shapes, other_shapes = ({stack.name: stack.shape for stack in side} for side in (planned, others))
    remedy = "pass a checkpoint of the same model"
    for name in [*shapes, *other_shapes]:
        if name not in other_shapes:
            raise CheckpointError(f"The reference {described} has no matrix {name}; {remedy}.")
        if name not in shapes:
            raise CheckpointError(f"The reference {described} has a matrix {name}, which the source lacks; {remedy}.")
        if shapes[name] != other_shapes[name]:
            raise CheckpointError(
                f"{name} has shape {shapes[name]}, but {other_shapes[name]} in the reference {described}; {remedy}."
            )


def _measured(name: str, matrix: Tensor, other: Tensor | None) -> dict[str, Any]:
    """Return all variables of one matrix."""
    s, reference_norm = _singular_values(matrix, other)
    norm = frobenius_norm(s)
    if not torch.isfinite(norm.square()) or not np.isfinite(reference_norm):
        raise CheckpointError(
            f"{name} contains a value that is not finite, or too large to be squared; leave out its layer with "
            "layers=, or use an earlier checkpoint."
        )
    values = s.cpu().numpy()
    largest = float(values[0])
    # Values are scaled so that squares of tiny ones do not underflow; tails and spikes do not depend on the scale.
    unit = largest**2 / max(matrix.shape)
    eigenvalues = np.square(values / largest) if largest else values
    tail, bulk = power_law_tail(eigenvalues), random_bulk(eigenvalues, *matrix.shape)
    row = {
        "singular_value": values,
        "frobenius_norm": float(norm),
        "spectral_norm": largest,
        "stable_rank": float(stable_rank(s)),
        "effective_rank": float(effective_rank(s, alpha=1)),
        "alpha": tail.alpha,
        "alpha_error": tail.error,
        "ks_distance": tail.distance,
        "tail_start": tail.start * unit,
        "n_tail": tail.n_tail,
        "bulk_variance": bulk.variance * unit,
        "bulk_edge": bulk.edge * unit,
        "n_spikes": bulk.n_spikes,
    }
    if other is not None:
        row["relative_change"] = float(norm) / reference_norm if reference_norm else np.nan
    return row


def _singular_values(matrix: Tensor, other: Tensor | None) -> tuple[Tensor, float]:
    """Return decreasing singular values of a matrix, or of its difference from another, and the other's norm."""
    if matrix.device.type == "mps":  # mps has no float64
        matrix = matrix.cpu()
    if other is not None:
        other = other.to(matrix.device)
    if matrix.dtype == torch.float64 or (other is not None and other.dtype == torch.float64):
        wide = matrix.double() if other is None else matrix.double() - other.double()
        return singular_values(wide), 0.0 if other is None else float(torch.linalg.matrix_norm(other.double()))
    is_wide = matrix.shape[0] < matrix.shape[1]
    long = matrix.T if is_wide else matrix
    long_other = None if other is None else (other.T if is_wide else other)
    gram = torch.zeros(long.shape[1], long.shape[1], dtype=torch.float64, device=matrix.device)
    squared = torch.zeros((), dtype=torch.float64, device=matrix.device)
    for start in range(0, len(long), _ROWS):
        rows = long[start : start + _ROWS].double()
        if long_other is not None:
            other_rows = long_other[start : start + _ROWS].double()
            squared += other_rows.square().sum()
            rows = rows - other_rows
        gram.addmm_(rows.T, rows)
    if not torch.isfinite(gram.diagonal()).all():  # LAPACK may not terminate
        return gram.diagonal() * torch.nan, float(squared.sqrt())
    squares = torch.linalg.eigvalsh(gram).flip(0)
    return without_rounding(squares, len(squares)).sqrt(), float(squared.sqrt())


def _as_dataset(rows: list[dict[str, Any]], attrs: dict[str, Any]) -> xr.Dataset:
    longest = max(len(row["singular_value"]) for row in rows)
    values = np.full((len(rows), longest), np.nan)
    for i, row in enumerate(rows):
        values[i, : len(row["singular_value"])] = row["singular_value"]
    rules = WEIGHTS | {name: rule for name, rule in WEIGHT_CHANGES.items() if name in rows[0]}
    columns = {name: values if name == "singular_value" else np.array([row[name] for row in rows]) for name in rules}
    return validate_weights(
        xr.Dataset(
            {name: (rule.dims, columns[name], rule.attrs) for name, rule in rules.items()},
            {
                name: (rule.dims, np.array([row[name] for row in rows]), rule.attrs)
                for name, rule in WEIGHT_COORDS.items()
            },
            attrs,
        )
    )


_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?|blk|resblocks)\.(\d+)(?:\.|$)")
_EXPERTS = re.compile(r"(?:^|[._])exp(?:ert)?s(?:[._]|$)")
_ATTENTION = r"\w*(?:attn|attention|att)\d?\.(?:self\.)?"
_MLP = r"(?:mlp|ffn|feed_?forward)\."
#: Role -> pattern of the end of a name in lower case, without ".weight"; the first that matches counts.
_ROLES: tuple[tuple[str, str], ...] = (
    ("position embedding", r"wpe|position_embeddings?|embed_positions|pos_embed(?:ding)?|position_embd"),
    ("embedding", r"wte|embed_tokens|tok_embeddings|token_embd|token_embedding|word_embeddings|embed_in"),
    ("head", r"lm_head|head|embed_out"),
    ("attention query-key-value", r"query_key_value|c_attn|qkv_proj|wqkv|in_proj_weight|attn_qkv|attn\.qkv"),
    ("attention query", rf"q_proj|attn_q|{_ATTENTION}(?:query|q|wq|q_lin)"),
    ("attention key", rf"k_proj|attn_k|{_ATTENTION}(?:key|k|wk|k_lin)"),
    ("attention value", rf"v_proj|attn_v|{_ATTENTION}(?:value|v|wv|v_lin)"),
    ("attention output", rf"attn_output|{_ATTENTION}(?:o_proj|out_proj|c_proj|proj|dense|output\.dense|out|o|wo|"
     r"out_lin)"),
    ("router", r"router|ffn_gate_inp|block_sparse_moe\.gate"),
    ("MLP gate and up", r"gate_up_proj"),
    ("MLP gate", rf"gate_proj|ffn_gate(?:_exps)?|wi_0|{_MLP}w1|experts\.\d+\.(?:w1|gate)"),
    ("MLP up", rf"up_proj|c_fc|dense_h_to_4h|fc1|intermediate\.dense|ffn_up(?:_exps)?|wi|wi_1|{_MLP}(?:up|w3)|"
     r"experts\.\d+\.(?:w3|up)"),
    ("MLP down", rf"down_proj|dense_4h_to_h|fc2|output\.dense|ffn_down(?:_exps)?|wo|{_MLP}(?:down|w2|c_proj)|"
     r"experts\.\d+\.(?:w2|down)"),
)  # fmt: skip
_PATTERNS = tuple((role, re.compile(rf"(?:^|\.)(?:{pattern})$")) for role, pattern in _ROLES)


def layer_of(name: str) -> int:
    """Return the number after the first of layers, layer, h, blocks, block, blk or resblocks in a name; -1 if none."""
    found = _LAYER.search(name)
    return int(found[1]) if found else -1


def role_of(name: str, names: Collection[str]) -> str:
    """Return the role that a name states, such as "attention query" or "expert down"; empty if it is not certain."""
    stem = name.removesuffix(".weight").lower()
    if stem == "output":  # in GGUF files and in the original files of Llama
        return "head"
    if stem.endswith(".gate") and (role := _gate_role(name.removesuffix(".weight").removesuffix(".gate"), names)):
        return role
    role = next((role for role, pattern in _PATTERNS if pattern.search(stem)), "")
    return role.replace("MLP", "expert") if is_of_experts(name) else role


def _gate_role(parent: str, names: Collection[str]) -> str:
    """Return the role of a ``gate``: a router if its parent has experts, a factor of an MLP if it has ``up``."""
    if any(name.startswith(f"{parent}.experts.") for name in names):
        return "router"
    if f"{parent}.up.weight" in names:
        return "expert gate" if is_of_experts(parent) else "MLP gate"
    return ""


def is_of_experts(name: str) -> bool:
    """Return whether a tensor belongs to an expert or is a stack of experts according to its name."""
    return bool(_EXPERTS.search(name.lower()))


#: Minimum number of eigenvalues for an exponent and a bulk; Clauset et al. (2009, section 3.2) require it in a tail.
MIN_EIGENVALUES = 50
#: A tail whose eigenvalues differ by less than this, relatively, consists of one value and rounding.
_ROUNDING = 1e-6
#: 99 % quantile of the Tracy-Widom law of real matrices (beta = 1).
_TRACY_WIDOM_99 = 2.0234


@dataclass(frozen=True)
class PowerLaw:
    """Power law p(x) ~ x^-alpha of the ``n_tail`` values above ``start``, and its error and distance (Kolmogorov)."""

    alpha: float = np.nan
    error: float = np.nan
    distance: float = np.nan
    start: float = np.nan
    n_tail: float = np.nan


def power_law_tail(values: np.ndarray) -> PowerLaw:
    """Fit a power law to the tail of positive values.

    The exponent is the maximum likelihood estimate for continuous values, and the tail starts where the
    Kolmogorov-Smirnov distance is smallest (Clauset, Shalizi and Newman 2009, arXiv:0706.1062, equations 3.1, 3.2 and
    3.9), as in the packages ``powerlaw`` and WeightWatcher (Martin and Mahoney 2021, arXiv:1810.01075).

    Args:
        values: Eigenvalues, in any order; zeros are left out.

    Returns:
        The fit; all NaN if fewer than 50 values are above 0, or all of them are equal within 1e-6.

    Raises:
        OptionError: If a value is negative or not finite.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> quantiles = (np.arange(2000) + 0.5) / 2000
        >>> fit = wb.weights.power_law_tail((1 - quantiles) ** (-1 / 2))  # p(x) ~ x^-3 from 1 on
        >>> round(fit.alpha, 1), fit.n_tail > 1000
        (3.0, True)

    See Also:
        `workbench.weights.random_bulk`: Compares the eigenvalues with those of a random matrix.
        `workbench.weights.weight_spectra`: Fits the tails of all matrices of a model.
    """
    values = _checked("values", values)
    values = np.sort(values[values > 0])
    if len(values) < MIN_EIGENVALUES:
        return PowerLaw()
    # Relative to the largest value: the sums of a tail are then free of cancellation.
    log = np.log(values / values[-1])
    starts = np.unique(log, return_index=True)[1]
    starts = starts[log[starts] < -_ROUNDING]
    if not len(starts):
        return PowerLaw()
    n = len(log) - starts
    alphas = 1 + n / (np.cumsum(log[::-1])[::-1][starts] - n * log[starts])
    distances = np.empty(len(starts))
    n_below = np.arange(len(log))
    for i, (start, alpha) in enumerate(zip(starts, alphas, strict=True)):
        predicted = -np.expm1((1 - alpha) * (log[start:] - log[start]))
        distances[i] = np.abs(predicted - n_below[: n[i]] / n[i]).max()
    best = distances.argmin()
    alpha = float(alphas[best])
    error = (alpha - 1) / np.sqrt(n[best])
    return PowerLaw(alpha, float(error), float(distances[best]), float(values[starts[best]]), float(n[best]))


@dataclass(frozen=True)
class Bulk:
    """Bulk of a random matrix with the same median eigenvalue of W'W / N: its 99 % edge, and spikes above it."""

    variance: float = np.nan
    edge: float = np.nan
    n_spikes: float = np.nan


def random_bulk(eigenvalues: np.ndarray, n_rows: PositiveInt, n_columns: PositiveInt) -> Bulk:
    """Compare eigenvalues with those of a matrix of independent entries (Marchenko-Pastur).

    The variance is that of the random matrix with the same median eigenvalue, which a few spikes hardly change (Gavish
    and Donoho 2014, arXiv:1305.5870, section 3.2). The edge is the 99 % quantile of the Tracy-Widom law of the largest
    eigenvalue (Johnstone 2001, theorem 1.1), so that one random matrix in a hundred has a spike. It exceeds the limit
    (1 + sqrt(M / N))^2 of the Marchenko-Pastur law, above which the largest eigenvalue of a finite random matrix often
    is, by a margin of relative order N^(-2/3).

    Args:
        eigenvalues: All min(n_rows, n_columns) eigenvalues of W'W / N, in any order; N is the longer side of W.
        n_rows: Number of rows of W.
        n_columns: Number of columns of W.

    Returns:
        The bulk; all NaN if there are fewer than 50 eigenvalues, or all of them are 0. If more than half of them are 0,
        variance and edge are 0 and every other eigenvalue is a spike.

    Raises:
        OptionError: If the eigenvalues are not those of such a matrix.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> W = np.random.default_rng(0).normal(size=(400, 100))
        >>> W[:, 0] += 3.0
        >>> bulk = wb.weights.random_bulk(np.linalg.svd(W, compute_uv=False) ** 2 / 400, 400, 100)
        >>> round(bulk.variance, 1), bulk.n_spikes
        (1.0, 1.0)

    See Also:
        `workbench.weights.power_law_tail`: Fits the tail of the eigenvalues.
        `workbench.weights.weight_spectra`: Finds the spikes of all matrices of a model.
    """
    eigenvalues = _checked("eigenvalues", eigenvalues)
    short, long = sorted((n_rows, n_columns))
    if len(eigenvalues) != short:
        raise OptionError(
            f"A matrix of {n_rows} rows and {n_columns} columns has {short} eigenvalues of W'W / N, got "
            f"{len(eigenvalues)}; pass all squared singular values divided by {long}."
        )
    if short < MIN_EIGENVALUES or not eigenvalues.any():
        return Bulk()
    variance = float(np.median(eigenvalues)) / _median(short / long)
    root = np.sqrt(long - 1), np.sqrt(short)
    center, scale = sum(root) ** 2, sum(root) * (1 / root[0] + 1 / root[1]) ** (1 / 3)
    edge = variance * (center + _TRACY_WIDOM_99 * scale) / long
    return Bulk(variance, float(edge), float((eigenvalues > edge).sum()))


def _checked(name: str, values: np.ndarray) -> np.ndarray:
    """Return values as a float array of one dimension; raise OptionError if one is negative or not finite."""
    values = np.asarray(values, float).ravel()
    is_wrong = ~(np.isfinite(values) & (values >= 0))
    if is_wrong.any():
        raise OptionError(f"Some of the {name} are negative or not finite; pass eigenvalues of W'W.")
    return values


@lru_cache
def _median(ratio: float) -> float:
    """Return the median of the Marchenko-Pastur law of unit variance with M / N = ``ratio``."""
    # With x = 1 + ratio + 2 sqrt(ratio) cos(angle) the density has no singular ends.
    angle = np.linspace(np.pi, 0, 20_001)[1:-1]
    x = 1 + ratio + 2 * np.sqrt(ratio) * np.cos(angle)
    mass = np.cumsum(np.sin(angle) ** 2 / x)
    return float(np.interp(0.5, mass / mass[-1], x))
