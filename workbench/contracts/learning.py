"""Contracts of the updates: whether they descend, whether their rate is in range, and whether a resume restores all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from workbench.contracts.lab import Lab, NotTestedError, contract, failed, not_applicable, not_tested, passed
from workbench.contracts.observer import MOST_BYTES, Backward, Update, digest
from workbench.contracts.results import Result
from workbench.formatting import counted, number_in_words
from workbench.models.calling import bare, is_split
from workbench.models.losses import tensors_in
from workbench.models.probing import is_library

#: Names of functions that measure an error, which no training makes larger.
_ERRORS = ("_loss", "cross_entropy", "with_logits", "pow", "square", "abs", "kl_div")
#: Least number of updates for a statement.
_LEAST = 3
#: Steps that try to fit one batch.
_N_FITTING = 5
#: Bend of the loss over a step, relative to its change, below which the change is a slope; and error of that slope.
_BEND = 0.1


@contract("descends")
def descends(lab: Lab) -> Result:
    """Do updates go down the gradient that the optimizer has read?

    The cosine of gradient and change is computed for some parameters in each update. Momentum may turn it for a while;
    an optimizer all of whose updates go up makes the loss larger.
    """
    seen = lab.seen
    found: dict[int, list[Update]] = {}
    for update in seen.updates:
        if not math.isnan(update.cosine):
            found.setdefault(id(update.optimizer), []).append(update)
    if not found or max(len(each) for each in found.values()) < _LEAST:
        raise NotTestedError("fewer than three updates with a gradient and a change were seen")
    for updates in found.values():
        if len(updates) < _LEAST or not all(update.cosine > 0 for update in updates):
            continue
        words = f"All {len(updates)} updates go up their gradient, the first with the cosine {updates[0].cosine:.2g}"
        if len(found) > 1 or not lab.tapes or not _is_error(lab.taped()):
            raise NotTestedError(f"{words[0].lower()}{words[1:]}: is the loss to be maximized?")
        losses = [one.loss for one in seen.passes]
        return failed(
            f"{words}; the loss goes from {number_in_words(losses[0])} to {number_in_words(losses[-1])}.",
            where=f"{type(updates[0].optimizer).__name__} ({updates[0].line})",
            remedy="leave out maximize=True, a negative rate, or a sign before the loss.",
        )
    if (tape := next((t for t in lab.tapes if t.functions[-1:] in (["neg"], ["__neg__"])), None)) is not None:
        losses = [one.loss for one in seen.passes]
        # What is negated is an error or its mean; the logarithm of a density has squares as well.
        of = next((name for name in tape.functions[-2::-1] if name not in ("mean", "sum")), "")
        if len(found) == 1 and of.endswith(_ERRORS) and max(losses) < 0:
            return failed(
                f"The loss that is made smaller is the negative of an error, {number_in_words(losses[0])} at first and "
                f"{number_in_words(losses[-1])} at last.",
                where=", ".join(tape.lines[-1:]) or seen.place_of_loss,
                remedy="leave out the sign before the loss.",
            )
    updates = max(found.values(), key=len)
    n = sum(update.cosine < 0 for update in updates)
    return passed(f"{n} of {len(updates)} updates go down their gradient, the last with {updates[-1].cosine:.2g}.")


@contract("overfits_one_batch", apart=True)
def overfits_one_batch(lab: Lab) -> Result:
    """On a copy, do steps down the gradient of one batch lower its loss, at first as fast as the gradient says?

    The slope is measured by steps in both directions that are so short that the loss is a straight line. Then steps
    begin with one that should lower it by a tenth; one that raises it is repeated with a quarter of its length.
    PyTorch's derivatives are exact, so that only functions with a backward pass of their own, and detached parts, give
    others.
    """
    of, model = lab.taped(), lab.model
    calls = lab.tape_of(of).calls
    if len({id(bare(call.module)) for call in calls}) > 1 or not _is_error(of):
        raise NotTestedError("the loss is not one error of the outputs of one model")
    trained = [p for p in model.parameters() if p.requires_grad]
    if is_split(model) or sum(p.numel() * p.element_size() for p in trained) > MOST_BYTES:
        raise NotTestedError("no copy of the parameters was made: they are sharded, or large")
    own, functions = [p.data for p in trained], list[str]()
    gradients: list[Tensor] = []

    def value(*, gradient: bool = False) -> float:
        nonlocal gradients, functions
        with lab.undisturbed(calls[0], trains=True, gradients=gradient):
            loss = lab.loss(of) / of.scale
            if gradient:
                functions = _own_functions(loss)
                gradients = [*torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)]
            return float(loss.detach())

    def move(step: float) -> None:
        for p, g in zip(trained, gradients, strict=True):
            p.data = p.data - step * g.to(p.data)

    try:
        first = before = value(gradient=True)
        square = sum(float(g.double().square().sum()) for g in gradients)
        if not math.isfinite(first * square) or not square:
            raise NotTestedError("the gradient of the batch is 0, or not finite")
        is_exact = calls[0].autocast is None and all(p.element_size() >= 4 for p in trained)
        slope = math.nan
        for share in (1e-3, 1e-4, 1e-5) if is_exact else ():
            step, ends = share * abs(first) / square, list[float]()
            for sign in (1, -2):
                move(sign * step)
                ends.append(value())
            move(step)
            if abs(sum(ends) - 2 * first) < _BEND * step * square:
                slope = (ends[1] - ends[0]) / (2 * step * square)
                break
        step, n = 0.1 * abs(first) / square, 0
        for _ in range(_N_FITTING):
            move(step)
            after = value()
            if after < before:
                before, n = after, n + 1
                continue
            move(-step)
            step /= 4
    finally:
        for p, data in zip(trained, own, strict=True):
            p.data = data
    where = ", ".join(functions) or lab.seen.place_of_loss
    if not n and not functions and abs(slope + 1) < _BEND:  # not of straight-through estimates, whose slope is any
        return failed(
            f"No step down the gradient of a batch lowers its loss, {first:.4g}: the gradient has the wrong sign.",
            where=where,
            remedy="look for detach() and .data on the way from the parameters to the loss.",
        )
    if abs(slope - 1) > _BEND:
        words = f"The loss of a batch changes {slope:.3g} times as fast as its gradient says"
        why = f"the backward pass of {where}" if functions else "what is detached from the gradient"
        return not_tested(f"{words}; is {why} meant to be no derivative?", where=where)
    if not n:
        raise NotTestedError("no step that was tried lowers the loss of a batch, which may be as low as it can be")
    measured = "" if math.isnan(slope) else f"; the measured slope is {slope:.4g} times that of the gradient"
    return passed(
        f"On a copy, {counted(n, 'step')} down the gradient of one batch take{'s' * (n == 1)} its loss from "
        f"{first:.4g} to {before:.4g}{measured}."
    )


def _is_error(of: Backward) -> bool:
    """Return whether a loss is a function that measures an error, as far as its operations were recorded."""
    names = [] if of.tape is None else of.tape.functions
    return any(name.endswith(_ERRORS) for name in names) or bool(of.calls and of.calls[0].loss is not None)


def _own_functions(loss: Tensor) -> list[str]:
    """Return the functions of a graph that belong to no package and have a backward pass of their own."""
    found, waiting, known = list[str](), [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        waiting += [each for each, _ in node.next_functions]
        kind = getattr(node, "_forward_cls", None)
        if kind is not None and not is_library(kind.__module__):
            found.append(kind.__name__)
    return [*dict.fromkeys(found)]


@contract("rate_in_range", apart=True)
def rate_in_range(lab: Lab) -> Result:
    """Does the last update lower the loss of its own batch, and if not, does a shorter step?

    The loss is computed again after the update, and after a quarter and a sixteenth of it. One update that is too long
    is usual; the rate is out of range if the training is worse than at its beginning as well.
    """
    if "descends" in lab.failed:
        raise NotTestedError("updates go up their gradient")
    update, of = _last(lab)
    losses, before = _by_update(lab), of.loss
    if not all(math.isfinite(each) for each in losses):
        raise NotTestedError("a loss is not finite")
    with _moved(update, 1.0):
        after = _loss(lab, of)
    if after > before:
        with _moved(update, 0.0):
            again = _loss(lab, of)
        # The scale of a gradient scaler may have grown since; any other difference makes the comparison void.
        if of.scale == 1.0 and abs(again - before) > 1e-3 * abs(before):
            raise NotTestedError("the loss before the last update cannot be computed again")
        before = again
    words = f"The last update, with the rate {max(update.rates):.3g}, takes the loss of its batch"
    unit = of.scale * before / of.loss if of.loss else 1.0
    change = f"{words} from {before / unit:.4g} to {after / unit:.4g}"
    if after <= before:
        return passed(f"{change}.")
    later = losses[-max(3, len(losses) // 4) :]
    if min(later) <= losses[0]:
        return passed(f"{change}; over all updates it falls from {losses[0]:.4g} to {min(later):.4g}.")
    shorter = {}
    for share in (0.25, 0.0625):
        with _moved(update, share):
            shorter[share] = _loss(lab, of)
    lower = next((share for share in (0.25, 0.0625) if shorter[share] < before), None)
    proof = (
        ""
        if lower is None
        else f"A step of {lower:.3g} times this length takes the loss to {shorter[lower] / unit:.4g}."
    )
    if lower is None:  # momentum has turned the step away from the gradient
        value = _down_the_gradient(lab, update, of)
        if value >= before:
            raise NotTestedError("steps of any length raise the loss")
        proof = f"A small step down the gradient of this batch takes the loss to {value / unit:.4g}."
    return failed(
        f"{change}; in the last {len(later)} of {len(losses)} updates losses are {min(later):.4g} or more, above the "
        f"first, {losses[0]:.4g}.",
        where=f"the rate of {type(update.optimizer).__name__} ({update.line})",
        remedy="make the rate smaller, and let it rise over the first updates.",
        proof=proof,
    )


def _last(lab: Lab) -> tuple[Update, Backward]:
    """Return the last update with its backward pass, if the loss is that of one pass and one optimizer."""
    seen = lab.seen
    if not seen.updates:
        raise NotTestedError("no update was seen")
    if len(seen.optimizers) != 1:
        raise NotTestedError("several optimizers train against or beside each other")
    update = next((each for each in reversed(seen.updates) if each.before), None)
    if seen.is_brief:
        lab.require_acts()
    if update is None:
        raise NotTestedError("parameters before the last update were not kept")
    own = [one for one in seen.passes if one.update == update.index]
    if len(own) != 1 or update is not seen.updates[-1]:
        raise NotTestedError("the last update has gradients of several backward passes")
    lab.tape_of(own[0])
    return update, own[0]


def _by_update(lab: Lab) -> list[float]:
    """Return the mean loss of each update, without the factor of a gradient scaler."""
    found: dict[int, list[float]] = {}
    for one in lab.seen.passes:
        found.setdefault(one.update, []).append(one.loss / one.scale)
    return [sum(each) / len(each) for each in found.values()]


@contextmanager
def _moved(update: Update, share: float) -> Iterator[None]:
    """Put parameters at a share of the way that an update has gone; restore them bit by bit."""
    now = [p.data for p, _ in update.before]
    try:
        if share != 1.0:
            for p, before in update.before:
                p.data = torch.lerp(before, p.data, share)
        yield
    finally:
        for (p, _), data in zip(update.before, now, strict=True):
            p.data = data


def _down_the_gradient(lab: Lab, update: Update, of: Backward) -> float:
    """Return the loss after a step down the gradient, a hundredth of the last update long."""
    assert of.tape is not None
    trained = [p for p, _ in update.before if p.requires_grad]
    length = math.sqrt(sum(float((p.detach() - before).square().sum()) for p, before in update.before))
    with _moved(update, 0.0):
        with lab.undisturbed(of.tape.calls[0], trains=True, gradients=True):
            gradients = torch.autograd.grad(lab.loss(of), trained, allow_unused=True)
        size = math.sqrt(sum(float(g.square().sum()) for g in gradients if g is not None))
        for p, g in zip(trained, gradients, strict=True):
            if g is not None and size > 0:
                p.data = p.data - g * (0.01 * length / size)
        return _loss(lab, of)


def _loss(lab: Lab, of: Backward) -> float:
    assert of.tape is not None
    with lab.undisturbed(of.tape.calls[0], trains=True):
        return float(lab.loss(of).detach())


# Resumed trainings


@contract("resume", of_loop=True)
def resume(lab: Lab) -> Result:
    """After a checkpoint is read, is everything restored that it holds?

    States of optimizers and schedules in the file are compared with what is loaded before the next pass, and the first
    batch afterwards with the first one of the training.
    """
    if (found := _resumed_trainer(lab)) is not None:
        return found
    seen, acts = lab.seen, lab.seen.acts
    reads = [act for act in acts if act.kind == "file read" and (act.numbers["optimizer"] or act.numbers["schedule"])]
    if not reads:
        return not_applicable("No file with the state of an optimizer is read.")
    read, names = reads[-1], ("optimizer", "schedule")
    around = [act for act in acts if act.n_passes == read.n_passes]
    files = [act for act in around if act.kind == "file read"]
    held = {name for name in (*names, "generator") if any(act.numbers[name] for act in files)}
    loads = [act for act in around if act.kind.endswith(" loads") and act.numbers.get("n_states", 1)]
    loaded = {kind: [act.of for act in loads if act.kind == f"{kind} loads"] for kind in ("module", *names)}
    models = [each for each in loaded["module"] if isinstance(each, nn.Module)]
    later = [call.module for one in seen.passes[read.n_passes :] for call in one.calls]
    later += [seen.interrupted.module] if seen.interrupted is not None else []
    trained = {id(p) for module in later for p in module.parameters()}
    if not any(id(p) in trained for model in models for p in model.parameters()):
        shapes = [[p.shape for p in bare(module).parameters()] for module in later]
        called = {id(bare(call.module)) for call in (*seen.calls, *(look.call for look in seen.looks))}
        unused = [m for m in models if id(bare(m)) not in called and [p.shape for p in m.parameters()] in shapes]
        if (
            unused
            and loaded["optimizer"]
            and not any(of is each for of in loaded["optimizer"] for each in seen.optimizers)
        ):
            return failed(
                "States are loaded into a model and an optimizer that are not used afterwards; others of the same "
                "shapes are trained.",
                where=f"the model and the optimizer ({read.line})",
                remedy="load after the model and the optimizer of the training are built.",
            )
        return not_applicable("No model that is loaded from a file is trained afterwards.")
    written = any(a.kind == "file write" and a.of == read.of and a.numbers["by_script"] for a in acts)
    missing = [name for name in names if name in held and not loaded[name]]
    words = f"The file that {read.line} reads has the state of the {' and the '.join(missing)}, which is not loaded"
    if not missing and "optimizer" not in held and any(of.state for of in seen.optimizers):
        missing, words = (
            ["optimizer"],
            f"The file that {read.line} reads has the state of a schedule and of no optimizer",
        )
    if missing:
        if not written and {*missing} == held - {"generator"}:
            raise NotTestedError(f"{words[0].lower()}{words[1:]}: is a new training meant to begin with its weights?")
        return failed(
            f"{words}, and the model is loaded.",
            where=f"the {missing[0]} ({read.line})",
            remedy="save its state_dict(), and load it with load_state_dict().",
        )
    # At the end of an epoch without shuffling, the first batch is the next one.
    n = seen.n_earlier + read.n_passes
    sizes = [len(each) for each in seen.loaders if hasattr(each.dataset, "__len__")]
    if "generator" in held and not any(size and n % size == 0 for size in sizes) and _is_replayed(lab, read.n_passes):
        return _replayed(read.line, "restore the state of its generator or sampler, which the file may hold.")
    return passed("States of optimizer and schedule in the file that is read are loaded.")


def _resumed_trainer(lab: Lab) -> Result | None:
    """Return the result of a Trainer that begins at a later step; None if there is none."""
    begun = next((act for act in lab.seen.acts if act.kind == "trainer" and act.numbers["step"] >= 1), None)
    if begun is None:
        return None
    step = int(begun.numbers["step"])
    if not begun.numbers["n_states"] and len(begun.of.state):
        return failed(
            f"The Trainer begins at step {step} with an optimizer that has no state.",
            where=f"the optimizer ({begun.line})",
            remedy="save and load the optimizer with the model: save_only_model=False.",
        )
    is_within = begun.numbers["epoch"] % 1 > 1e-6
    if is_within and _is_replayed(lab, begun.n_passes - 1):
        return _replayed(begun.line, "skip the batches that were seen: ignore_data_skip=False.")
    return passed(f"The Trainer begins at step {step} with the state of its optimizer.")


def _replayed(line: str, remedy: str) -> Result:
    return failed(
        "The first batch after the resume is the first batch of the training.",
        where=f"the data ({line})",
        remedy=remedy,
    )


def _is_replayed(lab: Lab, n_passes: int) -> bool:
    """Return whether the first batch after some passes is the first of all, which none between them is."""
    keys, n = lab.seen.keys + lab.seen.keys_of_passes(), len(lab.seen.keys) + n_passes
    before, after = keys[:n], keys[n:]
    if not after and (call := lab.seen.interrupted) is not None:
        after = [digest(tensors_in([call.args, call.kwargs]))]
    return len(before) > 1 and bool(after) and after[0] == before[0] and before.count(before[0]) == 1
