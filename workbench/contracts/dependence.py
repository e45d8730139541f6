"""Contracts of what an output depends on: tokens before it, other examples, padding, and the order of its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.contracts.data import padding_mask, shift_of_labels
from workbench.contracts.lab import Lab, NotTestedError, arguments, contract, failed, is_same, not_applicable, passed
from workbench.contracts.results import Result
from workbench.formatting import number_in_words
from workbench.models.losses import tensors_in
from workbench.models.probing import watch

#: Least change by other tokens, over rounding, of which one by their order is seen.
_LEAST_OVER = 30.0


def _other(tokens: Tensor) -> Tensor:
    """Return ids of the same batch that differ at every position, so that they are common ones."""
    low, high = int(tokens.min()), int(tokens.max())
    moved = torch.where(tokens < high, tokens + 1, low if low < high else max(0, low - 1))
    shuffled = tokens.roll(1, 1)
    return torch.where(shuffled == tokens, moved, shuffled)


def _change(lab: Lab, tokens: Tensor, *, by_token: bool = False) -> Tensor:
    """Return the largest change of logits when the first call reads other ids, of each token, or else of each example.

    The shape is (batch, token) or, in a model that has no logits at each of its tokens, (batch,).
    """
    change = (lab.logits(lab.call, *lab.with_tokens(lab.call, tokens)) - lab.base).abs().cpu()
    if change.shape == tokens.shape:
        raise NotTestedError("the outputs may be of tokens or of classes")
    n = 2 if change.shape[:2] == tokens.shape else 1
    if by_token and n < 2:
        raise NotTestedError("the model has no output at each of its tokens")
    return change.reshape(*change.shape[:n], -1).amax(-1)


@contract("causal")
def causal(lab: Lab) -> Result:
    """Do outputs before a token change when the token changes?

    It is tested if the loss at an output wants a later token. The change before the token is compared with rounding and
    with the change from the token on.
    """
    if lab.labels.labels.ndim != 2:
        return not_applicable("The loss has one label for each example.")
    shift, _ = shift_of_labels(lab)
    if shift is None or shift < 1:
        return not_applicable("The labels are not the next tokens.")
    tokens = lab.tokens.clone()
    counted = lab.labels.counts.any(0).nonzero().flatten()
    if len(counted) < 2:
        raise NotTestedError("fewer than two positions have labels")
    t = int(counted[-(len(counted) // 2)])  # prompts may have no labels
    tokens[:, t] = _other(lab.tokens)[:, t]
    change = _change(lab, tokens, by_token=True)
    # What padding before a text reads does not matter.
    change = change.where(lab.labels.counts & ~padding_mask(lab)[0], 0.0)
    before, after = float(change[:, :t].amax()), float(change[:, t:].amax())
    if not math.isfinite(before + after):
        raise NotTestedError("outputs are not finite")
    limit = max(lab.rounding(lab.base), 1e-6 * after)
    if before <= limit:
        if after <= limit:
            raise NotTestedError("no output depends on the tokens")
        return passed(
            f"Token {t} changes outputs from position {t} on by {number_in_words(after)}, and those before it by "
            f"{number_in_words(before)}."
        )
    n_leaks = int((change[:, :t].amax(0) > limit).sum())
    where, _ = _moved(lab, lab.tokens, tokens, lambda state: state[:, :t])
    return failed(
        f"Token {t} changes the outputs at {n_leaks} positions before it by up to {number_in_words(before)}, "
        f"{100 * before / max(after, 1e-30):.2g} % of its largest effect: the model sees the tokens that it predicts.",
        where=(where or "the attention mask") + ", whose mask is off by one" * (n_leaks == 1),
        remedy="pass is_causal=True, or mask scores above the diagonal; statistics over positions leak as well.",
        picture=_influence(lab),
    )


#: Most tokens of the picture of which token moves which output.
_MOST_SHOWN = 24


def _influence(lab: Lab) -> tuple[tuple[float, ...], ...]:
    """Return how much each token (row) moves each output (column) of one example, over the largest; empty if unknown.

    One pass: each example of the batch is the same one with another token.
    """
    same = lab.tokens[:1].expand_as(lab.tokens).clone()
    changed, n = same.clone(), min(*same.shape, _MOST_SHOWN)
    at = torch.arange(n, device=same.device)
    changed[at, at] = _other(same)[at, at]
    try:
        base, new = (lab.logits(lab.call, *lab.with_tokens(lab.call, each)) for each in (same, changed))
    except NotTestedError:
        return ()
    change = (new - base).abs().flatten(2).amax(-1)[:n, :n]
    change = change.where(change > lab.rounding(base), 0.0) / change.amax().clamp_min(1e-30)
    return tuple(tuple(round(float(each), 6) for each in row) for row in change)


@contract("examples_independent")
def examples_independent(lab: Lab) -> Result:
    """Do outputs of an example change when another example changes, in eval mode, and is each compared with its target?

    In packed batches, whose position_ids begin anew within an example, documents are tested likewise.
    """
    if (wrong := _wrong_axes(lab)) is not None:
        return wrong
    call = lab.call
    old, is_ids = _inputs(lab)
    if old.shape[0] < 2:
        raise NotTestedError("the batch has one example")
    given = arguments(call)
    has_others = any(each is not old and each.ndim > 1 and len(each) == len(old) for each in given)
    if any(_relates(each, len(old)) for each in given if each is not old or has_others):
        return not_applicable("An argument relates the examples to each other, as the edges of a graph do.")
    # All but one in the middle change, since a recurrence reaches only examples on one side, and a maximum is one's.
    i = old.shape[0] // 2
    others = [j for j in range(len(old)) if j != i]
    new, changed = _other(old) if is_ids else _noisy(old), call
    new[i] = old[i]
    for each in [] if is_ids else arguments(call):
        if each is not old and each.is_floating_point() and each.ndim > 1 and len(each) == len(old):
            more = _noisy(each)
            more[i] = each[i]
            args, kwargs = lab._with(changed, each, more)
            changed = replace(changed, args=args, kwargs=kwargs)
    base, moved = lab.outputs(call), lab.outputs(call, *lab._with(changed, old, new))
    pairs = [(a, b) for a, b in zip(base, moved, strict=True) if a.ndim > 1 and a.shape[0] == old.shape[0]]
    if not pairs:
        raise NotTestedError("no output has an entry for each example")
    # Of a matrix over pairs of examples, such as similarities, a column may belong to another example.
    own = [(a[i, i], b[i, i]) if a.shape[1] == len(old) else (a[i], b[i]) for a, b in pairs]
    here = max(float((a - b).abs().amax()) for a, b in own)
    there = max(float((a[others] - b[others]).abs().amax()) for a, b in pairs)
    limit = max(max(lab.rounding(a) for a, _ in pairs), 1e-6 * there)
    if here > limit:
        return failed(
            f"Other examples change the outputs of example {i} by {number_in_words(here)}, "
            f"{100 * here / max(there, 1e-30):.2g} % of the change of their own.",
            where=_moved(lab, old, new, lambda state: state[i : i + 1])[0] or "a module that mixes examples",
            remedy="normalize over features, and keep the axis of examples in every reshape.",
        )
    if there <= limit:
        if max(float(a.abs().amax()) for a, _ in pairs) <= limit:
            raise NotTestedError("the outputs are 0")
        moves, stops = _moved(lab, old, new, lambda state: state[others[:1]])
        return failed(
            "Other examples change no output, not even their own.",
            where=(moves and stops) or "the path from the inputs to the outputs",
            remedy="attend over tokens, not over examples (batch_first), and read the outputs from the states.",
        )
    if is_ids and (packed := _documents(lab, old)) is not None:
        return packed
    return passed(
        f"Other examples change their own outputs by {number_in_words(there)}, and those of example {i} by "
        f"{number_in_words(here)}."
    )


def _noisy(values: Tensor) -> Tensor:
    """Return values of another order and scale, with noise, since sums and norms see neither of the two."""
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(0)).to(values)
    return 4 * (values.flip(-1) + values.std() * noise)


#: Functions that compare outputs with targets entry by entry.
_COMPARISONS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "sub", "rsub", "__sub__", "__rsub__")


def _wrong_axes(lab: Lab) -> Result | None:
    """Return a failure if the loss compares each output with each target, or has a softmax over the examples.

    Where a softmax runs over the examples, the gradient of the outputs sums to 0 over them.
    """
    where = lab.seen.place_of_loss
    for tape in lab.tapes:
        for name, shapes in tape.shapes:
            n = math.prod(shapes[0]) if shapes else 1
            if name in _COMPARISONS and n > 1 and len(shapes) == 2 and {*shapes} == {(n, 1), (n,)}:
                return failed(
                    f"The loss compares shapes {shapes[0]} and {shapes[1]}, which are broadcast to ({n}, {n}): each "
                    "output is compared with the targets of all examples.",
                    where=where,
                    remedy="give both one shape, by squeeze(-1) of the outputs or unsqueeze(-1) of the targets.",
                )
        axes = [each for call in tape.calls for each in call.class_axes.values()]
        if {"softmax", "log_softmax"} & {*tape.functions} and axes == [[0]]:
            words = (
                "The gradient of the outputs sums to 0 over the examples and no other axis: a softmax runs over them."
            )
            return failed(words, where=where, remedy="pass dim=-1 to the softmax.")
    return None


def _relates(given: Tensor, n: int) -> bool:
    """Return whether an argument is a matrix over pairs of examples, or a list of such pairs."""
    if given.is_sparse or given.layout != torch.strided:
        return True
    is_list = not given.is_floating_point() and given.ndim == 2 and given.shape[0] == 2 < min(n, given.shape[1])
    return (given.is_floating_point() and given.shape == (n, n)) or (is_list and int(given.max()) < n)


def _inputs(lab: Lab) -> tuple[Tensor, bool]:
    """Return the main input of the first call with an axis of examples, and whether it holds ids."""
    try:
        return lab.tokens, True
    except NotTestedError:
        found = [each for each in arguments(lab.call) if each.is_floating_point() and each.ndim > 1]
        if not found:
            raise
        return found[0], False


def _moved(lab: Lab, old: Tensor, new: Tensor, part: Callable[[Tensor], Tensor]) -> tuple[str, str]:
    """Return the first modules of whose outputs a part changes, and does not, with the inputs, as their calls end.

    The first call of all counts for the first alone. Empty if there is none.
    """
    n = 2 if old.ndim == 2 else 1  # ids have an axis of tokens
    names = {module: name or type(module).__name__ for name, module in lab.model.named_modules()}
    states: list[dict[str, Tensor]] = []

    def keep(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        first = next((t for t in tensors_in(output) if t.is_floating_point() and t.ndim > 1), None)
        if first is not None and first.shape[:n] == old.shape[:n]:
            states[-1].setdefault(names[module], part(first.detach()).clone())

    with watch((module, keep, False) for module in names):
        for given in ((None, None), lab._with(lab.call, old, new)):
            states.append({})
            lab.outputs(lab.call, *given)
    pairs = [(name, a, states[1][name]) for name, a in states[0].items() if name in states[1]]
    moves = stops = ""
    for i, (name, a, b) in enumerate(each for each in pairs if each[1].shape == each[2].shape):
        if float((b - a).abs().amax()) > 1e-5 * max(float(a.abs().amax()), 1e-30):
            moves = moves or name
        elif i:
            stops = stops or name
    return moves, stops


def _documents(lab: Lab, tokens: Tensor) -> Result | None:
    """Return a failure if a document of a packed example depends on an earlier one; None without packing."""
    positions = lab.call.kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape != tokens.shape:
        return None
    starts = ((positions[:, 1:] == 0) & (positions[:, :-1] > 0)).nonzero()
    starts = starts[starts[:, 1] + 1 < tokens.shape[1] - 1]
    if not len(starts):
        return None
    row = int(starts[0, 0])
    start, stop, *_ = [*(starts[starts[:, 0] == row, 1] + 1).tolist(), tokens.shape[1]]
    new = tokens.clone()
    new[row, start - 1] = _other(tokens)[row, start - 1]
    change = _change(lab, new, by_token=True)[row]
    leaked, own = float(change[start:stop].amax()), float(change[start - 1])
    if leaked <= max(lab.rounding(lab.base), 1e-6 * own):
        return None
    return failed(
        f"The last token of a packed document changes outputs of the next one by {number_in_words(leaked)}.",
        where="the attention mask of packed documents",
        remedy="mask attention between documents: a block-diagonal mask, or attention of variable length.",
    )


def _without_gradient(lab: Lab) -> str:
    """Return the names of parameters that no pass gave a gradient."""
    n = len(lab.seen.passes[0].after)
    norms = np.fmax.reduce([each.after[:n] for each in lab.seen.passes])
    names = [name for name, _ in lab.seen.parameters.values()]
    return ", ".join(name for name, norm in zip(names, norms, strict=False) if not norm > 0)


def _with_other_padding(lab: Lab, ids: Tensor, is_padding: Tensor) -> list[Tensor]:
    """Return the outputs of the first call with the embeddings of other ids in the padding.

    The ids stay, since models find masks and ends of texts by them; without an embedding, they change.
    """
    new, is_replaced = torch.where(is_padding.to(ids.device), _other(ids), ids), False

    def replace(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        nonlocal is_replaced
        if not args or not is_same(args[0], ids):
            return None
        is_replaced = True
        return module.forward(new)

    with watch((each, replace, False) for each in lab.model.modules() if isinstance(each, nn.Embedding)):
        found = lab.outputs(lab.call)
    return found if is_replaced else lab.outputs(lab.call, *lab.with_tokens(lab.call, new))


def _used(lab: Lab, outputs: list[Tensor]) -> list[int]:
    """Return the places of the outputs of the first call that get a gradient, or that of the largest."""
    largest = max(range(len(outputs)), key=lambda i: outputs[i].numel())
    return [i for i in lab.call.class_axes if i < len(outputs)] or [largest]


@contract("mask_respected")
def mask_respected(lab: Lab) -> Result:
    """Do outputs of tokens change when padding holds other ids, and are those of fully masked examples finite?"""
    if "causal" in lab.failed:
        raise NotTestedError("outputs depend on later tokens")
    padded = [(ids, *padding_mask(lab, ids)) for ids in lab.read_ids]
    padded = [each for each in padded if each[1].any()]
    if not padded:
        return not_applicable("The batch has no padding.")
    is_padding = padding_mask(lab)[0]
    base = lab.outputs(lab.call)
    used, largest, how = _used(lab, base), 0.0, ""
    for ids, is_other, found in padded:
        moved = _with_other_padding(lab, ids, is_other)
        how = how or found
        for a, b in [(base[i], moved[i]) for i in used if base[i].ndim and base[i].shape == moved[i].shape]:
            masks = [each.to(a.device) for each in (is_padding, is_other) if a.shape[:2] == each.shape]
            real = ~torch.stack(masks).any(0) if masks else slice(None)
            if not torch.isfinite(a[real]).all():
                raise NotTestedError("outputs are not finite")
            change = float((a[real] - b[real]).abs().amax())
            if change > max(largest, lab.rounding(a)):
                largest, how = change, found
    if not largest:
        n = sum(int(each[1].sum()) for each in padded)
        return passed(f"Other tokens in {n:,} positions of padding ({how}) change no output of tokens.")
    is_passed = "attention_mask" in lab.call.kwargs
    made = ", ".join(dict.fromkeys(lab.call.lines_of_inputs[-4:]))
    where = "attention_mask" if is_passed else f"the call of the model, without a mask ({lab.call.line})"
    return failed(
        f"Other tokens in the padding ({how}) change outputs of tokens by {number_in_words(largest)}.",
        where=where + (f", with inputs from {made}" if made else ""),
        remedy="use the mask in every attention and every mean, with its sign and type, and pass it to the model.",
    )


@contract("order_matters")
def order_matters(lab: Lab) -> Result:
    """Does an output change when earlier tokens change places?

    The output of the last token of the shortest example is compared with that for another order of the tokens before.
    """
    if lab.failed & {"causal", "examples_independent"}:
        raise NotTestedError("what the outputs depend on is known to be wrong")
    tokens = lab.tokens
    is_padding, _ = padding_mask(lab)
    if is_padding[:, 0].any():
        raise NotTestedError("the examples begin with padding")
    n = int((~is_padding).sum(1).min())
    if n < 4:
        raise NotTestedError("some examples have fewer than four tokens")
    generator = torch.Generator().manual_seed(0)
    order = torch.cat([torch.randperm(n - 1, generator=generator), torch.arange(n - 1, tokens.shape[1])]).to(
        tokens.device
    )
    base = lab.outputs(lab.call)
    used = [i for i in _used(lab, base) if base[i].ndim and len(base[i]) == len(tokens)]
    if not used or any(base[i].shape == tokens.shape for i in used):
        raise NotTestedError("the outputs do not belong to the examples, or may be of tokens or of classes")

    def change(new: Tensor) -> tuple[float, float]:
        """Return the largest change of the last output by other tokens, and what it is over rounding."""
        found = lab.outputs(lab.call, *lab.with_tokens(lab.call, new))
        pairs = [(base[i], found[i]) for i in used]
        pairs = [(a[:, n - 1], b[:, n - 1]) if a.shape[:2] == tokens.shape else (a, b) for a, b in pairs]
        largest = [float((a - b).abs().amax()) for a, b in pairs]
        return max(largest), max(c / lab.rounding(a) if c else 0.0 for c, (a, _) in zip(largest, pairs, strict=True))

    largest, over = change(tokens[:, order])
    if not math.isfinite(largest):
        raise NotTestedError("outputs are not finite")
    if over > 1:
        return passed(f"Tokens in another order change the last output by {number_in_words(largest)}.")
    _, over = change(torch.cat([_other(tokens)[:, : n - 1], tokens[:, n - 1 :]], 1))
    if 0 < over < _LEAST_OVER:
        raise NotTestedError("rounding would hide the order, since the last output hardly depends on tokens before it")
    return failed(
        f"Tokens in another order change the last output by {number_in_words(largest)}, which rounding explains: the "
        "model does not see positions.",
        where=_without_gradient(lab) or "position embeddings",
        remedy="add the position embeddings to the states, or pass position_ids.",
    )
