"""Settings of a run at each update, and their unplanned changes."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache, partial
from numbers import Real
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.callbacks.alarms.settings_sentinel import Plan, SettingsChange, SettingsSentinel
from workbench.callbacks.recorder.joint_optimizer import JointOptimizer
from workbench.formatting import counted, listed
from workbench.io.provenance import versions
from workbench.models.calling import bare, innermost
from workbench.models.readable_weights import send_arrays

#: Numbers in an optimizer's groups that are settings. Others may be its state, such as the counters and estimates that
#: some optimizers store there; bools are settings regardless of their names.
_OPTIONS = (
    *("weight_decay", "betas", "beta2_decay", "beta3", "momentum", "dampening", "alpha", "rho", "lambd", "lr_decay"),
    *("momentum_decay", "eps", "eps1", "eps2", "etas", "step_sizes", "ns_steps", "max_grad_norm"),
)
#: Keys of the groups in which schedulers store the learning rates that they have planned.
_NOTED = ("initial_lr", "max_lr", "swa_lr")


def settings_of(optimizer: Any, model: nn.Module, **known: Any) -> dict[str, Any]:
    """Return the settings of a run that can be read in any training loop, by the names that `SettingsSentinel` uses.

    No call waits for a device: a learning rate or option that is a tensor on another device than the CPU is None (a
    loop that reads it anyway may pass it as ``learning_rate``). Autocast is the current one; since it has usually ended
    when the optimizer acts, a loop that uses it passes ``autocast`` as ``"off"`` or a dtype.

    Returns:
        JSON values; None if unknown. Settings of the optimizer's groups are lists with one entry per group. The cost is
        one pass over modules and parameters, about 1 microsecond each.
    """
    inner, module = innermost(optimizer), bare(model)
    found: dict[str, Any] = {"optimizer": inner.name if isinstance(inner, JointOptimizer) else type(inner).__name__}
    found |= _options(inner.param_groups) | _optimized(inner.param_groups) | _model(module) | _arithmetic(inner)
    return found | _version_of_packages(versions()) | {name: _plain(value) for name, value in known.items()}


@lru_cache(maxsize=1)
def _version_of_packages(all_versions: str) -> dict[str, str]:
    packages = (entry.rpartition(" ") for entry in all_versions.split(", ") if entry)
    return {f"version of {name}": version for name, _, version in packages}


def _options(groups: list[dict[str, Any]]) -> dict[str, Any]:
    flags = {name for group in groups for name, value in group.items() if isinstance(value, bool)}
    names = flags | {name for name in _OPTIONS if any(name in group for group in groups)}
    found: dict[str, Any] = {name: [_plain(group.get(name)) for group in groups] for name in sorted(names)}
    found["learning_rate"] = [_plain(group.get("lr")) for group in groups]
    noted = [[_plain(group[name]) for name in _NOTED if group.get(name) is not None] for group in groups]
    found["noted_rates"] = [[rate for rate in rates if rate is not None] for rates in noted]
    return found


def _optimized(groups: list[dict[str, Any]]) -> dict[str, Any]:
    parameters = [p for group in groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return {
        "n_groups": len(groups),
        "n_optimized": sum(p.numel() for p in parameters),
        "gradient_dtype": _distinct(g.dtype for g in gradients),
    }


def _model(model: nn.Module) -> dict[str, Any]:
    n_trainable = n_in_eval = 0
    dtypes, devices, attention = set(), set(), {}
    for module in model.modules():
        n_in_eval += not module.training
        if (config := vars(module).get("config")) is not None:
            attention[id(config)] = getattr(config, "_attn_implementation", None)
        for parameter in (each for each in module._parameters.values() if each is not None):
            n_trainable += parameter.numel() * parameter.requires_grad
            dtypes.add(parameter.dtype)
            devices.add(parameter.device)
    return {
        "n_trainable": n_trainable,
        "is_training": model.training,
        "n_in_eval": n_in_eval,
        "parameter_dtype": _distinct(dtypes),
        "device": _distinct(devices),
        "attention": _distinct(name for name in attention.values() if name is not None),
    }


def _arithmetic(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings of torch that change results."""
    kind = next((p.device.type for group in optimizer.param_groups for p in group["params"]), "cpu")
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "autocast": _plain(torch.get_autocast_dtype(kind)) if is_cast else "off",
        "default_dtype": _plain(torch.get_default_dtype()),
        # Unlike allow_tf32, these can be read regardless of how they were set.
        "matmul_precision": cuda.matmul.fp32_precision,
        "convolution_precision": attrgetter("conv.fp32_precision")(cudnn),
        "cpu_matmul_precision": attrgetter("mkldnn.matmul.fp32_precision")(torch.backends),
        "reduces_in_bfloat16": _plain(cuda.matmul.allow_bf16_reduced_precision_reduction),
        "reduces_in_float16": _plain(cuda.matmul.allow_fp16_reduced_precision_reduction),
        "cudnn_is_deterministic": cudnn.deterministic,
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        "flash_attention": cuda.flash_sdp_enabled(),
        "efficient_attention": cuda.mem_efficient_sdp_enabled(),
        "cudnn_attention": cuda.cudnn_sdp_enabled(),
    }


def _distinct(values: Iterable[Any]) -> str | None:
    """Return the distinct values as text, such as "bfloat16 and float32"; None if there are none."""
    return " and ".join(sorted({str(_plain(value)) for value in values})) or None


def _plain(value: Any) -> Any:
    """Return a value as a JSON value; None if reading it would have to wait for a device."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else None
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, str | bool | int | float | None):
        return value
    return float(value) if isinstance(value, Real) else str(value)


#: Updates between two checks, checks in a row that a tensor must fail, and largest number of tensors that are named.
_EVERY, _N_CHECKS, _N_NAMED = 50, 5, 3
#: Settings that list such tensors; their value is this if there is none.
NO_GRADIENT, NOT_CHANGED, NONE = "tensors_without_gradient", "unchanged_tensors", "none"


class SingleTensors:
    """Check of every trained tensor by itself, every 50 updates; five checks in a row decide.

    Tensors of modules that the model does not call, such as an unused pooling layer, count only after they have had a
    gradient. Sharded tensors and sparse gradients are not checked.
    """

    def __init__(self, model: nn.Module, called: Collection[str]) -> None:
        self._model, self._called = model, called
        self._n_checks = 0
        self._n_dead, self._n_still = Counter[str](), Counter[str]()
        self._reached: set[str] = set()
        self._norms: dict[str, float] = {}
        self._found = {NO_GRADIENT: NONE, NOT_CHANGED: NONE}
        self._finish: Callable[[], None] | None = None

    @torch.no_grad()
    def read(self, step: int) -> Mapping[str, str]:
        """Return the names of such tensors, right before the update of a step."""
        if (finish := self._finish) is not None:
            self._finish = None
            finish()
        if (step + 1) // _EVERY > self._n_checks:
            self._n_checks = (step + 1) // _EVERY
            self._check({name: p for name, p in self._model.named_parameters() if _is_checked(p)})
        return self._found

    def _check(self, tensors: dict[str, Tensor]) -> None:
        gradients = {name: p.grad for name, p in tensors.items() if p.grad is not None}
        if not gradients:
            return
        largest = torch._foreach_norm([*gradients.values()], float("inf"))
        lengths = torch._foreach_norm([p.detach() for p in tensors.values()])
        is_late = largest[0].device.type != "cpu"  # then the host does not wait; the next call evaluates them
        read = send_arrays([*largest, *lengths], waits=not is_late)
        finish = partial(self._evaluate, [*tensors], [*gradients], read)
        if is_late:
            self._finish = finish
        else:
            finish()

    def _evaluate(self, tensors: list[str], gradients: list[str], read: Callable[[], list[np.ndarray]]) -> None:
        numbers = [value.item() for value in read()]
        sizes = dict(zip(gradients, numbers, strict=False))
        norms = dict(zip(tensors, numbers[len(gradients) :], strict=True))
        self._reached |= {name for name, size in sizes.items() if size != 0}
        still = {name for name, norm in norms.items() if norm == self._norms.get(name) and sizes.get(name, 0) != 0}
        for name in tensors:
            is_used = name in self._reached or name.rpartition(".")[0] in self._called
            self._n_dead[name] = self._n_dead[name] + 1 if sizes.get(name, 0) == 0 and is_used else 0
            self._n_still[name] = self._n_still[name] + 1 if name in still else 0
        self._norms = norms
        for setting, counts in ((NO_GRADIENT, self._n_dead), (NOT_CHANGED, self._n_still)):
            names = [name for name in tensors if counts[name] >= _N_CHECKS]
            self._found[setting] = _named(names) if len(names) < len(tensors) else NONE


def _is_checked(parameter: Tensor) -> bool:
    gradient = parameter.grad
    is_plain = not hasattr(parameter, "to_local") and (gradient is None or gradient.layout == torch.strided)
    return parameter.requires_grad and bool(parameter.numel()) and is_plain


def _named(names: list[str]) -> str:
    if len(names) <= _N_NAMED:
        return listed(names) if names else NONE
    return f"{', '.join(names[: _N_NAMED - 1])} and {counted(len(names) - _N_NAMED + 1, 'other')}"


#: Updates with other learning rates that are remembered until the settings are read.
_N_BETWEEN = 1024
#: Metrics of an update that are settings.
_LOGGED = ("batch_size", "auxiliary_loss")


class SettingsWatch:
    """Comparison of settings that are read right before each update, with the changes reported after it."""

    def __init__(
        self, model: nn.Module, optimizer: JointOptimizer, planned: Mapping[str, Plan], called: Collection[str] = ()
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._tensors = SingleTensors(model, called)
        self.sentinel = SettingsSentinel(planned=planned)
        self._found: dict[str, Any] = {}
        #: Learning rates and the step at which they were noted, and those noted since the settings were read.
        self._rates: list[Any] = []
        self._rates_at = -1
        self._between: deque[tuple[int, list[Any]]] = deque(maxlen=_N_BETWEEN)
        #: Whether metrics that are settings are expected from the update whose settings were read.
        self.waits = False

    def read(self, step: int, autocast: torch.dtype | None, n_batches: int) -> None:
        """Read the settings right before the update of a step."""
        known: dict[str, Any] = {"autocast": "off" if autocast is None else autocast}
        known |= self._tensors.read(step)
        self._found = settings_of(self.optimizer, self.model, **known, accumulation=n_batches or None)
        self._rates, self._rates_at = self._found["learning_rate"], step

    def note_rates(self, step: int) -> None:
        """Remember the learning rates of an update whose other settings are not read, if they have changed."""
        rates = [group.get("lr") for group in self.optimizer.param_groups]
        if rates != self._rates and all(isinstance(rate, int | float) for rate in rates):
            if 0 <= self._rates_at < step - 1:  # so that the change is one of a single update
                self._between.append((step - 1, self._rates))
            self._between.append((step, rates))
            self._rates, self._rates_at = rates, step

    def changes(self, step: int) -> list[SettingsChange]:
        """Return the changes of the settings read before; called after the update, empty if it was not made."""
        settings, self._found = self._found, {}
        self.waits = bool(settings)
        changes = []
        while settings and self._between:
            at, rates = self._between.popleft()
            changes += self.sentinel.observe(at, {"learning_rate": rates, "noted_rates": settings["noted_rates"]})
        return changes + self.sentinel.observe(step, settings)

    def logged_changes(self, step: int, numbers: Mapping[str, float]) -> list[SettingsChange]:
        """Return the changes of settings that are metrics of the update; called when all metrics are known."""
        if not self.waits:
            return []
        self.waits = False
        return self.sentinel.observe(step, {name: numbers.get(name, math.nan) for name in _LOGGED})
