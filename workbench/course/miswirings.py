"""Small trainings with one line wrong, as people report it: for notebook 10, the gallery of contracts and practice."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint

from workbench.course.trainings import (
    Accumulated,
    Checkpointed,
    Checkpointing,
    Compiling,
    Continued,
    Decoder,
    Encoder,
    Encoding,
    Half,
    Mixing,
    Mixture,
    Resumed,
    Seeing,
    Tied,
    Training,
    Tying,
    Unclipped,
)
from workbench.errors import require_listed

#: Kinds of trainings that may be miswired, by what they train.
KINDS: dict[str, type[Training]] = {
    "decoder": Training,
    "micro-batches": Accumulated,
    "encoder": Encoding,
    "images": Seeing,
    "compiled": Compiling,
    "checkpointing": Checkpointing,
    "tied weights": Tying,
    "experts": Mixing,
    "float16": Half,
    "float16, not clipped": Unclipped,
    "small rate": Continued,
    "resumed": Resumed,
}
#: Kinds whose loop is the plain one.
_PLAIN = (Training, Encoding, Seeing)


@dataclass(frozen=True)
class Fault:
    """One line that is wrong.

    Attributes:
        name: What is wrong.
        contract: Id of the contract that it breaks.
        step: The step of the training, or of its model, that it replaces.
        line: The line in its place.
        kinds: Classes of trainings to which it is applied, the first by default.
        follows: Ids of contracts that are broken as a consequence.
    """

    name: str
    contract: str
    step: Callable[..., Any]
    line: Callable[..., Any]
    kinds: tuple[type[Training], ...] = (Training,)
    follows: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Name of the step, the place to change."""
        return self.step.__name__

    @property
    def lines(self) -> tuple[str, str]:
        """The sound line and the wrong one, as they are written."""
        return _line_of(self.step), _line_of(self.line)


@cache
def _sources(file: str) -> dict[int, str]:
    """Return the last statement of each function of a file, as it is written, by the line on which it begins."""
    text = Path(file).read_text(encoding="utf-8")
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            last = node.body[-1] if isinstance(node.body, list) else node.body
            words = " ".join((ast.get_source_segment(text, last) or "").split()).replace("( ", "(")
            found[node.lineno] = "pass" if words == "None" else words.removeprefix("return ")
    return found


def _line_of(function: Callable[..., Any]) -> str:
    code = inspect.unwrap(function).__code__
    return _sources(code.co_filename)[code.co_firstlineno]


def _copied_head(self: Tied) -> None:
    self.head.weight = nn.Parameter(self.embedding.weight.clone())


def _new_head(self: Training) -> None:
    self.model.head = nn.Linear(*self.model.head.weight.shape[::-1])


# Each line is one statement; it is shown as it is written here.
_FAULTS = (
    Fault("labels shifted twice", "labels_aligned", Training.loss,
          lambda self, model, ids: functional.cross_entropy(
              model(ids)[:, :-2].flatten(0, 1), ids[:, 2:].flatten(), ignore_index=0)),
    Fault("classes and tokens mixed", "labels_aligned", Training.loss,
          lambda self, model, ids: functional.cross_entropy(
              model(ids)[:, :-1].reshape(len(ids), 32, -1), self.labels(ids), ignore_index=0)),
    Fault("labels not shifted", "labels_aligned", Training.labels, lambda self, ids: ids[:, :-1]),
    Fault("mask in the place of labels", "labels_present", Training.labels, lambda self, ids: (ids[:, 1:] != 0).long()),
    Fault("padding in the loss", "padding_ignored", Training.loss,
          lambda self, model, ids: functional.cross_entropy(
              model(ids)[:, :-1].flatten(0, 1), self.labels(ids).flatten())),
    Fault("first batch again and again", "batches_differ", Training.chosen,
          lambda self, loader, stream: next(iter(loader)), _PLAIN),
    Fault("no causal mask", "causal", Decoder.visible,
          lambda self, ids: torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)),
    Fault("causal mask off by one", "causal", Decoder.visible,
          lambda self, ids: torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril(1)),
    Fault("softmax over examples", "examples_independent", Decoder.weights,
          lambda self, scores, visible: scores.masked_fill(
              ~visible, torch.finfo(scores.dtype).min).softmax(0), (Encoding,), ("mask_respected",)),
    Fault("column minus row", "examples_independent", Seeing.loss,
          lambda self, model, batch: (model(batch[0]) - batch[1]).square().mean(), (Seeing,)),
    Fault("mask not passed", "mask_respected", Encoding.loss,
          lambda self, model, ids: functional.cross_entropy(model(ids), self.labels(ids)), (Encoding,)),
    Fault("padding in the mean", "mask_respected", Encoder.pooled,
          lambda self, states, real: states.mean(1), (Encoding,)),
    Fault("all positions 0", "order_matters", Decoder.states,
          lambda self, ids: self.embedding(ids) + self.positions(torch.zeros_like(ids)), (Encoding,)),
    Fault("positions forgotten", "modules_used", Decoder.states, lambda self, ids: self.embedding(ids)),
    Fault("embeddings cut off", "gradients_reach_all", Decoder.states,
          lambda self, ids: (self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))).detach()),
    Fault("head copied instead of tied", "weights_tied", Tied.tie,
          _copied_head, (Tying,)),
    Fault("gradients never cleared", "gradients_cleared", Training.clear, lambda self: None, _PLAIN),
    Fault("mean of means", "accumulation", Training.share, lambda self, part, batch: 1 / self.n_parts, (Accumulated,)),
    Fault("losses summed", "accumulation", Training.share, lambda self, part, batch: 1.0, (Accumulated,)),
    Fault("random state not kept", "recompute", Checkpointed.through,
          lambda self, block, states, visible: checkpoint.checkpoint(
              block, states, self, visible, use_reentrant=False, preserve_rng_state=False), (Checkpointing,)),
    Fault("other code if compiled", "compiled_equals_eager", Decoder.scores,
          lambda self, queries, keys: queries @ keys.mT * (
              1.0 if torch.compiler.is_compiling() else queries.shape[-1] ** -0.5), (Compiling,)),
    Fault("balance loss forgotten", "balance_loss", Mixing.balanced, lambda self, balance_loss: 0.0, (Mixing,)),
    Fault("balance loss cut off", "balance_loss", Mixture.balance,
          lambda self, shares, best: 4 * (shares.detach().mean((0, 1)) * best.float().mean((0, 1))).sum(), (Mixing,)),
    Fault("loss made larger", "descends", Training.optimized,
          lambda self, parameters: torch.optim.AdamW(parameters, lr=self.rate, maximize=True), _PLAIN),
    Fault("rate a thousand times too large", "rate_in_range", Training.optimized,
          lambda self, parameters: torch.optim.AdamW(parameters, lr=1000 * self.rate)),
    Fault("optimizer not restored", "resume", Resumed.restore, lambda self, saved: None, (Resumed,)),
    Fault("softmax before the loss", "initial_loss", Decoder.outputs,
          lambda self, states, ids: self.head(self.norm(states)).softmax(-1)),
    Fault("first weights too large", "initial_loss", Tied.initialize,
          lambda self: nn.init.normal_(self.embedding.weight[1:], std=1.0), (Tying,)),
    Fault("left in eval mode", "train_mode", Training.set_mode, lambda self: self.model.eval(), _PLAIN),
    Fault("dropout in evaluation", "eval_deterministic", Decoder.dropped,
          lambda self, update: functional.dropout(update, 0.1), (Training, Encoding)),
    Fault("minus infinity in the mask", "finite", Decoder.weights,
          lambda self, scores, visible: scores.masked_fill(~visible, float("-inf")).softmax(-1),
          (Encoding,)),
    Fault("head replaced after the optimizer", "optimizer_covers", Training.finish,
          _new_head, _PLAIN),
    Fault("blocks alone optimized", "optimizer_covers", Training.optimized,
          lambda self, parameters: torch.optim.AdamW(self.model.blocks.parameters(), lr=self.rate)),
    Fault("two steps with one gradient", "update_as_predicted", Training.step,
          lambda self: [self.optimizer.step() for _ in range(2)], _PLAIN),
    Fault("cleared before the step", "update_as_predicted", Training.order,
          lambda self: ["clip", "clear", "step", "follow"], (Training, Seeing)),
    Fault("no step", "update_as_predicted", Training.step, lambda self: None, _PLAIN),
    Fault("parameters in bfloat16", "lost_to_rounding", Training.converted,
          lambda self, model: model.bfloat16(), (Continued,)),
    Fault("warm-up of whole numbers", "schedule", Training.scheduled,
          lambda self: torch.optim.lr_scheduler.LambdaLR(
              self.optimizer, lambda step: min(1.0, (step + 1) // 10)), _PLAIN),
    Fault("schedule stepped twice", "schedule", Training.follow,
          lambda self: [self.schedule.step() for _ in range(2)], _PLAIN),
    Fault("schedule before the step", "schedule", Training.order,
          lambda self: ["clip", "follow", "step", "clear"], _PLAIN),
    Fault("step without the scaler", "loss_scale", Unclipped.step, lambda self: self.optimizer.step(), (Unclipped,)),
    Fault("clipped after the step", "clipping_order", Training.order,
          lambda self: ["step", "clip", "follow", "clear"], _PLAIN),
    Fault("clipped before the scale is divided out", "clipping_order", Half.unscale, lambda self: None, (Half,)),
    Fault("positions in bfloat16", "precision_by_position", Decoder.states,
          lambda self, ids: self.embedding(ids) + self.positions(torch.arange(ids.shape[1])).bfloat16(),
          (Training, Encoding)),
    Fault("gradient reversed", "overfits_one_batch", Decoder.outputs,
          lambda self, states, ids: 2 * self.head(self.norm(states)).detach() - self.head(self.norm(states))),
)  # fmt: skip
#: Faults of `miswired` by name.
MISWIRED = {fault.name: fault for fault in _FAULTS}


def miswired(fault: str = "", kind: str = "") -> Training:
    """Create a small training with one line wrong, or a sound one.

    Args:
        fault: One of `MISWIRED`; empty for the sound training.
        kind: What is trained, one of ``decoder``, ``encoder``, ``images`` and others; by default that of the fault.

    Returns:
        The training, with batches for it.

    Raises:
        OptionError: If there is no such fault, or the kind has no such line.

    Example:
        >>> import workbench as wb
        >>> [each.id for each in wb.course.miswired("no causal mask").check().failed]
        ['causal']
        >>> wb.course.MISWIRED["gradients never cleared"].lines
        ('self.optimizer.zero_grad()', 'pass')

    See Also:
        `workbench.check`: Finds such faults in a training of your own.
    """
    require_listed("fault", [fault], ("", *MISWIRED))
    one = MISWIRED.get(fault)
    possible = [name for name, each in KINDS.items() if one is None or each in one.kinds]
    require_listed("kind", [kind], ("", *possible))
    training = KINDS[kind] if kind else Training if one is None else one.kinds[0]
    network = training.network
    if one is not None and hasattr(network, one.where) and getattr(network, one.where) is one.step:
        network = type(network.__name__, (network,), {one.where: one.line, "__module__": network.__module__})
    elif one is not None:
        training = type(training.__name__, (training,), {one.where: one.line, "__module__": training.__module__})
    return training(network)
