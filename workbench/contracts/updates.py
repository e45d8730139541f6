"""Contracts of updates: what an optimizer holds and does, its learning rate, loss scale and clipping."""

from __future__ import annotations

import ast
import copy
import gc
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from workbench.contracts.gradients import (
    full_name,
    is_real,
    names_in_words,
    optimizers_of,
    padded,
    places_of,
    reached,
    real_updates,
    was_loaded,
)
from workbench.contracts.lab import Lab, NotTestedError, contract, failed, not_applicable, not_tested, passed
from workbench.contracts.observer import Act, Backward, Copy, Observer, Update
from workbench.contracts.places import frames_of_script
from workbench.contracts.results import Result
from workbench.formatting import counted, fine_percent, number_in_words
from workbench.models.calling import innermost, is_shared

#: Optimizers whose updates are computed again.
_KNOWN = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adafactor")
#: Updates with a rate of 0 before it is a fault: a warm-up may begin with one.
_LEAST_STILL = 3
#: Share of the largest rate of an optimizer below which a rate is next to nothing.
_LEAST_RATE = 1e-4


def _live(kind: type) -> list[Any]:
    """Return the objects of a type that exist: modules, optimizers or schedules."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _parameters_of_modules() -> list[Tensor]:
    return [p for m in _live(nn.Module) for p in (vars(m).get("_parameters") or {}).values() if p is not None]


def _held(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _where(seen: Observer, parameters: Iterable[Tensor], *lines: str, most: int = 4) -> str:
    """Return the names of parameters and lines of the script as a place."""
    names = names_in_words([full_name(seen, p) for p in parameters], most)
    return "; ".join(each for each in (names, *lines) if each)


@contract("optimizer_covers")
def optimizer_covers(lab: Lab) -> Result:
    """Is each parameter with a gradient in an optimizer, once, and is each parameter of an optimizer in the model?

    Parameters that got gradients are looked up in all optimizers that exist. If some are in none and have not moved, it
    is a fault where the author has said that they are to be trained: the optimizer holds tensors of no module instead,
    or other parameters of the same module, or the author froze others by requires_grad, or nothing was loaded, so that
    they stay at random values.
    """
    seen, optimizers = lab.seen, optimizers_of(lab.seen)
    if not optimizers:
        raise NotTestedError("no update of an optimizer was seen")
    lines = [line for of in optimizers if (line := seen.line_of(of))]
    twice = [mine for one, two, mine in _reused(seen) if one.optimizer is not two.optimizer]
    if len(twice) > 1:
        shared = [p for i, (_, p) in enumerate(seen.parameters.values()) if any(i in mine for mine in twice)]
        words = f"{counted(len(shared), 'parameter')} are updated by two optimizers with the same gradient"
        remedy = "give each parameter to one optimizer."
        return failed(f"{words}, {len(twice)} times.", where=_where(seen, shared, *lines), remedy=remedy)
    if hidden := _in_plain_lists(seen):
        words = f"The parameters of {names_in_words([*hidden])} get gradients and are in no optimizer: lists hide them"
        if was_loaded(lab):
            return not_tested(f"{words}; is that on purpose?", where=names_in_words([*hidden]))
        remedy = "hold modules in nn.ModuleList or nn.ModuleDict."
        return failed(f"{words} from parameters().", where=names_in_words([*hidden]), remedy=remedy)
    has_gradient = {key: norm > 0 for key, norm in zip(seen.parameters, reached(seen), strict=True)}
    named = {id(p): (name, p) for root in seen.roots for name, p in root.named_parameters()}
    stepped = {id(p): p for of in optimizers for p in _held(of)}
    trained = [(key, p) for key, (_, p) in named.items() if p.requires_grad and has_gradient.get(key)]
    missing = {key: p for key, p in trained if key not in stepped and not seen.was_moved(p)}
    if missing:  # to look at all objects takes long
        anywhere = {id(p) for of in _live(torch.optim.Optimizer) for p in _held(of)}
        waiting = [p for key, p in missing.items() if key in anywhere]
        missing = {key: p for key, p in missing.items() if key not in anywhere}
        if waiting and not missing:
            words = f"{counted(len(waiting), 'parameter')} with gradients are in an optimizer that made no update"
            return not_tested(f"{words}; does it begin later?", where=_where(seen, waiting))
    dead = [p for key, p in stepped.items() if key not in named and not has_gradient.get(key)]
    held = counted(sum(key in named for key in stepped), "parameter")
    if not missing:
        alive = {id(p) for p in _parameters_of_modules()} if dead else ()
        n_idle = sum(id(p) not in alive for p in dead)
        words = f"; {counted(n_idle, 'tensor')} of no module are held as well" if n_idle else ""
        frozen = [name for name, p in named.values() if not p.requires_grad]
        share = sum(p.numel() for _, p in named.values() if not p.requires_grad) / sum(
            p.numel() for _, p in named.values()
        )
        if share > 0.5 and not was_loaded(lab):
            return not_tested(
                f"{fine_percent(share)} of the entries of the parameters are frozen at their random values, as nothing "
                "was loaded; is that on purpose?",
                where=names_in_words(frozen),
            )
        return passed(f"Each parameter with a gradient is in one optimizer: {held}{words}.")
    owner = {key: name.rpartition(".")[0] for key, (name, _) in named.items()}
    groups = [{owner[id(p)] for p in g["params"] if id(p) in owner} for of in optimizers for g in of.param_groups]
    split = {owner[key] for key in missing} & set[str]().union(*groups)
    holds_matrix = any(key in stepped and p.ndim > 1 for key, (_, p) in named.items())
    is_frozen = all(not p.requires_grad for p in dead)
    kind = "frozen ones" if is_frozen else "tensors without gradients that no called module has"
    has_parts = any(a & b for a, b in combinations(groups, 2))
    reasons = (
        (dead, f"the optimizer holds {len(dead)} {kind} instead"),
        (split and holds_matrix, f"other parameters of {names_in_words(sorted(split))} are in one"),  # not biases alone
        (has_parts, f"the {len(groups)} groups of the optimizer hold parts of all other modules"),
        (any(not p.requires_grad for _, p in named.values()), "others are frozen by requires_grad, these are not"),
        (not was_loaded(lab), "as nothing was loaded, they stay at their random values"),
    )
    reason = next((words for holds, words in reasons if holds), "")
    names = [full_name(seen, p) for p in missing.values()]
    modules = [*dict.fromkeys(name.rpartition(".")[0] or name for name in names)]
    where = "; ".join([names_in_words(names if len(names) < 4 else modules), *lines])
    words = f"{counted(len(missing), 'parameter')} with gradients are in no optimizer and do not move"
    if not reason:
        return not_tested(f"{words}, {held} are in one; is that on purpose?", where=where)
    remedy = "build the optimizer from model.parameters() of the finished model, or freeze by requires_grad=False."
    return failed(f"{words}; {reason}.", where=where, remedy=remedy)


def _in_plain_lists(seen: Observer) -> dict[str, nn.Module]:
    """Return modules that are called within a model, get gradients, and are in a list instead of a ModuleList."""
    known = {module for root in seen.roots for module in root.modules()}
    found: dict[str, nn.Module] = {}
    for name, part in [entry for root in seen.roots for entry in root.named_modules()]:
        for attribute, value in vars(part).items():
            parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
            for each in parts:
                is_other = isinstance(each, nn.Module) and each not in known
                if is_other and any(p.grad is not None and bool(p.grad.any()) for p in each.parameters()):
                    found[f"{name}.{attribute}".lstrip(".")] = each
    held = {id(p) for of in _live(torch.optim.Optimizer) for p in _held(of)} if found else set()
    return {name: each for name, each in found.items() if not any(id(p) in held for p in each.parameters())}


def _reused(seen: Observer) -> list[tuple[Update, Update, np.ndarray]]:
    """Return pairs of updates without a pass between them, with the places of parameters whose gradient both used."""
    since: list[Update] = []
    found = []
    for event in seen.events:
        if isinstance(event, Backward):
            since = []
        elif isinstance(event, Update) and is_real(event):
            norms, mine = padded(event.norms, seen), places_of(event.optimizer, seen)
            for other in since:
                is_same = (norms > 0) & np.isclose(norms, padded(other.norms, seen))
                both = mine[is_same[mine] & np.isin(mine, places_of(other.optimizer, seen))]
                if len(both):
                    found.append((other, event, both))
            since.append(event)
    return found


# One update, computed again


def _predicted(of: Any, each: Copy, dtype: torch.dtype) -> Tensor | None:
    """Return what an update of a known optimizer makes of a parameter, computed in a dtype; None if it is unknown."""
    kind, gradient = type(of), each.gradient
    if kind.__name__ not in _KNOWN or not kind.__module__.startswith("torch.optim") or gradient is None:
        return None
    if each.is_part and kind.__name__ == "Adafactor":  # its step depends on the other parts
        return None
    if gradient.is_sparse or each.before.is_complex() or type(each.before) is not Tensor:
        return None
    p = each.before.to(dtype, copy=True).requires_grad_()
    p.grad = gradient.to(dtype, copy=True)
    with torch.enable_grad():
        new = kind([p], lr=0.1)
    plain = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}
    new.param_groups[0].update(each.group | plain)
    for name, value in copy.deepcopy(each.state).items():
        new.state[p][name] = value.to(dtype) if isinstance(value, Tensor) and name != "step" else value
    try:  # not `step`, whose hooks are the observer's and the user's
        getattr(kind.step, "__wrapped__", kind.step)(new)
    except Exception:  # noqa: BLE001  (a group may hold what a subclass has added)
        return None
    return p.detach()


def _again(seen: Observer) -> Iterator[tuple[Update, Copy, Tensor, Tensor]]:
    """Yield updates of single parameters, with their values afterwards, and as they should be in float64."""
    for update in real_updates(seen):
        for each in update.copies:
            exact = None if each.after is None else _predicted(update.optimizer, each, torch.float64)
            if each.after is not None and exact is not None and torch.isfinite(exact).all():
                yield update, each, each.after, exact


@contract("update_as_predicted")
def update_as_predicted(lab: Lab) -> Result:
    """Does each update move the parameters as its optimizer defines, once, and does nothing else move them?

    Updates of the optimizers of PyTorch are computed again in float64 from copies of parameter, gradient and state. The
    tolerance is sixteen times the error of the same in the dtype of the parameter.
    """
    seen, updates = lab.seen, real_updates(lab.seen)
    if not updates:
        if not seen.passes:
            raise NotTestedError("no pass was seen")
        if any(seen.was_moved(p) for _, p in seen.parameters.values()):
            raise NotTestedError("parameters are moved by hand, without an optimizer of PyTorch")
        if np.isinf(seen.passes[-1].after).any():
            raise NotTestedError("gradients are not finite, and no update was made")
        words = f"{len(seen.passes)} backward passes gave finite gradients, and no update was made."
        remedy = "call step() of the optimizer; look at the condition before it."
        return failed(words, where=seen.passes[-1].line, remedy=remedy)
    again = [pair[:2] for pair in _reused(seen) if pair[0].optimizer is pair[1].optimizer]
    if (result := _without_effect(seen)) is not None:
        return result
    if len(again) > 1:
        name = type(again[0][0].optimizer).__name__
        words = f"{name} made {len(again)} updates with a gradient that it had used already."
        lines = dict.fromkeys(each.line for pair in again for each in pair if each.line)
        return failed(words, where=", ".join(lines), remedy="call step() once after the passes of an update.")
    if (result := _pulled_back(seen)) is not None:
        return result
    worst, n = 0.0, 0
    for update, each, after, exact in _again(seen):
        same = _predicted(update.optimizer, each, each.before.dtype)
        if same is None:
            continue
        n += 1
        step, apart, rounding = (float((t.double() - exact).norm()) for t in (each.before, after, same))
        # One rounding of each entry is allowed also where single steps happened to round well.
        rounding = max(rounding, torch.finfo(each.before.dtype).eps * float(each.before.double().norm()))
        error = apart / max(step, 1e-300)
        worst = max(worst, error)
        if apart > max(16 * rounding, 1e-3 * step):
            return failed(
                f"Update {update.index + 1} moved {full_name(seen, each.parameter)} otherwise than "
                f"{type(update.optimizer).__name__} defines, by {fine_percent(error)} of the step.",
                where=_where(seen, [each.parameter], update.line),
                remedy="look for code that changes parameters, or the optimizer's state, within step().",
                proof=f"Computed in float64, the step has the norm {step:.3g}.",
            )
    if not n:
        kinds = sorted({type(u.optimizer).__name__ for u in updates})
        raise NotTestedError(f"no update of {names_in_words(kinds)} can be computed again")
    return passed(f"{n} updates of single parameters are those in float64 up to {number_in_words(worst)} of the step.")


def _without_effect(seen: Observer) -> Result | None:
    """Return a failure if parameters with gradients never move, or an optimizer never has a gradient."""
    live = {id(p) for each in (*seen.roots, *seen.called) for p in each.parameters() if p.requires_grad}
    for of in optimizers_of(seen):
        updates, held = real_updates(seen, of), [p for p in _held(of) if id(p) in seen.parameters]
        norms = np.array([padded(u.norms, seen)[places_of(of, seen)] for u in updates])  # (update, parameter)
        if len(updates) < _LEAST_STILL or not held:
            continue
        words, line = f"{type(of).__name__} made {len(updates)} updates", updates[0].line
        trained = [p for p in held if p.requires_grad]
        if trained and np.isnan(norms).all() and all(id(p) in live or hasattr(p, "full_tensor") for p in trained):
            words += f", none of its {len(trained)} parameters with a gradient."
            remedy = "let gradients arrive before the update: synchronize the last pass, clear after it."
            return failed(words, where=_where(seen, trained, line, most=2), remedy=remedy)
        has_rate = np.array([max(u.rates, default=0.0) > 0 for u in updates])
        n_due = ((norms > 0) & has_rate[:, None]).sum(0)
        due = [p for p, n in zip(held, n_due, strict=True) if n >= _LEAST_STILL and p.element_size() >= 4]
        still = [p for p in due if not seen.was_moved(p)]
        # A step that is lost to rounding is another fault.
        again = [(c.before, x.to(c.before)) for u, c, _, x in _again(seen) if still and u.optimizer is of]
        if still and not any(torch.equal(before, after) for before, after in again):
            words += f" of {counted(len(still), 'parameter')} with gradients that left every entry as it was."
            remedy = "write the step to the parameter itself, in place, not to a copy."
            return failed(words, where=_where(seen, still, line), remedy=remedy)
    return None


def _pulled_back(seen: Observer) -> Result | None:
    """Return a failure if parameters are pulled, between updates, to those of another module that never moves."""
    moves = defaultdict[Tensor, list[tuple[Tensor, Tensor]]](list)
    for of in optimizers_of(seen):
        updates = [u for u in real_updates(seen, of) if u.copies][-3:]
        for a, b in (pair for one, two in pairwise(updates) for pair in zip(one.copies, two.copies, strict=False)):
            if a.parameter is b.parameter and a.after is not None and not torch.equal(a.after, b.before):
                moves[a.parameter].append((a.after.double(), (b.before - a.after).double()))
    moved = {p: pairs for p, pairs in moves.items() if len(pairs) > 1 and p.numel() > 8}
    others = _parameters_of_modules() if len(moved) > 1 else []
    others = [q for q in others if not hasattr(q, "to_local")]
    pairs = [(p, q) for p in moved for q in others if q is not p and q.shape == moves[p][0][0].shape]
    pulls = {p: pull for p, q in pairs if (pull := _pull(q, moved[p])) > 0}
    if len(pulls) < 2 or np.ptp([*pulls.values()]) > 1e-3:
        return None
    share = fine_percent(float(np.median([*pulls.values()])))
    words = f"After each update the parameters are pulled by {share} of the way to those of another module, which"
    where = _where(seen, moved, f"after the update ({real_updates(seen)[0].line})")
    remedy = "move the average towards the model: look at the order of the arguments."
    return failed(f"{words} never moves.", where=where, remedy=remedy)


def _pull(target: Tensor, moves: list[tuple[Tensor, Tensor]]) -> float:
    """Return the share of the way to a target that all moves go, from their start; NaN if they do not."""
    shares = []
    for start, move in moves:
        way = target.detach().double() - start
        share = float((way * move).sum() / way.square().sum())
        is_along = share >= 1e-3 and float((move - share * way).norm()) <= 1e-3 * float(move.norm())
        shares.append(share if is_along else math.nan)
    return float(np.mean(shares)) if np.ptp(shares) < 1e-3 else math.nan


@contract("lost_to_rounding")
def lost_to_rounding(lab: Lab) -> Result:
    """What part of an update is lost, as parameters are rounded to their dtype?

    Predicted are the updates of single parameters in float64; lost is what entries that stay as they were should have
    moved.
    """
    sums = defaultdict[str, np.ndarray](lambda: np.zeros(4))  # of each parameter: update, what is lost, entries of both
    kinds, rates, needed = set(), [0.0], []
    for update, each, after, exact in _again(lab.seen):
        before = each.before.double()
        step = (exact - before).abs()
        stays = (after == each.before) & (step > 0)
        sums[full_name(lab.seen, each.parameter)] += [float(t.sum()) for t in (step, step[stays], step > 0, stays)]
        half = torch.finfo(each.before.dtype).eps * before.abs() / 2
        needed.append((half / step.clamp_min(1e-300))[step > 0][:4096])
        kinds.add(str(each.before.dtype).removeprefix("torch."))
        rates += update.rates
    due, lost, n, n_lost = sum(sums.values(), np.zeros(4))
    if not n:
        raise NotTestedError("no update could be computed again")
    share, of_update = fine_percent(n_lost / n), fine_percent(lost / due)
    words = f"{share} of the entries that should move stay as they were, and with them {of_update} of the update"
    formats = names_in_words(sorted(kinds))
    if min(n_lost / n, lost / due) <= 0.5:
        return passed(f"{words} ({formats}).")
    rate = float(torch.cat(needed).median()) * max(rates)
    remedy = f"keep parameters in float32 (autocast), or round at random; a rate of about {rate:.1g} would move half."
    where = names_in_words(sorted(sums, key=lambda name: -sums[name][1] / max(sums[name][0], 1e-300)), 8)
    return failed(f"{words}, in {formats} with a rate of {max(rates):.2g}.", where=where, remedy=remedy)


# Learning rate


@contract("schedule", of_loop=True)
def schedule(lab: Lab) -> Result:
    """Does the schedule move once for each update, after it, and does the rate stay above 0?"""
    seen, updates = lab.seen, real_updates(lab.seen)
    if len(updates) < 2:
        raise NotTestedError("fewer than two updates were seen")
    live, optimizers = _live(lr_scheduler.LRScheduler), optimizers_of(seen)
    inner = {id(each) for s in live for each in getattr(s, "_schedulers", [])}
    schedules = [s for of in optimizers for s in live if id(s) not in inner and innermost(s.optimizer) is of]
    results = (*(_of_rates(seen, of, schedules) for of in optimizers), *(_of_steps(seen, each) for each in schedules))
    if (result := next((each for each in results if each is not None), None)) is not None:
        return result
    if not schedules:
        return not_applicable("The rate has no schedule of PyTorch, and is above 0.")
    n, rates = counted(sum(a.kind == "schedule" for a in seen.acts), "step"), [max(u.rates) for u in updates]
    span = f"{min(rates):.2g} to {max(rates):.2g}"
    return passed(f"{n} of the schedule in {len(updates)} updates, with rates from {span}.")


def _steps_of(seen: Observer, schedule: Any) -> list[Act]:
    """Return the steps of a schedule, without the one that creates it."""
    found = [a for a in seen.acts if a.kind == "schedule" and a.of is schedule]
    return found[1:] if seen.sees_all and not isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else found


def _of_rates(seen: Observer, of: Any, schedules: list[Any]) -> Result | None:
    """Return a failure if the rate is 0 in all updates, or next to nothing from some on."""
    updates = real_updates(seen, of)
    rates = np.array([max(u.rates, default=math.nan) for u in updates])
    first = int(np.max(np.flatnonzero(~(rates <= _LEAST_RATE * rates.max())), initial=-1)) + 1
    if len(rates) - first < _LEAST_STILL:
        return None
    mine = [s for s in schedules if innermost(s.optimizer) is of]
    acts = [_steps_of(seen, each) for each in mine]
    lines = [line for line in (*map(seen.line_of, mine), *(each[0].line for each in acts if each)) if line]
    where = f"learning rate of {type(of).__name__} ({', '.join(dict.fromkeys(lines)) or updates[0].line})"
    since = f"from update {first + 1} on, while the training goes on" if first else f"in all {len(rates)} updates"
    n = counted(len(acts[0]) if acts else 0, "step")
    size = "0" if not rates[first:].any() else f"{rates[-1]:.2g}, {rates[-1] / rates.max():.2g} of the largest,"
    words = f"The rate is {size} {since}; {n} of its schedule in {len(rates)} updates."
    remedy = "step the schedule once for each update, and make it as long as the training."
    return failed(words, where=where, remedy=remedy)


def _of_steps(seen: Observer, schedule: Any) -> Result | None:
    """Return a failure if a schedule moves several times for each update, before it, never, or by a wrong metric."""
    acts, name = _steps_of(seen, schedule), type(schedule).__name__
    updates = real_updates(seen, innermost(schedule.optimizer))
    kinds = (("s", acts), ("u", updates), ("p", seen.passes))
    letters = {id(each): letter for letter, events in kinds for each in events}
    between = "".join(letters.get(id(each), "") for each in seen.events).split("u")[:-1]
    steps, passes = ([each.count(letter) for each in between[1:]] for letter in "sp")
    n, k = min(steps, default=0), max(passes, key=passes.count, default=0)
    n_early = sum(each.endswith("s") and "p" in each for each in between)
    where = next((a.line for a in acts if a.line), name)
    if not acts and getattr(schedule, "last_epoch", 1) <= 0:
        return _never_stepped(seen, schedule)
    if len(steps) >= 3 and n >= 2 and steps.count(n) >= 0.9 * len(steps):
        is_by_pass, functions = n == k, getattr(schedule, "lr_lambdas", [])
        ends = [getattr(schedule, each, None) for each in ("total_steps", "T_max", "total_iters")]
        ends += [getattr(each, "keywords", {}).get("num_training_steps") for each in functions]
        total = next((each for each in ends if isinstance(each, int)), 0)
        words = f"{name} moves {n} times for each update"
        words += f", once for each of its {k} micro-batches" if is_by_pass else ""
        sizes = [len(each) for each in seen.loaders if hasattr(each.dataset, "__len__")]
        if is_by_pass and total and any(size and total % size == 0 for size in sizes):
            return not_tested(f"{words}; its {total} steps are a number of batches: is that on purpose?", where=where)
        if is_shared() and n == torch.distributed.get_world_size():
            return not_tested(f"{words}, as often as there are ranks; is its length in batches?", where=where)
        words += f" and ends after {total / n:.4g} updates instead of {total}." if total else "."
        once = "once after each update, not once for each micro-batch." if is_by_pass else "once."
        return failed(words, where=where, remedy=f"call its step() {once}")
    if len(steps) >= 3 and n_early >= max(3, 0.9 * len(steps)):
        words = f"{name} moves before the update in {n_early} of {len(between)} updates: its first rate is never used."
        return failed(words, where=where, remedy="call step() of the optimizer first, then that of the schedule.")
    return _wrong_way(seen, schedule)


def _never_stepped(seen: Observer, schedule: Any) -> Result:
    """Return a failure if the run has ended, or if its script never mentions a step of a schedule that did not move."""
    updates = real_updates(seen)
    words = f"{type(schedule).__name__} did not move in {len(updates)} updates"
    where = f"the schedule of {type(schedule.optimizer).__name__}"
    is_unused = _is_never_used(schedule)
    if not is_unused and not seen.has_ended:
        return not_tested(f"{words}; does it move once an epoch?", where=where)
    why = "; the script never calls its step()" if is_unused else ", and the script has ended"
    words += f"{why}: the rate stays at {schedule.optimizer.param_groups[0].get('lr'):.3g}."
    where = "; ".join([where, *sorted({u.line for u in updates} - {""})[:1]])
    return failed(words, where=where, remedy="call its step() after each update.")


def _is_never_used(schedule: Any) -> bool:
    """Whether nothing but variables of scripts holds a schedule, and no script uses more of them than attributes."""
    names = defaultdict[str, set[str]](set)
    spaces = [(frame, space) for frame in frames_of_script() for space in (frame.f_locals, frame.f_globals)]
    for frame, space in spaces:
        names[frame.f_code.co_filename] |= {name for name, value in space.items() if value is schedule}
    known = {id(space) for _, space in spaces}
    for holder in gc.get_referrers(schedule):
        if isinstance(holder, dict) and id(holder) not in known and "n_passes" not in holder:  # nor an act
            return False
    for file, mine in names.items():
        try:
            nodes = [*ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))]
        except (OSError, SyntaxError):
            return False
        attributes = {node.value: node.attr for node in nodes if isinstance(node, ast.Attribute)}
        uses = [n for n in nodes if isinstance(n, ast.Name) and n.id in mine and isinstance(n.ctx, ast.Load)]
        if any(attributes.get(each, "step") == "step" for each in uses):
            return False
    return any(names.values())


def _wrong_way(seen: Observer, schedule: Any) -> Result | None:
    """Return a failure if a schedule waits for larger values of a metric that falls with the loss."""
    acts = [a for a in seen.acts if a.of is schedule and "metric" in a.numbers]
    if len(acts) < 4 or len(seen.passes) < 2 or schedule.mode != "max":
        return None
    values, losses = np.array([a.numbers["metric"] for a in acts]), np.array([each.loss for each in seen.passes])
    early, late = losses[: len(losses) // 2], losses[len(losses) // 2 :]
    is_falling = np.mean(np.diff(values) < 0) >= 0.75 and values[-1] < values[0]
    is_loss = losses.min() * 0.5 <= values.min() and values.max() <= losses.max() * 1.5  # False if any is NaN
    if not is_falling or not is_loss or not late.mean() < early.mean() < math.inf:
        return None
    words = f"The metric of ReduceLROnPlateau falls from {values[0]:.3g} to {values[-1]:.3g}, as the loss does, and"
    where, remedy = seen.line_of(schedule) or acts[0].line, 'pass mode="min" for a loss or an error.'
    return failed(f'{words} mode="max" takes that for a plateau.', where=where, remedy=remedy)


# Loss scale and clipping


@contract("loss_scale", of_loop=True)
def loss_scale(lab: Lab) -> Result:
    """Is the loss scaled up in half precision, and is the scale divided out before the update?"""
    seen = lab.seen
    acts = [a for a in seen.acts if a.kind == "scaler scale" and "scale" in a.numbers]
    if not acts:
        is_half = any(call.autocast == torch.float16 for call in seen.calls)
        return _underflow(lab) if is_half else not_applicable("No pass is in float16.")
    is_scaled, n_wrong, n_updates = False, 0, 0
    for event in seen.events:
        if isinstance(event, Backward):
            is_scaled = event.scale != 1
        elif isinstance(event, Act) and event.kind in ("scaler unscale", "scaler step"):
            is_scaled = False
        elif isinstance(event, Update) and is_real(event):
            n_wrong, n_updates = n_wrong + is_scaled, n_updates + 1
    scales = [a.numbers["scale"] for a in acts]
    values = np.array([a.numbers["scale"] for a in seen.acts if a.kind == "scaler update" and "scale" in a.numbers])
    smallest = torch.finfo(torch.float16).tiny
    if n_wrong and n_wrong >= 0.9 * n_updates:
        words = f"{n_wrong} of {n_updates} updates use gradients {scales[-1]:.3g} times too large."
        remedy = "call scaler.step(optimizer) and scaler.update() instead of optimizer.step()."
        lines = sorted({u.line for u in real_updates(seen)} - {""}) or [acts[0].line]
        return failed(words, where=", ".join(lines), remedy=remedy)
    if len(values) >= 16 and (np.diff(values) < 0).all() and values[-1] < 1:
        words = f"The scale fell in each of {len(values)} steps, to {values[-1]:.3g}: the gradient is not finite."
        remedy = "look for the first value that is not finite; no scale can help."
        return failed(words, where=acts[0].line, remedy=remedy)
    if min(scales) < smallest:
        words = f"The scale is {min(scales):.3g}: a derivative of 1 is below the smallest normal number of float16"
        where, remedy = seen.line_of(acts[0].of) or acts[0].line, "begin with the default scale, 65,536."
        return failed(f"{words}, {smallest:.3g}.", where=where, remedy=remedy)
    return passed(f"The scale is {min(scales):.4g} to {max(scales):.4g}, and is divided out.")


def _underflow(lab: Lab) -> Result:
    """Return a failure if entries of the gradient are 0 that are not 0 with a scale."""
    of = lab.taped()
    with lab.undisturbed(of.calls[0], trains=True, gradients=True):
        parameters = [p for p in lab.model.parameters() if p.requires_grad]
        loss = lab.loss(of)
        plain = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        scaled = torch.autograd.grad(loss * 2.0**12, parameters, allow_unused=True)
    both = [(a, b) for a, b in zip(plain, scaled, strict=True) if a is not None and b is not None]
    known = [(b != 0) & torch.isfinite(b) for _, b in both]
    n_lost = sum(int((mine & (a == 0)).sum()) for mine, (a, _) in zip(known, both, strict=True))
    share = n_lost / max(1, sum(int(mine.sum()) for mine in known))
    words = f"Without a scaler, {fine_percent(share)} of the entries of the gradient are 0 that are not times 4,096."
    return failed(words, where=of.calls[0].line, remedy="use torch.amp.GradScaler.") if share > 0.1 else passed(words)


@contract("clipping_order", of_loop=True)
def clipping_order(lab: Lab) -> Result:
    """Are gradients clipped after the last pass of an update, without the loss scale, and before the update?"""
    seen = lab.seen
    clips = [a for a in seen.acts if a.kind == "clip"]
    if not clips:
        return not_applicable("No gradient is clipped by a function of PyTorch.")
    if not seen.updates:
        raise NotTestedError("no update was seen")
    counts = dict.fromkeys(("empty", "late", "scaled", "local", "early"), 0)
    for i, clip in enumerate(seen.events):
        if isinstance(clip, Act) and clip.kind == "clip":
            letters = _letters(seen, {*clip.of})
            before, (after, again, _) = letters[:i].rpartition("p")[2], letters[i + 1 :].partition("p")
            scale = next((e.scale for e in reversed(seen.events[:i]) if isinstance(e, Backward)), 1.0)
            is_scaled = scale > 1 and "n" not in before and "n" in after
            counts["empty"] += not clip.of
            counts["late"] += "u" in before and "u" not in after and "c" not in before
            counts["scaled"] += is_scaled and clip.numbers["limit"] < scale / 100
            counts["local"] += "r" in after.partition("u")[0] and "u" in after
            counts["early"] += bool(again) and not {*"uz"} & {*after} and "u" not in before
    n, where = counted(len(clips), "clipping"), clips[0].line or "the clipping"
    k = len(seen.passes) / max(1, len(real_updates(seen)))
    scale = max((each.scale for each in seen.passes), default=1.0)
    norms = [c.numbers["norm"] for c in clips if math.isfinite(c.numbers["norm"])]
    largest = f", norms up to {max(norms):.3g} against a limit of {clips[0].numbers['limit']:.3g}" if norms else ""
    is_accumulated = k >= 1.9 and len({each.line for each in seen.passes}) == 1
    counts["empty"] += counts["empty"] >= max(2, len(clips) - 1)  # the first one has used the generator up
    least = dict.fromkeys(counts, 0.9) | {"early": 0.9 * (k - 1) / k if is_accumulated else math.inf}
    too_large = f"see gradients {scale:.3g} times too large, as the scale is divided out afterwards{largest}"
    between = f"come between the {round(k)} passes of an update: the first are clipped again with the later ones"
    for name, words, remedy in (
        ("empty", "have no parameters, as their generator was used up", "pass a list, or a new generator each time."),
        ("late", "come after the update, whose gradients are not clipped", "clip before step()."),
        ("scaled", too_large, "call scaler.unscale_(optimizer) before it."),
        ("local", "come before the gradients are added over ranks", "clip after the reduction."),
        ("early", between, "clip once, after the last pass of an update."),
    ):
        if counts[name] > least[name] * len(clips):
            return failed(f"{min(counts[name], len(clips))} of {n} {words}.", where=where, remedy=remedy)
    return passed(f"{n} come after the passes and before the update{largest}.")


def _letters(seen: Observer, mine: set[int]) -> str:
    """Return a letter for each event of parameters: pass, update, clip, scale (n), reduction, clearing (z), other."""

    def letter(event: Any) -> str:
        if isinstance(event, Backward):
            return "p"
        if isinstance(event, Update):
            return "u" if is_real(event) and not mine.isdisjoint(map(id, _held(event.optimizer))) else "."
        if event.kind == "clip":
            return "." if mine.isdisjoint(event.of) else "c"
        return {"scaler unscale": "n", "reduce": "r", "clear": "z"}.get(event.kind, ".")

    return "".join(map(letter, seen.events))
