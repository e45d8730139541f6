"""Search for the columns of one matrix among those of others by value, if necessary through norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from workbench.models.readable_weights import read_parameter
from workbench.models.tracing import Normalization, ParameterSlice, Projection

#: Largest value of 1 - cosine between two columns that are equal up to rounding and a factor.
_LARGEST_GAP = 1e-5
#: Markers in place of the index of a source: no column matches; several match.
_MISSING, _AMBIGUOUS = -1, -2


@dataclass(frozen=True)
class NormStep:
    """A normalization that follows a projection."""

    gain: str | None  # path of the gain in the model
    gain_offset: int  # 1 if the norm multiplies by 1 + gain, else 0
    gain_index: Tensor  # index of each column in the flattened gain
    bias: str | None  # path of its bias
    is_centered: bool  # whether the mean is subtracted first
    spans_heads: bool  # whether it normalizes over all heads together rather than within each head

    def read_gain(self, model: nn.Module, like: Tensor) -> Tensor:
        """Return the current gain in the shape of ``gain_index``."""
        if self.gain is None:
            return torch.ones(self.gain_index.shape, dtype=like.dtype, device=like.device)
        gain = read_parameter(model, self.gain).flatten()
        return (gain + self.gain_offset)[self.gain_index.to(gain.device)].to(like)

    def center(self, weight: Tensor) -> Tensor:
        """Subtract from a weight (head, feature, head_dim) its mean over the dimensions that the norm spans."""
        dims = (0, 2) if self.spans_heads else (2,)
        return weight - weight.mean(dim=dims, keepdim=True)


@dataclass(frozen=True)
class ColumnSource:
    """A linear map whose outputs are candidates for the columns; weight and bias are None unless parameters."""

    origin: Projection  # map whose input is the stream: this map, or the one before it
    weight: ParameterSlice | None
    bias: ParameterSlice | None
    bias_value: Tensor | None  # bias that was added
    columns: Tensor  # outputs of the map at the first token, float64, shape (example, output)
    into: Tensor  # inputs of the map at the first token, shape (example, feature)
    inner: ColumnSource | None = None  # map before this one, if its normalized output is the input of this map
    inner_column: Tensor | None = None  # indices of the outputs of the inner map
    inner_norm: NormStep | None = None  # norm between the two maps

    @classmethod
    def of(cls, projection: Projection, n_batch: int, n_tokens: int) -> ColumnSource | None:
        """Create the source of a projection; None if the projection was not applied to every token."""
        columns = _at_first_token(projection.out, n_batch, n_tokens)
        into = _at_first_token(projection.into, n_batch, n_tokens)
        if columns is None or into is None:
            return None
        return cls(projection, projection.weight, projection.bias, projection.bias_value, columns, into)


@dataclass(frozen=True)
class Columns:
    """The origin of each column of a target."""

    sources: Sequence[ColumnSource]
    source: Tensor  # index of the map, shape (column,)
    column: Tensor  # index of the output of that map, shape (column,)
    factor: Tensor  # ratio of the column to that output, shape (column,)
    norm: NormStep | None = None  # norm between them, whose `gain_index` has shape (column,)

    @property
    def is_deep(self) -> Tensor:
        """Whether each column comes from a map that follows another map, shape (column,)."""
        return torch.tensor([self.sources[int(i)].inner is not None for i in self.source])


def first_token_columns(heads: Tensor, n_batch: int, n_tokens: int) -> Tensor | None:
    """Return queries or keys (..., token, head_dim) at the first token, float64, shape (example, head * head_dim)."""
    n_rest = heads.shape[:-2].numel()
    if n_rest % n_batch or heads.shape[-2] != n_tokens:
        return None
    return heads.reshape(n_batch, n_rest // n_batch, n_tokens, heads.shape[-1])[:, :, 0].flatten(1).cpu().double()


def find_columns(
    target: Tensor, sources: Sequence[ColumnSource], norms: Sequence[Normalization], n_batch: int, n_tokens: int
) -> Columns | str:
    """Return the origin of every column of a target (example, column), or a clause why not all were found."""
    distinct: list[ColumnSource] = []
    for each in sources:  # without repeated applications of the same weight with the same output
        same = (k for k in distinct if k.weight == each.weight is not None and k.columns.shape == each.columns.shape)
        distinct += [] if any(torch.equal(k.columns, each.columns) for k in same) else [each]
    sources = _with_inner(distinct, norms, n_batch, n_tokens)
    direct = _match(target, [s.columns for s in sources])
    if (direct[0] >= 0).all():
        return Columns(sources, *direct)
    if (direct[0] == _AMBIGUOUS).any():
        return "several linear maps have equal outputs, so the right one cannot be determined (are they zero or tied?)"
    best = float((direct[0] >= 0).double().mean())
    for norm in norms:
        into, out = (_at_first_token(t, n_batch, n_tokens) for t in (norm.into, norm.out))
        if into is None or out is None or into.shape != out.shape:
            continue
        if out.shape[1] > target.shape[1]:
            continue
        is_found, position, factor = _match(target, [out])
        if (is_found < 0).any():
            continue
        source, column, inner_factor = _match(into[:, position], [s.columns for s in sources])
        best = max(best, float((source >= 0).double().mean()))
        if (source < 0).any() or inner_factor.std(correction=0) > 1e-6 * inner_factor.abs().mean():
            continue
        step = _norm_step(norm, into, out)
        if step is None:
            return "the norm that follows the projection is of an unknown kind"
        # The norm's own factor is positive per token; the remaining factor is a constant that affects the scores.
        step = replace(step, gain_index=step.gain_index[position])
        return Columns(sources, source, column, factor, step)
    return f"only {best:.0%} of the columns are outputs of a linear map in the block"


def _with_inner(
    sources: Sequence[ColumnSource], norms: Sequence[Normalization], n_batch: int, n_tokens: int
) -> list[ColumnSource]:
    """Link each map to the one before it where only a norm lies between them."""
    before: list[tuple[Tensor, dict]] = []
    for norm in norms:
        into, out = (_at_first_token(t, n_batch, n_tokens) for t in (norm.into, norm.out))
        if into is None or out is None or into.shape != out.shape:
            continue
        index, column, _ = _match(into, [s.columns for s in sources], exactly=True)
        if (index < 0).any() or (index != index[0]).any():
            continue
        inner, step = sources[int(index[0])], _norm_step(norm, into, out)
        if inner.weight is not None and step is not None and step.bias is None:
            step = replace(step, gain_index=step.gain_index[None])
            link = {"origin": inner.origin, "inner": inner, "inner_column": column, "inner_norm": step}
            before.append((out, link))
    linked = []
    for source in sources:
        links = (link for out, link in before if out.shape == source.into.shape and torch.equal(out, source.into))
        linked.append(replace(source, **next(links, {})))
    return linked


def _at_first_token(tensor: Tensor, n_batch: int, n_tokens: int) -> Tensor | None:
    """Return the entries of the first token of every example, float64, shape (example, rest); None if unclear."""
    shape = tensor.shape
    if len(shape) > 2 and shape[0] == n_batch and n_tokens in shape[1:-1]:
        dim = 1 + shape[1:-1].index(n_tokens)
        tensor = tensor.select(dim, 0)
    elif len(shape) > 2 and shape[:2] == (n_tokens, n_batch):
        tensor = tensor[0]
    elif len(shape) > 1 and shape[0] == n_batch * n_tokens:
        tensor = tensor.unflatten(0, (n_batch, n_tokens))[:, 0]
    else:
        return None
    return tensor.flatten(1).cpu().double()


def _match(target: Tensor, sources: Sequence[Tensor], *, exactly: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return source (-1 for none, -2 for several), column and factor of each target column."""
    table: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for number, source in enumerate(sources):
        for column, values in enumerate(source.T.contiguous().numpy()):
            table[values.tobytes()].append((number, column))
    n = target.shape[1]
    found = torch.full((n,), _MISSING), torch.full((n,), _MISSING), torch.ones(n, dtype=torch.float64)
    for j, values in enumerate(target.T.contiguous().numpy()):
        if options := table.get(values.tobytes(), []):
            # Among equal columns the one that follows the column found before is chosen.
            after = (int(found[0][j - 1]), int(found[1][j - 1]) + 1) if j else None
            if after in options or len(options) == 1:
                found[0][j], found[1][j] = after if after in options else options[0]
            else:
                found[0][j] = _AMBIGUOUS
    if not exactly and target.shape[0] > 2 and sources and (missing := (found[0] == _MISSING).nonzero()[:, 0]).numel():
        _match_proportional(target, sources, found, missing)
    return found


def _match_proportional(
    target: Tensor, sources: Sequence[Tensor], found: tuple[Tensor, Tensor, Tensor], missing: Tensor
) -> None:
    """Match the missing columns up to a factor where one column fits and no other is close."""
    target = target[:, missing]
    lengths = target.norm(dim=0)
    unit = target / lengths.clamp_min(1e-300)
    cosines, columns = [], []
    for source in sources:  # one at a time, for memory
        cosine = unit.T @ (source / source.norm(dim=0).clamp_min(1e-300))
        best, place = cosine.abs().topk(min(2, cosine.shape[1]), dim=1)
        cosines.append(best if best.shape[1] == 2 else torch.cat([best, torch.zeros_like(best)], dim=1))
        columns.append(place[:, 0])
    ranked, order = torch.cat(cosines, dim=1).topk(2, dim=1)
    gap, next_gap = 1 - ranked[:, 0], 1 - ranked[:, 1]
    fits = (gap < _LARGEST_GAP) & (next_gap > torch.clamp(20 * gap, min=10 * _LARGEST_GAP)) & (lengths > 0)
    for i in fits.nonzero()[:, 0].tolist():
        number = int(order[i, 0]) // 2
        column = int(columns[number][i])
        values = sources[number][:, column]
        j = int(missing[i])
        found[0][j], found[1][j] = number, column
        found[2][j] = (target[:, i] @ values) / (values @ values)


def _norm_step(norm: Normalization, into: Tensor, out: Tensor) -> NormStep | None:
    """Determine the kind of a norm out = factor(token) gain (in [- mean]) + bias from its values; None if unknown."""
    n_columns, size = into.shape[1], norm.into.shape[-1]
    if n_columns % size:
        return None
    gain, bias = norm.gain_value, norm.bias_value
    gain_index = torch.arange(n_columns) % (gain.numel() if gain is not None else size)
    if bias is not None:
        out = out - bias.flatten().cpu().double()[torch.arange(n_columns) % bias.numel()]
    grouped = out.unflatten(1, (-1, size))
    best: tuple[float, bool, int] | None = None
    for is_centered in (False, True):
        for offset in (0, 1) if gain is not None else (0,):
            rows = into.unflatten(1, (-1, size))
            rows = rows - rows.mean(-1, keepdim=True) if is_centered else rows
            values = (
                rows if gain is None else rows * (gain.flatten().cpu().double() + offset)[gain_index].view(-1, size)
            )
            gap = 1 - torch.cosine_similarity(values, grouped, dim=-1).min()
            if gap > 1e-4:
                continue
            # A constant gain fits both offsets. Then the scale decides, because norms divide by the root mean square.
            scale = (grouped * values).sum(-1) / (values * values).sum(-1) * rows.square().mean(-1).sqrt()
            error = float((scale - 1).abs().mean()) if gain is not None else float(gap)
            if best is None or error < best[0]:
                best = (error, is_centered, offset)
    if best is None:
        return None
    _, is_centered, offset = best
    return NormStep(norm.gain, offset, gain_index, norm.bias, is_centered, size == n_columns)
