"""Query and key weights per head of any model, identified by values rather than by names.

Rotary embeddings are the identity at position 0. There each column of the queries and keys that reach the attention
scores must be an output of some linear map in the block, up to one constant factor. Matching the columns over several
examples identifies the row of the parameter that belongs to each head and feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SnapshotError
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.batches import Batches
from workbench.models.block_calls import Site
from workbench.models.calling import on_device_of, runnable, subject_in, tensors_of, with_values
from workbench.models.column_matching import Columns, ColumnSource, NormStep, find_columns, first_token_columns
from workbench.models.layout import BATCH_FIRST, BatchLayout
from workbench.models.readable_weights import on_device, read_parameter, readable
from workbench.models.streaming import with_weights
from workbench.models.subject import Subject
from workbench.models.tracing import (
    BlockTrace,
    PackedAttention,
    ParameterSlice,
    Scores,
    linear_widths,
    matrix_of,
    trace_blocks,
)


@dataclass(frozen=True)
class WeightRecipe:
    """Recipe to read the current weight of each head without a forward pass; a module is run on the unit vectors."""

    parameter: str  # path of the parameter in the model
    axis: int  # axis of the parameter that counts outputs
    index: Tensor  # indices along that axis, int64, shape (head, head_dim)
    bias: str | None = None  # path of the bias
    bias_index: Tensor | None = None  # indices into the bias, shape (head, head_dim)
    norm: NormStep | None = None  # norm between projection and scores
    inner: WeightRecipe | None = None  # map before this one, for low-rank projections, whose index has shape (1, rank)
    inner_norm: NormStep | None = None  # norm between the two maps
    is_module: bool = False

    def read(self, model: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Return the current weight, shape (head, feature, head_dim), and bias, shape (head, head_dim)."""
        model = runnable(model)
        matrix, offset = self._current(model)
        index = on_device(self.index, matrix.device)
        rows = (matrix if self.axis == 0 else matrix.T)[index]  # (head, head_dim, feature)
        bias = None
        if offset is not None and self.bias_index is not None:
            bias = offset[on_device(self.bias_index, matrix.device)]
        if self.inner is not None:
            inner, inner_bias = self.inner.read(model)
            inner, inner_bias = _after_norm(model, self.inner_norm, inner, inner_bias)
            # The norm between the two maps scales the inner bias per token, like the weight, but not the outer bias.
            bias = rows @ inner_bias[0] if inner_bias is not None and bias is None else bias
            rows = rows @ inner[0].T
        weight, bias = _after_norm(model, self.norm, rows.transpose(1, 2), bias)
        return weight, bias

    def _current(self, model: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Return the full matrix and the full bias."""
        if not self.is_module:
            bias = None if self.bias is None else read_parameter(model, self.bias)
            return read_parameter(model, self.parameter), bias
        module = model.get_submodule(self.parameter)
        widths = linear_widths(module)
        like = next(p for p in (*module.parameters(), *module.buffers()) if p.is_floating_point())
        weight, offset = matrix_of(module, widths[0] if widths else 0, like)
        return weight, None if self.bias is None else offset


@dataclass(frozen=True)
class QueryKey:
    """Query and key weights of one attention layer.

    Attributes:
        layer: Index of the site.
        site: Name of the site.
        query: Query weights, shape (head, feature, head_dim), so that q = x @ query[head] + query_bias[head].
        key: Key weights, shape (key-value head, feature, head_dim); query head h uses key head h // (heads / key-value
            heads).
        query_bias: Query bias, shape (head, head_dim); None if there is none.
        key_bias: Key bias, shape (key-value head, head_dim); None if there is none.
        notes: Notes on their scale: constant factors, norms between projection and scores.
        query_recipe: Recipe to read the current query weights, with the parameter and the indices of each head in it.
        key_recipe: The same for the key weights.
    """

    layer: int
    site: str
    query: Tensor
    key: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    notes: str
    query_recipe: WeightRecipe
    key_recipe: WeightRecipe

    def read(self, model: nn.Module) -> QueryKey:
        """Return a copy with the current weights, without a forward pass."""
        query, query_bias = self.query_recipe.read(model)
        key, key_bias = self.key_recipe.read(model)
        return replace(self, query=query, key=key, query_bias=query_bias, key_bias=key_bias)


@dataclass(frozen=True)
class Unreadable:
    """A site whose weights cannot be read."""

    layer: int  # index of the site
    site: str  # name of the site
    reason: str  # one sentence


@with_weights
def query_key_weights(
    model: Subject | nn.Module, inputs: Any, *, anatomy: Anatomy | None = None
) -> list[QueryKey | Unreadable]:
    """Return the query and key weights of every block, per head.

    The model runs once, on examples derived from ``inputs`` that begin with different tokens. Every column of the
    queries and keys that reach the attention scores must be found among the outputs of the block's linear maps;
    otherwise the block is `Unreadable`. In blocks with self- and cross-attention the self-attention is read.

    Weights behind a norm of the queries or keys are exact up to a positive factor per token. They include the gain of
    the norm, as stated in ``notes``. In multi-head latent attention only the part without position is one linear map of
    the stream, and only that part is returned.

    Args:
        model: Module, or a subject from `open_checkpoint`; it is not changed.
        inputs: Inputs as for `workbench.profile`; of several batches the first is used.
        anatomy: Anatomy of the model; None reads it.

    Returns:
        One entry per site, in order. Weights are copies; ``read()`` returns the current ones.

    Raises:
        AnatomyError: If no anatomy was passed and none can be read.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> first, second = wb.query_key_weights(model, torch.arange(8)[None])
        >>> tuple(first.query.shape)
        (2, 16, 8)

    See Also:
        `workbench.read_anatomy`: Finds the blocks.
        `workbench.monitors.qk_update_spectrum`: Analyzes how query and key weights change.
    """
    subject, model = subject_in(model), runnable(model)
    inputs = on_device_of(model, Batches.of(inputs, subject).first())
    anatomy = anatomy or read_anatomy(model, inputs)
    varied = probe_inputs(model, inputs, anatomy.layout)
    with readable(model):
        try:
            readings = trace_blocks(model, varied, anatomy, _read_block)
        except (SnapshotError, RuntimeError, ValueError, IndexError, TypeError, KeyError):  # the model may reject them
            readings = trace_blocks(model, inputs, anatomy, _read_block)
    found: list[QueryKey | Unreadable] = []
    for (layer, site), reading in zip(enumerate(anatomy.sites), readings, strict=True):
        if isinstance(reading, str):
            found.append(Unreadable(layer, site.name, reading))
            continue
        (query, query_bias), (key, key_bias) = reading.query.read(model), reading.key.read(model)
        how = reading.notes, reading.query, reading.key
        found.append(QueryKey(layer, site.name, query, key, query_bias, key_bias, *how))
    return found


@dataclass(frozen=True)
class _Reading:
    """Recipes of a block's query and key weights, with notes on their scale."""

    query: WeightRecipe
    key: WeightRecipe
    notes: str


def _read_block(layer: int, site: Site, trace: BlockTrace) -> _Reading | str:
    if not trace.attentions:
        return (
            f"No attention scores were computed in {site.name}; it may be a state-space, convolution or "
            "linear-attention block, or use a custom kernel (try the model's 'sdpa' or 'eager' attention)."
        )
    reasons = []
    for attention in trace.attentions:
        reading = _read_packed(attention) if isinstance(attention, PackedAttention) else _read_scores(attention, trace)
        if isinstance(reading, _Reading):
            return reading
        if reading:
            reasons.append(reading)
    reason = reasons[0] if reasons else "no product of queries and keys has one score per pair of tokens"
    return f"The query and key weights of {site.name} cannot be read: {reason}."


def _read_packed(attention: PackedAttention) -> _Reading | str:
    if attention.query is not attention.key and not torch.equal(attention.query, attention.key):
        return "its attention compares two different inputs"
    query, key = attention.query_weight, attention.key_weight
    if query is None or key is None:
        return "the projection that PyTorch's multi-head attention received is not a parameter of the model"

    def recipe_of(weight: ParameterSlice, bias: ParameterSlice | None) -> WeightRecipe:
        index = torch.arange(weight.size).view(attention.n_heads, -1)
        bias_index = index + bias.start if bias is not None else None
        return WeightRecipe(
            weight.name, weight.axis, index + weight.start, None if bias is None else bias.name, bias_index
        )

    return _Reading(recipe_of(query, attention.query_bias), recipe_of(key, attention.key_bias), "")


def _read_scores(attention: Scores, trace: BlockTrace) -> _Reading | str:
    n_tokens, head_dim = attention.query.shape[-2:]
    n_states = trace.state.shape[:-1].numel()
    if attention.key.shape[-2] != n_tokens or n_states % n_tokens or attention.query.ndim < 3:
        return ""
    n_batch = n_states // n_tokens
    sources = [
        s
        for p in trace.projections[: attention.n_projections]
        if (s := ColumnSource.of(p, n_batch, n_tokens)) is not None
    ]
    if not sources:
        return "no linear map before the scores has one output per token"
    columns = []
    for what, tensor in (("queries", attention.query), ("keys", attention.key)):
        target = first_token_columns(tensor, n_batch, n_tokens)
        if target is None:
            return f"the {what}, of shape {tuple(tensor.shape)}, do not have one vector per token and head"
        found = find_columns(target, sources, trace.norms, n_batch, n_tokens)
        if isinstance(found, str):
            return f"of the {what}, {found}"
        columns.append(found)
    return _combine(columns[0], columns[1], head_dim, trace.state.shape[-1])


def _combine(query: Columns, key: Columns, head_dim: int, width: int) -> _Reading | str:
    """Return recipes from matched columns, restricted to the features that are one linear map in queries and keys."""
    kept = torch.arange(head_dim)
    notes = []
    for part in (query, key):
        deep = part.is_deep.view(-1, head_dim)
        if deep.any() and not deep.all():
            if not (deep == deep[0]).all():
                return "its heads mix features of low-rank and of direct projections differently"
            kept = kept[deep[0][kept]]
    if len(kept) < head_dim:
        notes.append(f"only the {len(kept)} of {head_dim} features without position are included")
    recipes = []
    inputs = []
    for what, part in (("query", query), ("key", key)):
        index = torch.arange(part.source.numel()).view(-1, head_dim)[:, kept]
        built = _recipe(part, index)
        if isinstance(built, str):
            return f"{built} ({what})"
        recipe, source = built
        recipes.append(recipe)
        inputs.append(source.origin.into)
        notes += _notes(what, part, index, recipe)
    if inputs[0].shape != inputs[1].shape or not torch.equal(inputs[0], inputs[1]):
        return "its queries and keys come from different inputs, as in cross-attention"
    if inputs[0].shape[-1] != width:
        notes.append(f"the weights act on {inputs[0].shape[-1]} features computed from the {width} of the stream")
    return _Reading(recipes[0], recipes[1], "; ".join(notes))


def _recipe(part: Columns, index: Tensor) -> tuple[WeightRecipe, ColumnSource] | str:
    """Return the recipe of the columns ``index``, shape (head, feature), and their source; drop repeated heads."""
    used = part.source[index]
    if (used != used.flatten()[0]).any():
        return "the columns of one head come from several linear maps"
    source = part.sources[int(used.flatten()[0])]
    column = part.column[index]
    distinct = list(dict.fromkeys(map(tuple, column.tolist())))
    n_shares = len(column) // len(distinct)
    if column.tolist() != [list(head) for head in distinct for _ in range(n_shares)]:
        return "its shared heads are not in consecutive order"
    column = torch.tensor(distinct)
    if column.unique().numel() < column.numel():
        return "one column of a projection serves several features"
    if part.norm is None or source.origin.weight is None:
        norm = None
    else:
        first = [
            next(i for i, row in enumerate(part.column[index].tolist()) if tuple(row) == target) for target in distinct
        ]
        norm = replace(part.norm, gain_index=part.norm.gain_index[index[first]])
    factors = part.factor[index]
    if factors.std(correction=0) > 5e-3 * factors.abs().mean():
        return "the columns of one projection are scaled by different constants"
    weight, bias = source.weight, source.bias
    if weight is None:
        return "the matrix of a projection is not a parameter of the model"
    if source.bias_value is not None and bias is None and source.bias_value[column].any():
        return f"the bias that is added to {weight.name} is not a parameter of the model"
    inner = None
    if source.inner is not None:
        before, chosen = source.inner.weight, source.inner_column
        if before is None or chosen is None:
            return "the matrix of a projection is not a parameter of the model"
        inner = WeightRecipe(before.name, before.axis, (chosen + before.start)[None], is_module=before.is_module)
        inner = replace(inner, **_bias_of(source.inner, chosen[None]))
    recipe = WeightRecipe(
        weight.name,
        weight.axis,
        column + weight.start,
        norm=norm,
        inner=inner,
        inner_norm=source.inner_norm,
        is_module=weight.is_module,
    )
    return replace(recipe, **_bias_of(source, column)), source


def _bias_of(source: ColumnSource, column: Tensor) -> Mapping[str, Any]:
    if source.bias is None:
        return {}
    return {"bias": source.bias.name, "bias_index": column + source.bias.start}


def _notes(what: str, part: Columns, index: Tensor, recipe: WeightRecipe) -> list[str]:
    notes = []
    factor = float(part.factor[index].mean())
    if abs(factor - 1) > 1e-4:
        notes.append(f"the {what} is multiplied by {factor:.4g} before the scores")
    if recipe.is_module:
        notes.append(f"the {what} weight is not a parameter, but the matrix that {recipe.parameter} applies")
    if recipe.norm is not None:
        kind = "a LayerNorm" if recipe.norm.is_centered else "an RMS norm"
        notes.append(f"{what}: exact up to a positive factor per token, because {kind} follows; its gain is included")
        if recipe.norm.bias is not None:
            notes.append(f"the norm of the {what} adds its own bias, {recipe.norm.bias}, which is not included")
    if recipe.inner is not None:
        notes.append(f"{what}: product of two matrices, exact up to a positive factor per token (a norm lies between)")
    return notes


def _after_norm(
    model: nn.Module, norm: NormStep | None, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Apply a norm to weight (head, feature, head_dim) and bias (head, head_dim), up to a positive factor per token."""
    if norm is None:
        return weight, bias
    gain = norm.read_gain(model, weight)
    if norm.is_centered:
        weight = norm.center(weight)
        bias = norm.center(bias[:, None])[:, 0] if bias is not None else None
    return weight * gain[:, None], bias * gain if bias is not None else None


_N_EXAMPLES = 12
_LENGTHS = (11, 13, 7, 17, 19)


def probe_inputs(model: nn.Module, inputs: Any, layout: BatchLayout = BATCH_FIRST) -> Any:
    """Return twelve different examples like the given inputs, the same ones in every call.

    Their length divides no dimension of the model's weights, so that shapes are unambiguous.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = {size for p in model.parameters() for size in p.shape}
    n_tokens = next((n for n in _LENGTHS if all(size % n for size in sizes)), _LENGTHS[0])
    axis = layout.inputs
    if axis is None:
        return inputs
    given = [value for _, value in tensors_of(inputs) if value.ndim > axis]
    n_given = given[0].shape[axis] if given else 0

    # The embedding of padding is 0, so that no state could be told from another one by its direction.
    padding = {m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None}

    def remake(value: Any, name: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim <= axis or value.shape[axis] != n_given:
            return value
        return remade(value.movedim(axis, 0), str(name or "")).movedim(0, axis)

    def remade(value: Tensor, name: str) -> Tensor:
        if value.is_floating_point():
            copies = value[torch.arange(_N_EXAMPLES) % n_given].clone()
            scale = 0.1 * float(value.float().std(correction=0)) if "mask" not in name else 0.0
            noise = torch.randn(copies.shape, generator=generator) * scale
            return copies + noise.to(copies)
        if value.ndim != 2:
            return value[torch.arange(_N_EXAMPLES) % n_given]
        if "mask" in name:
            return value.new_ones(_N_EXAMPLES, n_tokens)
        if "position" in name:
            return torch.arange(n_tokens, device=value.device).expand(_N_EXAMPLES, -1).to(value)
        if "type" in name:
            return value.new_zeros(_N_EXAMPLES, n_tokens)
        return _draw(value, n_tokens, generator, padding)

    return with_values(inputs, remake)


def _draw(tokens: Tensor, n_tokens: int, generator: torch.Generator, padding: set[int]) -> Tensor:
    """Draw sequences of token ids from those given, or from those below; first tokens differ where possible."""
    known = tokens.unique().cpu()
    if len(known) < _N_EXAMPLES:
        known = torch.arange(int(known.max()) + 1)[-4 * _N_EXAMPLES :]
    is_padding = torch.isin(known, torch.tensor(sorted(padding), dtype=known.dtype))
    known = known if is_padding.all() else known[~is_padding]
    firsts = known[torch.randperm(len(known), generator=generator)]
    firsts = firsts[torch.arange(_N_EXAMPLES) % len(firsts)]
    rest = known[torch.randint(len(known), (_N_EXAMPLES, n_tokens - 1), generator=generator)]
    return torch.cat([firsts[:, None], rest], dim=1).to(tokens)
