"""Current settings of a run, read from its optimizer and model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from numbers import Real
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from workbench.callbacks.recorder.joint_optimizer import JointOptimizer
from workbench.io.provenance import versions
from workbench.models.wrapping import bare, innermost

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

    Args:
        optimizer: Optimizer, possibly wrapped.
        model: Model that is trained, possibly wrapped.
        **known: Further settings, or values to use instead of those read: ``batch_size``, ``accumulation``,
            ``auxiliary_loss``, ``seed``, ``clip_norm``, ``code_version``, weights of the terms of the loss, and others.

    Returns:
        JSON values; None if unknown. Settings of the optimizer's groups are lists with one entry per group. The cost is
        one pass over modules and parameters, about 1 microsecond each.

    Example:
        >>> import torch
        >>> from workbench.callbacks.recorder.current_settings import settings_of
        >>> model = torch.nn.Linear(4, 2)
        >>> settings = settings_of(torch.optim.AdamW(model.parameters(), lr=0.01), model, seed=7)
        >>> settings["learning_rate"], settings["n_optimized"], settings["parameter_dtype"], settings["seed"]
        ([0.01], 10, 'float32', 7)
    """
    inner, module = innermost(optimizer), bare(model)
    found: dict[str, Any] = {"optimizer": inner.name if isinstance(inner, JointOptimizer) else type(inner).__name__}
    found |= _options(inner.param_groups) | _optimized(inner.param_groups) | _model(module) | _arithmetic(inner)
    found |= {f"version of {name}": version for name, version in _packages()}
    return found | {name: _plain(value) for name, value in known.items()}


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
        "gradient_dtype": _named(g.dtype for g in gradients),
    }


def _model(model: nn.Module) -> dict[str, Any]:
    n_trainable = n_in_eval = 0
    dtypes, devices, attention = set(), set(), {}
    for module in model.modules():
        n_in_eval += not module.training
        if (config := vars(module).get("config")) is not None:
            attention[id(config)] = getattr(config, "_attn_implementation", None)
        for parameter in _own(module):
            n_trainable += parameter.numel() * parameter.requires_grad
            dtypes.add(parameter.dtype)
            devices.add(parameter.device)
    return {
        "n_trainable": n_trainable,
        "is_training": model.training,
        "n_in_eval": n_in_eval,
        "parameter_dtype": _named(dtypes),
        "device": _named(devices),
        "attention": _named(name for name in attention.values() if name is not None),
    }


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in module._parameters.values() if parameter is not None)


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


def _packages() -> list[tuple[str, str]]:
    pairs = (entry.rpartition(" ") for entry in versions().split(", ") if entry)
    return [(name, version) for name, _, version in pairs]


def _named(values: Iterable[Any]) -> str | None:
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
