"""Contracts of what an output depends on: tokens before it, other examples, padding, and the order of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from workbench.contracts.data import padding_mask, shift_of_labels
from workbench.contracts.lab import Lab, NotTestedError, contract, failed, not_applicable, passed
from workbench.contracts.results import Result
from workbench.formatting import number_in_words


def _other(tokens: Tensor, lab: Lab) -> Tensor:
    """Return ids of the same batch that differ at every position, so that they are common ones."""
    shuffled = tokens.roll(1, 1)
    same = shuffled == tokens
    low, high = int(tokens.min()), int(tokens.max())
    moved = torch.where(tokens < high, tokens + 1, low if low < high else max(0, low - 1))
    return torch.where(same, moved, shuffled)


def _change(lab: Lab, tokens: Tensor) -> Tensor:
    """Return the largest change of each position's logits when the first call reads other ids, shape (batch, token)."""
    new = lab.logits(lab.call, *lab.with_tokens(lab.call, tokens))
    change = (new - lab.base).abs().flatten(2).amax(-1)
    if change.shape != tokens.shape:
        raise NotTestedError("the model has no output at each of its tokens")
    return change.cpu()


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
    n = tokens.shape[1]
    t = n // 2
    tokens[:, t] = _other(lab.tokens, lab)[:, t]
    change = _change(lab, tokens)
    # What padding before a text reads does not matter.
    change = change.where(lab.labels.counts & ~padding_mask(lab)[0], 0.0)
    before, after = float(change[:, :t].amax()), float(change[:, t:].amax())
    limit = max(lab.rounding(lab.base), 1e-6 * after)
    if before <= limit:
        if after <= limit:
            raise NotTestedError("no output depends on the tokens")
        return passed(
            f"Token {t} changes outputs from position {t} on by {number_in_words(after)}, and those before it by "
            f"{number_in_words(before)}."
        )
    n_leaks = int((change[:, :t].amax(0) > limit).sum())
    where = _first_moved(lab, lab.tokens, tokens, lambda state: state[:, :t]) or "the attention mask"
    where += ", whose mask is off by one" if n_leaks == 1 else ""
    return failed(
        f"Token {t} changes the outputs at {n_leaks} positions before it by up to {number_in_words(before)}, "
        f"{100 * before / max(after, 1e-30):.2g} % of its largest effect: the model sees the tokens that it predicts.",
        where=where,
        remedy="pass is_causal=True, or mask scores above the diagonal; statistics over positions leak as well.",
        picture=_influence(lab),
    )


#: Most tokens of the picture of which token moves which output.
_MOST_SHOWN = 24


def _influence(lab: Lab) -> tuple[tuple[float, ...], ...]:
    """Return how much each token (row) moves each output (column) of one example, over the largest; empty if unknown.

    One pass: each example of the batch is the same one with another token.
    """
    tokens = lab.tokens
    n = min(len(tokens), tokens.shape[1], _MOST_SHOWN)
    same = tokens[:1].expand_as(tokens).clone()
    changed = same.clone()
    at = torch.arange(n, device=tokens.device)
    changed[at, at] = _other(same, lab)[at, at]
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
    if (wrong := _broadcast(lab) or _softmax_over_examples(lab)) is not None:
        return wrong
    call = lab.call
    old, is_ids = _inputs(lab)
    if old.shape[0] < 2:
        raise NotTestedError("the batch has one example")
    # All but one in the middle change, since a recurrence reaches only examples on one side, and a maximum is one's.
    i = old.shape[0] // 2
    others = [j for j in range(len(old)) if j != i]
    new = _other(old, lab) if is_ids else 4 * old.flip(-1) + old.std()
    new[i] = old[i]
    base, moved = lab.outputs(call), lab.outputs(call, *lab._with(call, old, new))
    pairs = [(a, b) for a, b in zip(base, moved, strict=True) if a.ndim > 1 and a.shape[0] == old.shape[0]]
    if not pairs:
        raise NotTestedError("no output has an entry for each example")
    here = max(float((a[i] - b[i]).abs().amax()) for a, b in pairs)
    there = max(float((a[others] - b[others]).abs().amax()) for a, b in pairs)
    limit = max(max(lab.rounding(a) for a, _ in pairs), 1e-6 * there)
    if here > limit:
        return failed(
            f"Other examples change the outputs of example {i} by {number_in_words(here)}, "
            f"{100 * here / max(there, 1e-30):.2g} % of the change of their own.",
            where=_first_moved(lab, old, new, lambda state: state[i : i + 1]) or "a module that mixes examples",
            remedy="normalize over features, and keep the axis of examples in every reshape.",
        )
    if there <= limit:
        if max(float(a.abs().amax()) for a, _ in pairs) <= limit:
            raise NotTestedError("the outputs are 0")
        return failed(
            "Other examples change no output, not even their own.",
            where=_last_moved(lab, old, new, others[0]),
            remedy="attend over tokens, not over examples (batch_first), and read the outputs from the states.",
        )
    if is_ids and (packed := _documents(lab, old)) is not None:
        return packed
    return passed(
        f"Other examples change their own outputs by {number_in_words(there)}, and those of example {i} by "
        f"{number_in_words(here)}."
    )


#: Functions that compare outputs with targets entry by entry.
_COMPARISONS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "sub", "rsub", "__sub__", "__rsub__")


def _broadcast(lab: Lab) -> Result | None:
    """Return a failure if the loss compares a column of outputs with a row of targets, so that each meets each."""
    for of in lab.seen.passes:
        for name, shapes in of.tape.shapes if of.tape is not None and of.tape.is_complete else ():
            if name in _COMPARISONS and len(shapes) == 2 and len({len(each) for each in shapes}) == 2:
                long, short = sorted(shapes, key=len, reverse=True)
                n = short[-1]
                if n > 1 and long == (n, 1) and short == (n,):
                    return failed(
                        f"The loss compares shapes {shapes[0]} and {shapes[1]}, which are broadcast to ({n}, {n}): "
                        "each output is compared with the targets of all examples.",
                        where=lab.seen.place_of_loss,
                        remedy="give both one shape, by squeeze(-1) of the outputs or unsqueeze(-1) of the targets.",
                    )
    return None


def _softmax_over_examples(lab: Lab) -> Result | None:
    """Return a failure if a softmax outside of the model runs over the examples: there the gradient sums to 0."""
    for of in lab.seen.passes:
        tape = of.tape
        if tape is None or not tape.is_complete or not {"softmax", "log_softmax"} & {*tape.functions}:
            continue
        axes = [each for call in tape.calls for each in call.class_axes.values()]
        if len(axes) == 1 and axes[0] == [0]:
            return failed(
                "The gradient of the outputs sums to 0 over the examples and no other axis: a softmax runs over them.",
                where=lab.seen.place_of_loss,
                remedy="pass dim=-1 to the softmax.",
            )
    return None


def _inputs(lab: Lab) -> tuple[Tensor, bool]:
    """Return the main input of the first call with an axis of examples, and whether it holds ids."""
    try:
        return lab.tokens, True
    except NotTestedError:
        values = [*lab.call.args, *lab.call.kwargs.values()]
        found = [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.ndim > 1]
        if not found:
            raise
        return found[0], False


def _first_moved(lab: Lab, old: Tensor, new: Tensor, part: Callable[[Tensor], Tensor]) -> str:
    """Return the first module of whose output a part changes with the inputs, in the order in which the calls end."""
    return next((name for name, is_moved in _moved(lab, old, new, part) if is_moved), "")


def _last_moved(lab: Lab, old: Tensor, new: Tensor, i: int) -> str:
    """Return the first module whose output of an example does not change although that of one before it does."""
    found = _moved(lab, old, new, lambda state: state[i : i + 1])
    begun = [name for name, is_moved in found if is_moved]
    stopped = [name for name, is_moved in found[1:] if not is_moved]
    return stopped[0] if begun and stopped else "the path from the inputs to the outputs"


def _moved(lab: Lab, old: Tensor, new: Tensor, part: Callable[[Tensor], Tensor]) -> list[tuple[str, bool]]:
    """Return whether a part of the output of each module changes with the inputs, in the order in which calls end."""
    states: list[dict[str, Tensor]] = []
    for args, kwargs in ((None, None), lab._with(lab.call, old, new)):
        seen: dict[str, Tensor] = {}
        handles = []

        def keep(name: str, seen: dict[str, Tensor] = seen) -> Callable[..., None]:
            def hook(module: object, given: tuple, output: object) -> None:
                first = next((t for t in _tensors(output) if t.is_floating_point() and t.ndim > 1), None)
                n = 2 if old.ndim == 2 else 1  # ids have an axis of tokens
                if first is not None and first.shape[:n] == old.shape[:n]:
                    seen.setdefault(name, part(first.detach()).clone())

            return hook

        for name, module in lab.model.named_modules():
            handles.append(module.register_forward_hook(keep(name)))
        try:
            lab.outputs(lab.call, args, kwargs)
        finally:
            for handle in handles:
                handle.remove()
        states.append(seen)
    found = []
    for name, before in states[0].items():
        after = states[1].get(name)
        if after is not None and after.shape == before.shape:
            limit = 1e-5 * max(float(before.abs().amax()), 1e-30)
            found.append((name or type(lab.model).__name__, float((after - before).abs().amax()) > limit))
    return found


def _tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _documents(lab: Lab, tokens: Tensor) -> Result | None:
    """Return a failure if a document of a packed example depends on an earlier one; None without packing."""
    positions = lab.call.kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape != tokens.shape:
        return None
    starts = ((positions[:, 1:] == 0) & (positions[:, :-1] > 0)).nonzero()
    starts = starts[starts[:, 1] + 1 < tokens.shape[1] - 1]
    if not len(starts):
        return None
    row, start = int(starts[0, 0]), int(starts[0, 1]) + 1
    new = tokens.clone()
    new[row, start - 1] = _other(tokens, lab)[row, start - 1]
    change = _change(lab, new)[row]
    ends = [int(s[1]) + 1 for s in starts if int(s[0]) == row and int(s[1]) + 1 > start]
    stop = ends[0] if ends else tokens.shape[1]
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
    after = [each.after[: len(lab.seen.passes[0].after)] for each in lab.seen.passes]
    none = ~np.any([np.nan_to_num(each) > 0 for each in after], axis=0)
    names = [name for name, _ in lab.seen.parameters.values()]
    return ", ".join(name for name, is_none in zip(names, none, strict=False) if is_none)


@contract("mask_respected")
def mask_respected(lab: Lab) -> Result:
    """Do outputs of tokens change when padding holds other ids, and are those of fully masked examples finite?"""
    if "causal" in lab.failed:
        raise NotTestedError("outputs depend on later tokens")
    tokens = lab.tokens
    is_padding, how = padding_mask(lab)
    if not is_padding.any():
        return not_applicable("The batch has no padding.")
    base = lab.base
    if not torch.isfinite(base[~is_padding.all(1).to(base.device)]).all():
        raise NotTestedError("outputs are not finite")
    on_device = is_padding.to(tokens.device)
    new = torch.where(on_device, _other(tokens, lab), tokens)
    moved = lab.logits(lab.call, *lab.with_tokens(lab.call, new))
    if base.shape[:2] == tokens.shape:
        real = ~on_device
        change = float((moved - base).abs().flatten(2).amax(-1)[real].amax())
    else:
        change = float((moved - base).abs().amax())
    if change <= lab.rounding(base):
        return passed(
            f"Other ids in {int(is_padding.sum()):,} positions of padding ({how}) change no output of tokens."
        )
    is_passed = "attention_mask" in lab.call.kwargs
    made = ", ".join(dict.fromkeys(lab.call.lines_of_inputs[-4:]))
    where = "attention_mask" if is_passed else f"the call of the model, without a mask ({lab.call.line})"
    return failed(
        f"Other ids in the padding ({how}) change outputs of tokens by {number_in_words(change)}.",
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
    order = torch.cat([torch.randperm(n - 1, generator=generator), torch.arange(n - 1, tokens.shape[1])])
    new = lab.logits(lab.call, *lab.with_tokens(lab.call, tokens[:, order.to(tokens.device)]))
    base = lab.base
    if base.shape[:2] == tokens.shape:
        change = (new[:, n - 1] - base[:, n - 1]).abs()
    elif base.shape[0] == tokens.shape[0]:
        change = (new - base).abs()
    else:
        raise NotTestedError("the outputs do not belong to the examples")
    largest = float(change.amax())
    if largest > lab.rounding(base):
        return passed(f"Tokens in another order change the last output by {number_in_words(largest)}.")
    return failed(
        f"Tokens in another order change the last output by {number_in_words(largest)}, which rounding explains: the "
        "model does not see positions.",
        where=_without_gradient(lab) or "position embeddings",
        remedy="add the position embeddings to the states, or pass position_ids.",
    )
