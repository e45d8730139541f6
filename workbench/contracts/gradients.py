"""Contracts of gradients: they reach every parameter, have the right weights, and hold nothing of other updates."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from workbench.contracts.between_ranks import of_all_ranks
from workbench.contracts.lab import (
    Lab,
    NotTestedError,
    contract,
    failed,
    not_applicable,
    not_tested,
    passed,
    restored_buffers,
)
from workbench.contracts.observer import Act, Backward, Call, Observer, Update
from workbench.contracts.places import frames_of_script
from workbench.contracts.results import Result
from workbench.formatting import counted, fine_percent, number_in_words
from workbench.models.calling import bare, innermost, is_shared, is_split
from workbench.models.losses import tensors_in
from workbench.models.probing import eval_mode, is_library, watch

#: Largest relative error of a sum of token weights, which are read from gradients in half precision.
_ROUNDING = 0.02
#: Share of the weight of tokens in the wrong place from which a mean of means is a fault.
_MISPLACED = 0.01
#: Most elements of the gradients that two passes are compared by, and most groups of parameters that are changed.
_MOST_COMPARED, _MOST_GROUPS = 1 << 24, 4
#: Acts by which weights may come from a file.
_LOADS = ("module loads", "file read")
#: Names of attributes that hold a balance loss.
_BALANCE = re.compile(r"(aux|balanc).*loss|loss.*(aux|balanc)|^l_aux", re.IGNORECASE)


# What was observed of gradients


def padded(norms: np.ndarray, seen: Observer) -> np.ndarray:
    """Return norms of gradients of all parameters, with NaN for those that were not known yet."""
    return np.pad(norms, (0, len(seen.parameters) - len(norms)), constant_values=np.nan)


def places_of(of: Any, seen: Observer) -> np.ndarray:
    """Return the places of the parameters of an optimizer in the arrays of norms."""
    order = {each: i for i, each in enumerate(seen.parameters)}
    return np.array([order[id(p)] for g in of.param_groups for p in g["params"] if id(p) in order], dtype=int)


def real_updates(seen: Observer, of: Any = None) -> list[Update]:
    """Return the updates, of one optimizer if it is given, without those of wrappers around another optimizer."""
    return [u for u in seen.updates if is_real(u) and (of is None or u.optimizer is of)]


def is_real(update: Update) -> bool:
    """Whether an update is not one of a wrapper around another optimizer."""
    return not update.wraps and innermost(update.optimizer) is update.optimizer


def optimizers_of(seen: Observer) -> list[Any]:
    """Return the optimizers that made updates, without wrappers."""
    return list({id(u.optimizer): u.optimizer for u in real_updates(seen)}.values())


def reached(seen: Observer) -> np.ndarray:
    """Return the largest norm of each parameter's gradient after any pass; NaN if it never had a gradient."""
    norms = [*(each.after for each in seen.passes), *(each.norms for each in seen.updates)]  # some are set by hand
    return np.fmax.reduce([np.full(len(seen.parameters), np.nan), *(padded(each, seen) for each in norms)])


def full_name(seen: Observer, parameter: Tensor) -> str:
    """Return the name of a parameter; in a training of several modules, after the variable of its module."""
    roots = [root for root in seen.roots if any(p is parameter for p in root.parameters())]
    prefix = f"{variable_of(roots[0])}." if roots and len(seen.roots) > 1 else ""
    return prefix + seen.name_of(parameter)


def variable_of(root: nn.Module) -> str:
    """Return what the running script calls a module; the name of its class if that is unknown."""
    for frame in frames_of_script():
        for variable, value in {**frame.f_globals, **frame.f_locals}.items():
            if isinstance(value, nn.Module) and not variable.startswith("_"):
                for name, module in value.named_modules():
                    if module is root:
                        return ".".join(each for each in (variable, name) if each)
    return type(root).__name__


def names_in_words(names: Sequence[str], most: int = 4) -> str:
    """Return some names, and how many others there are."""
    others = f" and {len(names) - most} others" if len(names) > most else ""
    return ", ".join(names[:most]) + others


def _n_passes(seen: Observer) -> str:
    return f"{len(seen.passes)} pass{'es' * (len(seen.passes) != 1)}"


# Gradients that do not arrive


@dataclass(eq=False)
class _Group:
    """Parameters of one module without gradients, and what a change of them changes."""

    root: nn.Module
    path: str
    is_none: bool  # no pass gave a gradient, instead of one that is exactly 0
    named: dict[str, Tensor] = field(default_factory=dict)
    is_called: bool = False
    is_like_another: bool = False  # a module of the same kind has gradients, as beside an expert without a token
    is_twin: bool = False  # and is outside of the list that holds this one, as that which a target copies
    is_own: bool = False  # the code that should use it belongs to no package
    changes: tuple[bool, bool] = (False, False)  # of loss and outputs with the parameters

    def describe(self, seen: Observer, with_gradient: set[int]) -> None:
        """Find out what the module is, and who should use it."""
        modules, path = dict(self.root.named_modules()), self.path
        module = user = modules[path]
        is_direct = any(p is q for p in module.parameters(recurse=False) for q in self.named.values())
        is_user = is_direct and module in seen.called and not is_library(type(module).__module__)
        while path and not is_user:
            path = _outer(path)
            user = modules[path]
            is_user = not isinstance(user, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        self.is_own = not is_library(type(user).__module__)
        self.is_called = any(each in seen.called for each in module.modules())
        shapes, parent = [p.shape for p in module.parameters()], _outer(self.path)
        for name, other in modules.items():
            if other is not module and type(other) is type(module) and [p.shape for p in other.parameters()] == shapes:
                theirs = dict(other.named_parameters())  # those of the same names, as others of this one may have some
                mine = (theirs.get(name.removeprefix(f"{self.path}.")) for name in self.named)
                is_alike = any(id(p) in with_gradient for p in mine)
                is_in_list = _outer(name) == parent and isinstance(modules[parent], nn.ModuleList | nn.ModuleDict)
                # A norm is like any other: one that is alone is forgotten.
                self.is_like_another |= is_alike and (is_in_list or bool([*module.children()]))
                self.is_twin |= is_alike and not is_in_list


def _outer(path: str) -> str:
    return path.rpartition(".")[0]


def _groups(lab: Lab) -> list[_Group]:
    """Return parameters without gradients by module, after the experiment on what changes with them."""
    if "groups" not in vars(lab):
        vars(lab)["groups"] = _without_gradients(lab)
    return vars(lab)["groups"]


def _without_gradients(lab: Lab) -> list[_Group]:
    seen = lab.seen
    if len(real_updates(seen)) < 2:
        raise NotTestedError("fewer than two updates were seen")
    norms = dict(zip(seen.parameters, reached(seen), strict=True))
    optimized = {id(p) for of in optimizers_of(seen) for g in of.param_groups for p in g["params"]}
    with_gradient = {key for key, norm in norms.items() if norm > 0}
    groups: dict[tuple[int, str, bool], _Group] = {}
    for root in seen.roots:
        modules = dict(root.named_modules())
        for name, p in root.named_parameters():
            # Without a place in an optimizer nobody wants to train it; if it was moved by hand, it is an average.
            if not p.requires_grad or id(p) not in optimized or id(p) in with_gradient or not p.numel():
                continue
            is_none, path = norms.get(id(p), math.nan) != 0, _outer(name)
            if is_none and seen.was_moved(p):
                continue
            # The largest module none of whose parameters has a gradient.
            while is_none and "." in path and not with_gradient & {id(q) for q in modules[_outer(path)].parameters()}:
                path = _outer(path)
            groups.setdefault((id(root), path, is_none), _Group(root, path, is_none)).named[name] = p
    found = [*groups.values()]
    if found and is_split(found[0].root):
        raise NotTestedError(f"{counted(len(found), 'module')} of a sharded model without gradients")
    for group in found:
        group.describe(seen, with_gradient)
    for root in {id(group.root): group.root for group in found}.values():
        mine, of = [group for group in found if group.root is root], lab.taped(root)
        plain = _measured(lab, of, [])
        together = _differs(_measured(lab, of, [p for group in mine for p in group.named.values()]), plain)
        is_apart = 1 < len(mine) <= _MOST_GROUPS and together[1]
        for group in mine:
            group.changes = _differs(_measured(lab, of, [*group.named.values()]), plain) if is_apart else together
    return found


def _measured(lab: Lab, of: Backward, noisy: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return loss and outputs of a recorded pass, with noise in some parameters, which are restored."""
    before, tape, made = [p.detach().clone() for p in noisy], lab.tape_of(of), []
    generator = torch.Generator().manual_seed(0)
    try:
        for p in [each.data for each in noisy]:
            is_constant = p.numel() == 1 or not bool((p != p.flatten()[0]).any())
            size = 1 / math.sqrt(p.shape[-1] if p.ndim > 1 else 1) if is_constant else float(p.float().std())
            p.add_((size * torch.randn(p.shape, generator=generator)).to(p))
        for call in tape.calls:
            with lab.undisturbed(call, trains=True):
                torch.manual_seed(0)
                made.append(lab.run(call))
        outputs = [t.detach().double() for t in tensors_in(made) if t.is_floating_point() and t.ndim]
        return tape.loss(made).detach().double(), outputs
    finally:
        for p, value in zip(noisy, before, strict=True):
            p.data.copy_(value)


def _differs(new: tuple[Tensor, list[Tensor]], old: tuple[Tensor, list[Tensor]]) -> tuple[bool, bool]:
    """Return whether the loss and any output differ by more than rounding in single precision."""

    def other(a: Tensor, b: Tensor) -> bool:
        return a.shape != b.shape or (b.numel() > 0 and bool((a - b).abs().amax() > 1e-5 * b.abs().amax()))

    is_other = other(new[0], old[0])
    return is_other, is_other or any(map(other, new[1], old[1]))


@contract("modules_used")
def modules_used(lab: Lab) -> Result:
    """Is each module whose parameters an optimizer holds called in training?

    Modules without calls whose parameters got no gradient are looked for, and noise is added to their parameters: if no
    output changes, nothing uses them.
    """
    unused = [g for g in _groups(lab) if g.is_none and not g.is_called and not g.changes[1]]
    if not unused:
        n = len(lab.seen.called)
        return passed(f"All modules with parameters of an optimizer are used in training, {n} by a call.")
    where = names_in_words([group.path or next(iter(group.named)) for group in unused])
    words = f"{where}: no call in {_n_passes(lab.seen)}, no gradient"
    if all(group.is_like_another or not group.is_own for group in unused):
        return not_tested(f"{words}; are they for other inputs or other stages?", where=where)
    words = f"{words}, and no output changes when their parameters do."
    return failed(words, where=where, remedy="call the module in the forward pass, or remove it.")


@contract("gradients_reach_all")
def gradients_reach_all(lab: Lab) -> Result:
    """Does each trained parameter get a gradient?

    Noise is added to parameters that never had one. If the loss changes, the graph between them and the loss is cut. If
    their gradient is exactly 0 in all passes although the loss depends on them, they can never move. If not even an
    output changes, the code that computes with them is without effect.
    """
    groups, n_passes = [g for g in _groups(lab) if g.is_called or g.changes[1]], _n_passes(lab.seen)
    cut = [g for g in groups if g.is_none and g.changes[0] and not g.is_twin]
    stuck = [g for g in groups if not g.is_none and g.changes[0]]
    idle = [g for g in groups if g.is_none and not g.changes[1] and g.is_own and not g.is_like_another]
    for found, words, remedy in (
        (
            cut,
            "have no gradient, although the loss changes with them",
            "pass use_reentrant=False to checkpoint, or let its inputs require gradients."
            if "reentrant" in lab.seen.checkpoints
            else "remove detach(), no_grad() or .data on the way from them to the loss.",
        ),
        (
            stuck,
            "have a gradient of exactly 0, although the loss changes with them together: they can never move",
            "start one factor of a product at values other than 0, and look for units that are dead.",
        ),
        (idle, "have no gradient, and no output changes with them", "use them in the forward pass, or remove them."),
    ):
        if found:
            names = [name for group in found for name in group.named]
            is_short = len(names) <= len(found) + 3 or found is stuck
            where = names_in_words(names if is_short else [g.path or next(iter(g.named)) for g in found])
            return failed(f"{counted(len(names), 'parameter')} {words} ({n_passes}).", where=where, remedy=remedy)
    rest = names_in_words([name for g in groups if g.is_none or g.changes[1] for name in g.named])
    if rest:
        words = f"{rest} got no gradient in {n_passes}, as the loss does not depend on their outputs"
        return not_tested(f"{words}; is that on purpose?", where=rest)
    norms = reached(lab.seen)
    if norms.size and not np.nanmax(norms, initial=0.0):
        return failed(
            f"The gradients of all parameters are exactly 0 in {n_passes}: nothing can be learned.",
            where=lab.seen.place_of_loss,
            remedy="look for a factor of 0 and for outputs that no trained parameter changes.",
        )
    return passed(f"{int((norms > 0).sum())} of {len(norms)} trained parameters have a gradient in {n_passes}.")


@contract("weights_tied")
def weights_tied(lab: Lab) -> Result:
    """Are weights one tensor that the configuration ties?"""
    promised: dict[str, tuple[Tensor, Tensor]] = {}
    for prefix, module in [entry for root in lab.seen.roots for entry in root.named_modules()]:
        config: Any = getattr(module, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        keys = getattr(module, "_tied_weights_keys", None)
        if not keys or not getattr(config, "tie_word_embeddings", False):
            continue
        weights, start = dict(module.named_parameters(remove_duplicate=False)), f"{prefix}." if prefix else ""
        pairs = keys.items() if isinstance(keys, dict) else ()
        found = {f"{start}{a}": (weights[a], weights[b]) for a, b in pairs if a in weights and b in weights}
        ends = ("get_output_embeddings", "get_input_embeddings")
        head, embedding = (getattr(getattr(module, end, lambda: None)(), "weight", None) for end in ends)
        if not found and head is not None and embedding is not None:
            found[f"{start}output embeddings"] = head, embedding
        promised |= found
    if not promised:
        return not_applicable("No configuration ties weights.")
    apart = {name: pair for name, pair in promised.items() if pair[0] is not pair[1]}
    if not apart:
        return passed(f"{counted(len(promised), 'tied weight')} and their source are one tensor.")
    where, (a, b) = names_in_words([*apart]), (t.detach() for t in next(iter(apart.values())))
    gap = f"{fine_percent(float((a - b).norm() / b.norm()))} of their norm" if a.shape == b.shape else "their shapes"
    return failed(
        f"{where}: not the tensor that tie_word_embeddings promises; they differ by {gap}.",
        where=where,
        remedy="call tie_weights() after weights are replaced, or set tie_word_embeddings=False.",
    )


# Gradients of several passes


@contract("gradients_cleared", of_loop=True)
def gradients_cleared(lab: Lab) -> Result:
    """Does the gradient of an update hold that of the update before, and is none discarded before it is used?

    Norms of the gradients are compared before and after each pass and at each update. A gradient that is at the first
    pass after an update what it was at the update, and is added to until the next, was not cleared.
    """
    seen = lab.seen
    if not real_updates(seen):
        raise NotTestedError("no update was seen")
    for of in optimizers_of(seen):
        mine = places_of(of, seen)
        n_pairs, stale = _stale(seen, of, mine)
        if stale and len(stale) >= 0.5 * n_pairs:
            held = [p for _, p in seen.parameters.values()]
            names = [full_name(seen, held[i]) for i in mine[np.any(stale, axis=0)]]
            lines = {each.line for each in real_updates(seen, of)} - {""}
            return failed(
                f"At {len(stale)} of {counted(n_pairs, 'update')} the gradients of {counted(len(names), 'parameter')} "
                "still hold those of the update before.",
                where="; ".join([names_in_words(names), *sorted(lines)]),
                remedy="call zero_grad() of all that the optimizer holds after each update.",
            )
    return _discarded(lab) or passed(
        f"The gradients of {counted(len(real_updates(seen)), 'update')} hold those of their own passes alone."
    )


def _stale(seen: Observer, of: Any, mine: np.ndarray) -> tuple[int, list[np.ndarray]]:
    """Return how often an update follows another, and which gradients then hold those of the other, where any does."""
    last: np.ndarray | None = None
    carried = touched = np.zeros(0, dtype=bool)
    n, found, is_first = 0, [], True
    for event in seen.events:
        if isinstance(event, Backward) and last is not None:
            before, after = (padded(each, seen)[mine] for each in (event.before, event.after))
            if is_first:
                carried, touched, is_first = np.isclose(before, last, rtol=1e-5, atol=0) & (last > 0), before < 0, False
            carried, touched = carried & (before > 0), touched | (after != before)
        elif isinstance(event, Update) and event.optimizer is of and is_real(event):
            if last is not None and not is_first:
                n += 1
                found += [carried & touched] if (carried & touched).any() else []
            last, is_first = padded(event.norms, seen)[mine], True
    return n, found


def _discarded(lab: Lab) -> Result | None:
    """Return a result if passes of each update are cleared before the update; None if none is."""
    seen = lab.seen
    waiting: list[np.ndarray] = []  # for each pass that no update has used, parameters to whose gradients it has added
    lost: list[str] = []
    cleared = ""
    for event in seen.events:
        if isinstance(event, Act):
            cleared = event.line if event.kind == "clear" and event.line else cleared
        elif isinstance(event, Backward):
            before, after = padded(event.before, seen), padded(event.after, seen)
            n_before = len(waiting)
            waiting = [places for places in waiting if (before[places] > 0).any()]
            lost += [cleared] * (n_before - len(waiting))
            added = (after > 0) & (after != before)
            if added.any() and np.isfinite(after[added]).all():
                waiting.append(added)
        elif is_real(event):
            norms = padded(event.norms, seen)
            own = np.isin(np.arange(len(norms)), places_of(event.optimizer, seen)) & (norms > 0)
            waiting = [places for places in waiting if not (places & own).any()]
    n, n_updates = len(seen.passes), len(real_updates(seen))
    k = n / max(1, n_updates)
    if not lost or k < 1.9 or len(lost) < 0.9 * (n - n_updates) - 2:
        return None
    words = f"The gradients of {len(lost)} of {n} passes are cleared before an update uses them"
    weights, k = [_total_weight(each) for each in seen.passes], round(k)
    is_part = all(each is not None and abs(each * k - 1) < _ROUNDING for each in weights)
    if is_part or any(abs(_divisor(each) - k) < 1e-6 for each in seen.passes):
        return failed(
            f"{words}, although each has 1/{k} of the weight of an update.",
            where=lost[0] or seen.passes[0].line,
            remedy="clear gradients once an update, after it.",
            proof=f"An update sees 1 of its {k} micro-batches, with 1/{k} of the loss.",
        )
    return not_tested(f"{words}; is that on purpose?", where=lost[0])


def _divisor(of: Backward) -> float:
    """Return the number by which the recorded loss was divided last; NaN if it was not."""
    if of.tape is None or not of.tape.operations or not of.tape.is_complete:
        return math.nan
    func, args, _, _ = of.tape.operations[-1]
    name, value = getattr(func, "__name__", ""), args[1] if len(args) > 1 else None
    if not isinstance(value, int | float) or not value:
        return math.nan
    return float(value) if "div" in name else 1 / float(value) if "mul" in name else math.nan


def _cross_entropies(of: Backward) -> list[Any]:
    return [each for call in of.calls for each in call.labels.values() if each.is_cross_entropy]


def _total_weight(of: Backward) -> float | None:
    """Return the sum of the weights of all tokens in a pass; None if its loss is no cross entropy of known size."""
    found = _cross_entropies(of)
    if not found or any(bool((each.weights < 0).any()) for each in found):
        return None
    sizes = {math.prod(shape) for call in of.calls for shape in call.output_shapes}
    if any(each.labels.numel() * each.n_classes not in sizes for each in found):
        return None  # weights of part of the batch alone were read
    return float(sum(each.weights.double().sum() for each in found)) / of.scale


def _is_whole(of: Backward) -> bool:
    """Whether the cross entropy is all of the loss."""
    found = _cross_entropies(of)
    if any(each.smoothing for each in found):
        return True
    value = sum(float((each.weights.double() * each.losses.double()).nansum()) for each in found)
    return abs(value - of.loss) <= _ROUNDING * abs(value)


@contract("accumulation")
def accumulation(lab: Lab) -> Result:
    """Has each token of an update the same weight in its gradient, and do the weights add up to 1?

    Weights are read from the gradients of the logits. With the mean of each micro-batch, tokens of short ones count
    more; without a division the gradient is that of a sum of means.
    """
    updates = _passes_by_update(lab)
    k = max((len(each) for each in updates), key=[len(each) for each in updates].count, default=0)
    updates = [each for each in updates if len(each) == k]
    if k > 1 and all(_is_cleared(one, then) for passes in updates for one, then in pairwise(passes)):  # as by LBFGS
        return not_applicable(f"Gradients are cleared between the {k} passes of an update.")
    # Of logits that are sure, rounding in half precision hides the weights.
    updates = [passes for passes in updates if all(_total_weight(each) is not None for each in passes)]
    totals = [[_total_weight(each) for each in passes] for passes in updates]
    if not updates:
        if k < 2:
            return not_applicable("Each update has one backward pass.")
        raise NotTestedError(f"the loss of the {k} passes of an update is no cross entropy of an output of the model")
    weights = np.array(totals, dtype=float)  # (update, pass)
    counts = np.array([[sum(int(t.counts.sum()) for t in _cross_entropies(b)) for b in passes] for passes in updates])
    is_whole = all(_is_whole(each) for passes in updates for each in passes)
    lines = {each.line for passes in updates for each in passes}
    if is_shared():
        lab.require_acts()  # other ranks may not come to this point
    if (result := _uneven_ranks(weights, counts, updates[0])) is not None:
        return result
    if k == 1:
        return _of_one_pass(weights, updates[0][0].line, is_whole=is_whole)
    if len(lines) > 1:
        return not_applicable(f"The {k} passes of an update are of different losses.")
    where = "".join(lines)
    factors = np.array([_factors(each) for each in updates])
    shares = np.median(weights * factors, axis=0)
    if np.median(np.abs(factors - 1).max(1)) > _ROUNDING and shares.max() > (1 + k * _ROUNDING) * shares.min() > 0:
        return failed(
            f"Between the {k} passes of an update the accumulated gradient is multiplied, so that in the end one pass "
            f"counts {shares.max() / shares.min():.3g} times as much as another.",
            where=where,
            remedy="add each gradient once; look for a buffer that is the gradient itself.",
        )
    total = float(np.median(weights.sum(1))) / (k if _is_divided_by_hand(lab.seen, updates, k) else 1)
    is_uneven, misplaced, low, high = _unevenness(weights, counts)
    if is_uneven and _cross_entropies(updates[0][0])[0].labels.ndim > 1:
        words = (
            f"A token of a micro-batch with {low} labels has {high / low:.2g} times the weight of one in a micro-batch "
            f"with {high}; {fine_percent(misplaced)} of the weight of an update is on other tokens than in a mean."
        )
        if abs(total / k - 1) < _ROUNDING:
            words += f" Their losses are summed as well: the weights add up to {total:.3g} instead of 1."
        if all(_is_scattered(each) for each in updates[0]):
            return not_tested(f"{words} As labels are drawn at random: is a mean of means on purpose?", where=where)
        return failed(
            words,
            where=where,
            remedy="divide the summed losses of each micro-batch by the number of labels in the whole update.",
            proof=_with_right_weights(lab, updates[0], weights[0] / weights[0].sum(), counts[0] / counts[0].sum()),
        )
    for factor, words, remedy in (
        (k, f"The {k} losses of an update are summed", "divide each by their number."),
        (1 / k, f"The losses of an update have 1/{k} of their weight: they are divided twice", "divide once."),
    ):
        if abs(total / factor - 1) < _ROUNDING and is_whole:
            last = [each for each in lab.seen.passes if each.update < lab.seen.n_done] or lab.seen.passes
            norm = _norm(last[-1].after) / lab.seen.passes[-1].scale
            return failed(
                f"{words}; the weights of its tokens add up to {total:.3g} instead of 1.",
                where=where,
                remedy=remedy,
                proof=f"The norm of the gradient is {norm / factor:.3g} instead of {norm:.3g}." if norm > 0 else "",
            )
    words = f"The weights of the tokens in the {k} passes of an update add up to {total:.3g}"
    return passed(f"{words}; {fine_percent(misplaced)} of the weight is misplaced.")


def _norm(norms: np.ndarray) -> float:
    return float(np.sqrt(np.nansum(norms**2)))


def _unevenness(weights: np.ndarray, counts: np.ndarray) -> tuple[bool, float, int, int]:
    """Return whether all parts of an update have one weight although their numbers of labels differ, and by how much.

    It is the share of the weight that is on other tokens than in a mean, and the labels of the two parts most apart.
    """
    right = counts / counts.sum(1, keepdims=True)
    misplaced = float(np.median(np.abs(weights / weights.sum(1, keepdims=True) - right).sum(1) / 2))
    worst = counts[np.argmax(counts.max(1) / np.maximum(counts.min(1), 1))]
    is_mean = bool(np.all(np.abs(weights / weights.mean() - 1) < _ROUNDING)) and bool((counts > 0).all())
    return is_mean and misplaced > _MISPLACED, misplaced, int(worst.min()), int(worst.max())


def _is_cleared(one: Backward, then: Backward) -> bool:
    """Whether no gradient of a pass is left when the next one begins."""
    held = one.after > 0
    return bool(held.any()) and not (then.before[: len(held)][held] > 0).any()


def _factors(passes: list[Backward]) -> np.ndarray:
    """Return by what the gradient of each pass is multiplied until the last pass, 1 if parameters differ in that."""
    found = np.ones(len(passes))
    for i, (one, then) in enumerate(pairwise(passes)):
        ratios = then.before[: len(one.after)][one.after > 0] / one.after[one.after > 0]
        if len(ratios) and np.isfinite(ratios).all() and np.ptp(ratios) <= 1e-3 * abs(ratios[0]):
            found[: i + 1] *= float(np.median(ratios)) * one.scale / then.scale
    return found


def _is_divided_by_hand(seen: Observer, updates: list[list[Backward]], k: int) -> bool:
    """Return whether the loop divides the gradient by the number of passes after the last one."""
    ratios = []
    for passes in updates:
        ends = [
            each
            for each in seen.events[seen.events.index(passes[-1]) + 1 :]
            if not isinstance(each, Act) or (each.kind == "clip" and math.isfinite(each.numbers["norm"]))
        ]
        event = next((each for each in ends if not isinstance(each, Update) or is_real(each)), None)
        if isinstance(event, Act | Update):
            norm = event.numbers["norm"] if isinstance(event, Act) else _norm(event.norms)
            ratios.append(norm / _norm(passes[-1].after))
    return bool(ratios) and abs(float(np.median(ratios)) * k - 1) < 1e-3


def _uneven_ranks(weights: np.ndarray, counts: np.ndarray, passes: list[Backward]) -> Result | None:
    """Return a failure if each rank takes the mean of its own tokens, whose numbers differ; None otherwise."""
    ranks = of_all_ranks([weights.sum(1).tolist(), counts.sum(1).tolist()], "tokens")
    n = min(len(rank[0]) for rank in ranks)
    if len(ranks) < 2 or not n or _cross_entropies(passes[0])[0].labels.ndim < 2:
        return None
    totals, sizes = (np.array([rank[i][:n] for rank in ranks], dtype=float).T for i in (0, 1))  # (update, rank)
    is_uneven, misplaced, low, high = _unevenness(totals, sizes)
    if not is_uneven or all(_is_scattered(each) for each in passes):
        return None
    return failed(
        f"Each rank takes the mean of its own labels: one on the rank with {low} has {high / low:.2g} times the weight "
        f"of one on the rank with {high}; {fine_percent(misplaced)} of the weight of an update is on other tokens than "
        "in a mean over all ranks.",
        where=passes[0].line,
        remedy="divide the summed losses by the number of labels on all ranks, times the number of ranks.",
    )


def _is_scattered(of: Backward) -> bool:
    """Whether the labels that count lie as if each was drawn at random, as those of masked tokens, not in a row."""
    found = _cross_entropies(of)[0].counts
    n_runs = int((found[:, 1:] & ~found[:, :-1]).sum() + found[:, 0].sum())
    return n_runs > max(1.5 * int(found.any(1).sum()), int(found.sum()) / 2)


def _passes_by_update(lab: Lab) -> list[list[Backward]]:
    """Return the passes of each update of the optimizer that holds most of the model, also those that were cleared."""
    seen, optimizers = lab.seen, optimizers_of(lab.seen)
    if not optimizers:
        raise NotTestedError("no update was seen")
    held = {id(p) for root in seen.roots[:1] for p in root.parameters()}
    of = max(optimizers, key=lambda each: sum(id(p) in held for g in each.param_groups for p in g["params"]))
    found: list[list[Backward]] = [[]]
    for event in seen.events:
        if isinstance(event, Backward) and any(bare(c.module) is seen.roots[0] for c in event.calls):
            found[-1].append(event)
        elif isinstance(event, Update) and event.optimizer is of and is_real(event) and found[-1]:
            found.append([])
    return found[:-1]


def _of_one_pass(weights: np.ndarray, line: str, *, is_whole: bool) -> Result:
    n = 1 / float(np.median(weights))
    is_constant = np.all(np.abs(weights * n - 1) < _ROUNDING)
    if is_whole and is_constant and round(n) >= 2 and abs(n / round(n) - 1) < 0.005:
        words = f"The loss is 1/{round(n)} of the mean over its tokens, with one pass for each update"
        return not_tested(f"{words}; is that on purpose?", where=line)
    return passed(f"One pass for each update, whose weights of tokens add up to {float(np.median(weights)):.3g}.")


def _with_right_weights(lab: Lab, passes: list[Backward], now: np.ndarray, due: np.ndarray) -> str:
    """Return how far the gradient of an update is from that with the same weight for each token."""
    parameters, apart, whole = _compared(lab.model), 0.0, 0.0
    try:
        made = [_gradients(lab, each, parameters) for each in passes[:_MOST_GROUPS]]
    except NotTestedError:
        return ""
    if len(made) < len(passes):
        return ""
    for p, *found in zip(parameters, *made, strict=True):
        g = torch.stack([torch.zeros_like(p) if each is None else each for each in found]).double()
        ratios = torch.as_tensor(due / now).to(g)  # of the weight of each pass with equal weights to that which it has
        whole += float(torch.tensordot(ratios, g, 1).square().sum())
        apart += float(torch.tensordot(ratios - 1, g, 1).square().sum())
    share = fine_percent(math.sqrt(apart / whole))
    return f"With equal weights the gradient of an update changes by {share} of its norm."


# The same gradient computed otherwise


def _compared(model: nn.Module) -> list[Tensor]:
    """Return trained parameters by whose gradients passes are compared."""
    found: list[Tensor] = []
    for p in model.parameters():
        if p.requires_grad and sum(each.numel() for each in found) + p.numel() <= _MOST_COMPARED:
            found.append(p)
    return found


def _gradients(
    lab: Lab,
    of: Backward,
    parameters: list[Tensor],
    *,
    trains: bool = True,
    is_compiled: bool = False,
    jitter: bool = False,
    seed: int = 0,
) -> list[Tensor | None]:
    """Return the gradient of a recorded pass, computed again.

    If the module is to run compiled, it is protected against changes of buffers alone. With ``jitter``, the outputs of
    all innermost modules are moved by one rounding.
    """
    tape = lab.tape_of(of)
    model = bare(tape.calls[0].module)
    if any(bare(call.module) is not model for call in tape.calls):
        raise NotTestedError("the loss is one of several modules")
    protected = _while_compiled if is_compiled else lab.undisturbed
    with protected(tape.calls[0], trains=trains, gradients=True), _jittered(model) if jitter else nullcontext():
        torch.manual_seed(seed)
        loss = tape.loss([lab.run(call, is_bare=not is_compiled) for call in tape.calls])
        return [*torch.autograd.grad(loss / of.scale, parameters, allow_unused=True)]


@contextmanager
def _while_compiled(call: Call, *, trains: bool, gradients: bool) -> Iterator[None]:
    """Restore buffers, modes and random states; nothing is compiled within the context of other experiments."""
    module = bare(call.module)
    devices = sorted({p.device for p in module.parameters() if p.is_cuda}, key=str)
    modes = nullcontext() if trains else eval_mode(module)
    with restored_buffers(module), torch.random.fork_rng(devices), torch.set_grad_enabled(gradients), modes:
        yield


def _jittered(model: nn.Module) -> AbstractContextManager[None]:
    """Move the outputs of all innermost modules by one rounding up or down."""
    generator = torch.Generator().manual_seed(1)

    def move(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        signs = 2.0 * torch.randint(0, 2, output.shape, generator=generator) - 1
        return output * (1 + torch.finfo(output.dtype).eps * signs.to(output))

    return watch((each, move, False) for each in model.modules() if not [*each.children()])


def _gap(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> tuple[float, np.ndarray]:
    """Return the distance of two gradients over the norm of the second, in all and for each parameter."""
    apart, sizes = [], []
    for x, y in zip(a, b, strict=True):
        x, y = (torch.zeros(()) if t is None else t.detach().double() for t in (x, y))
        apart.append(float((x - y.to(x.device)).norm()))
        sizes.append(float(y.norm()))
    return float(np.linalg.norm(apart)) / max(float(np.linalg.norm(sizes)), 1e-300), np.array(apart)


def _judged(
    lab: Lab, parameters: list[Tensor], gap: tuple[float, np.ndarray], noise: float, words: str, remedy: str
) -> Result:
    """Return whether two gradients differ by no more than one rounding makes."""
    words = f"{words} differ by {number_in_words(gap[0])} of their norm"
    if gap[0] <= max(16 * noise, 1e-6):
        return passed(f"{words}; one rounding makes {number_in_words(noise)}.")
    worst = [lab.seen.name_of(parameters[i]) for i in np.argsort(-gap[1])[:3] if gap[1][i] > 0]
    words = f"{words}, and by {number_in_words(noise)} after one rounding in all outputs."
    return failed(words, where=names_in_words(worst), remedy=remedy)


@contract("recompute", apart=True)
def recompute(lab: Lab) -> Result:
    """Is the gradient with activation checkpointing that without it, for the same random numbers?

    The difference is compared with that by one rounding in all outputs of modules.
    """
    seen = lab.seen
    if not seen.checkpoints:
        return not_applicable("No activation checkpointing is used.")
    of, parameters = lab.taped(), _compared(lab.model)
    with _without_checkpoints():
        plain = _gradients(lab, of, parameters)
    if "reentrant" in seen.checkpoints:
        norms = dict(zip(seen.parameters, reached(seen), strict=True))
        alive = [p for p, g in zip(parameters, plain, strict=True) if g is not None and bool(g.any())]
        missing = [seen.name_of(p) for p in alive if math.isnan(norms.get(id(p), math.nan))]
        if not missing:
            return not_tested("Reentrant checkpointing differentiates in ways that cannot be repeated on a copy.")
        return failed(
            f"{counted(len(missing), 'parameter')} have a gradient without checkpointing and none with it.",
            where=names_in_words(missing),
            remedy="pass use_reentrant=False, or let the inputs of the checkpointed modules require gradients.",
            proof=f"Without checkpointing, {counted(sum(g is not None for g in plain), 'parameter')} have a gradient.",
        )
    gap = _gap(_gradients(lab, of, parameters), plain)
    with _without_checkpoints():
        noise, _ = _gap(_gradients(lab, of, parameters, jitter=True), plain)
    remedy = "keep random states (preserve_rng_state=True), and checkpoint functions without side effects."
    return _judged(lab, parameters, gap, noise, "Gradients with and without checkpointing", remedy)


def _without_checkpoints() -> AbstractContextManager[Any]:
    """Let checkpointed functions run as others."""

    def through(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    plain = SimpleNamespace(apply=lambda function, preserve, *args: function(*args))
    return patch.multiple(checkpoint, _checkpoint_without_reentrant_generator=through, CheckpointFunction=plain)


@contract("compiled_equals_eager", apart=True)
def compiled_equals_eager(lab: Lab) -> Result:
    """Is the gradient of a compiled module that of its code, run as written?

    The difference is compared with that by one rounding in all outputs of modules. If the pass is random, it is made in
    eval mode.
    """
    modules = [each for call in lab.calls for each in call.module.modules()]
    if not any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in modules):
        return not_applicable("No module is compiled.")
    if is_shared():
        raise NotTestedError("compiled modules are compared on one rank only")
    of, parameters = lab.taped(), _compared(lab.model)
    for trains in (True, False):
        eager = _gradients(lab, of, parameters, trains=trains)
        noise, _ = _gap(_gradients(lab, of, parameters, trains=trains, jitter=True, seed=1), eager)
        if noise < 1e-2:
            break
    else:
        raise NotTestedError("the gradient is random in eval mode as well")
    gap = _gap(_gradients(lab, of, parameters, trains=trains, is_compiled=True), eager)
    remedy = "make the code the same when it is compiled; look at branches on is_compiling(), and at other backends."
    return _judged(lab, parameters, gap, noise, "Gradients of the compiled and the eager module", remedy)


@contract("balance_loss")
def balance_loss(lab: Lab) -> Result:
    """Is the auxiliary loss of a mixture of experts part of the loss, and does its gradient reach the router?

    It is the ``aux_loss`` of an output, or a number that the forward pass leaves in an attribute with such a name.
    """
    modules = [m for root in lab.seen.roots for m in root.modules()]
    config = next((c for m in modules if getattr(c := getattr(m, "config", None), "router_aux_loss_coef", None)), None)
    if config is None:
        return _kept_balance(lab)
    value, call, where = float(config.router_aux_loss_coef), lab.call, "output_router_logits"
    if not (call.kwargs.get(where) or getattr(config, where, False)):
        words = f"router_aux_loss_coef is {value:g}, but {where} is off: the loss has no auxiliary term"
        if value == getattr(type(config)(), "router_aux_loss_coef", None) and was_loaded(lab):
            return not_tested(f"{words}; is that on purpose?", where=where)
        return failed(f"{words}.", where=where, remedy=f"set {where}=True, or the factor to 0.")
    n, share = 0, None
    with lab.undisturbed(call, trains=True, gradients=True):
        parameters = [p for p in lab.model.parameters() if p.requires_grad]
        output = lab.run(call)
        auxiliary, loss = getattr(output, "aux_loss", None), getattr(output, "loss", None)
        tape = next((each for each in lab.tapes if each.calls == [call]), None)
        loss = loss if tape is None else tape.loss([output])  # the script may compute its own
        if not isinstance(auxiliary, Tensor):
            raise NotTestedError("the output has no auxiliary loss")
        if auxiliary.requires_grad:
            gradients = torch.autograd.grad(auxiliary, parameters, allow_unused=True, retain_graph=True)
            n = sum(g is not None and bool(g.any()) for g in gradients)
        if n and isinstance(loss, Tensor) and loss.requires_grad:
            share = torch.autograd.grad(loss, auxiliary, allow_unused=True)[0]
    size = f"The auxiliary loss, {float(auxiliary.detach()):.3g},"
    if not n or (loss is not None and not share):
        words, remedy = "has no gradient", "compute it from the probabilities of the router."
        if n:
            words, remedy = "is no part of the loss", "add it to the loss with its factor."
        return failed(f"{size} {words}.", where=f"the auxiliary loss; {lab.seen.place_of_loss}", remedy=remedy)
    factor = "" if share is None else f" and is in the loss with the factor {float(share):.3g}"
    return passed(f"{size} depends on {n} parameters{factor}.")


def _kept_balance(lab: Lab) -> Result:
    """Test balance losses that modules keep in attributes, from where the loop adds them to its loss."""
    places = [
        (f"{path}.{name}".lstrip("."), module, name)
        for root in lab.seen.roots[:1]
        for path, module in root.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point() and _BALANCE.search(name)
    ]
    if not places:
        return not_applicable("No router has an auxiliary loss.")
    of = lab.taped()
    tape = lab.tape_of(of)
    with lab.undisturbed(tape.calls[0], trains=True, gradients=True):
        before = [vars(module)[name] for _, module, name in places]
        output = [*tensors_in(lab.run(tape.calls[0]))]
        values = [vars(module)[name] for _, module, name in places]
    if any(new is old or any(new is t for t in output) for new, old in zip(values, before, strict=True)):
        raise NotTestedError("the auxiliary loss is not computed in each pass, or is an output")
    names = names_in_words([path for path, _, _ in places])
    where = names_in_words([*dict.fromkeys(_outer(path) for path, _, _ in places)])
    if not any(value.requires_grad for value in values):
        if not tape.outer:
            return not_applicable(f"{names}: no part of the loss, and without a gradient, as a number to look at.")
        return failed(
            f"{names}: no gradient reaches the router from a balance loss of {float(values[0].detach()):.3g}.",
            where=f"{where}, the gate",
            remedy="compute it from the probabilities of the router, without detach().",
        )
    if any(each.requires_grad for each in tape.outer):
        return passed(f"{names}: the loss depends on {len(values)} balance losses.")
    if all(is_library(type(module).__module__) for _, module, _ in places):
        return not_tested(f"{names}: no part of the loss; is that on purpose?", where=where)
    return failed(
        f"{names}: computed in each pass, with a gradient, and no part of the loss.",
        where=f"{of.line}; {where}, the gate",
        remedy="add them to the loss with a small factor.",
    )


def was_loaded(lab: Lab) -> bool:
    """Whether weights may come from a checkpoint: some were loaded, or the script was not seen from its beginning."""
    seen = lab.seen
    named = [getattr(getattr(m, "config", None), "_name_or_path", "") for root in seen.roots for m in root.modules()]
    return not seen.sees_all or any(named) or any(act.kind in _LOADS for act in seen.acts)
