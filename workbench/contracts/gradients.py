"""Contracts of gradients: they reach every parameter, have the right weights, and hold nothing of other updates."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from workbench.contracts.lab import Lab, NotTestedError, contract, failed, not_applicable, not_tested, passed
from workbench.contracts.observer import Act, Backward, Observer, Update
from workbench.contracts.places import frames_of_script
from workbench.contracts.ranks import of_all_ranks
from workbench.contracts.results import Result
from workbench.formatting import counted, fine_percent, number_in_words
from workbench.models.calling import bare, innermost, is_shared, is_split
from workbench.models.losses import tensors_in
from workbench.models.probing import eval_mode, is_library

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
    found = np.full(len(seen.parameters), np.nan)
    for each in seen.passes:
        found = np.fmax(found, padded(each.after, seen))
    for update in seen.updates:  # gradients that were set by hand
        found = np.fmax(found, padded(update.norms, seen))
    return found


def full_name(seen: Observer, parameter: Tensor) -> str:
    """Return the name of a parameter; in a training of several modules, after the variable of its module."""
    name = seen.name_of(parameter)
    roots = [root for root in seen.roots if any(p is parameter for p in root.parameters())]
    if len(seen.roots) < 2 or not roots:
        return name
    return f"{variable_of(roots[0])}.{name}"


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
    """Parameters of one module without gradients, and what a change of them changes.

    Attributes:
        root: Module that the loop calls.
        path: Path of the module.
        named: Parameters by name.
        is_none: Whether no pass gave a gradient, instead of one that is exactly 0.
        is_called: Whether the module, or the code that should use it, is called in training.
        is_like_another: Whether a module of the same kind has gradients, as beside an expert without a token.
        is_twin: Whether such a module is outside of the list that holds this one, as that which a target copies.
        is_own: Whether the code that should use it belongs to no package.
        changes: Whether loss and outputs change with the parameters.
    """

    root: nn.Module
    path: str
    is_none: bool
    named: dict[str, Tensor] = field(default_factory=dict)
    is_called: bool = False
    is_like_another: bool = False
    is_twin: bool = False
    is_own: bool = False
    changes: tuple[bool, bool] = (False, False)

    def describe(self, seen: Observer, with_gradient: set[int]) -> None:
        """Find out what the module is, and who should use it."""
        modules, path = dict(self.root.named_modules()), self.path
        module = user = modules[path]
        is_direct = any(p is q for p in module.parameters(recurse=False) for q in self.named.values())
        is_self = is_direct and module in seen.called and not is_library(type(module).__module__)
        while path and not is_self:
            path = path.rpartition(".")[0]
            user = modules[path]
            is_self = not isinstance(user, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        self.is_own = not is_library(type(user).__module__)
        self.is_called = any(each in seen.called for each in module.modules())
        shapes = [p.shape for p in module.parameters()]
        parent = self.path.rpartition(".")[0]
        for name, other in modules.items():
            if other is not module and type(other) is type(module) and [p.shape for p in other.parameters()] == shapes:
                is_alike = any(id(p) in with_gradient for p in other.parameters())
                is_in_list = name.rpartition(".")[0] == parent and isinstance(modules[parent], nn.ModuleList)
                self.is_like_another |= is_alike
                self.is_twin |= is_alike and not is_in_list


def _groups(lab: Lab) -> list[_Group]:
    """Return parameters without gradients by module, after the experiment on what changes with them."""
    key = "groups_without_gradients"
    if key not in vars(lab):
        vars(lab)[key] = _without_gradients(lab)
    return vars(lab)[key]


def _without_gradients(lab: Lab) -> list[_Group]:
    seen = lab.seen
    if len(real_updates(seen)) < 2:
        raise NotTestedError("fewer than two updates were seen")
    norms = dict(zip(seen.parameters, reached(seen), strict=True))
    optimized = {id(p) for of in optimizers_of(seen) for g in of.param_groups for p in g["params"]}
    with_gradient = {each for each, norm in norms.items() if norm > 0}
    groups: dict[tuple[int, str, bool], _Group] = {}
    for root in seen.roots:
        modules = dict(root.named_modules())
        for name, p in root.named_parameters():
            # Without a place in an optimizer nobody wants to train it; if it was moved by hand, it is an average.
            if not p.requires_grad or id(p) not in optimized or id(p) in with_gradient or not p.numel():
                continue
            is_none = norms.get(id(p), math.nan) != 0
            if is_none and (seen.was_moved(p) or (p.grad is not None and p.grad.is_sparse)):
                continue
            path = name.rpartition(".")[0]
            # The largest module none of whose parameters has a gradient.
            while is_none and "." in path:
                outer = path.rpartition(".")[0]
                if any(id(q) in with_gradient for q in modules[outer].parameters()):
                    break
                path = outer
            groups.setdefault((id(root), path, is_none), _Group(root, path, is_none)).named[name] = p
    found = [*groups.values()]
    if found and is_split(found[0].root):
        raise NotTestedError(f"{counted(len(found), 'module')} of a sharded model without gradients")
    for group in found:
        group.describe(seen, with_gradient)
    for root in {id(group.root): group.root for group in found}.values():
        mine = [group for group in found if group.root is root]
        of = _taped(lab, root)
        plain = _measured(lab, of, {})
        together = _differs(_measured(lab, of, {n: p for g in mine for n, p in g.named.items()}), plain)
        is_apart = 1 < len(mine) <= _MOST_GROUPS and together[1]
        for group in mine:
            group.changes = _differs(_measured(lab, of, group.named), plain) if is_apart else together
    return found


def _taped(lab: Lab, root: nn.Module) -> Backward:
    for each in lab.seen.passes:
        calls = each.tape.calls if each.tape is not None and each.tape.is_complete else []
        if all(call.is_kept for call in calls) and any(bare(call.module) is root for call in calls):
            return each
    raise NotTestedError("how the loss follows from the outputs of the model was not seen")


def _measured(lab: Lab, of: Backward, noisy: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return loss and outputs of a recorded pass, with noise in some parameters, which are restored."""
    assert of.tape is not None
    before = {name: p.detach().clone() for name, p in noisy.items()}
    generator = torch.Generator().manual_seed(0)
    made = []
    try:
        with torch.no_grad():
            for p in noisy.values():
                is_constant = p.numel() == 1 or not bool((p != p.flatten()[0]).any())
                size = 1 / math.sqrt(p.shape[-1] if p.ndim > 1 else 1) if is_constant else float(p.float().std())
                p.add_((size * torch.randn(p.shape, generator=generator)).to(p))
        for call in of.tape.calls:
            with lab.undisturbed(call, trains=True):
                torch.manual_seed(0)
                made.append(lab.run(call))
        loss = of.tape.loss(made).detach().double()
        return loss, [t.detach().double() for t in tensors_in(made) if t.is_floating_point() and t.ndim]
    finally:
        with torch.no_grad():
            for name, p in noisy.items():
                p.copy_(before[name])


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
    n = len(lab.seen.called)
    if not unused:
        return passed(f"All modules with parameters of an optimizer are used in training, {n} by a call.")
    names = [group.path or name for group in unused for name in list(group.named)[:1]]
    words = f"{names_in_words(names)}: no call in {counted(len(lab.seen.passes), 'pass')}, no gradient"
    if all(group.is_like_another or not group.is_own for group in unused):
        return not_tested(f"{words}; are they for other inputs or other stages?", where=names_in_words(names))
    return failed(
        f"{words}, and no output changes when their parameters do.",
        where=names_in_words(names),
        remedy="call the module in the forward pass, or remove it.",
    )


@contract("gradients_reach_all")
def gradients_reach_all(lab: Lab) -> Result:
    """Does each trained parameter get a gradient?

    Noise is added to parameters that never had one. If the loss changes, the graph between them and the loss is cut. If
    their gradient is exactly 0 in all passes although the loss depends on them, they can never move. If not even an
    output changes, the code that computes with them is without effect.
    """
    groups = [g for g in _groups(lab) if g.is_called or g.changes[1]]
    n = len(lab.seen.parameters)
    cut = [g for g in groups if g.is_none and g.changes[0] and not g.is_twin]
    stuck = [g for g in groups if not g.is_none and g.changes[0]]
    idle = [g for g in groups if g.is_none and not g.changes[1] and g.is_own and not g.is_like_another]
    n_passes = _n_passes(lab.seen)
    for found, words, remedy in (
        (cut, "have no gradient, although the loss changes with them", _remedy_of_cut(lab)),
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
            paths = names if is_short else [g.path or next(iter(g.named)) for g in found]
            return failed(
                f"{counted(len(names), 'parameter')} {words} ({n_passes}).",
                where=names_in_words(paths),
                remedy=remedy,
            )
    rest = [g for g in groups if g.is_none or g.changes[1]]
    if rest:
        names = [name for group in rest for name in group.named]
        return not_tested(
            f"{names_in_words(names)} got no gradient in {n_passes}, as the loss does not depend on their outputs; is "
            "that on purpose?",
            where=names_in_words(names),
        )
    return passed(f"Each of {n} trained parameters has a gradient in {n_passes}.")


def _remedy_of_cut(lab: Lab) -> str:
    if "reentrant" in lab.seen.checkpoints:
        return "pass use_reentrant=False to checkpoint, or let its inputs require gradients."
    return "remove detach(), no_grad() or .data on the way from them to the loss."


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
        weights = dict(module.named_parameters(remove_duplicate=False))
        pairs = [(a, b) for a, b in keys.items() if a in weights and b in weights] if isinstance(keys, dict) else []
        for a, b in pairs:
            promised[f"{prefix}.{a}".lstrip(".")] = weights[a], weights[b]
        ends = ("get_output_embeddings", "get_input_embeddings")
        head, embedding = (getattr(getattr(module, end, lambda: None)(), "weight", None) for end in ends)
        if not pairs and head is not None and embedding is not None:
            promised[f"{prefix}.output embeddings".lstrip(".")] = head, embedding
    if not promised:
        return not_applicable("No configuration ties weights.")
    apart = {name: pair for name, pair in promised.items() if pair[0] is not pair[1]}
    if not apart:
        return passed(f"{counted(len(promised), 'tied weight')} and their source are one tensor.")
    a, b = (t.detach() for t in next(iter(apart.values())))
    gap = f"{fine_percent(float((a - b).norm() / b.norm()))} of their norm" if a.shape == b.shape else "their shapes"
    return failed(
        f"{names_in_words([*apart])}: not the tensor that tie_word_embeddings promises; they differ by {gap}.",
        where=names_in_words([*apart]),
        remedy="call tie_weights() after weights are replaced, or set tie_word_embeddings=False.",
    )


# Gradients of several passes


@contract("gradients_cleared")
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
        n_stale = sum(bool(each.any()) for each in stale)
        if n_stale and n_stale >= 0.5 * n_pairs:
            which = np.any([each for each in stale if each.any()], axis=0)
            held = [*seen.parameters.values()]
            names = [full_name(seen, held[i][1]) for i in mine[which]]
            lines = {each.line for each in real_updates(seen, of)} - {""}
            return failed(
                f"At {n_stale} of {counted(n_pairs, 'update')} the gradients of {counted(len(names), 'parameter')} "
                "still hold those of the update before.",
                where="; ".join([names_in_words(names), *sorted(lines)]),
                remedy="call zero_grad() of all that the optimizer holds after each update.",
            )
    return _discarded(lab) or passed(
        f"The gradients of {counted(len(real_updates(seen)), 'update')} hold those of their own passes alone."
    )


def _stale(seen: Observer, of: Any, mine: np.ndarray) -> tuple[int, list[np.ndarray]]:
    """Return the pairs of updates of an optimizer, and in each which of its gradients hold those of the first."""
    last: np.ndarray | None = None
    carried, touched = np.zeros(0, dtype=bool), np.zeros(0, dtype=bool)
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
                found.append(carried & touched)
            last, is_first = padded(event.norms, seen)[mine], True
    return n, found


def _discarded(lab: Lab) -> Result | None:
    """Return a result if passes of each update are cleared before the update; None if none is."""
    seen = lab.seen
    waiting: dict[int, np.ndarray] = {}  # pass -> parameters to whose gradients it has added
    lost: dict[int, str] = {}
    cleared = ""
    for event in seen.events:
        if isinstance(event, Act) and event.kind == "clear" and event.line:
            cleared = event.line
        if isinstance(event, Backward):
            before, after = padded(event.before, seen), padded(event.after, seen)
            for i, places in list(waiting.items()):
                if not (before[places] > 0).any():
                    lost[i] = cleared
                    del waiting[i]
            added = (after > 0) & (after != before)
            if added.any() and np.isfinite(after[added]).all():
                waiting[seen.passes.index(event)] = added
        elif isinstance(event, Update) and is_real(event):
            norms = padded(event.norms, seen)
            own = np.isin(np.arange(len(norms)), places_of(event.optimizer, seen)) & (norms > 0)
            waiting = {i: places for i, places in waiting.items() if not (places & own).any()}
    n, n_updates = len(seen.passes), len(real_updates(seen))
    k = n / max(1, n_updates)
    if k < 1.9 or len(lost) < 0.9 * (n - n_updates) - 2:
        return None
    line = next(iter(lost.values()))
    words = f"The gradients of {len(lost)} of {n} passes are cleared before an update uses them"
    shares = [_total_weight(each) for each in seen.passes]
    divisors = [_divisor(each) for each in seen.passes]
    is_part = all(s is not None and abs(s * round(k) - 1) < _ROUNDING for s in shares)
    if is_part or any(d is not None and abs(d - round(k)) < 1e-6 for d in divisors):
        return failed(
            f"{words}, although each has 1/{round(k)} of the weight of an update.",
            where=line or seen.passes[0].line,
            remedy="clear gradients once an update, after it.",
            proof=f"An update sees 1 of its {round(k)} micro-batches, with 1/{round(k)} of the loss.",
        )
    return not_tested(f"{words}; is that on purpose?", where=line)


def _divisor(of: Backward) -> float | None:
    """Return the number by which the recorded loss was divided last; None if it was not."""
    if of.tape is None or not of.tape.is_complete or not of.tape.operations:
        return None
    func, args, _, _ = of.tape.operations[-1]
    name = getattr(func, "__name__", "")
    value = args[1] if len(args) > 1 else None
    if not isinstance(value, int | float) or not value:
        return None
    return float(value) if "div" in name else 1 / float(value) if "mul" in name else None


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
    seen = lab.seen
    updates = _passes_by_update(lab)
    k = max((len(each) for each in updates), key=[len(each) for each in updates].count, default=0)
    updates = [each for each in updates if len(each) == k]
    totals = [[_total_weight(each) for each in passes] for passes in updates]
    if not updates or any(each is None for passes in totals for each in passes):
        if k < 2:
            return not_applicable("Each update has one backward pass.")
        raise NotTestedError(f"the loss of the {k} passes of an update is no cross entropy of an output of the model")
    weights = np.array(totals, dtype=float)  # (update, pass)
    counts = np.array([[sum(int(t.counts.sum()) for t in _cross_entropies(b)) for b in passes] for passes in updates])
    if (uneven := _uneven_ranks(weights, counts, updates)) is not None:
        return uneven
    if k == 1:
        return _of_one_pass(weights[:, 0], counts[:, 0], updates)
    if len({each.line for passes in updates for each in passes}) > 1:
        return not_applicable(f"The {k} passes of an update are of different losses.")
    where = next(iter({each.line for each in updates[0]}))
    total, norm = float(np.median(weights.sum(1))), _norm_at_update(seen)
    is_mean = bool(np.all(np.abs(weights / weights.mean() - 1) < _ROUNDING))
    factors = np.array([_factors(each) for each in updates])
    shares = np.median(weights * factors, axis=0)
    if np.median(np.abs(factors - 1).max(1)) > _ROUNDING and shares.max() > (1 + k * _ROUNDING) * shares.min() > 0:
        return failed(
            f"Between the {k} passes of an update the accumulated gradient is multiplied, so that in the end one pass "
            f"counts {shares.max() / shares.min():.3g} times as much as another.",
            where=where,
            remedy="add each gradient once; look for a buffer that is the gradient itself.",
        )
    per_token = weights / np.maximum(counts, 1)
    right = counts / counts.sum(1, keepdims=True)
    misplaced = float(np.median(np.abs(weights / weights.sum(1, keepdims=True) - right).sum(1) / 2))
    if is_mean and misplaced > _MISPLACED and _cross_entropies(updates[0][0])[0].labels.ndim > 1:
        i = int(np.argmax(per_token.max(1) / per_token.min(1)))
        low, high = int(counts[i].min()), int(counts[i].max())
        words = (
            f"A token of a micro-batch with {low} labels has {high / low:.2g} times the weight of one in a micro-batch "
            f"with {high}; {fine_percent(misplaced)} of the weight of an update is on other tokens than in a mean."
        )
        if all(_is_scattered(each) for each in updates[0]):
            return not_tested(f"{words} As labels are drawn at random: is a mean of means on purpose?", where=where)
        return failed(
            words,
            where=where,
            remedy="divide the summed losses of each micro-batch by the number of labels in the whole update.",
            proof=_with_right_weights(lab, updates[0], weights[0], right[0]),
        )
    is_whole = all(_is_whole(each) for passes in updates for each in passes)
    if _is_divided_by_hand(seen, updates, k):
        total /= k
    for factor, words, remedy in (
        (k, f"The {k} losses of an update are summed", "divide each by their number."),
        (1 / k, f"The losses of an update have 1/{k} of their weight: they are divided twice", "divide once."),
    ):
        if abs(total / factor - 1) < _ROUNDING and is_whole:
            return failed(
                f"{words}; the weights of its tokens add up to {total:.3g} instead of 1.",
                where=where,
                remedy=remedy,
                proof=f"The norm of the gradient is {norm / factor:.3g} instead of {norm:.3g}." if norm > 0 else "",
            )
    return passed(
        f"The weights of the tokens in the {k} passes of an update add up to {total:.3g}; {fine_percent(misplaced)} of "
        "the weight is misplaced."
    )


def _factors(passes: list[Backward]) -> np.ndarray:
    """Return by what the gradient of each pass is multiplied until the last pass, 1 if parameters differ in that."""
    found = np.ones(len(passes))
    for i, (one, then) in enumerate(pairwise(passes)):
        after, before = one.after, then.before[: len(one.after)]
        ratios = (before / np.where(after > 0, after, np.nan))[after > 0]
        if len(ratios) and np.isfinite(ratios).all() and np.ptp(ratios) <= 1e-3 * abs(ratios[0]):
            found[: i + 1] *= float(np.median(ratios)) * one.scale / then.scale
    return found


def _is_divided_by_hand(seen: Observer, updates: list[list[Backward]], k: int) -> bool:
    """Return whether the loop divides the gradient by the number of passes after the last one."""
    ratios = []
    for passes in updates:
        last, after = seen.events.index(passes[-1]), passes[-1].after
        for event in seen.events[last + 1 :]:
            if isinstance(event, Update) and is_real(event):
                ratios.append(float(np.sqrt(np.nansum(event.norms**2) / np.nansum(after**2))))
                break
            if isinstance(event, Act) and event.kind == "clip" and math.isfinite(event.numbers["norm"]):
                ratios.append(event.numbers["norm"] / float(np.sqrt(np.nansum(after**2))))
                break
            if isinstance(event, Backward):
                break
    return bool(ratios) and abs(float(np.median(ratios)) * k - 1) < 1e-3


def _uneven_ranks(weights: np.ndarray, counts: np.ndarray, updates: list[list[Backward]]) -> Result | None:
    """Return a failure if each rank takes the mean of its own tokens, whose numbers differ; None otherwise."""
    ranks = of_all_ranks([weights.sum(1).tolist(), counts.sum(1).tolist()], "tokens")
    n = min(len(rank[0]) for rank in ranks)
    if len(ranks) < 2 or not n or _cross_entropies(updates[0][0])[0].labels.ndim < 2:
        return None
    totals, sizes = (np.array([rank[i][:n] for rank in ranks], dtype=float) for i in (0, 1))  # (rank, update)
    is_mean = bool(np.all(np.abs(totals / totals.mean() - 1) < _ROUNDING))
    misplaced = float(np.median(np.abs(1 / len(ranks) - sizes / sizes.sum(0)).sum(0) / 2))
    if not is_mean or misplaced <= _MISPLACED or (sizes == 0).any() or all(_is_scattered(each) for each in updates[0]):
        return None
    i = int(np.argmax(sizes.max(0) / sizes.min(0)))
    low, high = int(sizes[:, i].min()), int(sizes[:, i].max())
    return failed(
        f"Each rank takes the mean of its own labels: one on the rank with {low} has {high / low:.2g} times the weight "
        f"of one on the rank with {high}; {fine_percent(misplaced)} of the weight of an update is on other tokens than "
        "in a mean over all ranks.",
        where=updates[0][0].line,
        remedy="divide the summed losses by the number of labels on all ranks, times the number of ranks.",
    )


def _is_scattered(of: Backward) -> bool:
    """Whether the labels that count lie as if each was drawn at random, as those of masked tokens, not in a row."""
    found = _cross_entropies(of)[0].counts
    n_runs = int((found[:, 1:] & ~found[:, :-1]).sum() + found[:, 0].sum())
    return n_runs > max(1.5 * int(found.any(1).sum()), int(found.sum()) / 2)


def _passes_by_update(lab: Lab) -> list[list[Backward]]:
    """Return the passes of each update of the optimizer that holds most of the model, without the first group.

    Passes whose gradients were cleared count as well.
    """
    seen = lab.seen
    held = {id(p) for root in seen.roots[:1] for p in root.parameters()}
    optimizers = optimizers_of(seen)
    if not optimizers:
        raise NotTestedError("no update was seen")
    of = max(optimizers, key=lambda each: sum(id(p) in held for g in each.param_groups for p in g["params"]))
    found: list[list[Backward]] = [[]]
    for event in seen.events:
        if isinstance(event, Backward) and any(bare(c.module) is seen.roots[0] for c in event.calls):
            found[-1].append(event)
        elif isinstance(event, Update) and event.optimizer is of and is_real(event) and found[-1]:
            found.append([])
    return found[:-1]


def _norm_at_update(seen: Observer) -> float:
    """Return the norm of the gradient of all parameters after the last pass before an update."""
    last = [each for each in seen.passes if each.update < seen.n_done]
    return float(np.sqrt(np.nansum((last or seen.passes)[-1].after ** 2))) / seen.passes[-1].scale


def _of_one_pass(weights: np.ndarray, counts: np.ndarray, updates: list[list[Backward]]) -> Result:
    n = 1 / float(np.median(weights))
    is_whole = all(_is_whole(each) for passes in updates for each in passes)
    is_constant = np.all(np.abs(weights * n - 1) < _ROUNDING)
    if is_whole and is_constant and round(n) >= 2 and abs(n / round(n) - 1) < 0.005:
        return not_tested(
            f"The loss is 1/{round(n)} of the mean over its tokens, with one pass for each update; is that on purpose?",
            where=updates[0][0].line,
        )
    return passed(f"One pass for each update, whose weights of tokens add up to {float(np.median(weights)):.3g}.")


def _with_right_weights(lab: Lab, passes: list[Backward], weights: np.ndarray, right: np.ndarray) -> str:
    """Return how far the gradient of an update is from that with the same weight for each token."""
    parameters = _compared(lab.model)
    gap, whole = [[torch.zeros((), device=p.device)] * len(parameters) for p in parameters[:1] for _ in range(2)]
    try:
        for each, now, due in zip(passes if len(passes) <= 4 else [], weights / weights.sum(), right, strict=True):
            for j, g in enumerate(_gradients(lab, each, parameters)):
                if g is not None:  # of a loss with the weight `now` times the sum of all
                    whole[j] = whole[j] + (due / now) * g
                    gap[j] = gap[j] + (due / now - 1) * g
    except (NotTestedError, ValueError):
        return ""
    norms = [math.sqrt(sum(float(t.square().sum()) for t in each)) for each in (gap, whole)]
    return f"With equal weights the gradient of an update changes by {fine_percent(norms[0] / norms[1])} of its norm."


# The same gradient computed otherwise


def _compared(model: nn.Module) -> list[Tensor]:
    """Return trained parameters by whose gradients passes are compared."""
    found: list[Tensor] = []
    n = 0
    for p in model.parameters():
        if p.requires_grad and n + p.numel() <= _MOST_COMPARED:
            found.append(p)
            n += p.numel()
    return found


def _gradients(
    lab: Lab,
    of: Backward,
    parameters: list[Tensor],
    *,
    run: Callable[[Any], Any] | None = None,
    trains: bool = True,
    jitter: bool = False,
    seed: int = 0,
) -> list[Tensor | None]:
    """Return the gradient of a recorded pass, computed again.

    With ``run``, calls are made by it, without protection against all but changes of buffers; with ``jitter``, the
    outputs of all innermost modules are moved by one rounding.
    """
    tape = of.tape
    if tape is None or not tape.is_complete or not all(call.is_kept for call in tape.calls):
        raise NotTestedError("how the loss follows from the outputs of the model was not seen")
    if len({id(bare(call.module)) for call in tape.calls}) > 1:
        raise NotTestedError("the loss is one of several modules")
    protected = _while_compiled if run else lab.undisturbed
    with protected(tape.calls[0], trains=trains, gradients=True):
        torch.manual_seed(seed)
        with _jittered(bare(tape.calls[0].module)) if jitter else nullcontext():
            loss = tape.loss([(run or lab.run)(call) for call in tape.calls])
            return [*torch.autograd.grad(loss / of.scale, parameters, allow_unused=True)]


@contextmanager
def _while_compiled(call: Any, *, trains: bool, gradients: bool) -> Iterator[None]:
    """Restore buffers, modes and random states; nothing is compiled within the context of other experiments."""
    module = bare(call.module)
    before = [(b, b.detach().clone()) for b in module.buffers()]
    devices = sorted({p.device for p in module.parameters() if p.is_cuda}, key=str)
    modes = nullcontext() if trains else eval_mode(module)
    with torch.random.fork_rng(devices=devices), torch.set_grad_enabled(gradients), modes:
        yield
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)


@contextmanager
def _jittered(model: nn.Module) -> Iterator[None]:
    """Move the outputs of all innermost modules by one rounding up or down."""
    generator = torch.Generator().manual_seed(1)

    def move(module: nn.Module, args: tuple, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        signs = 2.0 * torch.randint(0, 2, output.shape, generator=generator) - 1
        return output * (1 + torch.finfo(output.dtype).eps * signs.to(output))

    handles = [m.register_forward_hook(move) for m in model.modules() if not [*m.children()]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _gap(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> tuple[float, np.ndarray]:
    """Return the distance of two gradients over the norm of the second, in all and for each parameter."""
    apart, sizes = [], []
    for x, y in zip(a, b, strict=True):
        x, y = (torch.zeros(()) if t is None else t.detach().double() for t in (x, y))
        apart.append(float((x - y.to(x.device)).norm()))
        sizes.append(float(y.norm()))
    total = math.sqrt(sum(each**2 for each in sizes))
    return math.sqrt(sum(each**2 for each in apart)) / max(total, 1e-300), np.array(apart)


def _worst(lab: Lab, parameters: list[Tensor], apart: np.ndarray) -> str:
    """Return the names of the parameters whose gradients differ the most."""
    return names_in_words([lab.seen.name_of(parameters[i]) for i in np.argsort(-apart)[:3] if apart[i] > 0])


@contract("recompute")
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
    norms = dict(zip(seen.parameters, reached(seen), strict=True))
    missing = [
        seen.name_of(p)
        for p, g in zip(parameters, plain, strict=True)
        if g is not None and bool(g.any()) and math.isnan(norms.get(id(p), math.nan))
    ]
    if missing and "reentrant" in seen.checkpoints:
        return failed(
            f"{counted(len(missing), 'parameter')} have a gradient without checkpointing and none with it.",
            where=names_in_words(missing),
            remedy="pass use_reentrant=False, or let the inputs of the checkpointed modules require gradients.",
            proof=f"Without checkpointing, {counted(sum(g is not None for g in plain), 'parameter')} have a gradient.",
        )
    if "reentrant" in seen.checkpoints:
        return not_tested("Reentrant checkpointing differentiates in ways that cannot be repeated on a copy.")
    gap, apart = _gap(_gradients(lab, of, parameters), plain)
    with _without_checkpoints():
        noise, _ = _gap(_gradients(lab, of, parameters, jitter=True), plain)
    words = f"Gradients with and without checkpointing differ by {number_in_words(gap)} of their norm"
    if gap <= max(16 * noise, 1e-6):
        return passed(f"{words}; one rounding makes {number_in_words(noise)}.")
    return failed(
        f"{words}, and by {number_in_words(noise)} after one rounding in all outputs.",
        where=_worst(lab, parameters, apart),
        remedy="keep random states (preserve_rng_state=True), and checkpoint functions without side effects.",
    )


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Let checkpointed functions run as others."""
    names = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")
    before = [getattr(checkpoint, name) for name in names]

    def through(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    plain = SimpleNamespace(apply=lambda function, preserve, *args: function(*args))
    try:
        for name, value in zip(names, (through, plain), strict=True):
            setattr(checkpoint, name, value)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(checkpoint, name, value)


@contract("compiled_equals_eager")
def compiled_equals_eager(lab: Lab) -> Result:
    """Is the gradient of a compiled module that of its code, run as written?

    The difference is compared with that by one rounding in all outputs of modules. If the pass is random, it is made in
    eval mode.
    """
    calls = [call for call in lab.calls if _is_compiled(call.module)]
    if not calls:
        return not_applicable("No module is compiled.")
    if is_shared():
        raise NotTestedError("compiled modules are compared on one rank only")
    of, parameters = lab.taped(), _compared(lab.model)

    def as_compiled(call: Any) -> Any:
        lab.n_passes += 1
        kind = parameters[0].device.type
        with torch.autocast(kind, call.autocast, enabled=call.autocast is not None):
            return call.module(*call.args, **call.kwargs)

    for trains in (True, False):
        eager = _gradients(lab, of, parameters, trains=trains)
        noise, _ = _gap(_gradients(lab, of, parameters, trains=trains, jitter=True, seed=1), eager)
        if noise < 1e-2:
            break
    else:
        raise NotTestedError("the gradient is random in eval mode as well")
    gap, apart = _gap(_gradients(lab, of, parameters, run=as_compiled, trains=trains), eager)
    words = f"Gradients of the compiled and the eager module differ by {number_in_words(gap)} of their norm"
    if gap <= max(16 * noise, 1e-6):
        return passed(f"{words}; one rounding makes {number_in_words(noise)}.")
    return failed(
        f"{words}, and by {number_in_words(noise)} after one rounding in all outputs.",
        where=_worst(lab, parameters, apart),
        remedy="make the code the same when it is compiled; look at branches on is_compiling(), and at other backends.",
    )


def _is_compiled(module: nn.Module) -> bool:
    return any(
        hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) is not None
        for each in module.modules()
    )


@contract("balance_loss")
def balance_loss(lab: Lab) -> Result:
    """Is the auxiliary loss of a mixture of experts part of the loss, and does its gradient reach the router?

    It is the ``aux_loss`` of an output, or a number that the forward pass leaves in an attribute with such a name.
    """
    modules = [m for root in lab.seen.roots for m in root.modules()]
    config = next((c for m in modules if getattr(c := getattr(m, "config", None), "router_aux_loss_coef", None)), None)
    if config is None:
        return _kept_balance(lab)
    value, call = float(config.router_aux_loss_coef), lab.call
    if not (call.kwargs.get("output_router_logits") or getattr(config, "output_router_logits", False)):
        words = f"router_aux_loss_coef is {value:g}, but output_router_logits is off: the loss has no auxiliary term"
        if value == getattr(type(config)(), "router_aux_loss_coef", None) and was_loaded(lab):
            return not_tested(f"{words}; is that on purpose?", where="output_router_logits")
        return failed(
            f"{words}.", where="output_router_logits", remedy="set output_router_logits=True, or the factor to 0."
        )
    parameters = [p for p in lab.model.parameters() if p.requires_grad]
    with lab.undisturbed(call, trains=True, gradients=True):
        output = lab.run(call)
        auxiliary, loss = getattr(output, "aux_loss", None), getattr(output, "loss", None)
        if not isinstance(auxiliary, Tensor):
            raise NotTestedError("the output has no auxiliary loss")
        n = 0
        if auxiliary.requires_grad:
            gradients = torch.autograd.grad(auxiliary, parameters, allow_unused=True, retain_graph=True)
            n = sum(g is not None and bool(g.any()) for g in gradients)
        share = None
        if n and isinstance(loss, Tensor) and loss.requires_grad:
            share = torch.autograd.grad(loss, auxiliary, allow_unused=True)[0]
    words, remedy = "", ""
    if not n:
        words, remedy = "has no gradient", "compute it from the probabilities of the router."
    elif loss is not None and (share is None or not float(share)):
        words, remedy = "is no part of the loss", "add it to the loss with its factor."
    size = f"The auxiliary loss, {float(auxiliary.detach()):.3g},"
    if words:
        return failed(f"{size} {words}.", where="the auxiliary loss", remedy=remedy)
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
    assert of.tape is not None
    call = of.tape.calls[0]
    with lab.undisturbed(call, trains=True, gradients=True):
        before = [vars(module)[name] for _, module, name in places]
        output = [*tensors_in(lab.run(call))]
        values = [vars(module)[name] for _, module, name in places]
    if any(new is old or any(new is t for t in output) for new, old in zip(values, before, strict=True)):
        raise NotTestedError("the auxiliary loss is not computed in each pass, or is an output")
    names = names_in_words([path for path, _, _ in places])
    where = names_in_words([*{path.rpartition(".")[0]: None for path, _, _ in places}])
    if not any(value.requires_grad for value in values):
        if not of.tape.outer:
            return not_applicable(f"{names}: no part of the loss, and without a gradient, as a number to look at.")
        return failed(
            f"{names}: no gradient reaches the router from a balance loss of {float(values[0].detach()):.3g}.",
            where=f"{where}, the gate",
            remedy="compute it from the probabilities of the router, without detach().",
        )
    if not any(each.requires_grad for each in of.tape.outer):
        if all(is_library(type(module).__module__) for _, module, _ in places):
            return not_tested(f"{names}: no part of the loss; is that on purpose?", where=where)
        return failed(
            f"{names}: computed in each pass, with a gradient, and no part of the loss.",
            where=f"{of.line}; {where}, the gate",
            remedy="add them to the loss with a small factor.",
        )
    return passed(f"{names}: the loss depends on {len(values)} balance losses.")


def was_loaded(lab: Lab) -> bool:
    """Whether weights may come from a checkpoint: some were loaded, or the script was not seen from its beginning."""
    seen = lab.seen
    named = [getattr(getattr(m, "config", None), "_name_or_path", "") for root in seen.roots for m in root.modules()]
    return not seen.sees_all or any(named) or any(act.kind in _LOADS for act in seen.acts)
