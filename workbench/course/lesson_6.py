"""Exercises of lesson 6: whether a training is wired as its author believes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from workbench.course.exercises import ChoiceExercise, FunctionExercise, NumberExercise, SetExercise
from workbench.course.miswirings import miswired

#: Training in the lesson -> its fault.
FAULTS = {"A": "", "B": "causal mask off by one", "C": "mean of means", "D": "left in eval mode"}
#: Entropy of the next id in the texts, in nats: it is one id ahead in 7 of 10 cases, and five ids in 3 of 10.
ENTROPY = float(torch.special.entr(torch.tensor([0.7, 0.3], dtype=torch.float64)).sum())
#: The token that is changed, of 24.
_TOKEN = 10
#: Updates over which a curve is compared with the entropy.
_N_UPDATES, _N_LAST = 120, 20


def gradient(loss: Tensor, model: nn.Module) -> Tensor:
    """Return the gradient of a loss by all parameters of a model, as one vector."""
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([each.flatten() for each in parts])


@cache
def _too_good() -> set[str]:
    """Return the trainings whose loss falls below the entropy of the texts."""
    found = {name: miswired(fault).train(_N_UPDATES, seed=1)[-_N_LAST:] for name, fault in FAULTS.items()}
    return {name for name, losses in found.items() if sum(losses) / _N_LAST < ENTROPY}


@torch.no_grad()
def _moved(*, trains: bool = False) -> Tensor:
    """Return whether the logits at each position of training B change with one token, shape (token,)."""
    training = miswired(FAULTS["B"])
    model = training.model.train(trains)
    ids = next(iter(training.loader(1)))
    changed = ids.clone()
    changed[:, _TOKEN] = ids[:, _TOKEN] % 31 + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return (model(changed) - model(ids)).abs().amax((0, 2)) > 1e-6


@cache
def _gap(*, weighs: bool = True, halves: bool = True) -> float:
    """Return how far the accumulated gradient of training C is from that of its batch, over the norm of the second."""
    training = miswired(FAULTS["C"])
    model, batch = training.model.eval(), next(iter(training.loader(1)))
    whole = gradient(training.loss(model, batch), model)
    parts = training.parts(batch)[: None if halves else 1]
    added = torch.stack([gradient(training.loss(model, p), model) for p in parts]).sum(0)
    added = added * training.share(parts[0], batch) if weighs else added
    return float((added - whole).norm() / whole.norm())


def share(part: Tensor, batch: Tensor) -> float:
    """Return the share of the labels of a batch that are in a micro-batch; padding, id 0, is no label."""
    return float((part[:, 1:] != 0).sum() / (batch[:, 1:] != 0).sum())


def _batches() -> tuple[tuple[Tensor, Tensor], ...]:
    ids = torch.tensor([[3, 4, 5, 6, 7], [2, 3, 8, 9, 10], [5, 6, 0, 0, 0], [4, 9, 10, 0, 0]])
    return (ids[:2], ids), (ids[2:], ids), (ids[1:3], ids[:3])


EXERCISES = (
    SetExercise(
        number="6.1",
        question=(
            "No model that reads only what was before can have a mean loss below `ENTROPY` on these texts. Which of "
            "the trainings A, B, C and D must be broken, by its curve alone?"
        ),
        answer=_too_good,
        members={
            "A": "Its last losses are above the entropy, as those of a sound model have to be.",
            "B": "The mean of its last 20 losses is below the entropy: it reads what it should predict. A loss that is "
            "too good is the only fault that a curve shows by itself.",
            "C": "Its curve is that of A up to noise. It may be broken or not; its curve does not tell.",
            "D": "It is a little below A, as any other seed may be, and above the entropy. Its curve does not tell.",
        },
        hints=(
            "Single losses fluctuate. Take the mean over the last 20 updates of each column of `curves`.",
            "Compare `curves.tail(20).mean()` with `ENTROPY`.",
        ),
        solution="last = curves.tail(20).mean()\nanswer = set(last.index[last < ENTROPY])\n",
        explanation=(
            "A, C and D have nearly the same curve, and two of them are broken. Without the entropy of the data, which "
            "nobody knows for real texts, not even B would be found."
        ),
    ),
    ChoiceExercise(
        number="6.2",
        question=(
            "After the backward pass, a sound loop has the steps *clip, step, follow* (of the schedule), *clear*. "
            "Somebody writes *clip, clear, step, follow*. Which contract breaks: `'gradients_cleared'`, "
            "`'clipping_order'`, `'update_as_predicted'` or `'schedule'`?"
        ),
        answer=lambda: "update_as_predicted",
        choices={
            "gradients_cleared": "This one asks whether an update holds gradients of the update before. Here they are "
            "cleared too early, not too late: nothing is left over.",
            "clipping_order": "The clipping comes after the backward pass and before the step, as it should.",
            "update_as_predicted": "",
            "schedule": "The schedule moves once for each update, after it.",
        },
        hints=(
            "What is in the gradients when the optimizer reads them?",
            "Without gradients AdamW moves no parameter. Which contract is about what an update does?",
        ),
        solution='answer = "update_as_predicted"\n',
        explanation=(
            "The optimizer finds no gradient and moves nothing: the loss stays where it began. A curve that is flat "
            "from the first update on has many causes; the experiment names one."
        ),
    ),
    NumberExercise(
        number="6.3",
        question=(
            f"Change token {_TOKEN} of all texts in `ids`, and compare the logits of `model`, the model of training B, "
            f"with and without the change. At how many of the positions before token {_TOKEN} do they move?"
        ),
        answer=lambda: int(_moved()[:_TOKEN].sum()),
        tolerance=0,
        mistakes={
            "In train mode dropout draws other numbers in each pass, so that all logits move. Call model.eval() before "
            "both passes.": lambda: int(_moved(trains=True)[:_TOKEN].sum()),
            f"These are the positions from token {_TOKEN} on, which may move. Count those before it.": lambda: int(
                _moved()[_TOKEN:].sum()
            ),
            f"You counted all positions. Those from token {_TOKEN} on may move.": lambda: int(_moved().sum()),
        },
        look_at="In eval mode, take the largest change over texts and ids at each position; count those above 1e-6.",
        hints=(
            "model.eval() first. `changed = ids.clone()`, then give its column another id.",
            "`(model(changed) - model(ids)).abs().amax((0, 2))` is the largest change at each position.",
        ),
        solution=f"""\
model.eval()
changed = ids.clone()
changed[:, {_TOKEN}] = ids[:, {_TOKEN}] % 31 + 1
change = (model(changed) - model(ids)).abs().amax((0, 2))
answer = int((change[:{_TOKEN}] > 1e-6).sum())
""",
        explanation=(
            "The mask is off by one, and the model has two blocks: each passes the change one position back. This is "
            "the whole experiment of the contract `causal`: change one input, predict what must not move, look."
        ),
    ),
    NumberExercise(
        number="6.4",
        question=(
            "`training` is training C, with two micro-batches for each update. How far is the gradient that it adds up "
            "over the micro-batches of `batch` from the gradient of the whole batch, as a fraction of the norm of the "
            "latter?"
        ),
        answer=_gap,
        is_fraction=True,
        mistakes={
            "You added the gradients without their weights, `training.share(part, batch)`.": lambda: _gap(weighs=False),
            "This is the first micro-batch alone. Add the gradients of all.": lambda: _gap(halves=False),
        },
        look_at="Compute both in eval mode, subtract the vectors, then take the norm.",
        hints=(
            "`training.parts(batch)` returns the micro-batches, and the loop multiplies the loss of each by "
            "`training.share(part, batch)`.",
            "`gradient(loss, model)` returns a vector. The norm of a difference is not the difference of norms.",
        ),
        solution="""\
model = training.model.eval()
whole = gradient(training.loss(model, batch), model)
added = sum(
    gradient(training.loss(model, part) * training.share(part, batch), model)
    for part in training.parts(batch)
)
answer = (added - whole).norm() / whole.norm()
""",
        explanation=(
            "The mean of two means is no mean if one micro-batch has more labels. Nothing crashes, and the loss falls; "
            "it is that of another weighting, which changes with the size of the micro-batch."
        ),
    ),
    FunctionExercise(
        number="6.5",
        question=(
            "Mend it: write the function that weighs the loss of a micro-batch, so that the gradients add up to that "
            "of the mean over all labels of the batch. Labels are all ids but the first one of each text; padding, id "
            "0, is no label."
        ),
        answer=lambda: share,
        cases=_batches,
        mistakes={
            "This is the fault: each micro-batch has the same weight, however many labels it has.": lambda p, b: 0.5,
            "This is the share of the texts. Texts have different numbers of labels.": lambda p, b: len(p) / len(b),
            "The first id of a text is no label. Leave out the first column.": lambda p, b: float(
                (p != 0).sum() / (b != 0).sum()
            ),
        },
        hints=("Count the labels of `part` and those of `batch`.", "`(part[:, 1:] != 0).sum()` counts labels."),
        solution="""\
def share(part, batch):
    n_labels = (part[:, 1:] != 0).sum()
    return n_labels / (batch[:, 1:] != 0).sum()

answer = share
""",
        explanation="Set `training.share = share`, and repeat exercise 6.4: the distance is that of rounding.",
    ),
)
