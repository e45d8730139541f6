"""Calls of any model with inputs of any supported form."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.errors import SnapshotError, WorkbenchError
from workbench.models.config_options import Option, config_options
from workbench.models.refused_inputs import reason_for

if TYPE_CHECKING:
    from torch import Tensor


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model with inputs of any supported form.

    Args:
        model: Module to call.
        inputs: A tensor, passed as the first argument (an encoder-decoder model also receives the same tokens for its
            decoder, or its start token); a mapping, passed as keywords; or a tuple or list, passed by position. A model
            without an argument ``input_ids`` receives them first, without a mask that only marks padding at the end.

    Returns:
        The output of the model.

    Raises:
        SnapshotError: If a model that accepts only tokens receives a mask that hides tokens elsewhere than at the end.
    """
    with config_options(_no_cache(model)):
        if isinstance(inputs, Mapping):
            return model(**inputs) if _takes(model, inputs) else model(_tokens_alone(model, inputs))
        if isinstance(inputs, tuple | list):
            return model(*inputs)
        return model(inputs, **_decoder_tokens(model, inputs))


def _no_cache(model: nn.Module) -> list[Option]:
    """Return the options that keep a Hugging Face model from filling a cache, which some models do not support."""
    main = getattr(model, "config", None)
    parts = (getattr(main, name, None) for name in getattr(main, "sub_configs", ()))
    return [(config, "use_cache", False) for config in (main, *parts) if getattr(config, "use_cache", None) is True]


def _takes(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return whether the inputs can be passed by keyword; only token ids can be passed otherwise."""
    known = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    return takes_any or "input_ids" not in inputs or "input_ids" in known


def _tokens_alone(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    mask = inputs.get("attention_mask")
    # In a causal model, padding after a token does not change its state; padding before it does.
    if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise SnapshotError(
            f"{type(model).__name__} accepts no attention mask, but this batch is padded before tokens; pad it at the "
            "end."
        )
    return inputs["input_ids"]


def _decoder_tokens(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return {}
    if "decoder_input_ids" not in inspect.signature(model.forward).parameters:
        return {}
    if not inputs.is_floating_point():
        return {"decoder_input_ids": inputs}
    start = getattr(config, "decoder_start_token_id", None) or 0
    return {"decoder_input_ids": torch.full((inputs.shape[0], 1), start, device=inputs.device)}


def run_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model as `call_model` does, and explain any exception of the model in one sentence.

    Raises:
        SnapshotError: If the model cannot run on the inputs; its cause is the exception of the model.
    """
    try:
        return call_model(model, inputs)
    except WorkbenchError:
        raise
    except Exception as error:
        raise SnapshotError(reason_for(model, inputs, error)) from error


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's inputs: that of its parameters, or where offloaded parameters are moved to."""
    parameters = (parameter.device for parameter in model.parameters() if parameter.device.type != "meta")
    if (device := next(parameters, None)) is not None:
        return device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    places = (getattr(hook, "execution_device", None) for hook in hooks)
    place = next((place for place in places if place is not None), None)
    return torch.device("cpu" if place is None else place)


def on_device_of(model: nn.Module, batch: Any) -> Any:
    """Return the batch on the device of the model's inputs."""
    device = device_of(model)
    if isinstance(batch, torch.Tensor):
        # The copy may be asynchronous: memory that is not pinned is read before the call returns.
        is_upload = batch.device.type == "cpu" and device.type == "cuda"
        return batch.to(device, non_blocking=is_upload and not batch.is_pinned())
    if isinstance(batch, tuple | list):
        return type(batch)(on_device_of(model, item) for item in batch)
    if hasattr(batch, "items"):
        return {name: on_device_of(model, item) for name, item in batch.items()}
    return batch


def named_arguments(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a call in the form for `call_model`: a tuple, or a mapping of keywords."""
    if not kwargs:
        return args
    names = [*inspect.signature(model.forward).parameters]
    return dict(zip(names, args, strict=False)) | kwargs
