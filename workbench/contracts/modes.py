"""Contracts of modes: the first loss, train and eval mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from workbench.contracts.lab import Lab, NotTestedError, contract, failed, not_applicable, not_tested, passed
from workbench.contracts.observer import Call, Look, digest
from workbench.contracts.places import line_of_script
from workbench.contracts.results import Result
from workbench.formatting import fine_percent, number_in_words
from workbench.models.calling import bare
from workbench.models.losses import tensors_in

#: Least excess, in nats, of a first loss over that of a uniform guess that is too large.
_LEAST_EXCESS = 2.0


@contract("initial_loss")
def initial_loss(lab: Lab) -> Result:
    """Is the cross entropy of the first update at most that of a uniform guess?

    A random initialization is near ln V; Gaussian logits with the standard deviation s add s^2 / 2. Pretrained and
    resumed models lie below. Probabilities in the place of logits keep the loss above a floor.
    """
    if (double := _double_softmax(lab)) is not None:
        return double
    call = next((c for c in lab.seen.main_calls() if c.update == 0 and c.token_labels is not None), None)
    if call is None:
        return not_applicable("The loss is no cross entropy of an output of the model.")
    found = call.token_labels
    assert found is not None
    weights = found.weights[found.counts]
    if bool((weights < -0.1 * weights.abs().median()).double().mean() > 0.1):
        return not_applicable("The weights of the tokens have both signs: a policy gradient.")
    weights = weights.clamp_min(0.0)  # a position whose label is certain has a gradient of rounding
    loss = float((found.losses[found.counts] * weights).sum() / weights.sum())
    shares = found.labels[found.counts].unique(return_counts=True)[1].double()
    shares /= shares.sum()
    uniform, frequent = math.log(found.n_classes), float(-(shares * shares.log()).sum())
    evidence = (
        f"The first cross entropy is {loss:.3g} nats; a uniform guess among {found.n_classes:,} classes has "
        f"{uniform:.3g}, the frequencies of the labels {frequent:.3g}"
    )
    # Above twice the uniform guess, the model is sure of wrong classes before it has learned anything.
    if loss <= uniform + max(uniform, _LEAST_EXCESS):
        return passed(f"{evidence}.")
    return failed(
        f"{evidence}. The logits have the standard deviation {found.spread:.3g}; if they are Gaussian, it adds "
        f"{found.spread**2 / 2:.3g}.",
        where=f"logits of {type(lab.seen.roots[0]).__name__} before the first update",
        remedy="initialize with smaller weights, also where they are tied, or load those that belong to the tokenizer.",
    )


def _double_softmax(lab: Lab) -> Result | None:
    """Return a failure if a cross entropy receives probabilities instead of logits."""
    where, loss, n_classes = "", "", 0
    for call in lab.seen.main_calls()[:1]:
        if (found := call.token_labels) is not None and found.are_probabilities:
            where, n_classes = f"the output of {type(bare(call.module)).__name__}", found.n_classes
    for one in lab.seen.passes[:1]:
        if one.tape is not None and one.tape.is_complete and one.tape.doubled[1]:
            (loss, n_classes), kind = one.tape.doubled, "sigmoid" if one.tape.doubled[1] == 1 else "softmax"
            is_outside = not one.calls or any(kind in name for name in one.tape.functions)
            where = f"{kind} before the loss ({one.line})"
            where = where if is_outside else f"the output of {type(bare(one.calls[0].module)).__name__}"
    if not where:
        return None
    if loss in ("nll_loss", "ctc_loss"):
        words = f"{loss} receives probabilities instead of their logarithms."
        return failed(words, where=where, remedy="use log_softmax instead of softmax.")
    floor = math.log1p(max(1, n_classes - 1) / math.e)
    return failed(
        f"The cross entropy receives probabilities instead of logits: it cannot fall below {floor:.3g} nats.",
        where=where,
        remedy="pass logits to the loss, without softmax or sigmoid.",
    )


# Modes


@contract("train_mode")
def train_mode(lab: Lab) -> Result:
    """Are modules with dropout or batch norm in train mode in the passes that train them?

    Where a whole update was made in eval mode, outputs in train and in eval mode are compared; if they are the same,
    the mode has no effect. A part in eval mode is told apart by who has set its mode.
    """
    n_partial = 0
    for root in lab.seen.roots:
        calls = [call for call in lab.seen.calls if call.reached and bare(call.module) is root]
        first_in_eval: dict[int, bool] = {}
        in_train = {call.update for call in calls if root not in call.in_eval}
        for call in calls:
            first_in_eval.setdefault(call.update, root in call.in_eval)
        updates = sorted({call.update for call in calls} - in_train)
        next_one = lab.seen.interrupted
        was_evaluated = any(look.call.update == lab.seen.n_done for look in lab.seen.looks)
        is_left = next_one is not None and bare(next_one.module) is root and root in next_one.in_eval
        if is_left and was_evaluated and not any(first_in_eval.values()):
            updates.append(lab.seen.n_done)
        if updates and (kept := next((c for c in calls if c.is_kept), None)) is not None:
            change, limit = _effect_of_modes(lab, kept, root.modules())
            if change > limit:
                n = len({*first_in_eval, *updates})
                since = "" if len(updates) == n else f", from update {updates[0] + 1} on"
                return failed(
                    f"{type(root).__name__} is in eval mode in {len(updates)} of {n} updates{since}; in train mode its "
                    f"outputs change by {fine_percent(change)}.",
                    where=_who_set(lab, root)[0] or type(root).__name__,
                    remedy="call model.train() before the passes that train, also after each evaluation.",
                )
        found = _parts_in_eval(lab, root, [call for call in calls if root not in call.in_eval])
        if isinstance(found, Result):
            return found
        n_partial += found
    if not lab.seen.roots:
        raise NotTestedError("no pass of a module was seen")
    words = f"; {n_partial} parts in eval mode have no trained dropout" if n_partial else ""
    return passed(f"No module whose mode has an effect is trained in eval mode{words}.")


def _effect_of_modes(lab: Lab, call: Call, modules: Any) -> tuple[float, float]:
    """Return the change of a call's outputs between eval and train mode of modules over their norm, and by rounding."""
    modules, found = list(modules), []
    for mode in (False, True):
        with lab.undisturbed(call):
            torch.set_rng_state(call.rng)
            for each in modules:
                each.training = mode
            try:
                found.append([t.detach() for t in tensors_in(lab.run(call)) if t.is_floating_point()])
            finally:
                for each in modules:
                    each.training = False
    pairs = [(a, b) for a, b in zip(*found, strict=True) if a.numel() and a.shape == b.shape]
    gaps = [float((a - b).double().nan_to_num(0.0).norm() / a.double().norm().clamp_min(1e-30)) for a, b in pairs]
    return max(gaps, default=0.0), max((8 * torch.finfo(a.dtype).eps for a, _ in pairs), default=0.0)


def _parts_in_eval(lab: Lab, root: nn.Module, calls: list[Call]) -> Result | int:
    """Return a failure or a question about a trained part in eval mode; else how many parts are in it."""
    call = next((call for call in reversed(calls) if call.in_eval and call.is_kept), None)
    if call is None:
        return 0
    above = {child: part for part in root.modules() for child in part.children()}
    names = {module: name for name, module in root.named_modules()}
    parts = [each for each in root.modules() if each in call.in_eval and above.get(each) not in call.in_eval]
    change, part = 0.0, root
    for part in parts:
        if any(p.requires_grad for p in part.parameters()):
            acting = [m for m in part.modules() if not isinstance(m, nn.modules.batchnorm._NormBase)]
            change, limit = _effect_of_modes(lab, call, acting)
            if change > limit:
                break
    else:
        return len(parts)
    line, is_by_library = _who_set(lab, part)
    words = f"{names[part]}, which has parameters that are trained, is in eval mode while {type(root).__name__} is not"
    if not is_by_library:
        return not_tested(f"Is it on purpose that {words}?", where=line or names[part])
    return failed(
        f"{words}; in train mode it changes the outputs by {fine_percent(change)}.",
        where=f"{names[part]} ({line})" if line else names[part],
        remedy="call train() on the whole model before the training.",
    )


def _who_set(lab: Lab, module: nn.Module) -> tuple[str, bool]:
    """Return the line of the script that put a module in eval mode, and whether a package did it there."""
    for mode in reversed(lab.seen.modes):
        if not mode.training and any(each is module for each in mode.module.modules()):
            return mode.line, mode.by_library
    return "", False


@contract("eval_deterministic")
def eval_deterministic(lab: Lab) -> Result:
    """Does an evaluation give the same outputs twice?

    A pass is made twice in eval mode with different random numbers. Passes without gradient that the script makes in
    train mode are made in both modes; those of each update are no evaluation, but part of the training.
    """
    for look in lab.seen.looks:
        if (found := _random_look(lab, look)) is not None:
            return found
    call, outputs, careless = lab.call, [], list[str]()
    for seed in (1, 2):
        with lab.undisturbed(call), _noted_dropout(careless):
            torch.manual_seed(seed)
            outputs.append([t.detach() for t in tensors_in(lab.run(call)) if t.is_floating_point()])
    pairs = list(zip(*outputs, strict=True))
    change = max((float((a - b).abs().nan_to_num(0.0).amax()) for a, b in pairs if a.numel()), default=0.0)
    if all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
        return passed("Two passes in eval mode give the same outputs, bit by bit.")
    if change <= max(lab.rounding(a) for a, _ in pairs):
        return passed(f"Two passes in eval mode differ by {number_in_words(change)}, the order of sums.")
    if careless:
        return failed(
            f"Dropout acts in eval mode: the same inputs give outputs that differ by {number_in_words(change)}.",
            where=careless[0],
            remedy="pass training=self.training to dropout, and dropout_p only if self.training.",
        )
    raise NotTestedError(
        f"in eval mode the same inputs give outputs that differ by {number_in_words(change)}, which may be on purpose: "
        "is the model meant to draw random numbers in eval mode?"
    )


@contextmanager
def _noted_dropout(lines: list[str]) -> Iterator[None]:
    """Note where dropout acts without having been told the mode."""
    own = {name: getattr(functional, name) for name in ("dropout", "scaled_dot_product_attention")}

    def around(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "dropout":
                p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
                is_careless = p > 0 and len(args) < 3 and "training" not in kwargs
            else:
                is_careless = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0
            if is_careless:
                lines.append(f"{name} ({line_of_script()})" if line_of_script() else name)
            return own[name](*args, **kwargs)

        return call

    try:
        for name in own:
            setattr(functional, name, around(name))
        yield
    finally:
        for name, function in own.items():
            setattr(functional, name, function)


def _random_look(lab: Lab, look: Look) -> Result | None:
    """Return a failure if a call without gradient is an evaluation, or a fixed teacher, in train mode."""
    call, module = look.call, bare(look.call.module)
    if call.module in call.in_eval or not call.is_kept or not call.update + look.is_frozen:
        return None
    mine = [each for each in lab.seen.looks if bare(each.call.module) is module and each.call.update]
    keys = [each.key for each in mine]
    if look.is_frozen:
        # A moving average of weights is a part of the training.
        if any(each.version != look.version for each in mine):
            return None
    else:
        updates = {each.call.update for each in mine}
        is_trained = any(id(p) in lab.seen.parameters for p in module.parameters())
        is_of_each_update = 2 * len(updates) >= lab.seen.n_done
        is_repeated = len(set(keys)) < len(keys)
        now = tuple(m.momentum for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase))
        if not is_trained or is_of_each_update or is_repeated or look.momenta != now or _is_trained_on(lab, look):
            return None
    change, limit = _effect_of_modes(lab, call, module.modules())
    if change <= limit:
        return None
    what = "A fixed model" if look.is_frozen else "An evaluation"
    return failed(
        f"{what}, {look.name}, runs in train mode: in eval mode its outputs change by {number_in_words(change)}.",
        where=f"{look.name} ({look.line})",
        remedy="call eval() on it before, and train() afterwards if it is trained.",
    )


def _is_trained_on(lab: Lab, look: Look) -> bool:
    """Return whether an example of a call without gradient is trained on later, or it grows token by token."""
    mine = next((t for t in tensors_in([look.call.args, look.call.kwargs]) if t.ndim), None)
    if mine is None:
        return True
    examples = {digest([each]) for each in mine}
    for call in lab.seen.calls:
        theirs = next((t for t in tensors_in([call.args, call.kwargs]) if t.ndim), None)
        if call.is_kept and call.update >= look.call.update and theirs is not None:
            if theirs.shape[1:] == mine.shape[1:] and examples & {digest([each]) for each in theirs}:
                return True
            grows = not mine.is_floating_point() and mine.ndim == theirs.ndim == 2 and theirs.shape[1] > mine.shape[1]
            if grows and len(theirs) == len(mine) and torch.equal(theirs[:, : mine.shape[1]], mine):
                return True
    return False
