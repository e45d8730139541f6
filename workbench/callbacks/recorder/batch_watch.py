"""Training inputs of a model: their counts and contents, and a few examples of the first batch kept as probe."""

from __future__ import annotations

import copy
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from workbench.callbacks.recorder.backward_passes import (
    ScalerWatch,
    are_cleared,
    current_pass,
    differentiable_in,
    differentiated_loss,
    follow,
    labels_from_gradient,
    versions_of,
)
from workbench.callbacks.recorder.blame import PassSketches
from workbench.callbacks.recorder.joint_optimizer import JointOptimizer
from workbench.errors import SnapshotError
from workbench.models.batches import count_examples, take_examples
from workbench.models.calling import bare, entrances, named_arguments
from workbench.models.losses import are_classes, largest_losses, loss_in, prediction_of, targets_of, tensors_in
from workbench.probes.batch import IGNORED, BatchProbe, lookahead


class ModelHook:
    """A forward hook that acts where a model is called, and does nothing where it is compiled, exported or transformed.

    A graph that is traced contains nothing of it, so that it adds no graph break. A copy of the model, by ``deepcopy``,
    ``pickle`` or ``torch.save``, has a function of Python in its place that does nothing.
    """

    def __init__(self, act: Callable[..., None]) -> None:
        from torch._dynamo.eval_frame import skip_code

        self._act = torch.compiler.disable(act)
        skip_code(ModelHook.__call__.__code__)  # called within a compiled model but outside of its graphs

    def __call__(self, *call: Any) -> None:
        """Act, unless the model is traced."""
        is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or peek_interpreter_stack() is not None
        if not is_traced:
            self._act(*call)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to create the hook of a copy: a method that accepts any arguments and returns None."""
        return getattr, (nullcontext(), "__exit__")


#: Argument by which a Hugging Face Trainer passes the number of labels in all batches of an update; the losses are then
#: summed.
_LABELS_OF_UPDATE = "num_items_in_batch"
#: Maximum number of forward passes that may turn out to be training although no backward pass reaches them.
_MOST_WAITING = 32
#: Words in the names of rates of dropout and noise, with which outputs are random.
_RANDOM = ("drop", "jitter", "noise")
#: Number of changes of the parameters without an update, one after the other, after which another optimizer is sought.
_MOST_CHANGES = 3


@dataclass(frozen=True)
class PassContext:
    """Context in which a pass runs: autocast, and modes that replace torch's functions."""

    kind: str = "cpu"
    autocast: torch.dtype | None = None
    modes: tuple[TorchFunctionMode, ...] = ()

    @classmethod
    def of(cls, kind: str) -> PassContext:
        """Return the current context, on a kind of device."""
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return cls(kind, autocast, tuple(_get_current_function_mode_stack()))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the context again; modes that are already active are not entered twice."""
        active = _get_current_function_mode_stack()
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(self.kind, self.autocast, enabled=self.autocast is not None))
            for mode in self.modes:
                if not any(mode is other for other in active):
                    stack.enter_context(mode)
            yield


@dataclass
class Pass:
    """A backward pass that reached the model.

    Attributes:
        loss: Loss that is differentiated, 0-dim; None if unknown.
        scales: Factor on it of each gradient scaler that may be that of the loop, 0-dim.
        is_own: Whether inputs of the model have no gradient, so that the pass is not that of another model.
    """

    loss: Tensor | None
    scales: dict[int, Tensor]
    is_own: bool = False


@dataclass
class Seen:
    """Counts of the inputs of one module through which the model is called, since the last update.

    Attributes:
        n_forwards: Number of calls.
        n_examples: Number of examples.
        n_tokens: Number of tokens, as a number or as a 0-dim tensor that may not be computed yet.
        losses: Losses in the outputs, 0-dim.
        are_parts: Whether the losses are summands of the update's loss, instead of means over their batches.
        weights: Derivatives of the differentiated losses by those in the outputs, 0-dim, each with its pass.
        contents: Sums over the calls of the results of `BatchProbe` and `largest_losses`.
        lookahead: Result of `lookahead` for each call.
        passes: Backward passes.
        scaler: Key of the gradient scaler; None without one.
        averages: Whether gradients are divided by the number of passes after them, so that the loss is their mean.
    """

    n_forwards: int = 0
    n_examples: float = 0.0
    n_tokens: float | Tensor = 0.0
    losses: tuple[Tensor, ...] = ()
    are_parts: bool = False
    weights: tuple[tuple[Tensor, Pass], ...] = ()
    contents: dict[str, float | Tensor] = field(default_factory=dict)
    lookahead: tuple[Tensor, ...] = ()
    passes: tuple[Pass, ...] = ()
    scaler: int | None = None
    averages: bool = False

    def add(self, contents: Mapping[str, float | Tensor]) -> None:
        """Add the contents of one call to the sums."""
        for name, value in contents.items():
            self.contents[name] = self.contents[name] + value if name in self.contents else value

    def numbers(self) -> dict[str, float | Tensor]:
        """Return the metrics of the update, with the names of ``schema.MONITORS``.

        The loss is the mean of those in the outputs, or else the sum of those that were differentiated.
        """
        found: dict[str, float | Tensor] = {"batch_size": self.n_examples, "n_tokens": self.n_tokens}
        found |= {name: total / self.n_forwards for name, total in self.contents.items()}
        if self.lookahead:
            found["lookahead"] = torch.stack(self.lookahead).nanmean()
        if self.losses:
            found["loss"] = _sum(self.losses) / (1 if self.are_parts else len(self.losses))
            if self.weights:
                weights = [self._unscaled(*each) for each in self.weights]
                found["loss_weight"] = _sum(weights) / (len(weights) if self.are_parts else 1)
        elif differentiated := [self._unscaled(each.loss, each) for each in self.passes if each.loss is not None]:
            found["loss"] = _sum(differentiated) / (len(differentiated) if self.averages else 1)
        scales = [each.scales[self.scaler] for each in self.passes if self.scaler in each.scales]
        return found | ({"loss_scale": scales[-1]} if scales else {})

    def _unscaled(self, value: Tensor, of: Pass) -> Tensor:
        scale = None if self.scaler is None else of.scales.get(self.scaler)
        return value if scale is None else value.float() / scale.to(value.device)


@dataclass
class Call:
    """A forward pass that counts once a backward pass reaches its output."""

    inputs: Any
    context: PassContext
    is_training: float
    loss: Tensor | None = None
    logits: weakref.ref[Tensor] | None = None
    largest: dict[str, Tensor] = field(default_factory=dict)
    lookahead: Tensor | None = None
    is_counted: bool = False
    last_pass: int = -1  # that reached its output


class BatchWatch:
    """Hooks that count the training inputs of the model that the loop calls.

    A forward pass is counted when a backward pass reaches its output, whether the model is in training mode or not.
    Those of the recorder itself are not, nor those within a backward pass, which recompute activations. The hooks never
    change inputs, outputs or gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: JointOptimizer,
        *,
        n_probe_tokens: int,
        probe: Any = None,
        begin: Callable[[], None] = lambda: None,
        labels: Callable[[], Any] | None = None,
        recent_examples: Sequence[int] = (),
        notes_unmade: bool = True,
        loses_sight: Callable[[], None] = lambda: None,
        timed: Callable[[str], AbstractContextManager[Any]] = lambda part: nullcontext(),
    ) -> None:
        self._notes_unmade = notes_unmade
        self.probe = probe
        self.is_paused = False
        #: Whether the contents of the batches of the current update are examined, and not only counted.
        self.examines = True
        #: Whether nothing is read of the current update, which has no row.
        self.rests = False
        #: Whether each backward pass so far was part of an update that was made.
        self.is_plain = True
        #: Whether the model is a stage of a pipeline, and its schedule divides gradients by the number of passes.
        self.is_stage = self.averages = False
        #: Sketches of the backward passes, once the model has been read.
        self.sketches: PassSketches | None = None
        self._timed = timed
        self.has_seen = False
        self.unmade: list[Seen] = []
        self._optimizer = optimizer
        self._scaler = ScalerWatch(optimizer)
        self._optimized = optimizer.parameters
        self._versions: list[int] = []
        self._loses_sight, self._n_changed = loses_sight, 0
        self._n_probe_tokens = n_probe_tokens
        self._begin = begin
        self.entrances = entrances(model)
        self._kind = next((p.device.type for p in model.parameters()), "cpu")
        self._seen: dict[nn.Module, Seen] = {}
        self._contents = BatchProbe()
        self._contents.load_state_dict(recent_examples)
        self._contents_before = self._contents
        self._labels = labels
        self._pass = PassContext()
        self._calls: dict[nn.Module, Call] = {}  # while a forward runs
        self._waiting: deque[tuple[nn.Module, Call]] = deque(maxlen=_MOST_WAITING)  # in training mode, not reached
        self._modules: dict[nn.Module, list[nn.Module]] = {}
        self._is_random: dict[nn.Module, bool] = {}
        self._keeps_state: dict[nn.Module, bool] = {}
        self._passes: dict[int, Pass] = {}
        self._first: dict[nn.Module, Any] = {}
        self._by_loss: set[nn.Module] = set()  # modules whose own loss is differentiated
        enter, leave = ModelHook(self._enter), ModelHook(self._leave)
        self._handles = [
            handle
            for module in self.entrances
            for handle in (
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave),
            )
        ]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which forward passes are not counted, for those of the recorder itself."""
        was_paused, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was_paused

    @property
    def recent_examples(self) -> list[int]:
        """Hashes of the latest examples, see `BatchProbe.state_dict`."""
        return self._contents.state_dict()

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of autocast in the last forward pass; None if it was off."""
        return self._pass.autocast

    @property
    def may_rest(self) -> bool:
        """Whether updates may be left unread: their batches are seen, and no scaler skips some of them."""
        return self.has_seen and self.is_plain and self._scaler.key is None

    def forget(self) -> None:
        """Forget the passes of an update that was left unread."""
        self._passes = {}
        if self._calls or self._seen or self._waiting:
            self.take()

    def around_pass(self) -> AbstractContextManager[None]:
        """Return the context in which the model was last called in training."""
        return self._pass.entered()

    def detach(self) -> None:
        """Remove the hooks and release the inputs."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.entrances, self._seen, self._first, self._calls, self.probe = [], {}, {}, {}, None
        self._modules, self._is_random, self._keeps_state, self._passes = {}, {}, {}, {}
        self._optimized, self.unmade = [], []
        self._waiting.clear()

    def settle_probe(self) -> tuple[Any, list[nn.Module]]:
        """Fix the probe: the given one, or else examples of the first batch; None before the first batch."""
        modules = self.entrances
        if self.probe is None and self._first:
            modules = [module for module in self.entrances if module in self._first][:1]
            self.probe = self._first[modules[0]]
        self._first = {}
        return self.probe, list(dict.fromkeys(bare(module) for module in modules))

    def take(self) -> Seen:
        """Return the counts since the last call, for the outermost module that was called."""
        seen = next((self._seen[module] for module in self.entrances if module in self._seen), Seen())
        seen.passes, seen.scaler = tuple(self._passes.values()), self._scaler.key
        seen.averages = self.averages
        self._seen, self._passes, self._calls = {}, {}, {}
        self._waiting.clear()
        return seen

    def begin_update(self) -> None:
        """Prepare for an update: count what no backward pass reached, and identify the scaler that calls the update."""
        self.count_unreached()
        self._n_changed = 0
        _ = self._scaler.key

    def note_unmade(self) -> None:
        """Notice whether the gradients since the last update were discarded: their update was skipped.

        This is so if the gradient scaler has ended its step without an update, or gradients were cleared. If the
        parameters were changed in between, the passes only led to the point at which the gradient is computed, or an
        unknown optimizer made the update.
        """
        if self._optimizer.is_updating or not self._passes or not self._notes_unmade:
            return
        has_ended = self._scaler.has_ended_step()
        if has_ended is None and versions_of(self._optimized) != self._versions:
            self._discard()
            self._n_changed += 1
            if self._n_changed == _MOST_CHANGES:
                self._loses_sight()
            return
        if has_ended is None and are_cleared(self._optimized):
            if not any(each.is_own for each in self._passes.values()):  # they were passes of another model
                self._discard()
                return
            self._scaler.search()
            has_ended = True
        if has_ended:
            self.is_plain = False
            self.unmade.append(self.take())

    def _discard(self) -> None:
        """Forget the counts since the last update, and their examples."""
        self.is_plain = False
        self.take()
        self._contents = self._contents_before

    def count_unreached(self) -> None:
        """Count forward passes in training mode if backward passes reached none: gradients may come from elsewhere."""
        for module, call in self._waiting if not self._seen else ():
            self._count(module, call)
        self._waiting.clear()

    @property
    def n_forwards(self) -> int:
        """Number of training forwards since the last `take`."""
        return max((seen.n_forwards for seen in self._seen.values()), default=0)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self._counts(module):
            return
        with nullcontext() if self.rests else self._timed("row"):
            self.note_unmade()
            self._begin()
            if self.rests:
                return
            is_training = math.nan
            if self.examines:
                if module not in self._modules:
                    self._modules[module] = [*module.modules()]
                    self._is_random[module] = any(_draws(each) for each in self._modules[module])
                    self._keeps_state[module] = any(isinstance(each, nn.RNNBase) for each in self._modules[module])
                modules = self._modules[module]
                is_training = sum(each.training for each in modules) / len(modules)
            inputs = named_arguments(bare(module), args, kwargs)
            context = PassContext.of(self._kind) if self.examines or not self.has_seen else self._pass
            self._calls[module] = Call(inputs, context, is_training)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self.rests:
            if not (self._passes or self.is_paused):
                self._note_pass(output)
            return
        if not self._counts(module) or module not in self._calls:
            return
        is_outermost = module is next(entrance for entrance in self.entrances if entrance in self._calls)
        call = self._calls.pop(module)
        if is_outermost:  # a pass counts for the outermost module
            with self._timed("batch" if self.examines else "row"):
                self._follow(module, call, output)

    def _follow(self, module: nn.Module, call: Call, output: Any) -> None:
        """Read the output of a forward pass, and count the pass when a backward pass reaches it."""
        tensors = differentiable_in(output)
        held = None if self.sketches is None else self.sketches.hold(bare(module), call.inputs, call.context)
        loss = loss_in(output)
        if loss is None:
            loss = next((each for each in tensors if not each.ndim), None)
        call.loss = None if loss is None else loss.detach().reshape(())
        logits = None
        if self.examines:
            call.largest = self._largest_losses(module, call.inputs, output)
            if not self._keeps_state[module] and not (call.is_training and self._is_random[module]):
                with suppress(Exception):  # outputs may be of any kind, and a measurement never stops a training
                    call.lookahead = next((e for t in tensors if (e := lookahead(call.inputs, t)) is not None), None)
            may_be_logits = (
                each
                for each in tensors
                if type(each) is Tensor and each.ndim > 1 and each.shape[-1] > 1 and each.is_floating_point()
            )
            logits = None if call.largest else next(may_be_logits, None)
        elif module in self._by_loss and any(loss is each for each in tensors) and held is None:
            tensors = [each for each in tensors if each is loss]
        call.logits = None if logits is None else weakref.ref(logits)
        reference = weakref.ref(self)
        for i, tensor in enumerate(tensors):

            def arrive(
                gradient: Tensor | None, i: int = i, is_loss: bool = tensor is loss, is_logits: bool = tensor is logits
            ) -> None:
                if (watch := reference()) is not None and not watch.is_paused and watch._handles:
                    with watch._timed("batch" if watch.examines else "row"):
                        watch._arrive(module, call, gradient if is_loss else None, gradient if is_logits else None)
                    if held is not None and watch.sketches is not None:
                        with watch._timed("sketch"), suppress(Exception):
                            watch.sketches.arrive(held, i, gradient, watch._loss_of(call))

            follow(tensor, arrive)
        if module.training:
            self._waiting.append((module, call))

    def _note_pass(self, output: Any) -> None:
        """Notice a backward pass of an update that is not read, which shows whether the update is skipped."""
        reference = weakref.ref(self)

        def arrive(gradient: Tensor | None) -> None:
            watch = reference()
            if watch is None or not watch.rests or watch._passes or not watch._handles:
                return
            watch._versions = versions_of(watch._optimized)
            watch._passes[current_pass()] = Pass(None, {}, is_own=True)

        for tensor in differentiable_in(output):
            follow(tensor, arrive)

    def _arrive(self, module: nn.Module, call: Call, of_loss: Tensor | None, of_logits: Tensor | None) -> None:
        """Count a call when the first gradient arrives at its output, and read the labels from that of the logits."""
        try:
            if (number := current_pass()) == call.last_pass and not self.examines:
                return
            call.last_pass = number
            if number not in self._passes:
                self.note_unmade()
                self._versions = versions_of(self._optimized)
                is_known = call.loss is not None and not self.examines
                self._passes[number] = Pass(None if is_known else differentiated_loss(), self._scaler.begin_pass())
            if not call.is_counted:
                is_first = not any(each.requires_grad for each in tensors_in(call.inputs))
                self._passes[number].is_own |= is_first or self.is_stage
                self._count(module, call)
            if of_loss is not None and self.examines:
                self._by_loss.add(module)
                self._seen_by(module).weights += ((of_loss.detach().reshape(()), self._passes[number]),)
            if of_logits is not None and call.logits is not None:
                self._take_labels(module, call, of_logits)
        except Exception:  # noqa: BLE001  (an exception would end the backward pass of the training)
            call.inputs = call.logits = None

    def _loss_of(self, call: Call) -> Tensor | None:
        """Return the loss of the pass that is running."""
        of_pass = self._passes.get(current_pass())
        return call.loss if call.loss is not None or of_pass is None else of_pass.loss

    def _seen_by(self, module: nn.Module) -> Seen:
        return self._seen.setdefault(module, Seen())

    def _count(self, module: nn.Module, call: Call) -> None:
        if not self._seen and self.examines:
            self._contents_before = copy.copy(self._contents)
        call.is_counted, self.has_seen, self._pass = True, True, call.context
        seen, inputs = self._seen_by(module), call.inputs
        seen.n_forwards += 1
        try:
            seen.n_examples += count_examples(inputs)
        except SnapshotError:
            seen.n_examples = math.nan
        seen.n_tokens = seen.n_tokens + count_tokens(inputs)
        seen.are_parts = isinstance(inputs, Mapping) and inputs.get(_LABELS_OF_UPDATE) is not None
        seen.losses += () if call.loss is None else (call.loss,)
        seen.lookahead += () if call.lookahead is None else (call.lookahead,)
        contents = self._contents_of(inputs) if self.examines else {}
        if not math.isnan(call.is_training):
            seen.add({"is_training": call.is_training} | contents | call.largest)
        if self.probe is None and module not in self._first:
            self._first[module] = few_examples(inputs, self._n_probe_tokens)
        if call.logits is None or "label_entropy" in contents:
            call.inputs = call.logits = None

    def _contents_of(self, inputs: Any) -> dict[str, Tensor]:
        labels = None if self._labels is None else self._labels()
        try:
            return self._contents.take(inputs, labels if isinstance(labels, Tensor) else None)
        except Exception:  # noqa: BLE001  (inputs may be of any kind, and a measurement never stops a training)
            return {}

    @torch.no_grad()
    def _take_labels(self, module: nn.Module, call: Call, gradient: Tensor) -> None:
        """Measure the labels that the gradient of the logits shows; NaN if it is not that of a cross entropy."""
        inputs, logits = call.inputs, None if call.logits is None else call.logits()
        call.inputs = call.logits = None
        labels, is_known = labels_from_gradient(gradient, IGNORED)
        found = self._contents.of_labels(inputs, labels)
        if logits is not None and not call.largest:
            found["largest_losses"] = largest_losses(logits.detach(), labels)
        self._seen_by(module).add({name: value.where(is_known, math.nan) for name, value in found.items()})

    @torch.no_grad()
    def _largest_losses(self, module: nn.Module, inputs: Any, output: Any) -> dict[str, Tensor]:
        logits, labels = prediction_of(output), None if self._labels is None else self._labels()
        try:
            pair = (logits, labels) if are_classes(logits, labels) else targets_of(bare(module), inputs, output)
            return {} if pair is None else {"largest_losses": largest_losses(*pair)}
        except Exception:  # noqa: BLE001  (outputs may be of any kind, and a measurement never stops a training)
            return {}

    def _counts(self, module: nn.Module) -> bool:
        if self.is_paused or not torch.is_grad_enabled() or module not in self.entrances:
            return False
        if current_pass() != -1:  # within backward: gradient checkpointing recomputes the forward
            return False
        if self.is_stage and _finds_shapes():
            return False
        if not any(module is each for each in self.entrances):  # a copy of the model, which has its hooks too
            return False
        # Lightning under DDP replaces forward by a function whose arguments are not those of the model.
        return not isinstance(module.forward, FunctionType) or hasattr(module.forward, "__wrapped__")


def _finds_shapes() -> bool:
    """Return whether a schedule of a pipeline runs its stage on memory that nobody has written, to find shapes."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_forward_metadata_inference":
        frame = frame.f_back
    return frame is not None


def _draws(module: nn.Module) -> bool:
    """Return whether a module has a rate of dropout or noise above 0, as an attribute or in its configuration."""
    rates = [module.p] if isinstance(module, nn.modules.dropout._DropoutNd) else []
    for holder in (module, getattr(module, "config", None)):
        given = getattr(holder, "__dict__", {})
        names = [name for name in given if any(word in name for word in _RANDOM) and "classifier" not in name]
        rates += [given[name] for name in names]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _sum(numbers: Sequence[Tensor]) -> Tensor:
    if len(numbers) == 1:
        return numbers[0].float()
    return torch.stack([number.float() for number in numbers]).sum()


def count_tokens(inputs: Any) -> float | Tensor:
    """Return the number of tokens in a batch without masked ones; NaN if its examples are not sequences."""
    if isinstance(inputs, Mapping):
        mask = inputs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            return (mask != 0).sum().double()
        inputs = tuple(inputs.values())
    values = inputs if isinstance(inputs, tuple | list) else (inputs,)
    first = next((value for value in values if isinstance(value, Tensor) and value.ndim), None)
    if first is None:
        return math.nan
    is_sequence = first.ndim == (3 if first.is_floating_point() else 2)
    return float(first.shape[0] * first.shape[1]) if is_sequence else math.nan


def few_examples(inputs: Any, n_tokens: int) -> Any:
    """Return copies of the first examples of a batch, with about ``n_tokens`` tokens; None if it has no examples.

    A single longer example is truncated if all tensors have one entry per token.
    """
    try:
        n_examples = count_examples(inputs)
    except SnapshotError:
        return None
    if isinstance(inputs, Mapping):
        inputs = {name: value for name, value in inputs.items() if name != _LABELS_OF_UPDATE}
    values = (
        inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else [inputs]
    )
    tensors = [v for v in values if isinstance(v, Tensor)]
    length = next((v.shape[1] for v in tensors if v.ndim in (2, 3)), 1)
    rows = take_examples(inputs, slice(0, min(n_examples, max(1, n_tokens // max(1, length)))))
    rows = _mapped(rows, lambda tensor: tensor.detach().clone())
    if length > n_tokens and all(v.shape[1:] == (length,) for v in tensors):
        rows = _mapped(rows, lambda tensor: tensor[:, :n_tokens].clone())
    return rows


def _mapped(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {name: _mapped(value, change) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(_mapped(value, change) for value in inputs)
    return inputs
