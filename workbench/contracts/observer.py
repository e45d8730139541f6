"""What a training does in its first updates, seen through PyTorch's global hooks, without any change to its code."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as hooks
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler, optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint
from torch.utils.data import DataLoader

from workbench.contracts.places import frames_of_script, line_of_script
from workbench.contracts.tape import Origins, Tape, leave_closed
from workbench.contracts.token_labels import TokenLabels, read_labels
from workbench.models.calling import acting_on_gradients, bare, is_shared, is_split
from workbench.models.losses import tensors_in
from workbench.models.probing import is_library
from workbench.models.readable_weights import local_part

#: Updates whose passes are recorded, so that their losses can be computed again; more than one batch is kept of each.
_N_TAPED = 2
#: Passes without any update after which the observation ends.
_MOST_PASSES = 1000
#: Most bytes of inputs, and of copies of parameters, that are kept.
MOST_BYTES = 1 << 28
#: Parameters of which an update keeps copies, and most elements of each.
_N_SAMPLED, _MOST_SAMPLED = 8, 1 << 18
#: Most lines of a place.
_MOST_LINES = 4
#: Most tensors of an output whose gradients are read.
_MOST_OUTPUTS = 8
#: Acts of an earlier stage that matter in later ones.
_LASTING = ("create", "file read", "file write")
#: Most calls without gradient that are noted.
_MOST_LOOKS = 4096


@dataclass(eq=False)
class Call:
    """One call in training of a module that no other module calls."""

    module: nn.Module
    args: tuple[Any, ...]  # copies, if they are kept
    kwargs: dict[str, Any]
    update: int  # number of updates before the call
    rng: Tensor  # state of torch's generator on the CPU before the call
    autocast: torch.dtype | None
    in_eval: frozenset[nn.Module]
    line: str = ""  # of the script
    lines_of_inputs: list[str] = field(default_factory=list)  # that made and wrote integer arguments, while noted
    is_kept: bool = False
    tokens: dict[str, list[Tensor]] = field(default_factory=dict)  # ids at each call of an embedding, by its path
    labels: dict[int, TokenLabels] = field(default_factory=dict)  # read from the gradient of each output
    class_axes: dict[int, list[int]] = field(default_factory=dict)  # over which the gradient of an output sums to 0
    output_shapes: list[tuple[int, ...]] = field(default_factory=list)
    loss: float | None = None  # in the output
    reached: bool = False  # by a backward pass
    has_nan: bool = False

    @property
    def token_labels(self) -> TokenLabels | None:
        """Labels of the cross entropy that is differentiated; None if there is none, or its gradient was not read."""
        return next((each for each in self.labels.values() if each.is_cross_entropy), None)


@dataclass(eq=False)
class Look:
    """One call without gradient of a module that no other module calls: an evaluation, a teacher, a sample."""

    call: Call  # whose inputs are kept for the first of each module in each mode
    is_frozen: bool  # no parameter of the module requires a gradient
    line: str
    name: str  # of the module in the script, or of its class
    version: int  # how often the parameters had been written to
    momenta: tuple[float | None, ...]  # of norms over the batch
    key: int = 0  # hash of the first tensor, by which repeated inputs are recognized


@dataclass(frozen=True)
class Mode:
    """A change of the mode of a module, with the line of the script, and whether a package made it there."""

    module: nn.Module
    training: bool
    line: str
    by_library: bool


@dataclass(eq=False)
class Backward:
    """One backward pass."""

    update: int  # number of updates before it
    calls: list[Call]  # that it reached, in their order
    loss: float  # NaN if what is differentiated is not one number
    scale: float  # of the gradient scaler
    before: np.ndarray  # norm of each parameter's gradient, NaN without one; see `Observer.parameters`
    after: np.ndarray
    tape: Tape | None
    line: str
    is_finite: bool = True


@dataclass(eq=False)
class Copy:
    """A parameter with its gradient and the state of its optimizer just before an update, and afterwards."""

    parameter: Tensor
    before: Tensor
    gradient: Tensor | None
    state: dict[str, Any]
    group: dict[str, Any]
    after: Tensor | None = None
    is_part: bool = False  # whether the tensors are parts of those of all ranks


@dataclass(eq=False)
class Update:
    """One update of an optimizer."""

    index: int  # of the update of the training; several optimizers may share one
    optimizer: Any
    rates: list[float]  # of each group
    norms: np.ndarray  # of the gradients before it, as in `Backward`
    copies: list[Copy]  # of some parameters
    line: str
    wraps: bool = False  # another optimizer made its update within this one, as in SAM
    cosine: float = float("nan")  # of gradients and changes of the copies, without decoupled decay
    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # all parameters, of the last update, if small


@dataclass(frozen=True)
class Act:
    """Another act of the loop.

    It is ``create`` (of an optimizer, a schedule or a scaler), ``clip``, ``clear`` (``zero_grad``), ``reduce`` (of a
    gradient over ranks, by the loop itself), ``cross entropy``, ``schedule``, ``scaler scale``, ``scaler unscale``,
    ``scaler step``, ``scaler update``, ``file read``, ``file write``, ``module loads``, ``optimizer loads``,
    ``schedule loads``, or ``trainer``, the begin of a Trainer.
    """

    kind: str
    update: int
    n_passes: int
    line: str
    of: Any = None
    numbers: dict[str, float] = field(default_factory=dict)


class Finished(BaseException):
    """Ends a script after the experiments; no script catches it by ``except Exception``."""


class Observer:
    """Observes the first updates of a training; a context that leaves nothing behind.

    Args:
        n_updates: Updates after which ``ready`` is called, at the beginning of the next forward pass.
        ready: Function that makes the experiments; it may raise `Finished`.

    Attributes:
        calls: Calls of modules in training.
        passes: Backward passes.
        updates: Updates of optimizers.
        acts: Clippings, steps of schedules and of gradient scalers.
        looks: Calls without gradient.
        modes: Changes of modes by ``train()`` and ``eval()``.
        at_first: With several ranks, `fingerprint` of each parameter before the first update, by its ``id``.
        interrupted: The call before which the experiments are made; None at the end of a script.
        events: Passes, updates and acts together, in their order.
        called: All modules that were called in training.
        checkpoints: Kinds of activation checkpointing that were used: ``reentrant``, ``not reentrant``.
        sees_all: Whether the whole script is observed, from its first line on.
        sees_loop: Whether the loop is the author's, not one that the check makes.
        is_brief: Whether nothing is noted before the first pass, and no copy of all parameters is kept.
        has_ended: Whether the script ended before the number of updates was reached.
        loaders: Loaders of data that were read.
        keys: Hash of the inputs of each kept pass of earlier stages.
        n_earlier: Number of updates of earlier stages.
        n_unseen: Number of updates after the experiments.
        waiting: Function that is called before each forward pass after the experiments, while a further stage is waited
            for: one that begins with a new optimizer, or with a state that one loads. None to wait for none.
        parameters: Parameters with their names, in the order of the arrays of norms.
    """

    def __init__(self, n_updates: int = 20, ready: Callable[[Observer], None] = lambda seen: None) -> None:
        self.n_updates, self._ready = n_updates, ready
        self.acts: list[Act] = []
        self._n_acts = 0  # at the experiments
        self.optimizers: list[Any] = []
        self.loaders: list[Any] = []
        self.keys: list[str] = []
        self.n_earlier = 0
        self.sees_all = self.has_ended = self.is_brief = False
        self.sees_loop = True
        self.waiting: Callable[[], None] | None = None
        self._origins = Origins()
        self._undo: list[Callable[[], None]] = []
        self._begin()

    def _begin(self) -> None:
        """Begin a stage of the training, of whose acts alone earlier ones are known."""
        self.calls: list[Call] = []
        self.passes: list[Backward] = []
        self.updates: list[Update] = []
        self.looks: list[Look] = []
        self.modes: list[Mode] = []
        self.interrupted: Call | None = None
        self.at_first: dict[int, tuple[float, float]] = {}
        self.events: list[Backward | Update | Act] = []
        self.checkpoints: set[str] = set()
        self.called: set[nn.Module] = set()
        self.parameters: dict[int, tuple[str, Tensor]] = {}
        self.optimizers.clear()
        self.n_done = 0
        self._depth = threading.local()
        self._is_passing = False
        self._open: list[Call] = []  # since the last backward pass
        self._inner: list[Tensor] = []  # logits of cross entropies within the last call
        self._tape: Tape | None = None
        self._n_bytes = 0
        self._stepped: set[int] = set()
        self._looked: set[tuple[int, bool, bool]] = set()
        self._stepping: list[Update] = []
        self._sizes: dict[int, float] = {}  # norm of each parameter when it was seen first
        self.n_unseen = 0  # updates after the experiments
        self.is_over = False

    # What the training consists of

    @property
    def roots(self) -> list[nn.Module]:
        """Modules that the loop calls and that have trained parameters, the largest first, without wrappers."""
        found = dict.fromkeys(bare(call.module) for call in self.calls if call.reached)
        return sorted(found, key=lambda each: -sum(p.numel() for p in each.parameters() if p.requires_grad))

    def keys_of_passes(self) -> list[str]:
        """Return a hash of the inputs of each kept pass of this stage."""
        first = [one.calls[0] for one in self.passes if one.calls and one.calls[0].is_kept]
        return [digest(tensors_in([call.args, call.kwargs])) for call in first]

    def _begin_again(self) -> None:
        """Begin another stage, for which the loop itself was not observed."""
        self.keys += self.keys_of_passes()
        self.n_earlier += self.n_done + self.n_unseen
        known = [act for i, act in enumerate(self.acts) if i >= self._n_acts or act.kind in _LASTING]
        self.acts = [replace(act, update=0, n_passes=0) for act in known]
        self.waiting = None
        self._begin()

    @property
    def n_passes(self) -> int:
        """Number of backward passes so far."""
        return len(self.passes)

    @property
    def place_of_loss(self) -> str:
        """Lines of the script that make the labels and compute the loss, or else of its backward pass, in words."""
        tape = next((each.tape for each in self.passes if each.tape is not None and each.tape.is_complete), None)
        loss = [act.line for act in self.acts if act.kind == "cross entropy"][:1]
        loss = [*([] if tape is None else tape.lines), *loss] or [each.line for each in self.passes[:1]]
        labels = [] if tape is None else [line for each in tape.targets for line in self._origins.of(each)]
        labels += [line for call in self.calls[:1] for line in call.lines_of_inputs]
        loss = [*dict.fromkeys(loss)]
        if len(loss) > _MOST_LINES:
            loss = [*loss[: _MOST_LINES // 2], *loss[-_MOST_LINES // 2 :]]
        made = [line for line in dict.fromkeys(labels) if line not in loss][-_MOST_LINES:]
        return f"the loss ({', '.join(loss)})" + (f", with labels from {', '.join(made)}" if made else "")

    def main_calls(self) -> list[Call]:
        """Calls that a backward pass reached, of the largest module that the loop calls."""
        roots = self.roots
        return [call for call in self.calls if roots and call.reached and bare(call.module) is roots[0]]

    def name_of(self, parameter: Tensor) -> str:
        """Name of a parameter in the module that the loop calls."""
        return self.parameters[id(parameter)][0] if id(parameter) in self.parameters else "a tensor of no module"

    def line_of(self, created: Any) -> str:
        """Line of the script that created an optimizer, a schedule or a scaler; empty if it was not seen."""
        return next((act.line for act in self.acts if act.kind == "create" and act.of is created), "")

    def was_moved(self, parameter: Tensor) -> bool:
        """Whether a parameter has changed since it was seen first, by whatever."""
        return _sizes_of([parameter])[0] != self._sizes.get(id(parameter))

    # Context

    def __enter__(self) -> Observer:
        if not (_get_current_function_mode_stack() or self.is_brief):
            self._origins.__enter__()
        leave = hooks.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)

        def remove() -> None:  # torch forgets some of its tables
            leave.remove()
            for name in ("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called"):
                getattr(hooks, name).pop(leave.id, None)

        self._undo += [
            remove,
            hooks.register_module_forward_pre_hook(self._enter).remove,
            optimizer.register_optimizer_step_pre_hook(self._before_step).remove,
            optimizer.register_optimizer_step_post_hook(self._after_step).remove,
        ]
        warnings.filterwarnings("ignore", message="Using `torch.compile.* global hooks")
        entry: Any = warnings.filters[0]
        self._undo.append(lambda: _remove(warnings.filters, entry))
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(nn.Module, "train", self._set_mode)
        self._replace(nn.Module, "compile", self._compile)
        self._replace(DataLoader, "__iter__", self._read)
        self._replace(torch, "save", self._file("write"))
        self._replace(torch, "load", self._file("read"))
        self._replace(nn.Module, "load_state_dict", self._noted("module loads"))
        self._replace(optimizer.Optimizer, "load_state_dict", self._noted("optimizer loads"))
        for kind in {each for each in vars(lr_scheduler).values() if isinstance(each, type)}:
            if "load_state_dict" in vars(kind) and not issubclass(kind, optimizer.Optimizer):
                self._replace(kind, "load_state_dict", self._noted("schedule loads"))
        for name in ("_clip_grads_with_norm_", "clip_grad_value_"):
            self._replace(clip_grad, name, self._clip)
        self._replace(nn.utils, "clip_grad_value_", self._clip)
        self._replace(functional, "cross_entropy", self._cross_entropy)
        for kind in [lr_scheduler.LRScheduler, *_subclasses(lr_scheduler.LRScheduler)]:
            if "step" in vars(kind):
                self._replace(kind, "step", self._noted("schedule"))
        plateau = lr_scheduler.ReduceLROnPlateau
        for owner in (lr_scheduler.LRScheduler, plateau, optimizer.Optimizer, torch.amp.GradScaler):
            self._replace(owner, "__init__", self._noted("create"))
        for name in ("scale", "unscale_", "step", "update"):
            self._replace(torch.amp.GradScaler, name, self._noted(f"scaler {name.rstrip('_')}"))
        self._replace(optimizer.Optimizer, "zero_grad", self._noted("clear"))
        self._replace(nn.Module, "zero_grad", self._noted("clear"))
        if torch.distributed.is_available():
            self._replace(torch.distributed, "all_reduce", self._reduced)
            self._replace(torch.distributed, "destroy_process_group", self._parting)
        self._replace(checkpoint, "_checkpoint_without_reentrant_generator", self._checkpointed)
        own = checkpoint.CheckpointFunction

        def apply(*args: Any) -> Any:
            self.checkpoints.add("reentrant")
            return own.apply(*args)

        checkpoint.CheckpointFunction = SimpleNamespace(apply=apply)  # type: ignore[misc,assignment]
        self._undo.append(lambda: setattr(checkpoint, "CheckpointFunction", own))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close_tape()
        self._origins.is_closed = True
        leave_closed()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a function by one that calls ``around`` with it."""
        own = vars(owner)[name]

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return around(own, *args, **kwargs)

        replacement.__wrapped__ = own  # type: ignore[attr-defined]
        replacement.__name__, replacement.__doc__ = own.__name__, own.__doc__
        setattr(owner, name, replacement)
        # What others have put around it since stays, and passes through.
        self._undo.append(lambda: setattr(owner, name, own) if vars(owner).get(name) is replacement else None)

    # Forward passes

    def _enter(self, module: nn.Module, args: tuple) -> None:
        if _is_traced():
            return
        if self.is_over:
            if self.waiting is not None:
                self.waiting()
            return
        leave_closed()
        depth = getattr(self._depth, "n", 0)
        self._depth.n = depth + 1
        if torch._C._current_graph_task_id() != -1:
            return
        is_frozen = not depth and not any(p.requires_grad for p in module.parameters())
        if not torch.is_grad_enabled() or is_frozen:
            if not depth:
                self._note_look(module, is_frozen=is_frozen)
            return
        if depth:
            self.called.add(module)
            return
        is_idle = not self.updates and len(self.passes) >= _MOST_PASSES
        # Within an update of several optimizers the training goes on, but not for one that is used no more.
        if self.n_done >= self.n_updates + bool(self._stepped) or is_idle:
            self.interrupted = self._call(module)
            self.interrupted.args = args
            self.finish()
            return
        self._origins.is_closed = True
        leave_closed()
        self.called.add(module)
        self._inner.clear()
        self._open.append(self._call(module))

    def _call(self, module: nn.Module) -> Call:
        kind = next((p.device.type for p in module.parameters()), "cpu")
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        in_eval = frozenset(each for each in module.modules() if not each.training)
        return Call(module, (), {}, self.n_done, torch.get_rng_state(), dtype, in_eval, line_of_script())

    def _note_look(self, module: nn.Module, *, is_frozen: bool) -> None:
        """Note a call without gradient."""
        if len(self.looks) >= _MOST_LOOKS or not any(True for _ in module.parameters()):
            return
        momenta = tuple(m.momentum for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase))
        version, frame = sum(p._version for p in module.parameters()), next(frames_of_script(), None)
        known = {} if frame is None else frame.f_globals | frame.f_locals
        name = next((name for name, each in known.items() if each is module), type(bare(module)).__name__)
        self.looks.append(Look(self._call(module), is_frozen, line_of_script(), name, version, momenta))

    def _complete(self, look: Look, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the inputs of a call without gradient, and keep those of the first of each module in each mode."""
        look.call.reached = True
        first = next(tensors_in([args, kwargs]), None)
        if first is not None and first.numel() <= _MOST_SAMPLED:
            look.key = hash(first.detach().cpu().float().numpy().tobytes())
        kind = (id(look.call.module), look.call.module in look.call.in_eval, look.call.update > 0)
        if kind not in self._looked:
            self._looked.add(kind)
            self._keep_inputs(look.call, args, kwargs)

    def _set_mode(self, own: Callable[..., Any], module: nn.Module, mode: bool = True) -> Any:
        """Note who changes the mode of a module; of its parts, which it sets itself, only the module is noted."""
        if getattr(self._depth, "sets_mode", False) or self.is_over:
            return own(module, mode)
        self._depth.sets_mode = True
        try:
            result = own(module, mode)
        finally:
            self._depth.sets_mode = False
        caller = sys._getframe(2)
        if caller.f_code.co_name == "eval" and caller.f_back is not None:
            caller = caller.f_back
        is_ours = not is_library(caller.f_globals.get("__name__", ""))
        self.modes.append(Mode(module, mode, line_of_script(), not is_ours))
        return result

    def _compile(self, own: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> None:
        own(module, *args, **kwargs)
        self.see_compiled(module)

    def see_compiled(self, module: nn.Module) -> None:
        """Observe the calls of a module if it was compiled in place, as its hooks are a part of the compiled code."""
        if (compiled := module._compiled_call_impl) is None:
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter(module, args)
            output = None
            try:
                output = compiled(*args, **kwargs)
            finally:
                self._leave(module, args, kwargs, output)
            return output

        module._compiled_call_impl = call
        self._undo.append(lambda: setattr(module, "_compiled_call_impl", compiled))

    def finish(self) -> None:
        """Make the experiments, once."""
        if not self.is_over:
            self.is_over, self._n_acts = True, len(self.acts)
            self._close_tape()
            self._ready(self)

    def _leave(self, module: nn.Module, args: tuple, *rest: Any) -> None:
        # After an exception of the module, torch passes no keywords.
        kwargs, output = rest if len(rest) == 2 else ({}, None)
        if self.is_over or _is_traced():
            return
        self._depth.n = depth = max(0, getattr(self._depth, "n", 0) - 1)
        if torch._C._current_graph_task_id() != -1:
            return
        look = self.looks[-1] if self.looks and not depth else None
        if look is not None and look.call.module is module and not look.call.reached:
            self._complete(look, args, kwargs)
            return
        if not torch.is_grad_enabled() or not self._open:
            return
        call = self._open[-1]
        if isinstance(module, nn.Embedding) and depth and args and isinstance(args[0], Tensor):
            name = next((name for name, each in call.module.named_modules() if each is module), "")
            call.tokens.setdefault(name, []).append(local_part(args[0].detach()).clone())
        if depth or call.module is not module or output is None:
            return
        call.lines_of_inputs = [line for each in tensors_in([args, kwargs]) for line in self._origins.of(each)]
        self._keep_inputs(call, args, kwargs)
        tensors = [each for each in tensors_in(output) if each.is_floating_point()]
        tensors += self._inner if not any(each.ndim for each in tensors) else []  # of a module that returns its loss
        self._inner.clear()
        call.output_shapes = [tuple(each.shape) for each in tensors]
        call.has_nan = any(bool(local_part(each.detach()).isnan().any()) for each in tensors[:_MOST_OUTPUTS])
        for i, tensor in enumerate(tensors[:_MOST_OUTPUTS]):
            if tensor.grad_fn is not None:
                self._follow(call, i, tensor)
        is_taped = self.n_done < _N_TAPED or self.n_done == self.n_updates - 1
        if is_taped and self._tape is None and not _get_current_function_mode_stack():
            self._tape = Tape()
            self._tape.__enter__()
        if self._tape is not None:
            self._tape.add_outputs(call, output)

    def _keep_inputs(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> None:
        """Keep copies of the inputs while they are small."""
        size = sum(t.numel() * t.element_size() for t in tensors_in([args, kwargs]))
        if self._n_bytes + size <= MOST_BYTES:
            self._n_bytes += size
            call.args, call.kwargs = _copied(args), _copied(kwargs)
            call.is_kept = True

    def _follow(self, call: Call, i: int, tensor: Tensor) -> None:
        """Read labels from the gradient that arrives at an output."""
        # Held until the gradient arrives; the loop may have released its own reference by then.
        held = [tensor.detach()]
        node, place = tensor.grad_fn, tensor.output_nr
        assert node is not None
        is_loss = not tensor.ndim
        if is_loss:
            call.loss = float(tensor.detach())

        def arrive(gradients: tuple[Tensor | None, ...]) -> None:
            if not self._is_passing:  # a derivative by torch.autograd.grad is no pass of the training
                return
            gradient = gradients[place] if place < len(gradients) else None
            call.reached = True
            if gradient is None or is_loss or i in call.labels or not held:
                return
            logits, gradient = held.pop(), gradient.detach()
            if not bool(torch.isfinite(gradient).all()):
                return
            if float(gradient.abs().amax()) > 64 * torch.finfo(gradient.dtype).tiny:  # sums of subnormal numbers round
                call.class_axes[i] = axes = _axes_that_sum_to_zero(gradient)
                classes = [axis for axis in axes if axis]
                if classes and gradient.ndim - 1 not in classes:  # such as (batch, class, token)
                    logits, gradient = logits.movedim(classes[0], -1), gradient.movedim(classes[0], -1)
            with contextlib.suppress(Exception):  # outputs may be of any kind, and an observation never ends a training
                if (found := read_labels(*(by_token(each, call.tokens) for each in (logits, gradient)))) is not None:
                    call.labels[i] = found

        node.register_prehook(arrive)

    # Backward passes

    def _backward(self, own: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self.is_over or threading.current_thread() is not threading.main_thread():
            own(tensors, *args, **kwargs)
            return
        tape, self._tape = self._tape, None
        roots = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        root = roots[0] if len(roots) == 1 and isinstance(roots[0], Tensor) and roots[0].numel() == 1 else None
        if tape is not None:
            tape.close(root)
        self._find_parameters()
        before, line = self._norms(), line_of_script()
        self._is_passing = True
        try:
            own(tensors, *args, **kwargs)
        finally:
            self._is_passing = False
        calls = [call for call in self._open if call.reached]
        self._open = [call for call in self._open if not call.reached]
        self.calls += calls
        loss = float("nan") if root is None else float(root.detach())
        scale = next((a.numbers.get("scale", 1.0) for a in reversed(self.acts) if a.kind == "scaler scale"), 1.0)
        is_finite = all(bool(torch.isfinite(t.detach()).all()) for t in roots if isinstance(t, Tensor))
        self.passes.append(Backward(self.n_done, calls, loss, scale, before, self._norms(), tape, line, is_finite))
        self.events.append(self.passes[-1])

    def _close_tape(self) -> None:
        if self._tape is not None:
            self._tape.close(None)
            self._tape = None

    def _find_parameters(self) -> None:
        """Note the parameters of modules that are called, and of optimizers."""
        for call in self._open:
            self._add((n, p) for n, p in bare(call.module).named_parameters() if p.requires_grad)

    def _add(self, named: Iterable[tuple[str, Tensor]]) -> None:
        new = {id(p): (name, p) for name, p in named if id(p) not in self.parameters}
        self.parameters |= new
        self._sizes |= zip(new, _sizes_of([p for _, p in new.values()]), strict=True)

    def _norms(self) -> np.ndarray:
        """Return the norm of the gradient of each parameter; NaN without one."""
        found = np.full(len(self.parameters), np.nan)
        held = [(i, p.grad.detach()) for i, (_, p) in enumerate(self.parameters.values()) if p.grad is not None]
        held = [(i, g.coalesce().values() if g.is_sparse else local_part(g)) for i, g in held]
        if held:
            norms = torch._foreach_norm([g.float() if g.element_size() < 4 else g for _, g in held])
            found[[i for i, _ in held]] = torch.stack([n.cpu() for n in norms]).double().numpy()
        return found

    # Updates

    def _before_step(self, of: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.is_over:
            self.n_unseen += 1
            return None
        leave_closed()
        return acting_on_gradients(of, args, kwargs, lambda loss: self._note_update(of))

    def _note_update(self, of: Any) -> None:
        is_new = not any(each is of for each in self.optimizers)
        if is_new:
            self.optimizers.append(of)
        if id(of) in self._stepped:  # another update begins
            self._end_update()
        rates = [float(group.get("lr", float("nan"))) for group in of.param_groups]
        held = [p for group in of.param_groups for p in group["params"]]
        for call in self.passes[-1].calls if self.passes else ():
            if is_split(call.module):  # shards take the place of gathered parameters after a pass
                self._add(each for each in bare(call.module).named_parameters() if each[1].requires_grad)
        self._add((f"an optimized tensor of shape {tuple(p.shape)}", p) for p in held)
        if is_shared():
            for p in held:
                if id(p) not in self.at_first and (is_new or not self.n_done):
                    self.at_first[id(p)] = fingerprint(p)
        copies = self._copies(of)
        update = Update(self.n_done, of, rates, self._norms(), copies, line_of_script())
        for outer in self._stepping:
            outer.wraps = True
        self._stepping.append(update)
        self.updates.append(update)
        self.events.append(update)
        size = sum(p.numel() * p.element_size() for p in held)
        are_whole = not any(hasattr(p, "to_local") for p in held)
        if self.n_done == self.n_updates - 1 and size <= MOST_BYTES and not self.is_brief and are_whole:
            update.before = [(p, p.detach().clone()) for p in held if not _is_released(p)]
        if sum(each.optimizer is of for each in self.updates) == 1:
            self._note_trainer(of)

    def _note_trainer(self, of: Any) -> None:
        """Note at which step a Trainer begins with an optimizer, and how many tensors have a state."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            state = getattr(frame.f_locals.get("self"), "state", None)
            step, epoch = getattr(state, "global_step", None), getattr(state, "epoch", None)
            if frame.f_globals.get("__name__") == "transformers.trainer" and isinstance(step, int):
                numbers = {"step": float(step), "epoch": float(epoch or 0), "n_states": float(len(of.state))}
                self._note("trainer", of, numbers)
                return
            frame = frame.f_back

    def _copies(self, of: Any) -> list[Copy]:
        """Copy some parameters of an optimizer, evenly spaced, with gradients and states."""
        held = [(p, g) for g in of.param_groups for p in g["params"] if p.numel() <= _MOST_SAMPLED]
        held = [(p, g) for p, g in held if not _is_released(p)]
        chosen = held[:: max(1, len(held) // _N_SAMPLED)][:_N_SAMPLED]
        states, scale = getattr(of, "state", {}), getattr(of, "grad_scale", None)  # of fused kernels
        return [
            Copy(
                p,
                local_part(p.detach()).clone(),
                None if (g := _part_of_gradient(p)) is None else g.clone() if scale is None else g / scale,
                copy.deepcopy({name: _local(value) for name, value in states[p].items()}) if p in states else {},
                {name: value for name, value in group.items() if name != "params"},
                is_part=hasattr(p, "to_local"),
            )
            for p, group in chosen
        ]

    def _after_step(self, of: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self._stepping = [each for each in self._stepping if each.optimizer is not of]
        if self.is_over or not self.updates or self.updates[-1].optimizer is not of:
            return
        update = self.updates[-1]
        for each in update.copies:
            each.after = local_part(each.parameter.detach()).clone()
        update.cosine = _cosine(update.copies)
        for earlier in self.updates[:-3]:
            earlier.copies = []
        self._stepped.add(id(of))
        if len(self._stepped) >= len(self.optimizers):
            self._end_update()

    def _end_update(self) -> None:
        self._stepped.clear()
        self.n_done += 1

    # Other acts

    def _clip(self, own: Callable[..., Any], parameters: Any, limit: Any, *args: Any, **kwargs: Any) -> Any:
        leave_closed()
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = args[0] if args and own.__name__ == "_clip_grads_with_norm_" else None
        numbers = {"limit": float(limit), "norm": float("nan") if norm is None else float(norm)}
        self._note("clip", [id(p) for p in parameters], numbers)
        return own(parameters, limit, *args, **kwargs)

    def _read(self, own: Callable[..., Any], loader: Any) -> Any:
        if not self.is_over and not any(each is loader for each in self.loaders):
            self.loaders.append(loader)
        return own(loader)

    def _noted(self, kind: str) -> Callable[..., Any]:
        def call(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            of = args[0] if args else None
            if kind == "scaler step":  # before the update that it may make
                self._note(kind, of, {})
                return own(*args, **kwargs)
            result = own(*args, **kwargs)
            if torch.compiler.is_compiling():
                return result
            is_begun = kind == "optimizer loads" or (kind == "create" and isinstance(of, optimizer.Optimizer))
            if is_begun and self.is_over and self.waiting is not None:
                self._begin_again()
            scale = getattr(of, "_scale", None) if kind.startswith("scaler") else None
            numbers = {} if scale is None else {"scale": float(scale)}
            if kind == "optimizer loads":
                numbers["n_states"] = float(len(getattr(of, "state", ())))
            if kind == "schedule" and isinstance(of, lr_scheduler.ReduceLROnPlateau) and len(args) > 1:
                numbers["metric"] = float(args[1])
            self._note(kind, None if isinstance(of, Tensor) else of, numbers)
            return result

        return call

    def _cross_entropy(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("input")
        is_within = bool(self._open and getattr(self._depth, "n", 0)) and torch._C._current_graph_task_id() == -1
        if isinstance(given, Tensor) and is_within and not (self.is_over or _is_traced()):
            self._inner.append(given)
        return self._noted("cross entropy")(own, *args, **kwargs)

    def _reduced(self, own: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a gradient that the loop itself adds over ranks."""
        if not self.is_over and any(p.grad is tensor for _, p in self.parameters.values()):
            self._note("reduce", id(tensor), {})
        return own(tensor, *args, **kwargs)

    def _parting(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make the experiments before ranks can no longer exchange messages."""
        try:
            if self.passes and self.sees_all and not self.is_over:
                self.has_ended = True
                self.finish()
        finally:
            own(*args, **kwargs)

    def _checkpointed(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.checkpoints.add("not reentrant")
        return own(*args, **kwargs)

    def _file(self, kind: str) -> Callable[..., Any]:
        """Note what a file holds that is read or written, and whether the script itself does it."""

        def call(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            path = args[1 if kind == "write" else 0] if len(args) > (kind == "write") else kwargs.get("f")
            held = _contents(result if kind == "read" else args[0] if args else kwargs.get("obj"))
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_globals.get("__name__") == __name__:
                frame = frame.f_back
            is_ours = frame is not None and not is_library(frame.f_globals.get("__name__", ""))
            self._note(f"file {kind}", str(path), held | {"by_script": float(is_ours)})
            return result

        return call

    def _note(self, kind: str, of: Any, numbers: dict[str, float]) -> None:
        if not self.is_over or self.waiting is not None:
            self.acts.append(Act(kind, self.n_done, len(self.passes), line_of_script(), of, numbers))
            self.events.append(self.acts[-1])


@torch.no_grad()
def _cosine(copies: Sequence[Copy]) -> float:
    """Return the cosine of gradients and changes of parameters, without what decoupled weight decay may take."""
    along = size = length = 0.0
    for each in copies:
        if each.gradient is not None and each.after is not None and not each.gradient.is_sparse:
            decay = float(each.group.get("lr", 0.0)) * float(each.group.get("weight_decay", 0.0) or 0.0)
            g, before = each.gradient.double(), each.before.double()
            change = each.after.double() - before * (1 - decay)
            along, size = along + float((g * change).sum()), size + float(g.square().sum())
            length += float(change.square().sum())
    return along / (size * length) ** 0.5 if size * length > 0 else float("nan")


def _part_of_gradient(parameter: Any) -> Tensor | None:
    """Return this rank's part of a gradient; None if there is none, or other ranks have summands of it."""
    gradient, placements = parameter.grad, getattr(parameter, "placements", None)
    if gradient is None or placements is None:
        return None if gradient is None else gradient.detach()
    others = [a for a, b in zip(gradient.placements, placements, strict=True) if a != b]
    if not all(each.is_replicate() for each in others):
        return None
    return local_part(gradient.detach().redistribute(placements=placements) if others else gradient.detach())


def _local(value: Any) -> Any:
    return local_part(value) if isinstance(value, Tensor) else value


def _contents(value: Any, depth: int = 3) -> dict[str, float]:
    """Return how many states of optimizers, schedules and generators of random numbers a file holds."""
    found = {"optimizer": 0.0, "schedule": 0.0, "generator": 0.0}
    if isinstance(value, Tensor):
        found["generator"] = float(
            value.dtype == torch.uint8 and value.ndim == 1 and value.numel() == torch.get_rng_state().numel()
        )
    elif isinstance(value, Mapping) and "param_groups" in value and "state" in value:
        found["optimizer"] = float(bool(value["state"]))
    elif isinstance(value, Mapping) and "last_epoch" in value:
        found["schedule"] = 1.0
    elif depth and isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            for name, n in _contents(part, depth - 1).items():
                found[name] += n
    return found


def _axes_that_sum_to_zero(gradient: Tensor) -> list[int]:
    """Return the axes over which a gradient sums to 0 up to rounding, with that of the batch, 0."""
    g = gradient.double()
    sums = [(axis, g.sum(axis).abs().amax(), g.abs().sum(axis).amax()) for axis in range(g.ndim)]
    limit = max(1e-3, 64 * torch.finfo(gradient.dtype).eps)
    return [axis for axis, total, size in sums if float(total) <= limit * float(size)]


def by_token(output: Tensor, tokens: Mapping[str, Sequence[Tensor]]) -> Tensor:
    """Return an output with the axes (batch, token) of ids that embeddings received if they were flattened to one."""
    shapes = (ids.shape for each in tokens.values() for ids in each if ids.ndim == 2 and ids.shape[1] > 1)
    shape = next((each for each in shapes if output.ndim == 2 and each.numel() == len(output)), None)
    return output if shape is None else output.reshape(*shape, -1)


def _is_traced() -> bool:
    """Whether tensors have no values now, under compilation or vmap and grad of torch.func, or belong to a thread."""
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return torch.compiler.is_compiling() or is_transformed or threading.current_thread() is not threading.main_thread()


def _remove(values: Any, value: Any) -> None:
    """Remove a value from a list if it is still there."""
    if value in values:
        values.remove(value)


def _subclasses(kind: type) -> set[type]:
    children: list[type] = kind.__subclasses__()
    return {*children}.union(*map(_subclasses, children))


def _sizes_of(tensors: Sequence[Tensor]) -> list[float]:
    """Return norms that change with any entry."""
    return [float(torch.linalg.vector_norm(_values(t), dtype=torch.float64)) for t in tensors]


def _is_released(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor was released, as FSDP does with what it gathered for a pass."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_plain and bool(tensor.numel()) and not tensor.untyped_storage().nbytes()


def _values(tensor: Tensor) -> Tensor:
    """Return the entries of a tensor on this rank; none if its memory was released."""
    return tensor.new_zeros(0) if _is_released(tensor) else local_part(tensor.detach())


def _copied(value: Any) -> Any:
    """Return nested containers with copies of their tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict or type(value).__name__ in ("BatchEncoding", "OrderedDict"):
        return {name: _copied(each) for name, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_copied(each) for each in value)
    return value


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of tensors with several values; empty if there are none."""
    known = [t.detach().cpu().contiguous() for t in tensors if t.numel() > 1]
    values = [(t.float() if t.dtype == torch.bfloat16 else t).numpy().tobytes() for t in known]
    return hashlib.sha256(b"".join(values)).hexdigest() if values else ""


@torch.no_grad()
def fingerprint(tensor: Tensor) -> tuple[float, float]:
    """Return norm and a projection of a tensor, of a DTensor of its part on this rank, by which ranks are compared."""
    values = _values(tensor).flatten().double()
    return float(values.norm()), float(values @ torch.arange(len(values), device=values.device).double().cos())
