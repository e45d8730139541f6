"""Call any model with inputs of any supported form; a refusal becomes an error of one sentence."""

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
        inputs: A tensor, passed first (an encoder-decoder model that would miss its decoder's tokens gets the same
            tokens there, or its start token); a mapping, passed as keywords; or a tuple or list, passed by position.
            A model that knows no ``input_ids`` gets them first, without a mask that only marks padding at the end.

    Returns:
        The model's output.

    Raises:
        SnapshotError: If a model that takes tokens alone is given a mask that hides more than the end.
    """
    with config_options(_no_cache(model)):
        if isinstance(inputs, Mapping):
            return model(**inputs) if _takes(model, inputs) else model(_tokens_alone(model, inputs))
        if isinstance(inputs, tuple | list):
            return model(*inputs)
        return model(inputs, **_decoder_tokens(model, inputs))


def _no_cache(model: nn.Module) -> list[Option]:
    """The options that keep a Hugging Face model from filling a cache, which some models have no room for."""
    whole = getattr(model, "config", None)
    parts = (getattr(whole, name, None) for name in getattr(whole, "sub_configs", ()))
    return [(config, "use_cache", False) for config in (whole, *parts) if getattr(config, "use_cache", None) is True]


def _takes(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether the inputs may be passed by keyword; only for token ids is there another way."""
    known = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    return takes_any or "input_ids" not in inputs or "input_ids" in known


def _tokens_alone(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    mask = inputs.get("attention_mask")
    # What follows a token changes nothing in a causal model; what hides in front of it does.
    if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise SnapshotError(
            f"{type(model).__name__} takes tokens without a mask, but this batch is padded in front of tokens; "
            "pad it at the end."
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


def run_foreign(model: nn.Module, inputs: Any) -> Any:
    """`call_model` on inputs that the model may refuse: what it raises becomes one sentence.

    Raises:
        SnapshotError: If the model cannot run on the inputs; the model's own error is its cause.
    """
    try:
        return call_model(model, inputs)
    except WorkbenchError:
        raise
    except Exception as error:
        raise SnapshotError(reason_for(model, inputs, error)) from error


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's inputs: that of its parameters, or the one that offloaded parameters are sent to."""
    parameters = (parameter.device for parameter in model.parameters() if parameter.device.type != "meta")
    if (device := next(parameters, None)) is not None:
        return device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    places = (getattr(hook, "execution_device", None) for hook in hooks)
    place = next((place for place in places if place is not None), None)
    return torch.device("cpu" if place is None else place)


def on_device_of(model: nn.Module, batch: Any) -> Any:
    """The batch on the device of the model's inputs."""
    device = device_of(model)
    if isinstance(batch, torch.Tensor):
        # The host need not wait: memory that is not pinned is read before the call returns, and may be changed then.
        is_upload = batch.device.type == "cpu" and device.type == "cuda"
        return batch.to(device, non_blocking=is_upload and not batch.is_pinned())
    if isinstance(batch, tuple | list):
        return type(batch)(on_device_of(model, item) for item in batch)
    if hasattr(batch, "items"):
        return {name: on_device_of(model, item) for name, item in batch.items()}
    return batch


def named_arguments(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The arguments of a call as `call_model` takes them: a tuple, or a mapping of keywords."""
    if not kwargs:
        return args
    names = [*inspect.signature(model.forward).parameters]
    return dict(zip(names, args, strict=False)) | kwargs
