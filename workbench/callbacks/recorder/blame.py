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
from workbench.models.probing import undisturbed
from workbench.models.readable_weights import Measurement, finish, read_arrays
from workbench.probes.batch import IGNORED
from workbench.probes.blame import Blame, Passes, PassHistory, Rows, capital, judge_rows, nobody
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
#: Backward passes of an update that are told apart, and updates whose batches are kept, by reference.
_N_PASSES, _N_KEPT = 32, 8
#: Most bytes of one gradient at an output that is kept as it is, and of all that is kept of earlier updates.
_MOST_OF_ONE, _MOST_BYTES = 1 << 24, 1 << 26
#: Rows of a micro-batch that are computed alone, parts into which more are divided, and rows of each earlier pass that
#: show what is usual, with the fewest that do.
_N_ROWS, _N_PARTS, _N_USUAL, _ENOUGH = 32, 8, 4, 32
#: Updates between two searches that nobody asked for, and score of a pass from which one begins: only what needs no
#: statistics, whose false answers were not measured on fresh data.
_PAUSE, _UNASKED = 20, math.inf
#: Numbers about the loss of rows, and least cosine of two gradients that differ by a factor.
_N_NUMBERS, _PARALLEL = 5, 0.98
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
    found: Blame


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
        # Before the passes: a rank that lags behind may be brought up to date afterwards.
        self._weights = self._of_parameters() if self._is_replicated else torch.zeros(0)
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

    @torch.no_grad()
    def _of_parameters(self) -> Tensor:
        parameters = [self._projections.parameters[number] for number in self.numbers]
        entries = torch.zeros((len(parameters), _N_ENTRIES), device=parameters[0].device)
        for row, parameter, places in zip(entries, parameters, self._places, strict=True):
            found = entries_of(parameter, places).reshape(-1)
            row[: len(found)] = found
        return project(entries, self._projections.signs_on(entries.device)[:, :_N_ENTRIES])

    def sketch_of(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the sketch of the gradients of `leaves`, as of a pass."""
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
        found = self._history.judge(seen)
        self._history.add(seen, found)
        self._keep(_Update(step, passes, seen, found))
        asked, self._asked = self._asked, -1
        if found.score >= _UNASKED and step >= self._paused_until:
            asked, self._paused_until = step, step + _PAUSE
        is_current = asked == step and not self._is_late
        if any(asked == e.step for e in self._kept) and (answer := self.find(asked, is_current=is_current)).score >= 1:
            self._report(answer)

    def ask(self, step: int) -> None:
        """Ask for an update at the next one, because of an alarm; on every rank."""
        self._asked = step

    def forget(self) -> None:
        """Release all batches."""
        self.sketches.disarm()
        self._kept.clear()

    def find(self, step: int | None = None, *, is_current: bool = False) -> Blame:
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
            self._answers[update.step] = capital(self._found(update, is_current=is_current))
        return self._answers[update.step]

    def _found(self, update: _Update, *, is_current: bool) -> Blame:
        own, problem = list[Rows](), ""
        with self._around():  # which may gather shards from all ranks
            try:
                own = self._read(update)
            except Exception as error:  # noqa: BLE001  (models are of any kind, and the pass is known without rows)
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
        groups = [each for of_rank in of_each_rank(own) for each in of_rank]
        found = judge_rows(update.seen, update.found, groups, is_current=is_current)
        problems = [each for each in of_each_rank(problem) if each]
        if problems and found.row < 0:
            found = replace(found, sentence=f"{found.sentence.rstrip('.')} (no row was read: {problems[0]})")
        return found

    def _read(self, update: _Update) -> list[Rows]:
        """Compute rows of this rank's passes again: those of the update, and a few of the ones before."""
        rank = distributed.get_rank() if is_shared() else 0
        found = []
        for number, each in enumerate(update.passes[:_N_PASSES]):
            found.append(self._rows(each, rank, number, update.seen.sketch[rank, number]))
        for earlier in [each for each in reversed(self._kept) if each.step < update.step and each.found.score < 1]:
            for number, each in enumerate(earlier.passes[:_N_PASSES]):
                if sum(len(rows.numbers) for rows in found if rows.is_reference) >= _ENOUGH:
                    return found
                with suppress(Exception):  # they only add to what is usual
                    found.append(self._rows(each, rank, number, None))
        return found

    def _rows(self, of_pass: _Pass, rank: int, number: int, seen: np.ndarray | None) -> Rows:
        """Compute rows of a pass alone, and all of them together by their sum if there are few."""
        features: dict[str, list[np.ndarray]] = {}
        numbers, ids, first, total = list[int](), dict[int, str](), 0, 0.0
        is_whole, weight = True, 0.0
        for call in of_pass.calls:
            if call.gradient is None or not call.is_intact:
                raise SnapshotError("the inputs of the pass were overwritten, or no gradient reached an output")
            n = count_examples(call.inputs)
            with _computing(call):
                which = self._which(call, n) if seen is not None else _spread(n, _N_USUAL)
                found = np.stack([self._sketch(call, row, row + 1).cpu().numpy() for row in which])
            sketches = found[:, :-_N_NUMBERS].reshape(len(found), len(self.sketches.numbers), -1)
            is_whole &= len(which) == n
            total = total + np.nan_to_num(sketches).sum(0)
            weight += _weight(found[:, -_N_NUMBERS + 1 :]) * n / len(which)
            for name, values in _features(call, which, sketches, found[:, -_N_NUMBERS]).items():
                features.setdefault(name, []).append(values)
            ids |= {first + row: _id_of(call.inputs, row) for row in which} if seen is not None else {}
            numbers += [first + row for row in which]
            first += n
        off = scale = math.nan
        if seen is not None and is_whole and isinstance(total, np.ndarray) and np.isfinite(seen).all():
            a, b = total[:, :-1].ravel(), seen[:, :-1].ravel()
            if a @ a > 0 and b @ b > 0 and not any(call.are_labels for call in of_pass.calls):
                off, scale = float(np.linalg.norm(b - a) / np.linalg.norm(b)), float((a @ b) / (a @ a))
        of_all = {name: np.concatenate(values) for name, values in features.items()}
        return Rows(rank, number, numbers, of_all, ids, off, scale, weight, is_reference=seen is None)

    def _which(self, call: HeldCall, n: int) -> list[int]:
        """Return the rows to compute alone: all, or those of the parts with the largest gradients and some others."""
        parts = [(0, n)]
        while sum(end - begin for begin, end in parts) > _N_ROWS:
            divided = [
                (a, min(a + size, end))
                for begin, end in parts
                for size in [-(-(end - begin) // _N_PARTS)]
                for a in range(begin, end, size)
            ]
            sizes = [
                _norm(self._sketch(call, *each)[:-_N_NUMBERS].cpu().numpy()) / math.sqrt(each[1] - each[0])
                for each in divided
            ]
            order = sorted(range(len(sizes)), key=lambda i: -sizes[i] if math.isfinite(sizes[i]) else -math.inf)
            parts = [divided[i] for i in order[: max(1, len(divided) // _N_PARTS)]]
        found = {row for begin, end in parts for row in range(begin, end)}
        return sorted(found | {*_spread(n, _N_ROWS // 2)})

    def _sketch(self, call: HeldCall, begin: int, end: int) -> Tensor:
        """Return the sketch of the gradient of some rows and, last, five numbers about their loss.

        These are the loss itself; the product of the gradient at the output, which arrived in the training, with that
        of the sum of the losses over the labels; the squares of both; and the number of labels. They are NaN unless the
        loss is a cross entropy of the output.
        """
        which, n = slice(begin, end), count_examples(call.inputs)
        output = differentiable_in(call_model(call.module, take_examples(call.inputs, which)))[call.output]
        leaves = self.sketches.leaves
        assert call.gradient is not None
        numbers = torch.full((_N_NUMBERS,), math.nan, device=output.device)
        if call.are_labels:
            labels = call.gradient.reshape(n, -1)[which]
            given = _cross_entropy(output.reshape(*labels.shape, -1), labels)
            gradients = torch.autograd.grad(given, leaves, allow_unused=True)
            numbers[0] = given.detach() / (labels != IGNORED).sum()
        elif not call.gradient.ndim:
            gradients = torch.autograd.grad(output, leaves, call.gradient, allow_unused=True)
            numbers[0] = output.detach()
        else:
            given = call.gradient.reshape(n, -1)[which].reshape(output.shape).to(output.dtype)
            gradients = torch.autograd.grad(output, leaves, given, allow_unused=True)
            labels, is_known = labels_from_gradient(given, IGNORED)
            if given.ndim > 1 and given.shape[-1] > 1 and bool(is_known):
                logits = output.detach().float().requires_grad_()
                loss = _cross_entropy(logits, labels)
                (alone,) = torch.autograd.grad(loss, logits)
                counts = (labels != IGNORED).sum()
                numbers[0] = loss.detach() / counts
                products = [(given * alone).sum(), alone.square().sum(), given.square().sum(), counts]
                numbers[1:] = torch.stack([each.float() for each in products])
        return torch.cat([self.sketches.sketch_of(gradients).flatten(), numbers])

    def _keep(self, update: _Update) -> None:
        self._kept.append(update)
        while len(self._kept) > 1 and _n_bytes(self._kept) > _MOST_BYTES:
            self._kept.popleft()
        self._answers = {step: found for step, found in self._answers.items() if step > update.step - 1000}


def _n_bytes(kept: Sequence[_Update]) -> int:
    return sum(call.n_bytes for update in kept for each in update.passes for call in each.calls)


@contextmanager
def _computing(call: HeldCall) -> Iterator[None]:
    """Compute rows in eval mode, since dropout and norms over the batch are not those of the pass for single rows."""
    with undisturbed(call.module), torch.enable_grad(), checkpoints_with_graph(), call.around.entered():
        yield


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def _spread(n: int, n_most: int) -> list[int]:
    return sorted({*np.linspace(0, n - 1, min(n, n_most)).round().astype(int).tolist()})


def _weight(products: np.ndarray) -> float:
    """Return the factor on the sum of losses, times the number of labels; NaN if the gradients are not parallel."""
    both, own, given, counts = products.sum(0)
    if not (math.isfinite(both) and own > 0 and given > 0) or both < _PARALLEL * math.sqrt(own * given):
        return math.nan
    return float(both / own * counts)


def _norm(sketch: np.ndarray) -> float:
    return float(np.linalg.norm(sketch.reshape(-1, N_PROJECTIONS + 1)[:, -1]))


def _features(call: HeldCall, which: Sequence[int], sketches: np.ndarray, losses: np.ndarray) -> dict[str, np.ndarray]:
    """Return the features of rows: of their gradients and losses, and of their inputs."""
    norms = np.array([_norm(each) for each in sketches])
    with np.errstate(divide="ignore"):
        size = np.where(np.isfinite(norms), np.log(np.maximum(norms, 1e-30)), math.inf)
    found = {"size": size} | ({"loss": losses} if np.isfinite(losses).any() else {})
    n, places = count_examples(call.inputs), torch.as_tensor(list(which))
    first = next((t for _, t in tensors_of(call.inputs) if t.ndim and len(t) == n), None)
    if first is None:
        return found
    rows = first.detach().flatten(1)[places.to(first.device)].cpu() if first.ndim > 1 else first.cpu()[places, None]
    if rows.is_floating_point():
        found["scale"] = rows.double().square().mean(1).sqrt().clamp_min(1e-30).log().nan_to_num(80.0, 80.0).numpy()
    return found


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
