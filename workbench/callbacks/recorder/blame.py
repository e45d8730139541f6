"""Search for what spoiled an update: sketches of each backward pass before any reduction, and rows computed again."""

from __future__ import annotations

import hashlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from workbench.callbacks.recorder.backward_passes import current_pass, differentiable_in, labels_from_gradient
from workbench.callbacks.recorder.options import jointly, of_each_rank
from workbench.errors import SnapshotError
from workbench.models.batches import count_examples, take_examples
from workbench.models.calling import call_model, is_shared, tensors_of
from workbench.models.probing import RepeatedPasses
from workbench.models.readable_weights import Measurement, finish, read_arrays
from workbench.probes.batch import IGNORED
from workbench.probes.blame import ROW_VALUES, Blame, Passes, PassHistory, Rows, capital, find_exact, judge, nobody
from workbench.probes.failed_pass import checkpoints_with_graph
from workbench.probes.gradient_projections import (
    N_PROJECTIONS,
    GradientProjections,
    Places,
    entries_of,
    gathered_from_ranks,
    project,
)

#: Parameters whose gradients are sketched, and most entries of each.
_N_PARAMETERS, _N_ENTRIES = 8, 1024
#: Backward passes of an update that are told apart, latest updates whose batches are kept, by reference, and earlier
#: ones, of every how many one is kept.
_N_PASSES, _N_KEPT, _N_EARLIER, _EVERY = 32, 8, 8, 4
#: Most bytes of one gradient at an output that is kept as it is, and of all that is kept of earlier updates.
_MOST_OF_ONE, _MOST_BYTES = 1 << 24, 1 << 26
#: Rows of a micro-batch whose gradients are computed alone, passes of each other update that show what is usual, and
#: entries of logits that are read at a time.
_N_ROWS, _N_USUAL, _N_LOGITS = 32, 4, 1 << 22
#: Updates between two searches that nobody asked for.
_PAUSE = 20
#: Names of a column of ids, in this order.
_IDS = ("id", "ids", "index", "idx")


@dataclass(eq=False)
class HeldCall:
    """A call of the model that can be computed again: its inputs, and the gradient that arrived at its output.

    Attributes:
        module: The module, without wrappers.
        inputs: Its inputs, in the form for `call_model`; references, whose versions show whether they were overwritten.
        around: Context in which it ran.
        output: Index of the output among those with a graph; -1 if no gradient has arrived yet.
        gradient: Gradient of that output; or the labels of its cross entropy, int64, if the gradient is too large.
    """

    module: nn.Module
    inputs: Any
    around: Any
    output: int = -1
    gradient: Tensor | None = None
    are_labels: bool = False
    versions: list[int] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        """Bytes that are kept alive."""
        held = [tensor for _, tensor in tensors_of(self.inputs)] + ([] if self.gradient is None else [self.gradient])
        return sum(each.numel() * each.element_size() for each in held)

    def shorten(self) -> None:
        """Keep labels in place of the gradient, if it is that of a cross entropy and no host waits for the answer."""
        given = None if self.are_labels else self.gradient
        if given is not None and given.device.type == "cpu" and given.ndim > 1 and given.shape[-1] > 1:
            labels, is_known = labels_from_gradient(given, IGNORED)
            if bool(is_known):
                self.gradient, self.are_labels = labels, True

    @property
    def is_intact(self) -> bool:
        """Whether no input was overwritten since."""
        return [tensor._version for _, tensor in tensors_of(self.inputs)] == self.versions


@dataclass(eq=False)
class _Pass:
    """One backward pass: the calls that it reached, its loss, and entries of the gradients that it added."""

    calls: list[HeldCall] = field(default_factory=list)
    loss: Tensor | None = None
    entries: Tensor | None = None  # (parameter, entry), until the pass has ended
    values: Tensor | None = None  # projections and norms, (parameter, projection + 1)


@dataclass(eq=False)
class _Update:
    """What is kept of one update."""

    step: int
    passes: list[_Pass]
    seen: Passes


class PassSketches:
    """Sketches of the gradients that each backward pass of an update adds, on this rank alone.

    Hooks on the autograd nodes that accumulate the gradients of at most eight parameters copy up to 1,024 entries of
    each, which are projected on eight random signs when the pass has ended. They return nothing and send no message.
    """

    def __init__(
        self, projections: GradientProjections, model: nn.Module, replicas: Sequence[int], *, is_replicated: bool
    ) -> None:
        self._projections, self._model, self._is_replicated = projections, model, is_replicated
        parameters, names = projections.parameters, {id(p): name for name, p in model.named_parameters()}
        trained = [i for i in replicas if parameters[i].requires_grad and id(parameters[i]) in names]
        able = [i for i in trained if parameters[i].ndim > 1] or trained
        self.numbers = [able[i] for i in _spread(len(able), _N_PARAMETERS)]
        self._names = [names[id(parameters[i])] for i in self.numbers]
        self._places = [Places.of(parameters[i], 0, _N_ENTRIES) for i in self.numbers]
        self._handles: list[RemovableHandle] | None = None
        self._nodes: list[Node] = []
        self._passes: list[_Pass] = []
        self._weights = torch.zeros(0)
        self._number, self._lock = -1, threading.Lock()
        self.problem: Exception | None = None

    @property
    def is_armed(self) -> bool:
        """Whether passes are sketched at the moment."""
        return self._handles is not None

    @property
    def leaves(self) -> list[Tensor]:
        """The sketched parameters of the model, whole within the context in which shards are gathered."""
        return [self._model.get_parameter(name) for name in self._names]

    def arm(self) -> None:
        """Register the hooks before the first backward pass of an update, once."""
        if self.is_armed:
            return
        self._handles, self._passes, self._number, self.problem = [], [], -1, None
        parameters = self._projections.parameters
        # Before the passes: a rank that lags behind may be brought up to date afterwards.
        replicated = [parameters[number] for number in self.numbers] if self._is_replicated else []
        self._weights = self.sketch_of(replicated) if replicated else torch.zeros(0)
        for i, number in enumerate(self.numbers):
            leaf = self._projections.leaf(number)
            if leaf is not None and leaf.requires_grad:
                node = get_gradient_edge(leaf).node
                self._nodes.append(node)  # the parameter does not keep the node and its hooks alive
                self._handles.append(node.register_prehook(partial(torch.compiler.disable(self._see), i)))

    def disarm(self) -> None:
        """Remove the hooks."""
        for handle in self._handles or ():
            handle.remove()
        self._handles = None
        self._nodes.clear()

    def hold(self, module: nn.Module, inputs: Any, around: Any) -> HeldCall | None:
        """Keep references to the inputs of a call; None if passes are not sketched now."""
        if not self.is_armed:
            return None
        return HeldCall(module, inputs, around, versions=[tensor._version for _, tensor in tensors_of(inputs)])

    def arrive(self, call: HeldCall, index: int, gradient: Tensor | None, loss: Tensor | None) -> None:
        """Note that a backward pass has reached an output of a call, with its gradient."""
        if not self.is_armed:
            return
        with self._lock:
            if (number := current_pass()) != self._number:
                self._end_pass()
                self._number = number
                self._passes.append(_Pass(loss=loss))
            of_pass = self._passes[-1]
            if call not in of_pass.calls:
                of_pass.calls.append(call)
                call.output = -1
            is_first = call.output < 0 or (call.gradient is not None and not call.gradient.ndim)
            if gradient is not None and is_first and (gradient.ndim or call.output < 0):
                call.output, call.gradient, call.are_labels = index, gradient.detach(), False
                if gradient.numel() * gradient.element_size() > _MOST_OF_ONE:
                    labels, _ = labels_from_gradient(call.gradient, IGNORED)
                    call.gradient, call.are_labels = labels, True

    def _see(self, i: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Copy entries of the gradient that autograd is about to accumulate; an exception would end the pass."""
        gradient = gradients[0]
        if gradient is None or gradient.layout != torch.strided or self.problem is not None:
            return
        try:
            with self._lock, torch.no_grad():  # each device has a thread
                if not self._passes:
                    self._passes.append(_Pass())
                of_pass = self._passes[-1]
                if of_pass.entries is None:
                    shape = (len(self.numbers), _N_ENTRIES)
                    of_pass.entries = torch.zeros(shape, device=gradient.device)
                entries = entries_of(gradient, self._places[i]).reshape(-1)
                # A reentrant checkpoint accumulates gradients of one pass in several parts.
                of_pass.entries[i, : len(entries)] += entries
        except Exception as error:  # noqa: BLE001  (it is raised when the update is measured)
            self.problem = error

    def _end_pass(self) -> None:
        if self._passes and (last := self._passes[-1]).entries is not None:
            signs = self._projections.signs_on(last.entries.device)[:, :_N_ENTRIES]
            last.values, last.entries = project(last.entries, signs), None

    def take(self) -> Measurement[tuple[list[_Pass], np.ndarray]]:
        """Return the passes since `arm`, and the message of this rank: (pass + 1, numbers), the last of parameters."""
        self.disarm()
        if self.problem is not None:
            raise self.problem
        self._end_pass()
        passes, self._passes = [each for each in self._passes if each.values is not None], []
        shape = (len(self.numbers), N_PROJECTIONS + 1)
        tensors = [each.values for each in passes[:_N_PASSES] if each.values is not None]
        losses = [each.loss for each in passes[:_N_PASSES] if each.loss is not None]
        *values, of_weights = yield [*tensors, *losses, self._weights]
        message = np.full((_N_PASSES + 1, shape[0] * shape[1] + 1), np.nan)
        losses_of = iter(values[len(tensors) :])
        for i, (each, value) in enumerate(zip(passes[:_N_PASSES], values, strict=False)):
            is_finite: Any = np.isfinite(value).all(1)
            row = np.where(is_finite[:, None], value, 0.0)
            row[~is_finite, -1] = math.inf
            message[i, :-1] = row.ravel()
            message[i, -1] = float(next(losses_of).item()) if each.loss is not None else math.nan
        if of_weights.size:
            message[-1, :-1] = of_weights.ravel()
        return passes, message

    def sketch_of(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the sketch of tensors that are like `leaves`, as of the gradients of a pass."""
        device = next((each.device for each in gradients if each is not None), torch.device("cpu"))
        entries = torch.zeros((len(self.numbers), _N_ENTRIES), device=device)
        for row, gradient, places in zip(entries, gradients, self._places, strict=True):
            if gradient is not None:
                found = entries_of(gradient, places).reshape(-1)
                row[: len(found)] = found
        return project(entries, self._projections.signs_on(device)[:, :_N_ENTRIES])


def passes_of(step: int, messages: np.ndarray, n_parameters: int) -> Passes:
    """Return the passes of all ranks from their messages, (rank, pass + 1, number)."""
    numbers, losses = messages[:, :, :-1], messages[:, :-1, -1]
    sketch = numbers.reshape(*numbers.shape[:2], n_parameters, -1)
    return Passes(step, sketch[:, :-1], losses, sketch[:, -1])


class BlameSearch:
    """Search for the rank, micro-batch and row that spoiled an update.

    Args:
        sketches: Sketches of the passes on this rank.
        passes: Returns the context in which passes of the recorder run.
        report: Function that is called with what is found without being asked.
    """

    def __init__(
        self,
        sketches: PassSketches,
        *,
        passes: Callable[[], AbstractContextManager[Any]],
        report: Callable[[Blame], None],
        is_late: bool,
    ) -> None:
        self.sketches, self._around, self._report, self._is_late = sketches, passes, report, is_late
        self._history = PassHistory()
        self._kept: deque[_Update] = deque(maxlen=_N_KEPT)
        self._earlier: deque[_Update] = deque(maxlen=_N_EARLIER)
        self._n_kept = 0
        self._repeated: RepeatedPasses | None = None
        self._answers: dict[int, Blame] = {}
        self._paused_until, self._asked = 0, -1
        self._begun: tuple[int, Measurement[Any], Sequence[Tensor]] | None = None

    def take(self, step: int) -> None:
        """Compare the passes of an update right before it is made; on every rank.

        On an accelerator, those of the update before are compared, whose values have been computed by now.
        """
        measurement = self.sketches.take()
        now = step, measurement, jointly(lambda: next(measurement))
        begun, self._begun = (self._begun, now) if self._is_late else (now, None)
        if begun is None:
            return
        step = begun[0]
        passes, message = jointly(lambda: finish(begun[1], read_arrays(begun[2])))
        seen = passes_of(step, gathered_from_ranks(message), len(self.sketches.numbers))
        if not seen.is_made.any():
            return
        self._history.add(seen)
        self._keep(_Update(step, passes, seen))
        asked, self._asked = self._asked, -1
        if step >= self._paused_until and find_exact(seen) is not None:
            asked, self._paused_until = step, step + _PAUSE
        if any(asked == each.step for each in self._kept) and (answer := self.find(asked)).score >= 1:
            self._report(answer)

    def ask(self, step: int) -> None:
        """Ask for an update at the next one, because of an alarm; on every rank."""
        self._asked = step

    def forget(self) -> None:
        """Release all batches."""
        self.sketches.disarm()
        self._kept.clear()
        self._earlier.clear()
        self._repeated = None

    def find(self, step: int | None = None) -> Blame:
        """Return what spoiled an update, the latest by default; on every rank."""
        update = next((each for each in reversed(self._kept) if step is None or each.step == step), None)
        if update is None:
            known = self._answers.get(-1 if step is None else step)
            steps = ", ".join(str(each.step) for each in self._kept)
            reason = (
                f"its passes are not kept any more, those of steps {steps} are" if steps else "no pass was seen yet"
            )
            return known or nobody(-1 if step is None else step, reason)
        if update.step not in self._answers:
            self._answers[update.step] = capital(self._found(update))
        return self._answers[update.step]

    def _found(self, update: _Update) -> Blame:
        own, problem = list[Rows](), ""
        with self._around():  # which may gather shards from all ranks
            try:
                own = self._read(update)
            except Exception as error:  # noqa: BLE001  (models are of any kind, and the pass is known without rows)
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
        groups = [each for of_rank in of_each_rank(own) for each in of_rank]
        found = judge(update.seen, self._history, groups)
        problems = [each for each in of_each_rank(problem) if each]
        if problems and found.row < 0:
            found = replace(found, sentence=f"{found.sentence.rstrip('.')} (no row was read: {problems[0]})")
        return found

    def _read(self, update: _Update) -> list[Rows]:
        """Compute this rank's passes of an update again, each row alone, and only the losses of earlier updates."""
        rank, found = distributed.get_rank() if is_shared() else 0, list[Rows]()
        for number, each in enumerate(update.passes[:_N_PASSES]):
            found.append(self._rows(each, update.step, rank, number, update.seen.sketch[rank, number]))
        for other in [each for each in (*self._earlier, *self._kept) if each.step < update.step]:
            for number, each in enumerate(other.passes[:_N_USUAL]):
                with suppress(Exception):  # they only add to what is usual
                    found.append(self._rows(each, other.step, rank, number, None))
        return found

    def _rows(self, of_pass: _Pass, step: int, rank: int, number: int, seen: np.ndarray | None) -> Rows:
        """Compute a pass again, and its rows alone if its sketch is given."""
        values, ids, total = list[np.ndarray](), dict[int, str](), np.zeros(0)
        for call in of_pass.calls:
            if call.gradient is None or not call.is_intact:
                raise SnapshotError("the inputs of the pass were overwritten, or no gradient reached an output")
            first = sum(map(len, values))
            with self._computing(call):
                of_call, sketch = self._again(call, alone=seen is not None)
            values.append(of_call)
            if seen is not None:
                total = total + sketch if total.size else sketch
                alone = np.flatnonzero(~np.isnan(of_call[:, -1])).tolist()
                ids |= {first + row: _id_of(call.inputs, row) for row in alone}
        off = scale = math.nan
        if seen is not None and np.isfinite(seen).all() and not any(call.are_labels for call in of_pass.calls):
            a, b = total[:, :-1], seen[:, :-1]
            with np.errstate(all="ignore"):  # of a parameter without a gradient
                scales = (a * b).sum(1) / np.square(a).sum(1)
                sines = np.linalg.norm(b - np.maximum(scales, 0.0)[:, None] * a, axis=1) / np.linalg.norm(b, axis=1)
            if (is_known := np.isfinite(scales) & np.isfinite(sines)).any():  # one may depend on a single token
                off, scale = float(np.median(sines[is_known])), float(np.median(scales[is_known]))
        return Rows(step, rank, number, np.concatenate(values), ids, off, scale)

    def _again(self, call: HeldCall, *, alone: bool) -> tuple[np.ndarray, np.ndarray]:
        """Compute a call again; return the `ROW_VALUES` of its rows, and the sketch of its gradient."""
        n, given, leaves = count_examples(call.inputs), call.gradient, self.sketches.leaves
        assert given is not None
        output = differentiable_in(call_model(call.module, call.inputs))[call.output]
        labels = given.reshape(n, -1) if call.are_labels else None
        if labels is None and given.ndim > 1 and given.shape[-1] > 1:
            found, is_known = labels_from_gradient(given, IGNORED)
            labels = found.reshape(n, -1) if bool(is_known) else None
        values = torch.full((n, len(ROW_VALUES)), math.nan, dtype=torch.float64)
        values[:, ROW_VALUES.index("labels")] = 1.0
        if labels is not None:
            logits = output.detach().reshape(*labels.shape, -1)
            values[:, :-2] = row_values(logits, labels, None if call.are_labels else given.reshape(logits.shape)).cpu()
        first = next((t for _, t in tensors_of(call.inputs) if t.ndim and len(t) == n), None)
        if first is not None and first.is_floating_point():
            values[:, -2] = first.detach().reshape(n, -1).double().square().mean(1).sqrt().cpu()
        if not alone:
            return values.numpy(), np.zeros(0)

        def sketch(of: Tensor, which: slice) -> Tensor:
            if call.are_labels:
                kept = given.reshape(n, -1)[which]
                logits = of.reshape(kept.numel(), -1).float()
                loss = cross_entropy(logits, kept.flatten(), ignore_index=IGNORED, reduction="sum")
                return self.sketches.sketch_of(torch.autograd.grad(loss, leaves, allow_unused=True))
            back = given.reshape(n, -1)[which].reshape(of.shape).to(of.dtype) if given.ndim else given
            return self.sketches.sketch_of(torch.autograd.grad(of, leaves, back, allow_unused=True))

        whole = sketch(output, slice(0, n))
        for row in self._chosen(values.numpy(), given, n):
            which = slice(row, row + 1)
            output = differentiable_in(call_model(call.module, take_examples(call.inputs, which)))[call.output]
            if not given.ndim:
                values[row, 0] = float(output.detach())
            norm = float(sketch(output, which)[:, -1].square().sum().sqrt())
            values[row, -1] = norm if math.isfinite(norm) else math.inf
        return values.numpy(), whole.cpu().numpy()

    @contextmanager
    def _computing(self, call: HeldCall) -> Iterator[None]:
        """Compute rows in eval mode: dropout and norms over the batch are not those of the pass for single rows."""
        if self._repeated is None or self._repeated.model is not call.module:
            self._repeated = RepeatedPasses(call.module)
        with self._repeated.undisturbed(), torch.enable_grad(), checkpoints_with_graph(), call.around.entered():
            yield

    def _chosen(self, values: np.ndarray, given: Tensor, n: int) -> list[int]:
        """Return the rows to compute alone: all, or those of the largest losses and gradients, and some others."""
        if n <= _N_ROWS:
            return [*range(n)]
        losses = values[:, 0] / values[:, ROW_VALUES.index("labels")]
        found = {*_spread(n, _N_ROWS // 2), *np.argsort(-np.nan_to_num(losses, nan=-math.inf))[: _N_ROWS // 4].tolist()}
        if given.is_floating_point() and given.ndim:
            sizes = given.detach().reshape(n, -1).float().norm(dim=1).nan_to_num(math.inf, math.inf)
            found |= {*sizes.argsort(descending=True)[: _N_ROWS // 4].tolist()}
        return sorted(found)

    def _keep(self, update: _Update) -> None:
        if len(self._kept) == _N_KEPT and self._n_kept % _EVERY == 0:
            self._earlier.append(self._kept[0])
            for call in (call for each in self._kept[0].passes for call in each.calls):
                call.shorten()
        self._n_kept += 1
        self._kept.append(update)
        while len(self._kept) > 1 and sum(map(_n_bytes, (*self._earlier, *self._kept))) > _MOST_BYTES:
            (self._earlier or self._kept).popleft()
        self._answers = {step: found for step, found in self._answers.items() if step > update.step - 1000}


def _n_bytes(update: _Update) -> int:
    return sum(call.n_bytes for each in update.passes for call in each.calls)


@torch.no_grad()
def row_values(logits: Tensor, labels: Tensor, given: Tensor | None) -> Tensor:
    """Return the values of rows about their losses, `ROW_VALUES` without the last two, float64.

    The loss that a model expects is the entropy of what it predicts, and its variance that of the logarithm of a
    probability. Both hold exactly for labels that are drawn from the predictions.

    Args:
        logits: Logits, shape (row, token, class).
        labels: Labels, shape (row, token); `IGNORED` does not count.
        given: Gradient of the logits in the training; None if unknown.
    """
    found, n = [], max(1, _N_LOGITS // logits.shape[-1])
    backs = repeat(None) if given is None else given.flatten(0, 1).split(n)
    for part, kept, back in zip(logits.flatten(0, 1).split(n), labels.flatten().split(n), backs, strict=False):
        logs, right = part.double().log_softmax(-1), kept.clamp_min(0)[:, None]
        p = logs.exp()
        expected = -(p * logs).nan_to_num(0.0).sum(1)
        variance = (p * logs.square()).nan_to_num(0.0).sum(1) - expected.square()
        loss = -logs.gather(1, right)[:, 0]
        values = [loss, loss - expected, variance, torch.ones_like(loss), *[torch.full_like(loss, math.nan)] * 4]
        if back is not None:
            both = back.double(), p.scatter_add(1, right, -torch.ones_like(loss)[:, None])
            values[4:7] = [(both[i] * both[j]).sum(1) for i, j in ((0, 1), (1, 1), (0, 0))]
            values[7] = -both[0].gather(1, right)[:, 0]
        found.append(torch.where((kept != IGNORED)[:, None], torch.stack(values, 1), 0.0))
    of_tokens = torch.cat(found).reshape(*labels.shape, -1)
    return torch.cat([of_tokens[..., :-1].sum(1), of_tokens[..., -1:].amax(1)], 1)


def _spread(n: int, n_most: int) -> list[int]:
    return sorted({*np.linspace(0, n - 1, min(n, n_most)).round().astype(int).tolist()})


def _id_of(inputs: Any, row: int) -> str:
    """Return the id of a row: that of a column, or a hash of its content."""
    for name in _IDS if isinstance(inputs, Mapping) else ():
        column = inputs.get(name)
        if isinstance(column, Tensor | list | tuple) and len(column) > row:
            value = column[row]
            return str(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
    digest = hashlib.blake2b(digest_size=4)
    for _, tensor in tensors_of(take_examples(inputs, slice(row, row + 1))):
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f"#{digest.hexdigest()}"


def is_replicated(modules: Sequence[nn.Module]) -> bool:
    """Return whether the ranks hold the same parameters, by DDP."""
    return is_shared() and any(isinstance(each, DistributedDataParallel) for each in modules)
