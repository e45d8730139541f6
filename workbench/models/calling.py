"""The module of a model that is called, and its calls with inputs of any supported form."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, distributed, nn

from workbench.errors import AnatomyError, SnapshotError, WorkbenchError
from workbench.models.subject import Subject
from workbench.zoo.module_of import module_of


def unwrap(model: Subject | nn.Module) -> nn.Module:
    """Return the module of a subject or of ``torch.compile``, whose code ignores hooks that are added later."""
    module = module_of(model)
    return getattr(module, "_orig_mod", module)


def runnable(model: Subject | nn.Module) -> nn.Module:
    """Return the module to call: unwrapped, and taken out of modules without forward, such as a LightningModule."""
    module = unwrap(model)
    if not isinstance(module, nn.Module) or has_forward(module):
        return module
    parts = {name: part for name, part in module.named_children() if any(True for _ in part.parameters())}
    if len(parts) == 1:
        return runnable(*parts.values())
    example = f", such as model.{next(iter(parts))}" if parts else ""
    raise AnatomyError(
        f"{type(module).__name__} has no forward, and {len(parts) or 'none'} of its parts have parameters, expected "
        f"one; pass the part that maps inputs to outputs{example}."
    )


def has_forward(module: nn.Module) -> bool:
    """Return whether a module has a forward pass; a LightningModule may leave it to the model that it contains."""
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), nn.Module)
    return "forward" in vars(module) or owner.__name__ not in ("Module", "LightningModule")


def subject_in(model: Subject | nn.Module) -> Subject | None:
    """Return the subject; None for a module."""
    return None if isinstance(model, nn.Module) or unwrap(model) is model else model


def as_written() -> AbstractContextManager:
    """Return a context in which modules run uncompiled, because compiled code ignores hooks that are added later."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile`` and DDP."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return bare(model.module)
    if isinstance(model, torch.jit.ScriptModule):
        return model
    inner = unwrap(model)
    return model if inner is model else bare(inner)


def entrances(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a loop may call to run the full model, outermost first."""
    chain, weights = [model], {id(p) for p in model.parameters() if p.requires_grad}
    while True:
        inner = [m for m in chain[-1].children() if weights <= {id(p) for p in m.parameters()}]
        if len(inner) != 1:
            return [module for module in chain if has_forward(module)] or chain
        chain.append(inner[0])


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that updates the parameters, without its wrappers (accelerate, Lightning, SAM)."""
    for name in ("base_optimizer", "optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer):
            return innermost(inner)
    return optimizer


def acting_on_gradients(
    optimizer: torch.optim.Optimizer, args: tuple, kwargs: Mapping[str, Any], act: Callable[[Any], None]
) -> tuple[tuple, dict[str, Any]] | None:
    """Run an action between gradients and update, from a pre-hook of the optimizer's step, whose result is returned.

    With a closure, as in Lightning, it runs after each call of the closure, with its value; otherwise once with None.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        act(None)
        return None

    def closure_and_action() -> Any:
        loss = closure()
        act(loss)
        return loss

    others = {name: value for name, value in kwargs.items() if name != "closure"}
    return (optimizer, closure_and_action, *args[2:]), others


def is_split(model: nn.Module) -> bool:
    """Return whether a rank holds only parts of the weights (FSDP, tensor parallelism, DeepSpeed)."""
    is_flat = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    return is_flat or any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in model.parameters())


#: What records a stage of a pipeline in this process. Ranks wait for each other's stages before they begin a batch, so
#: that none of them may wait for anything else.
alone: WeakSet[Any] = WeakSet()


def is_shared() -> bool:
    """Return whether there are several ranks that act together, unlike those that record stages of a pipeline."""
    is_several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    return is_several and not alone


def message_device() -> torch.device:
    """Return the device for messages between ranks: the CPU if the backend supports it, so no step waits for a GPU."""
    can_use_host = "cpu" in distributed.get_backend_config()
    return torch.device("cpu") if can_use_host else torch.device("cuda", torch.cuda.current_device())


#: A config, the name of an option, and its value.
Option = tuple[Any, str, Any]
#: Option of the attention implementation. Unlike the property without the suffix, it does not change nested configs.
_ATTENTION = "_attn_implementation_internal"


def configs_of(model: nn.Module) -> list[Any]:
    """Return the configs of a model and its parts, each once."""
    return list({id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}.values())


def known_options(model: nn.Module, values: Mapping[str, Any]) -> list[Option]:
    """Return these values for every config in which the option exists and is not None."""
    return [
        (config, name, value)
        for config in configs_of(model)
        for name, value in values.items()
        if getattr(config, name, None) is not None
    ]


def visible_attention(model: nn.Module) -> list[Option]:
    """Return the options that replace the kernels of flash or flex attention by observable operations.

    Models that select their attention from transformers' ``AttentionInterface`` are switched to "sdpa", or to "eager"
    where they cap their logits or have sinks, for which torch's ``scaled_dot_product_attention`` has no argument.
    Masks, windows and scales of the model are unchanged. Implementations that users register are not replaced, because
    they may compute something else.
    """
    options = {}
    for part in model.modules():
        config = getattr(part, "config", None)
        name = getattr(config, _ATTENTION, None)
        if not isinstance(name, str) or not ("flash" in name or name == "flex_attention"):
            continue
        # Only models of transformers have this method; their attention modules share the config.
        if (can_set := getattr(part, "_can_set_attn_implementation", None)) is not None and can_set():
            options[id(config)] = (config, _ATTENTION, "sdpa" if part._supports_sdpa else "eager")
    return list(options.values())


@contextmanager
def config_options(options: Iterable[Option]) -> Iterator[None]:
    """Set options within a context and restore them afterwards."""
    undo = []
    try:
        for config, name, value in options:
            undo.append((config, name, getattr(config, name)))
            setattr(config, name, value)
        yield
    finally:
        for before in reversed(undo):
            setattr(*before)


def tensors_of(batch: Any) -> list[tuple[Any, Tensor]]:
    """Return name and value of each tensor with an axis in a batch; names are those of `with_values`, or positions."""
    items: Iterable[tuple[Any, Any]] = [("", batch)]
    if isinstance(batch, Mapping | tuple | list):
        items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return [(name, value) for name, value in items if isinstance(value, Tensor) and value.ndim]


def with_values(batch: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a batch whose values a function of value and name (None by position, "" of one tensor) changed."""
    if isinstance(batch, Mapping):
        return {name: change(value, name) for name, value in batch.items()}
    return tuple(change(value, None) for value in batch) if isinstance(batch, tuple | list) else change(batch, "")


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model with inputs of any supported form.

    A tensor is passed as the first argument (an encoder-decoder model also receives the same tokens for its decoder, or
    its start token), a mapping as keywords, a tuple or list by position. A model without an argument ``input_ids``
    receives them first, without a mask that only marks padding at the end; other masks raise SnapshotError.
    """
    # A cache, which some models do not support, must not be filled.
    main = getattr(model, "config", None)
    configs = [main, *(getattr(main, name, None) for name in getattr(main, "sub_configs", ()))]
    with config_options([(c, "use_cache", False) for c in configs if getattr(c, "use_cache", None) is True]):
        if isinstance(inputs, Mapping):
            known = inspect.signature(model.forward).parameters
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
            if takes_any or "input_ids" not in inputs or "input_ids" in known:
                return model(**inputs)
            return model(_tokens_alone(model, inputs))
        if isinstance(inputs, tuple | list):
            return model(*inputs)
        return model(inputs, **_decoder_tokens(model, inputs))


def _tokens_alone(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    mask = inputs.get("attention_mask")
    # In a causal model, padding after a token does not change its state; padding before it does.
    if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise SnapshotError(f"{type(model).__name__} accepts no attention mask; pad this batch at the end.")
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
    """Call a model as `call_model` does, and explain any exception of the model in one sentence, a SnapshotError."""
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
    forward = model.forward
    of_class = getattr(forward, "__func__", None)
    names = [*inspect.signature(forward).parameters] if of_class is None else _parameters(of_class)[1:]
    return dict(zip(names, args, strict=False)) | kwargs


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> list[str]:
    return [*inspect.signature(function).parameters]


#: Options of configurations that bound the length of a sequence.
_LENGTHS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_length", "max_seq_len", "block_size", "context_length",
)  # fmt: skip


def reason_for(model: nn.Module, inputs: Any, error: Exception) -> str:
    """Explain in one sentence why a model could not run: what was given, what it expects, and what to do."""
    name = type(model).__name__
    if isinstance(error, torch.OutOfMemoryError):
        return f"{name} ran out of memory on {_described(inputs)}; pass fewer or shorter sequences."
    if isinstance(error, NotImplementedError) and type(model).forward is nn.Module.forward:
        return f"{name} does not implement forward(); pass the network inside it, such as one of its attributes."
    is_offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if any(parameter.is_meta for parameter in model.parameters()) and not is_offloaded:
        return (
            f"The parameters of {name} are on the meta device and have no values, so it cannot run; load a checkpoint "
            "into it first."
        )
    has_images = getattr(getattr(model, "config", None), "image_size", None) is not None and _embedding(model) is None
    takes_images = getattr(model, "main_input_name", "") == "pixel_values" or has_images
    if found := (_about_images if takes_images else _about_tokens)(model, inputs):
        return found
    if isinstance(error, TypeError) and _is_with_targets(inputs):
        return f"{name} cannot run on a batch with its targets; pass only its tokens, batch[0], or the task itself."
    lines = str(error).strip().splitlines()
    first = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
    return f"{name} cannot run on {_described(inputs)} ({first}); pass inputs on which model(inputs) runs."


def _is_with_targets(inputs: Any) -> bool:
    """Return whether the inputs may be a batch of a task: token ids, and targets of the same shape."""
    if not (isinstance(inputs, tuple) and len(inputs) == 2 and all(isinstance(item, torch.Tensor) for item in inputs)):
        return False
    tokens, targets = inputs
    return tokens.shape == targets.shape and not (tokens.is_floating_point() or targets.is_floating_point())


def _about_tokens(model: nn.Module, inputs: Any) -> str:
    """Return a sentence about token ids that do not fit; empty if there are none."""
    name = type(model).__name__
    embedding = _embedding(model)
    vectors = [key for key, t in tensors_of(inputs) if key in ("", 0) and t.ndim == 3 and t.is_floating_point()]
    if vectors and embedding is not None and "inputs_embeds" in inspect.signature(model.forward).parameters:
        return f"{name} takes token ids first, and vectors were given; pass them as {{'inputs_embeds': vectors}}."
    for key, tokens in _token_ids(inputs):
        if tokens.is_floating_point() or tokens.dtype is torch.bool:
            if embedding is not None and (key == "input_ids" or tokens.ndim == 2):
                kind = str(tokens.dtype).removeprefix("torch.")
                return f"{name} takes integer token ids, and {kind} was given; pass ids.long() if these are ids."
            continue
        if not tokens.numel():
            continue
        low, high = int(tokens.min()), int(tokens.max())
        if embedding is not None and (low < 0 or high >= embedding.num_embeddings):
            return (
                f"Token ids range from {low} to {high}, but {name} has {embedding.num_embeddings} tokens (0 to "
                f"{embedding.num_embeddings - 1}); tokenize with the model's own tokenizer."
            )
        longest = _longest(model)
        if longest is not None and tokens.ndim == 2 and tokens.shape[1] > longest:
            return (
                f"Sequences have {tokens.shape[1]} tokens, but {name} takes at most {longest}; truncate them, for "
                f"example ids[:, :{longest}]."
            )
    return ""


def _about_images(model: nn.Module, inputs: Any) -> str:
    """Return a sentence about images that do not fit; empty if there are none."""
    name, config = type(model).__name__, getattr(model, "config", None)
    images = next((t for _, t in tensors_of(inputs) if t.ndim > 1), None)
    if images is None:
        return ""
    size, channels = (getattr(config, option, None) for option in ("image_size", "num_channels"))
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    expected = f"(image, {channels or 'channel'}, {sides[0] or 'height'}, {sides[1] or 'width'})"
    shape = tuple(images.shape)
    if images.ndim == 3:
        return f"{name} takes images of shape {expected}, and a single image was given; pass image[None]."
    is_known = images.ndim == 4 and channels and sides[0]
    if images.ndim != 4 or (is_known and shape[1:] != (channels, *sides)):
        return (
            f"{name} takes images of shape {expected}, and the given images have shape {shape}; resize them or choose "
            "another model."
        )
    if not images.is_floating_point():
        kind = str(images.dtype).removeprefix("torch.")
        return f"{name} takes images of floating-point numbers, and {kind} was given; pass images.float() / 255."
    return ""


def _embedding(model: Any) -> nn.Embedding | None:
    """Return the embedding of tokens: the one that the model names, else its longest; None if it has none."""
    try:
        found = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        found = max(tables, key=lambda table: table.num_embeddings, default=None)
    return found if isinstance(found, nn.Embedding) else None


def _longest(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        for option in _LENGTHS:
            value = part.get(option) if isinstance(part, Mapping) else getattr(part, option, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _token_ids(inputs: Any) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors_of(inputs):
        if name in ("", 0, "input_ids", "decoder_input_ids") and tensor.ndim in (1, 2):
            yield str(name), tensor


def _described(inputs: Any) -> str:
    """Describe inputs by their types and shapes."""
    parts = [
        f"{f'{name} ' if name and isinstance(name, str) else ''}{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
        for name, t in tensors_of(inputs)
    ]
    return f"inputs of {', '.join(parts)}" if parts else f"a {type(inputs).__name__}"
