"""Contracts of updates: what an optimizer holds and does, its learning rate, loss scale and clipping."""

from __future__ import annotations

import ast
import copy
import gc
import math
from itertools import pairwise
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
from workbench.contracts.observer import Act, Backward, Copy, Update
from workbench.contracts.places import frames_of_script
from workbench.contracts.results import Result
from workbench.formatting import counted, fine_percent, number_in_words
from workbench.models.calling import innermost, is_shared

#: Optimizers whose updates are computed again.
_KNOWN = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adafactor")
#: Smallest normal number of float16.
_SMALLEST = 2.0**-14
#: Updates with a rate of 0 before it is a fault: a warm-up may begin with one.
_LEAST_STILL = 3


def _live(lab: Lab, kind: type) -> list[Any]:
    """Return the objects of a type that exist: modules, optimizers or schedules."""
    found = vars(lab).get("live_objects")
    if found is None:
        kinds = (nn.Module, torch.optim.Optimizer, lr_scheduler.LRScheduler)
        objects = gc.get_objects()
        wanted = {each for each in {type(each) for each in objects} if issubclass(each, kinds)}
        found = vars(lab)["live_objects"] = [each for each in objects if type(each) in wanted]
    return [each for each in found if isinstance(each, kind)]


@contract("optimizer_covers")
def optimizer_covers(lab: Lab) -> Result:
    """Is each parameter with a gradient in an optimizer, once, and is each parameter of an optimizer in the model?

    Parameters that got gradients are looked up in all optimizers that exist. If some are in none and have not moved, it
    is a fault where the author has said that they are to be trained: the optimizer holds tensors of no module instead,
    or other parameters of the same module, or the author froze others by requires_grad, or nothing was loaded, so that
    they stay at random values.
    """
    seen = lab.seen
    optimizers = optimizers_of(seen)
    if not optimizers:
        raise NotTestedError("no update of an optimizer was seen")
    norms = dict(zip(seen.parameters, reached(seen), strict=True))
    holders = _live(lab, torch.optim.Optimizer)
    anywhere = {id(p) for of in holders for g in of.param_groups for p in g["params"]}
    stepped = {id(p): p for of in optimizers for g in of.param_groups for p in g["params"]}
    named = {id(p): (root, name, p) for root in seen.roots for name, p in root.named_parameters()}
    missing = {
        key: entry
        for key, entry in named.items()
        if entry[2].requires_grad and norms.get(key, 0) > 0 and key not in anywhere and not seen.was_moved(entry[2])
    }
    alive = {id(p) for m in _live(lab, nn.Module) for p in (m.__dict__.get("_parameters") or {}).values()}
    dead = [p for key, p in stepped.items() if key not in named and not norms.get(key, 0) > 0]
    lines = [line for of in optimizers if (line := seen.line_of(of))]
    twice = [places for one, two, places in _reused(lab) if one.optimizer is not two.optimizer]
    if len(twice) > 1:
        held = [*seen.parameters.values()]
        names = [full_name(seen, held[i][1]) for i in sorted({i for places in twice for i in places})]
        return failed(
            f"{counted(len(names), 'parameter')} are updated by two optimizers with the same gradient, {len(twice)} "
            "times.",
            where="; ".join([names_in_words(names), *lines]),
            remedy="give each parameter to one optimizer.",
        )
    n_held = counted(sum(key in named for key in stepped), "parameter")
    if not missing:
        idle = [p for p in dead if id(p) not in alive]
        words = f"; {counted(len(idle), 'tensor')} of no module are held as well" if idle else ""
        return passed(f"Each parameter with a gradient is in one optimizer: {n_held}{words}.")
    names = [full_name(seen, entry[2]) for entry in missing.values()]
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    where = "; ".join([names_in_words(names if len(names) < 4 else modules), *lines])
    words = f"{counted(len(missing), 'parameter')} with gradients are in no optimizer and do not move"
    owners = {key: name.rpartition(".")[0] for key, (_, name, _) in named.items()}
    split = {owners[key] for key in missing} & {owners[key] for key in stepped if key in owners}
    groups = [g["params"] for of in optimizers for g in of.param_groups]
    by_kind = [{owners[id(p)] for p in g if id(p) in owners} for g in groups]
    is_by_kind = any(a & b for i, a in enumerate(by_kind) for b in by_kind[:i])
    is_frozen = any(not entry[2].requires_grad for entry in named.values())
    reason = ""
    if dead:
        frozen = sum(not p.requires_grad for p in dead)
        kind = "frozen ones" if frozen == len(dead) else "tensors without gradients that no called module has"
        reason = f"the optimizer holds {len(dead)} {kind} instead"
    elif split and any(key in stepped and entry[2].ndim > 1 for key, entry in named.items()):  # not biases alone
        reason = f"other parameters of {names_in_words([*split])} are in one"
    elif is_by_kind:
        reason = f"the {len(groups)} groups of the optimizer hold parts of all other modules"
    elif is_frozen:
        reason = "others are frozen by requires_grad, these are not"
    elif not was_loaded(lab):
        reason = "as nothing was loaded, they stay at their random values"
    if not reason:
        return not_tested(f"{words}, {n_held} are in one; is that on purpose?", where=where)
    return failed(
        f"{words}; {reason}.",
        where=where,
        remedy="build the optimizer from model.parameters() of the finished model, or freeze by requires_grad=False.",
    )


def _reused(lab: Lab) -> list[tuple[Update, Update, list[int]]]:
    """Return pairs of updates without a pass between them, with the places of parameters whose gradient both used."""
    since: list[Update] = []
    found = []
    for event in lab.seen.events:
        if isinstance(event, Backward):
            since = []
        elif isinstance(event, Update) and is_real(event):
            norms, mine = padded(event.norms, lab.seen), places_of(event.optimizer, lab.seen)
            for other in since:
                is_same = np.isin(mine, places_of(other.optimizer, lab.seen)) & (norms[mine] > 0)
                is_same &= np.isclose(norms[mine], padded(other.norms, lab.seen)[mine])
                if is_same.any():
                    found.append((other, event, [int(i) for i in mine[is_same]]))
            since.append(event)
    return found


# One update, computed again


def _predicted(of: Any, each: Copy, dtype: torch.dtype) -> Tensor | None:
    """Return what an update of a known optimizer makes of a parameter, computed in a dtype; None if it is unknown."""
    kind = type(of)
    if kind.__name__ not in _KNOWN or not kind.__module__.startswith("torch.optim") or each.gradient is None:
        return None
    if each.gradient.is_sparse or each.before.is_complex() or type(each.before) is not Tensor:
        return None
    p = each.before.to(dtype, copy=True).requires_grad_()
    p.grad = each.gradient.to(dtype, copy=True)
    plain = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}
    options = {name: value for name, value in each.group.items() if name not in ("initial_lr", "swa_lr")}
    options |= {name: value for name, value in plain.items() if name in options}
    hidden = {"decoupled_weight_decay"} if kind.__name__ == "AdamW" else set()
    own = {name: value for name, value in options.items() if name in kind.__init__.__code__.co_varnames}
    with torch.enable_grad():
        new = kind([p], **{name: value for name, value in own.items() if name not in hidden})
    new.param_groups[0].update(options)
    if each.state:
        new.state[p] = {
            name: value.to(dtype) if isinstance(value, Tensor) and name != "step" else copy.deepcopy(value)
            for name, value in each.state.items()
        }
    # Not `step`, whose hooks are the observer's and the user's.
    own_step = getattr(kind.step, "__wrapped__", kind.step)
    try:
        own_step(new)
    except Exception:  # noqa: BLE001  (a group may hold what a subclass has added)
        return None
    return p.detach()


def _copies(lab: Lab) -> list[tuple[Update, Copy]]:
    return [(u, c) for u in real_updates(lab.seen) for c in u.copies if c.after is not None and c.gradient is not None]


@contract("update_as_predicted")
def update_as_predicted(lab: Lab) -> Result:
    """Does each update move the parameters as its optimizer defines, once, and does nothing else move them?

    Updates of the optimizers of PyTorch are computed again in float64 from copies of parameter, gradient and state. The
    tolerance is sixteen times the error of the same in the dtype of the parameter.
    """
    seen = lab.seen
    updates = real_updates(seen)
    if not updates:
        if not seen.passes:
            raise NotTestedError("no pass was seen")
        moved = [name for name, p in seen.parameters.values() if seen.was_moved(p)]
        if moved:
            raise NotTestedError("parameters are moved by hand, without an optimizer of PyTorch")
        if not np.isfinite(seen.passes[-1].after[~np.isnan(seen.passes[-1].after)]).all():
            raise NotTestedError("gradients are not finite, and no update was made")
        return failed(
            f"{len(seen.passes)} backward passes gave finite gradients, and no update was made.",
            where=seen.passes[-1].line,
            remedy="call step() of the optimizer; look at the condition before it.",
        )
    for result in (_without_effect(lab), _repeated(lab), _pulled_back(lab)):
        if result is not None:
            return result
    worst, n = 0.0, 0
    for update, each in _copies(lab):
        exact = _predicted(update.optimizer, each, torch.float64)
        same = _predicted(update.optimizer, each, each.before.dtype)
        if exact is None or same is None or not torch.isfinite(exact).all():
            continue
        n += 1
        step = float((exact - each.before.double()).norm())
        apart = float(((each.before if each.after is None else each.after).double() - exact).norm())
        rounding = float((same.double() - exact).norm())
        # One rounding of each entry is allowed also where single steps happened to round well.
        rounding = max(rounding, torch.finfo(each.before.dtype).eps * float(each.before.double().norm()))
        if step == 0 and apart == 0:
            continue
        error = apart / max(step, 1e-300)
        worst = max(worst, error)
        if apart > max(16 * rounding, 1e-3 * step):
            return failed(
                f"Update {update.index + 1} moved {full_name(seen, each.parameter)} otherwise than "
                f"{type(update.optimizer).__name__} defines, by {fine_percent(error)} of the step.",
                where="; ".join([full_name(seen, each.parameter), update.line]),
                remedy="look for code that changes parameters, or the optimizer's state, within step().",
                proof=f"Computed in float64, the step has the norm {step:.3g}.",
            )
    if not n:
        kinds = sorted({type(u.optimizer).__name__ for u in updates})
        raise NotTestedError(f"no update of {names_in_words(kinds)} can be computed again")
    return passed(f"{n} updates of single parameters are those in float64 up to {number_in_words(worst)} of the step.")


def _without_effect(lab: Lab) -> Result | None:
    """Return a failure if parameters with gradients never move, or an optimizer never has a gradient."""
    seen = lab.seen
    if len(real_updates(seen)) < 3:
        return None
    for of in optimizers_of(seen):
        mine, updates = places_of(of, seen), real_updates(seen, of)
        held = [[*seen.parameters.values()][i][1] for i in mine]
        norms = np.array([padded(u.norms, seen)[mine] for u in updates])
        live = {id(p) for root in seen.roots for p in root.parameters() if p.requires_grad}
        is_mine = held and all(id(p) in live or hasattr(p, "full_tensor") for p in held)
        if is_mine and len(updates) > 2 and np.isnan(norms).all():
            return failed(
                f"{type(of).__name__} made {len(updates)} updates, none of its {len(held)} parameters with a gradient.",
                where="; ".join([names_in_words([full_name(seen, p) for p in held], 2), updates[0].line]),
                remedy="let gradients arrive before the update: synchronize the last pass, clear after it.",
            )
        rates = np.array([max(u.rates, default=0.0) for u in updates])
        is_active = ((norms > 0) & (rates[:, None] > 0)).sum(0) >= 3
        still = [
            p
            for p, active in zip(held, is_active, strict=True)
            if active and not seen.was_moved(p) and p.dtype in (torch.float32, torch.float64)
        ]
        if still and not _vanishes(lab, of):
            names = [full_name(seen, p) for p in still]
            return failed(
                f"{type(of).__name__} made {len(updates)} updates of {counted(len(still), 'parameter')} with gradients "
                "that left every entry as it was.",
                where="; ".join([names_in_words(names), updates[0].line]),
                remedy="write the step to the parameter itself, in place, not to a copy.",
            )
    return None


def _vanishes(lab: Lab, of: Any) -> bool:
    """Whether a predicted update of an optimizer is lost to rounding."""
    known = [(c, _predicted(of, c, torch.float64)) for u, c in _copies(lab) if u.optimizer is of]
    return any(new is not None and torch.equal(new.to(c.before.dtype), c.before) for c, new in known)


def _repeated(lab: Lab) -> Result | None:
    """Return a failure if an optimizer makes two updates with one gradient."""
    again = [(one, two) for one, two, _ in _reused(lab) if one.optimizer is two.optimizer]
    if len(again) < 2:
        return None
    lines = dict.fromkeys(each.line for pair in again for each in pair if each.line)
    return failed(
        f"{type(again[0][0].optimizer).__name__} made {len(again)} updates with a gradient that it had used already.",
        where=", ".join(lines),
        remedy="call step() once after the passes of an update.",
    )


def _pulled_back(lab: Lab) -> Result | None:
    """Return a failure if parameters are pulled, between updates, to those of another module that never moves."""
    seen = lab.seen
    for of in optimizers_of(seen):
        updates = [u for u in real_updates(seen, of) if u.copies][-3:]
        gaps: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for one, two in pairwise(updates):
            for a, b in zip(one.copies, two.copies, strict=False):
                if a.parameter is b.parameter and a.after is not None and not torch.equal(a.after, b.before):
                    gaps.setdefault(id(a.parameter), []).append((a.after.double(), (b.before - a.after).double()))
        gaps = {key: pairs for key, pairs in gaps.items() if len(pairs) > 1 and pairs[0][0].numel() > 8}
        if len(gaps) < 2:
            continue
        found = [_target_of(lab, seen.parameters[key][1], pairs) for key, pairs in gaps.items()]
        factors = [each for each in found if each is not None]
        if len(factors) < 2 or max(factors) - min(factors) > 1e-3:
            continue
        names = [full_name(seen, seen.parameters[key][1]) for key in gaps]
        return failed(
            f"After each update the parameters are pulled by {fine_percent(float(np.median(factors)))} of the way to "
            "those of another module, which never moves.",
            where=f"{names_in_words(names)}; after the update ({updates[0].line})",
            remedy="move the average towards the model: look at the order of the arguments.",
        )
    return None


def _target_of(lab: Lab, parameter: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> float | None:
    """Return the factor by which a parameter moves to a tensor of the same shape that exists and is constant."""
    for module in _live(lab, nn.Module):
        for p in (module.__dict__.get("_parameters") or {}).values():
            if p is None or p is parameter or p.shape != parameter.shape:
                continue
            factors = []
            for start, move in pairs:
                way = p.detach().double() - start
                size = float(way.square().sum())
                factor = float((way * move).sum()) / size if size else 0.0
                if factor < 1e-3 or float((move - factor * way).norm()) > 1e-3 * float(move.norm()):
                    break
                factors.append(factor)
            if len(factors) == len(pairs) and max(factors) - min(factors) < 1e-3:
                return float(np.mean(factors))
    return None


@contract("lost_to_rounding")
def lost_to_rounding(lab: Lab) -> Result:
    """What part of an update is lost, as parameters are rounded to their dtype?

    Predicted are the updates of single parameters in float64; lost is what entries that stay as they were should have
    moved.
    """
    due = lost = 0.0
    n = n_lost = 0
    scales: list[Tensor] = []
    worst: dict[str, list[float]] = {}
    dtypes, rates = set(), [0.0]
    for update, each in _copies(lab):
        exact = _predicted(update.optimizer, each, torch.float64)
        if exact is None or each.after is None or not each.before.is_floating_point():
            continue
        step = (exact - each.before.double()).abs()
        stays = (each.after == each.before) & (step > 0)
        due, lost = due + float(step.sum()), lost + float(step[stays].sum())
        n, n_lost = n + int((step > 0).sum()), n_lost + int(stays.sum())
        entry = worst.setdefault(full_name(lab.seen, each.parameter), [0.0, 0.0])
        entry[0], entry[1] = entry[0] + float(step[stays].sum()), entry[1] + float(step.sum())
        dtypes.add(each.before.dtype)
        rates += update.rates
        ulp = torch.finfo(each.before.dtype).eps * each.before.double().abs() / 2
        scales.append((ulp / step.clamp_min(1e-300))[step > 0].flatten()[:4096])
    if not n:
        raise NotTestedError("no update could be computed again")
    words = (
        f"{fine_percent(n_lost / n)} of the entries that should move stay as they were, and with them "
        f"{fine_percent(lost / due)} of the update"
    )
    kinds = names_in_words([str(each).removeprefix("torch.") for each in dtypes])
    if n_lost / n <= 0.5 or lost / due <= 0.5:
        return passed(f"{words} ({kinds}).")
    needed = float(torch.cat(scales).median()) * max(rates)
    names = sorted(worst, key=lambda name: -worst[name][0] / max(worst[name][1], 1e-300))
    return failed(
        f"{words}, in {kinds} with a rate of {max(rates):.2g}.",
        where=names_in_words(names, 8),
        remedy=f"keep parameters in float32 (autocast), or round at random; a rate of about {needed:.1g} would move "
        "half of them.",
    )


# Learning rate


@contract("schedule")
def schedule(lab: Lab) -> Result:
    """Does the schedule move once for each update, after it, and does the rate stay above 0?"""
    seen = lab.seen
    updates = real_updates(seen)
    if len(updates) < 2:
        raise NotTestedError("fewer than two updates were seen")
    acts = [a for a in seen.acts if a.kind == "schedule"]
    live = _live(lab, lr_scheduler.LRScheduler)
    inner = {id(each) for s in live for each in getattr(s, "_schedulers", [])}
    schedules = [s for s in live if id(s) not in inner]
    schedules = [s for s in schedules if any(innermost(s.optimizer) is of for of in optimizers_of(seen))]
    for of in optimizers_of(seen):
        mine = [s for s in schedules if innermost(s.optimizer) is of]
        result = _of_rates(lab, of, mine) or next((r for s in mine if (r := _of_steps(lab, of, s))), None)
        if result is not None:
            return result
    for each in schedules:
        if (result := _never_stepped(lab, each) or _wrong_way(lab, each)) is not None:
            return result
    if not schedules:
        return not_applicable("The rate has no schedule of PyTorch, and is above 0.")
    rates = [max(u.rates) for u in updates]
    return passed(
        f"{counted(len(acts), 'step')} of the schedule in {len(updates)} updates, with rates from {min(rates):.2g} to "
        f"{max(rates):.2g}."
    )


def _of_rates(lab: Lab, of: Any, schedules: list[Any]) -> Result | None:
    """Return a failure if the rate is 0 in all updates, or from some on."""
    updates = real_updates(lab.seen, of)
    rates = np.array([max(u.rates, default=math.nan) for u in updates])
    if len(rates) < _LEAST_STILL or rates[-1] != 0:
        return None
    positive = np.flatnonzero(rates > 0)
    first = int(positive[-1]) + 1 if len(positive) else 0
    if len(rates) - first < _LEAST_STILL:
        return None
    n_steps = len(_acts_of(lab, schedules[0])) if schedules else 0
    words = f"The rate is 0 in all {len(rates)} updates"
    if first:
        words = f"The rate is 0 from update {first + 1} on, while the training goes on"
    lines = [lab.seen.line_of(s) for s in schedules] + [a.line for s in schedules for a in _acts_of(lab, s)[:1]]
    line = ", ".join(dict.fromkeys(each for each in lines if each)) or updates[0].line
    return failed(
        f"{words}; {counted(n_steps, 'step')} of its schedule in {len(rates)} updates.",
        where=f"learning rate of {type(of).__name__} ({line})",
        remedy="step the schedule once for each update, and make it as long as the training.",
    )


def _acts_of(lab: Lab, schedule: Any) -> list[Act]:
    """Return the steps of a schedule, without the one that creates it."""
    found = [a for a in lab.seen.acts if a.kind == "schedule" and a.of is schedule]
    return found[1:] if lab.seen.sees_all and not isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else found


def _of_steps(lab: Lab, of: Any, schedule: Any) -> Result | None:
    """Return a failure if a schedule moves several times for each update, or before it."""
    seen, steps, n_early, n_since, n_passes = lab.seen, [], 0, 0, 0
    mine = {id(a) for a in _acts_of(lab, schedule)}
    passes: list[int] = []
    order = ""
    for event in seen.events:
        if isinstance(event, Backward):
            n_passes += 1
            order += "p"
        elif isinstance(event, Act) and id(event) in mine:
            n_since += 1
            order += "s"
        elif isinstance(event, Update) and event.optimizer is of and is_real(event):
            steps.append(n_since)
            passes.append(n_passes)
            n_early += order.endswith("s") and "p" in order
            n_since, n_passes, order = 0, 0, ""
    steps, passes = steps[1:], passes[1:]
    if len(steps) < 3:
        return None
    line = next((a.line for a in _acts_of(lab, schedule) if a.line), "")
    where = line or type(schedule).__name__
    n = min(steps)
    if n >= 2 and steps.count(n) >= 0.9 * len(steps):
        k = max(passes, key=passes.count)
        per = "micro-batch" if n == k else "update"
        words = f"{type(schedule).__name__} moves {n} times for each update" + (
            f", once for each of its {k} micro-batches" if n == k else ""
        )
        total = _length_of(schedule)
        loaders = [len(d) for d in lab.seen.loaders if hasattr(d.dataset, "__len__")]
        if n == k and total and any(size and total % size == 0 for size in loaders):
            return not_tested(f"{words}; its {total} steps are a number of batches: is that on purpose?", where=where)
        if is_shared() and n == torch.distributed.get_world_size():
            return not_tested(f"{words}, as often as there are ranks; is its length in batches?", where=where)
        ends = f" and ends after {total / n:.4g} updates instead of {total}" if total else ""
        return failed(
            f"{words}{ends}.",
            where=where,
            remedy=f"call its step() once after each update, not once for each {per}."
            if n == k
            else "call its step() once.",
        )
    if n_early >= 0.9 * len(steps) and n_early >= 3:
        return failed(
            f"{type(schedule).__name__} moves before the update in {n_early} of {len(steps) + 1} updates: its "
            "first rate is never used.",
            where=where,
            remedy="call step() of the optimizer first, then that of the schedule.",
        )
    return None


def _length_of(schedule: Any) -> int | None:
    """Return the number of steps of a schedule; None if it has no end."""
    for name in ("total_steps", "T_max", "total_iters"):
        if isinstance(value := getattr(schedule, name, None), int):
            return value
    for function in getattr(schedule, "lr_lambdas", []):
        keywords = getattr(function, "keywords", {})
        if isinstance(value := keywords.get("num_training_steps"), int):
            return value
    return None


def _never_stepped(lab: Lab, schedule: Any) -> Result | None:
    """Return a failure if nothing moves a schedule: the run has ended, or its script never mentions a step of it."""
    if _acts_of(lab, schedule) or getattr(schedule, "last_epoch", 1) > 0:
        return None
    n = len(real_updates(lab.seen))
    words = f"{type(schedule).__name__} did not move in {n} updates"
    rate = schedule.optimizer.param_groups[0].get("lr")
    where = f"the schedule of {type(schedule.optimizer).__name__}"
    is_unused = _is_never_used(schedule)
    if lab.seen.has_ended or is_unused:
        why = "; the script never calls its step()" if is_unused else ", and the script has ended"
        return failed(
            f"{words}{why}: the rate stays at {rate:.3g}.",
            where="; ".join([where, *sorted({u.line for u in real_updates(lab.seen)} - {""})[:1]]),
            remedy="call its step() after each update.",
        )
    return not_tested(f"{words}; does it move once an epoch?", where=where)


def _is_never_used(schedule: Any) -> bool:
    """Whether nothing but variables of scripts holds a schedule, and no script uses more of them than attributes."""
    names: dict[str, set[str]] = {}
    spaces: set[int] = set()
    for frame in frames_of_script():
        for space in (frame.f_locals, frame.f_globals):
            spaces.add(id(space))
            mine = {name for name, value in space.items() if value is schedule}
            names[frame.f_code.co_filename] = names.get(frame.f_code.co_filename, set()) | mine
    for holder in gc.get_referrers(schedule):
        is_act = isinstance(holder, dict) and "n_passes" in holder
        if isinstance(holder, dict) and id(holder) not in spaces and not is_act:
            return False
    for file, mine in names.items():
        try:
            nodes = [*ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))]
        except (OSError, SyntaxError):
            return False
        attributes = {id(node.value): node.attr for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            is_use = isinstance(node, ast.Name) and node.id in mine and isinstance(node.ctx, ast.Load)
            if is_use and attributes.get(id(node), "step") == "step":
                return False
    return any(names.values())


def _wrong_way(lab: Lab, schedule: Any) -> Result | None:
    """Return a failure if a schedule waits for larger values of a metric that falls with the loss."""
    if not isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        return None
    acts = [a for a in lab.seen.acts if a.of is schedule and "metric" in a.numbers]
    values = np.array([a.numbers["metric"] for a in acts])
    losses = np.array([each.loss for each in lab.seen.passes])
    half = len(losses) // 2
    if len(values) < 4 or not half or not np.isfinite(losses).all():
        return None
    sign = -1 if schedule.mode == "max" else 1
    is_contrary = np.mean(np.diff(values) * sign > 0) >= 0.75 and (values[-1] - values[0]) * sign > 0
    is_loss = losses.min() * 0.5 <= values.min() and values.max() <= losses.max() * 1.5
    if sign == 1 or not is_contrary or losses[half:].mean() >= losses[:half].mean() or not is_loss:
        return None
    return failed(
        f"The metric of ReduceLROnPlateau falls from {values[0]:.3g} to {values[-1]:.3g}, as the loss does, and "
        f'mode="{schedule.mode}" takes that for a plateau.',
        where=lab.seen.line_of(schedule) or acts[0].line,
        remedy='pass mode="min" for a loss or an error.',
    )


# Loss scale and clipping


@contract("loss_scale")
def loss_scale(lab: Lab) -> Result:
    """Is the loss scaled up in half precision, and is the scale divided out before the update?"""
    seen = lab.seen
    scales = [a for a in seen.acts if a.kind == "scaler scale" and "scale" in a.numbers]
    is_half = any(call.autocast == torch.float16 for call in seen.calls)
    if not scales:
        if not is_half:
            return not_applicable("No pass is in float16.")
        return _underflow(lab, 1.0, "autocast to float16 without a gradient scaler")
    line = scales[0].line
    is_scaled, n_wrong, n_updates = False, 0, 0
    for event in seen.events:
        if isinstance(event, Backward):
            is_scaled = event.scale != 1
        elif isinstance(event, Act) and event.kind in ("scaler unscale", "scaler step"):
            is_scaled = False
        elif isinstance(event, Update) and is_real(event):
            n_wrong, n_updates = n_wrong + is_scaled, n_updates + 1
    if n_wrong and n_wrong >= 0.9 * n_updates:
        lines = sorted({u.line for u in real_updates(seen)} - {""})
        return failed(
            f"{n_wrong} of {n_updates} updates use gradients {scales[-1].numbers['scale']:.3g} times too large.",
            where=", ".join(lines) or line,
            remedy="call scaler.step(optimizer) and scaler.update() instead of optimizer.step().",
        )
    values = np.array([a.numbers["scale"] for a in seen.acts if a.kind == "scaler update" and "scale" in a.numbers])
    if len(values) >= 16 and (np.diff(values) < 0).all() and values[-1] < 1:
        return failed(
            f"The scale fell in each of {len(values)} steps, to {values[-1]:.3g}: the gradient is not finite.",
            where=line,
            remedy="look for the first value that is not finite; no scale can help.",
        )
    least = min(a.numbers["scale"] for a in scales)
    if least < _SMALLEST:
        return failed(
            f"The scale is {least:.3g}, so that even a derivative of 1 is below the smallest normal number of float16, "
            f"{_SMALLEST:.3g}.",
            where=seen.line_of(scales[0].of) or line,
            remedy="begin with the default scale, 65,536.",
        )
    return passed(f"The scale is {least:.4g} to {max(a.numbers['scale'] for a in scales):.4g}, and is divided out.")


def _underflow(lab: Lab, scale: float, words: str) -> Result:
    """Return a failure if entries of the gradient are 0 that are not 0 with a scale."""
    of = lab.taped()
    parameters = [p for p in lab.model.parameters() if p.requires_grad]
    call = of.calls[0]
    with lab.undisturbed(call, trains=True, gradients=True):
        loss = lab.loss(of)
        first = torch.autograd.grad(loss * scale, parameters, retain_graph=True, allow_unused=True)
        zero = [None if g is None else g == 0 for g in first]
        second = torch.autograd.grad(loss * 2.0**12, parameters, allow_unused=True)
    both = [(z, g) for z, g in zip(zero, second, strict=True) if z is not None and g is not None]
    n = sum(int(((g != 0) & torch.isfinite(g)).sum()) for _, g in both)
    lost = sum(int((z & (g != 0) & torch.isfinite(g)).sum()) for z, g in both)
    share = lost / max(1, n)
    found = f"{fine_percent(share)} of the entries of the gradient are 0 that are not with a scale of 4,096"
    if share > 0.1:
        return failed(f"{found} ({words}).", where=call.line, remedy="use torch.amp.GradScaler.")
    return passed(f"{found} ({words}).")


@contract("clipping_order")
def clipping_order(lab: Lab) -> Result:
    """Are gradients clipped after the last pass of an update, without the loss scale, and before the update?"""
    seen = lab.seen
    clips = [a for a in seen.acts if a.kind == "clip"]
    if not clips:
        return not_applicable("No gradient is clipped by a function of PyTorch.")
    n = counted(len(clips), "clipping")
    counts = dict.fromkeys(("late", "scaled", "empty", "early", "local"), 0)
    for i, event in enumerate(seen.events):
        if not isinstance(event, Act) or event.kind != "clip":
            continue
        mine = {*event.of}
        before = _kinds(seen.events[:i][::-1], mine, ("p",))
        after = _kinds(seen.events[i + 1 :], mine, ("p",))
        counts["empty"] += not mine
        counts["late"] += "u" in before and "u" not in after and "c" not in before
        scale = next((e.scale for e in seen.events[:i][::-1] if isinstance(e, Backward)), 1.0)
        is_scaled = scale > 1 and "n" not in before and "n" in after
        counts["scaled"] += is_scaled and event.numbers["limit"] < scale / 100
        counts["local"] += "r" in after and "u" in after and after.index("r") < after.index("u")
        counts["early"] += after.endswith("p") and not {*"uz"} & {*after} and not {*"u"} & {*before}
    share = {name: value / len(clips) for name, value in counts.items()}
    where = clips[0].line or "the clipping"
    k = len(seen.passes) / max(1, len(real_updates(seen)))
    scale = max((each.scale for each in seen.passes), default=1.0)
    limit, norms = clips[0].numbers["limit"], [c.numbers["norm"] for c in clips if math.isfinite(c.numbers["norm"])]
    largest = f", norms up to {max(norms):.3g} against a limit of {limit:.3g}" if norms else ""
    lines = {each.line for each in seen.passes}
    for name, words, remedy in (
        ("empty", "have no parameters, as their generator was used up", "pass a list, or a new generator each time."),
        ("late", "come after the update, whose gradients are not clipped", "clip before step()."),
        (
            "scaled",
            f"see gradients {scale:.3g} times too large, as the scale is divided out afterwards{largest}",
            "call scaler.unscale_(optimizer) before it.",
        ),
        ("local", "come before the gradients are added over ranks", "clip after the reduction."),
    ):
        if share[name] > 0.9:
            return failed(f"{counts[name]} of {n} {words}.", where=where, remedy=remedy)
    if k >= 1.9 and len(lines) == 1 and share["early"] > 0.9 * (k - 1) / k:
        return failed(
            f"{counts['early']} of {n} come between the {round(k)} passes of an update, of which the first are clipped "
            "again with the later ones.",
            where=where,
            remedy="clip once, after the last pass of an update.",
        )
    return passed(f"{n} come after the passes and before the update{largest}.")


def _kinds(events: Any, mine: set[int], ends: tuple[str, ...]) -> str:
    """Return the kinds of events up to the next pass: p pass, u update, c clip, n unscale, r reduction, z clearing."""
    found = ""
    for each in events:
        if isinstance(each, Backward):
            kind = "p"
        elif isinstance(each, Update):
            held = {id(p) for g in each.optimizer.param_groups for p in g["params"]}
            kind = "u" if is_real(each) and held & mine else ""
        else:
            kind = {"clip": "c", "scaler unscale": "n", "reduce": "r", "clear": "z"}.get(each.kind, "")
            if kind == "c" and not {*each.of} & mine:
                kind = ""
        found += kind
        if kind in ends:
            break
    return found
