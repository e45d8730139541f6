"""Measures of attention: changes of query-key products, size of logits, and entropy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import OptionError
from workbench.models.readable_weights import on_device, read_arrays
from workbench.monitors.matrices import at_least_float32, widened, without_rounding

#: Number of scores to hold at a time: on the host as many as fit its caches, elsewhere enough to occupy the device.
_SCORES_ON_HOST, _SCORES_ON_DEVICE = 2**17, 2**23
#: Largest score of a masked token, in models that add a finite number as mask.
_CUSTOMARY_MASK = -1e4


def qk_update_spectrum(wq0: Tensor, wk0: Tensor, wq1: Tensor, wk1: Tensor) -> dict[str, Tensor]:
    """Return the singular values of the change of the query-key products between two states of the weights.

    With dWq = wq1 - wq0 and dWk = wk1 - wk0 the product changes by D2 + D3 (Huang et al. 2026, arXiv:2606.28116). No
    matrix of feature x feature is formed: with factors LL' of the Gram matrices of [dWq, wq0] and [dWk, wk0], D2, D3
    and W have the singular values of products of parts of them. Since only products are compared, they are invariant
    under a change of basis within a head (wq R, wk R^-T at both states).

    Squares of singular values are accurate to about 1e-15 of the largest. Norms, the stable rank, and effective rank
    and entropy with alpha = 2 therefore have relative errors below 1e-8. Values below about 1e-7 of the largest have no
    digits and become 0, which may change an effective rank with alpha = 1 by 1e-5, and with alpha = 1/2 by 1 %. If the
    two terms of D2 nearly cancel because the change is one of basis, its relative error may reach 1e-15 times the
    squared ratio of their size to that of D2.

    Args:
        wq0: Query weights at the base point, shape (..., query head, feature, head_dim); layers of equal shape can be
            stacked along leading dimensions.
        wk0: Key weights at the base point, shape (..., key head, feature, head_dim). With fewer key than query heads,
            each key head serves several consecutive query heads.
        wq1: Current query weights.
        wk1: Current key weights.

    Returns:
        Singular values in the unit of the weights (squared for the products), in decreasing order, shape
        (..., query head, n):

        - ``D2``: of dWq wk0' + wq0 dWk', n = min(2 head_dim, feature);
        - ``D3``: of dWq dWk'; ``dWq``; ``dWk``; ``W``: of wq1 wk1'; each n = min(head_dim, feature).

        float64 on the host. Values that are zero within rounding are 0: a head that did not change has norm 0 and
        effective rank NaN. NaN for a head with a query or key weight that is not finite, or whose square is not.

    Raises:
        OptionError: If the shapes do not match, or if the number of query heads is not a multiple of that of key heads.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wq, wk = torch.randn(2, 3, 16, 4, generator=torch.Generator().manual_seed(0))
        >>> spectrum = wb.monitors.qk_update_spectrum(wq, wk, 1.01 * wq, wk)
        >>> {name: tuple(values.shape) for name, values in spectrum.items()}
        {'D2': (3, 8), 'D3': (3, 4), 'dWq': (3, 4), 'dWk': (3, 4), 'W': (3, 4)}
        >>> spectrum["D3"].max().item()
        0.0

    See Also:
        `workbench.monitors.effective_rank`: Effective rank of the singular values.
        `workbench.Recorder`: Records these spectra for every head.
    """
    grams = update_grams(wq0, wk0, wq1, wk1)
    gram_q, gram_k = (torch.from_numpy(gram) for gram in read_arrays(grams))
    return spectrum_of_grams(gram_q, gram_k, wq0.shape[-2], torch.finfo(grams[0].dtype).eps)


def update_grams(wq0: Tensor, wk0: Tensor, wq1: Tensor, wk1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Gram matrices of [dWq, wq0] and [dWk, wk0], shape (..., head, 2 head_dim, 2 head_dim), on the device.

    They are all that `spectrum_of_grams` needs from there. Arguments are those of `qk_update_spectrum`.
    """
    _check_heads(wq0, wk0, wq1, wk1)
    both = (_change_and_base(wq0, wq1), _change_and_base(wk0, wk1))
    return both[0].mT @ both[0], both[1].mT @ both[1]


def spectrum_of_grams(gram_q: Tensor, gram_k: Tensor, n_features: int, eps: float) -> dict[str, Tensor]:
    """Return the result of `qk_update_spectrum` from the result of `update_grams` on the host.

    ``eps`` is the rounding unit of the number format of the device's products.
    """
    (n_query, n_key), head_dim = (gram_q.shape[-3], gram_k.shape[-3]), gram_q.shape[-1] // 2
    n_per_key, change, base = n_query // n_key, slice(head_dim), slice(head_dim, None)
    is_known = [gram.diagonal(dim1=-2, dim2=-1).isfinite().all(-1) for gram in (gram_q, gram_k)]
    is_known[0] &= is_known[1].repeat_interleave(n_per_key, -1)
    gram_q, gram_k = (
        gram if known.all() else gram.masked_fill(~known[..., None, None], 0)
        for gram, known in zip((gram_q, gram_k), is_known, strict=True)
    )
    l_q, l_k = _lower_factor(gram_q, eps), _spread(_lower_factor(gram_k, eps), n_per_key)
    # The product AB' has the singular values of L_A'L_B.
    d2 = (l_q[..., change, :].mT @ l_k[..., base, :]).add_(l_q[..., base, :].mT @ l_k[..., change, :])
    spread = _spread(gram_k, n_per_key)
    pairs = (
        (gram_q[..., change, change], spread[..., base, base]),
        (gram_q[..., base, base], spread[..., change, change]),
    )
    norms = [(of_q * of_k).sum((-2, -1)).clamp_min(0).sqrt() for of_q, of_k in pairs]
    of_sums = [
        half[..., change] + half[..., base] for g in (gram_q, spread) for half in [g[..., change, :] + g[..., base, :]]
    ]
    queries = torch.stack([gram_q[..., change, change], of_sums[0]])
    l_products = _lower_factor(queries, eps)
    of_products = l_products.mT @ torch.stack([spread[..., change, change], of_sums[1]]) @ l_products
    squares = torch.linalg.eigvalsh(torch.cat([*of_products, queries[0], gram_k[..., change, change]], -3)).flip(-1)
    d3, w, dwq, dwk = squares[..., : min(n_features, head_dim)].split([n_query] * 3 + [n_key], -2)
    spectra = {
        "D2": torch.linalg.eigvalsh(d2 @ d2.mT).flip(-1)[..., : min(n_features, 2 * head_dim)],
        "D3": d3,
        "dWq": dwq,
        "dWk": dwk.repeat_interleave(n_per_key, -2),
        "W": w,
    }
    values = {name: without_rounding(of_term, n_features, eps).sqrt() for name, of_term in spectra.items()}
    # The two terms of D2 are much larger than itself if they cancel.
    values["D2"] = without_rounding(values["D2"], n_features, eps, largest=norms[0] + norms[1])
    return {name: s.masked_fill(~is_known[0][..., None], torch.nan) for name, s in values.items()}


def _lower_factor(gram: Tensor, eps: float) -> Tensor:
    """Return L with LL' = ``gram``: Cholesky of scaled columns, or from eigenvectors where that has no digits."""
    length = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    divisor = length.masked_fill(length == 0, 1)
    scaled = (gram / divisor[..., None]).div_(divisor[..., None, :])
    scaled.diagonal(dim1=-2, dim2=-1).add_(length == 0)
    factor, failed = torch.linalg.cholesky_ex(scaled)
    pivots = factor.diagonal(dim1=-2, dim2=-1).square().amin(-1)
    is_lost = (failed > 0) | ~(pivots > 100 * gram.shape[-1] * eps)
    if is_lost.any():
        squares, vectors = torch.linalg.eigh(scaled[is_lost])
        factor[is_lost] = vectors * without_rounding(squares, gram.shape[-1], eps).sqrt()[..., None, :]
    return factor.mul_(length[..., None])


@dataclass(frozen=True)
class AttentionHealth:
    """Logits and entropy of the attention of one layer; NaN for a head with a score that is not finite.

    Attributes:
        logit_max: Largest score of a visible token before the softmax, shape (..., head). Training worsens near 1e3,
            and above 1e4 it always diverged (arXiv:2309.14322).
        entropy: Mean over tokens of the entropy of their attention, in nat, shape (..., head). Its collapse to 0
            precedes divergence (arXiv:2303.06296).
        entropy_share: Mean over tokens of that entropy over its largest value, log(number of visible tokens), between 0
            and 1; tokens that see only one token are left out. Shape (..., head).
    """

    logit_max: Tensor
    entropy: Tensor
    entropy_share: Tensor


@dataclass(frozen=True)
class AttentionQueries:
    """What each query of one layer sees: shape (batch, head, token), on the device."""

    largest: Tensor  # largest score of a visible token
    entropy: Tensor  # entropy of its attention, in nat
    n_seen: Tensor  # number of visible tokens; 0 for a query to leave out
    n_choices: Tensor  # number of tokens that could be seen

    @property
    def health(self) -> AttentionHealth:
        """The measures of the layer."""
        of_layers = attention_health([self])
        return AttentionHealth(of_layers.logit_max[0], of_layers.entropy[0], of_layers.entropy_share[0])


def attention_health(layers: Sequence[AttentionQueries]) -> AttentionHealth:
    """Return the measures of layers of equal shape, (layer, head); NaN for heads without a query that counts."""
    largest, entropy, n_seen, n_choices = (
        widened(torch.stack([getattr(layer, name) for layer in layers]))
        for name in ("largest", "entropy", "n_seen", "n_choices")
    )
    is_left_out, has_no_choice = n_seen <= 0, (n_choices <= 1) | (n_seen <= 0)
    over_queries = (1, 3)
    n_queries = (~is_left_out).sum(over_queries)
    share = (entropy / n_choices.log()).masked_fill(has_no_choice, 0).sum(over_queries)
    return AttentionHealth(
        largest.masked_fill(is_left_out, -torch.inf).amax(over_queries).masked_fill(n_queries == 0, torch.nan),
        entropy.masked_fill(is_left_out, 0).sum(over_queries) / n_queries,
        share / (~has_no_choice).sum(over_queries),
    )


def measure_attention(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> AttentionQueries:
    """Measure attention scores scale * q @ k' without keeping them, and without the host waiting.

    The arguments are those of `scaled_dot_product_attention`: queries (batch, query head, token, head_dim) as they
    enter the scores, keys (batch, key head, token, head_dim), each of which may serve several consecutive query heads,
    and a boolean mask of visible tokens or a number added to the scores. ``rows`` is a mask of the querying tokens to
    include, (batch, token); tokens that see no token are never included. It is computed in the precision of the
    queries, at least float32, a few rows of scores at a time.
    """
    _check_groups(q.shape[-3], k.shape[-3])
    q, k = at_least_float32(q), at_least_float32(k)
    k = _spread(k, q.shape[-3] // k.shape[-3])
    (n_rows, _, n_queries), n_keys = q.shape[:3], k.shape[-2]
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        mask = mask.expand(*torch.broadcast_shapes(mask.shape, (n_rows, 1, n_queries, n_keys)))

    def scores(row: slice, part: slice) -> tuple[Tensor, Tensor | None]:
        end = min(part.stop, n_keys) if is_causal else n_keys
        logits, is_hidden = q[row, :, part] @ k[row, :, :end].mT, None
        if is_causal:
            shape = part.stop - part.start, end
            is_hidden = torch.ones(shape, dtype=torch.bool, device=q.device).triu(part.start + 1)
        if mask is not None:
            here = mask[row, :, part, :end]
            is_masked = ~here if here.dtype == torch.bool else here < torch.finfo(here.dtype).min / 2
            logits = logits if here.dtype == torch.bool else logits + here
            is_hidden = is_masked if is_hidden is None else is_hidden | is_masked
        return logits, is_hidden

    return _of_queries(scores, (*q.shape[:3], n_keys), q.device, rows)


def measure_logits(logits: Tensor, *, rows: Tensor | None = None) -> AttentionQueries:
    """Measure attention from the input of its softmax, scores (batch, head, token, token) with the mask added.

    Scores at the lowest value of the number format are masked. Since masks of -1e4 are common too, tokens with such a
    score or a lower one do not count as visible in the largest value of the entropy. ``rows`` as in
    `measure_attention`.
    """
    lowest = torch.finfo(logits.dtype).min / 2

    def scores(row: slice, part: slice) -> tuple[Tensor, Tensor]:
        here = at_least_float32(logits[row, :, part])
        return here, here < lowest

    return _of_queries(scores, logits.shape, logits.device, rows, mask_score=_CUSTOMARY_MASK)


def _of_queries(
    scores: Callable[[slice, slice], tuple[Tensor, Tensor | None]],
    shape: Sequence[int],
    device: torch.device,
    rows: Tensor | None,
    *,
    mask_score: float | None = None,
) -> AttentionQueries:
    """Measure scores and the mask of hidden ones, which a function returns for parts of the batch and the queries."""
    by_row: dict[int, list[tuple[Tensor, ...]]] = {}
    for row, part in _parts(shape, device):
        logits, is_hidden = scores(row, part)
        n_choices = None if mask_score is None else (~(logits <= mask_score)).sum(-1)
        if is_hidden is None:
            n_seen = torch.full((1, 1, 1), logits.shape[-1], device=device)
        else:
            n_seen = logits.shape[-1] - is_hidden.sum(-1)
            # Finite, so that a query that sees no token is not NaN, but still 0 after the exponential.
            logits = logits.masked_fill(is_hidden, torch.finfo(logits.dtype).min / 4)
        if rows is not None:
            n_seen = n_seen * on_device(rows[row, None, part], device)
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
        n_seen = n_seen.expand(entropy.shape)
        found = logits.amax(-1), entropy, n_seen, n_seen if n_choices is None else n_choices
        by_row.setdefault(row.start, []).append(found)
    of_rows = [[_joined(parts, -1) for parts in zip(*pieces, strict=True)] for pieces in by_row.values()]
    return AttentionQueries(*(_joined(parts, 0) for parts in zip(*of_rows, strict=True)))


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim)


def _parts(shape: Sequence[int], device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield slices of batch and queries to process together: full sequences where they fit, otherwise parts of one."""
    n_rows, n_heads, n_queries, n_keys = shape
    at_a_time = _SCORES_ON_HOST if device.type == "cpu" else _SCORES_ON_DEVICE
    rows_at_a_time = max(1, at_a_time // max(1, n_heads * n_queries * n_keys))
    queries_at_a_time = max(1, at_a_time // max(1, n_heads * n_keys))
    for row in range(0, n_rows, rows_at_a_time):
        for start in range(0, n_queries, queries_at_a_time):
            yield slice(row, row + rows_at_a_time), slice(start, min(start + queries_at_a_time, n_queries))


def _change_and_base(before: Tensor, after: Tensor) -> Tensor:
    """Return [after - before, before], (..., head, feature, 2 head_dim), filled in place to save memory."""
    head_dim = before.shape[-1]
    both = widened(before[..., :0]).new_empty(*before.shape[:-1], 2 * head_dim)
    both[..., :head_dim] = after.detach()
    both[..., head_dim:] = before.detach()
    both[..., :head_dim] -= both[..., head_dim:]
    return both


def _spread(per_key_head: Tensor, n_per_key: int) -> Tensor:
    """Repeat key heads: (..., key head, ., .) -> (..., query head, ., .)."""
    return per_key_head.repeat_interleave(n_per_key, dim=-3) if n_per_key > 1 else per_key_head


def _check_groups(n_query: int, n_key: int) -> None:
    """Raise OptionError if query heads cannot be divided equally among key heads."""
    if n_key == 0 or n_query % n_key:
        raise OptionError(f"Query heads must be a multiple of the key heads, got {n_query} and {n_key}.")


def _check_heads(wq0: Tensor, wk0: Tensor, wq1: Tensor, wk1: Tensor) -> None:
    if wq0.shape != wq1.shape or wk0.shape != wk1.shape:
        raise OptionError(
            f"The weights at the base point have shapes {tuple(wq0.shape)} and {tuple(wk0.shape)}, the current ones "
            f"{tuple(wq1.shape)} and {tuple(wk1.shape)}; pass the same heads twice."
        )
    if wq0.ndim < 3 or wq0.shape[-2:] != wk0.shape[-2:] or wq0.shape[:-3] != wk0.shape[:-3]:
        raise OptionError(
            f"Query weights of shape {tuple(wq0.shape)} and key weights of shape {tuple(wk0.shape)} have no product; "
            "expected (..., head, feature, head_dim) with the same feature and head_dim."
        )
    _check_groups(wq0.shape[-3], wk0.shape[-3])
