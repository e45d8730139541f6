"""Checkpoints of any supported format, opened as a subject; checkpoints of the zoo are saved, those of runs listed."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from workbench.errors import CheckpointError, WorkbenchError
from workbench.models.lazy_state import GgufFile, LazyTensor, base_model, kind_of_matrix, lazy_state, merged
from workbench.models.pretrained import errors_in_one_sentence, open_pretrained
from workbench.models.state_files import (
    CHECKPOINT,
    STATE_SUFFIXES,
    check_safetensors,
    load_state,
    matched_state,
    read_config,
    require_files,
    tied_names,
    unwrapped_names,
)
from workbench.models.streaming import StreamedWeights, StreamingChoice, stream_module, stream_pretrained
from workbench.models.subject import ByteTokenizer, Subject
from workbench.models.weight_folders import (
    ZOO_KEY,
    diffusers_config,
    diffusers_model,
    folder_weights,
    is_adapter,
    is_without_architecture,
    own_checkpoint,
)
from workbench.option_checks import checked
from workbench.zoo import ZooModel
from workbench.zoo.module_of import module_of

#: Key in the config of a zoo checkpoint that names its tokenizer, if known: "bytes".
TOKENIZER_KEY = "tokenizer"
_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?$")


@checked
def open_checkpoint(
    source: str | os.PathLike[str] | nn.Module | Subject,
    *,
    module: nn.Module | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | str = "auto",
    name: str | None = None,
    strict: bool = True,
    streaming: bool | str = "auto",
    device: torch.device | str | None = None,
) -> Subject:
    """Open a model for study.

    Prefixes that torch.compile (``_orig_mod.``) and data parallelism (``module.``) add to the names of tensors are
    removed. So is the prefix of a module that was saved as a part of a larger one, for example by Lightning, if the
    tensors below exactly one prefix fill ``module``.

    Args:
        source: A Hugging Face folder or hub name; a folder saved by `save_checkpoint`; a Trainer's folder with one
            checkpoint; an adapter of PEFT (LoRA), which is merged into ``module`` or into the base model that it
            names, if that is a local path; a ``.gguf`` file; any ``nn.Module``; or a subject. Together with
            ``module``, also files that hold only parameters: a ``.safetensors``, ``.bin``, ``.pt``, ``.pth`` or
            Lightning's ``.ckpt`` file, in which they may be below "model", "model_state_dict", "state_dict" or
            "module"; a folder of PyTorch's distributed checkpoint, of Megatron (``torch_dist``), DeepSpeed or
            diffusers; shards with or without an index. A folder with a config.json of Hugging Face may hold its
            parameters in any of these forms. Other objects in a pickle are never created, and a pickle that calls a
            function is rejected. Quantized parameters of a GGUF file become float32, or ``dtype``, with the rounding
            error of the quantization.
        module: Module to which a state dict belongs; its parameters are replaced, unless an exception is raised.
        trust_remote_code: Whether a Hugging Face checkpoint may run its own Python code.
        dtype: Type of the parameters, one in which torch computes; "auto" keeps that of the checkpoint, or of
            ``module``.
        name: Name for titles and stores; None derives it from the source.
        strict: Whether to raise an exception for missing or unused parameters, except for those of another head of the
            same family. Otherwise the fitting ones are loaded; the remaining parameters of the model have random
            values, or those of ``module``, and `Subject.unloaded` lists them.
        streaming: Whether the parameters stay on disk and fill each block while it runs, so that the model is never
            completely in memory; such a subject can be run and profiled, but not trained. "auto" streams if the
            parameters would take more than half of the free memory and can be streamed. Quantized checkpoints of
            Hugging Face, adapters, and parameters that do not fit cannot.
        device: Device on which the model runs; if streamed, one block at a time is moved there. None is the CPU, or the
            device of ``module``.

    Returns:
        The subject, in eval mode, except that the mode of a module that was passed is unchanged.

    Raises:
        CheckpointError: If the checkpoint does not exist, is damaged, is unsafe or does not fit.

    Example:
        >>> import workbench as wb
        >>> subject = wb.open_checkpoint(wb.samples.embedded("pre_ln"))
        >>> subject.name, type(subject.model).__name__
        ('pre_ln', 'Transformer')

    See Also:
        `workbench.profile`: Measures the opened model.
        `workbench.save_checkpoint`: Saves a model of the zoo.
    """
    torch_dtype = _as_dtype(dtype)
    if isinstance(source, nn.Module):
        source = Subject(source, name or type(source).__name__, f"module {type(source).__qualname__}")
    if isinstance(source, Subject):
        return _opened_already(source, module, torch_dtype, name)
    path, text = _as_path(source)
    looks_like_path = path.suffix in (*STATE_SUFFIXES, ".gguf") or text.startswith((".", "/", "~"))
    if not path.is_dir() and not path.is_file() and (looks_like_path or not _HUB_NAME.match(text)):
        raise CheckpointError(f"There is no file or folder {text}; check the path.")
    if path.is_file() and path.suffix not in (*STATE_SUFFIXES, ".gguf"):
        raise CheckpointError(f"{path} has an unknown format; pass a folder, .safetensors, .bin, .pt or .gguf file.")
    how = StreamingChoice.of(streaming, device)
    options = _Options(trust_remote_code, torch_dtype, strict, how, name)
    with CHECKPOINT.reading(text):
        if path.is_dir():
            path = own_checkpoint(path)
            require_files(path)
        is_folder = path.is_dir()
        is_state = is_folder and is_without_architecture(path, has_module=module is not None)
        if is_state or (path.is_file() and path.suffix in STATE_SUFFIXES):
            return _open_state(path, module, options)
        if is_folder and is_adapter(path):
            if streaming is True:
                raise CheckpointError(
                    f"{path} is an adapter, merged in memory; use wb.open_checkpoint(..., streaming=False)."
                )
            of_base: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": torch_dtype, "strict": strict}
            of_base |= {"streaming": False, "device": device}
            opened = open_checkpoint(base_model(path), **of_base) if module is None else open_checkpoint(module)
            return _open_adapter(path, opened, torch_dtype, name)
        if is_folder and not (path / "config.json").exists():
            raise CheckpointError(f"{path} has no config.json and is not a checkpoint folder; {_hint(path)}.")
        if module is not None:
            raise CheckpointError(f"module= is used only with a file of weights, which {text} is not; leave it out.")
        if is_folder:
            return _open_folder(path, options)
        if path.is_file():
            return _open_gguf(path, options)
        return _open_hub(text, options)


@checked
def save_checkpoint(
    model: nn.Module | Subject,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    _state: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Save a model of the zoo as config.json and model.safetensors, which `open_checkpoint` reads.

    Args:
        model: Model from ``wb.zoo``, or its subject; for a subject the folder also records whether its tokens are
            bytes.
        folder: Folder to write to; created if needed.
        overwrite: Whether to replace an existing checkpoint.

    Returns:
        The folder.

    Raises:
        CheckpointError: If the folder holds a checkpoint already, the model is not of the zoo, or the disk is full.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> folder = wb.save_checkpoint(model, "tiny")
        >>> sorted(path.name for path in folder.iterdir())
        ['config.json', 'model.safetensors']

    See Also:
        `workbench.open_checkpoint`: Opens the folder.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tokenizer = model.own_tokenizer if isinstance(model, Subject) else None
    folder, model = Path(folder), module_of(model)
    if not isinstance(model, ZooModel):
        raise CheckpointError(f"{type(model).__name__} is not a model of the zoo; use its own save_pretrained().")
    if (folder / "model.safetensors").exists() and not (overwrite and ZOO_KEY in read_config(folder / "config.json")):
        raise CheckpointError(
            f"{folder} holds a checkpoint already; pass "
            + ("another folder, as it is not of the zoo." if overwrite else "overwrite=True to replace it.")
        )
    if any(parametrize.is_parametrized(module) for module in model.modules()):
        raise CheckpointError("The weights of the model are parametrized; save wb.baselines.plain_copy(model).")
    options = model.config.as_dict()
    config = {ZOO_KEY: options.pop("family"), **options}
    if isinstance(tokenizer, ByteTokenizer):
        config[TOKENIZER_KEY] = tokenizer.name
    state = model.state_dict() if _state is None else _state
    tied = tied_names(state)
    weights = {name: tensor.contiguous() for name, tensor in state.items() if name not in tied}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as scratch:
            save_file(weights, Path(scratch) / "model.safetensors")
            (Path(scratch) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            for file in sorted(Path(scratch).iterdir()):
                file.chmod(0o644)  # safetensors writes files that only the owner can read
                file.replace(folder / file.name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be written ({error}); check path and free disk space.") from error
    return folder


def _as_dtype(dtype: Any) -> torch.dtype | str:
    """Return the dtype, in which torch must compute, as a torch.dtype or "auto"."""
    if dtype is None or dtype == "auto":
        return "auto"
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise CheckpointError(
            f"dtype={dtype!r} is not a dtype in which models compute; pass 'auto', 'float32', 'bfloat16' or 'float16'."
        )
    return found


def _opened_already(subject: Subject, module: nn.Module | None, dtype: torch.dtype | str, name: str | None) -> Subject:
    """Return the subject, renamed if a name is passed."""
    if module is not None and module is not subject.model:
        raise CheckpointError(f"Both a {type(subject.model).__name__} and module= are passed; pass one of them.")
    if dtype != "auto" and any(p.is_floating_point() and p.dtype != dtype for p in subject.model.parameters()):
        raise CheckpointError(
            f"dtype= applies to weights that are read from a file; convert the {type(subject.model).__name__} with "
            ".to() and pass it without dtype=."
        )
    return replace(subject, name=name) if name and name != subject.name else subject


def _as_path(source: str | os.PathLike[str]) -> tuple[Path, str]:
    """Return the argument as a path and as text."""
    if not isinstance(text := os.fspath(source), str):
        raise CheckpointError(f"The path {text!r} is not text; pass a string or a pathlib.Path.")
    try:
        path = Path(text).expanduser()
        path.is_dir()
    except (OSError, RuntimeError) as error:  # too long, not readable, or the home of an unknown user
        raise CheckpointError(f"{_shortened(text)} cannot be opened ({_shortened(str(error))}); check it.") from error
    if not text.strip():
        raise CheckpointError("The path is empty; pass a folder, a file, a hub name, or an nn.Module.")
    return path, text


def _shortened(text: str) -> str:
    """Return a text as a single line of at most 120 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 120 else text[:117] + "..."


def _hint(folder: Path) -> str:
    """Return advice on what to pass instead of a folder that is not a checkpoint."""
    if (folder / "model_index.json").exists():
        models = sorted(file.parent for file in folder.glob("*/config.json"))
        such = f", such as {models[0]}" if models else ""
        return f"it holds a diffusers pipeline: pass the folder of one of its models{such}"
    files = [file for file in sorted(folder.iterdir()) if file.suffix in (".gguf", *STATE_SUFFIXES)]
    return f"pass the file {files[0]}" if files else "pass the folder that save_pretrained() wrote"


class _Options(NamedTuple):
    """Options of `open_checkpoint`."""

    trust_remote_code: bool
    dtype: torch.dtype | str
    strict: bool
    how: StreamingChoice
    name: str | None


def _open_folder(folder: Path, options: _Options, source: str | None = None) -> Subject:
    config_file = folder / "config.json"
    config = read_config(config_file)
    if not isinstance(model_type := config.get("model_type", ""), str):
        raise CheckpointError(f"{config_file} has model_type = {_shortened(repr(model_type))}, no name; correct it.")
    for file in sorted(folder.glob("*.safetensors")):
        check_safetensors(file)
    tokenizer, streamed = None, None
    if ZOO_KEY in config:
        tokenizer = _tokenizer_of(config_file, config)
        model, unloaded, streamed = _open_zoo(folder, config, options)
    else:
        with errors_in_one_sentence(str(folder)):
            weights = folder_weights(folder)
        why_not = "it is quantized" if config.get("quantization_config") else ""
        why_not = why_not if weights is not None else "its weights are in no known file format"
        n_bytes = weights.n_bytes if weights is not None else 0
        is_streamed = options.how.is_streamed(n_bytes, why_not=why_not, is_strict=options.strict)
        model, unloaded = open_pretrained(
            str(folder),
            folder,
            trust_remote_code=options.trust_remote_code,
            dtype=options.dtype,
            strict=options.strict,
            without_memory=is_streamed,
        )
        if is_streamed and weights is not None:
            streamed = stream_pretrained(model.eval(), weights.state, folder, options.how.device or "cpu")
    model = model.eval() if streamed else options.how.placed(model.eval())
    name, source = options.name or folder.name, source or str(folder)
    return Subject(model, name, source, folder, unloaded, tokenizer, streamed, options.trust_remote_code)


def _open_gguf(path: Path, options: _Options) -> Subject:
    file, how = GgufFile.read(path), options.how
    is_streamed = how.is_streamed(file.n_bytes(options.dtype), why_not=file.why_not_streamed, is_strict=options.strict)
    model, unloaded = file.model(dtype=options.dtype, strict=options.strict, without_memory=is_streamed)
    streamed = stream_pretrained(model.eval(), file.state(), path, how.device or "cpu") if is_streamed else None
    model = model if is_streamed else how.placed(model)
    return Subject(model, options.name or path.stem, str(path), path, unloaded, streamed=streamed)


def _tokenizer_of(file: Path, config: dict[str, Any]) -> ByteTokenizer | None:
    """Remove the entry of the tokenizer from the configuration of a zoo model, and return the tokenizer."""
    kind = config.pop(TOKENIZER_KEY, None)
    if kind is None:
        return None
    if kind != ByteTokenizer.name:
        raise CheckpointError(
            f"{file} names the tokenizer {_shortened(repr(kind))}, which this version does not know; update the "
            "workbench, or remove the entry and pass token ids."
        )
    return ByteTokenizer(config.get("max_length"))


def _open_zoo(folder: Path, config: dict[str, Any], options: _Options) -> tuple[nn.Module, str, StreamedWeights | None]:
    from accelerate import init_empty_weights

    from workbench import zoo

    family = config.pop(ZOO_KEY)
    if not isinstance(family, str) or family not in zoo.FAMILIES:
        raise CheckpointError(
            f"{folder} holds a model of the family '{family}', which this version does not know; update the workbench."
        )
    file = folder / "model.safetensors"
    is_streamed = file.is_file() and options.how.is_streamed(file.stat().st_size, is_strict=options.strict)
    try:
        with init_empty_weights(include_buffers=False) if is_streamed else nullcontext():
            model = zoo.build(zoo.ArchitectureConfig.from_dict({**config, "family": family}))
    except WorkbenchError as error:
        raise CheckpointError(f"{folder / 'config.json'} does not describe a {family}: {error}") from error
    except Exception as error:  # an option of a wrong type or size fails wherever it is used first
        reason = f"{type(error).__name__}: {_shortened(str(error))}"
        raise CheckpointError(
            f"{folder / 'config.json'} does not describe a {family} ({reason}); download the checkpoint again."
        ) from error
    state, dtype = lazy_state(file), options.dtype
    if dtype == "auto":
        dtype = next((tensor.dtype for tensor in state.values() if tensor.dtype.is_floating_point), torch.float32)
    remedy = "download the checkpoint again or correct its config.json"
    model = model.to(dtype)
    if is_streamed:
        return model, "", _stream_plain(model, state, file, remedy, options.how)
    return model, load_state(model, state, file.name, remedy=remedy, left="random values", strict=options.strict), None


def _stream_plain(
    module: nn.Module, state: Mapping[str, LazyTensor], path: Path, remedy: str, how: StreamingChoice
) -> StreamedWeights:
    fitting, _ = matched_state(module, state, path.name, remedy=remedy)
    lazy = {name: found if isinstance(found, LazyTensor) else LazyTensor.of(found) for name, found in fitting.items()}
    return stream_module(module, lazy, path, how.device or "cpu")


def _open_state(path: Path, module: nn.Module | None, options: _Options) -> Subject:
    if module is None and (config := diffusers_config(path)):
        module = diffusers_model(path, config).eval()
    if module is None:
        raise CheckpointError(
            f"{path.name} holds weights without an architecture; pass wb.open_checkpoint(..., module=), or "
            "the folder with its config.json."
        )
    remedy, left = "pass the module from which it was saved", "the module's own values"
    state, dtype, how = lazy_state(path), options.dtype, options.how
    streamed, unloaded = None, ""
    if how.is_streamed(sum(tensor.n_bytes for tensor in state.values()), is_strict=options.strict):
        matched_state(module, state, path.name, remedy=remedy)  # before the module is changed
        module = module if isinstance(dtype, str) else module.to(dtype)
        streamed = _stream_plain(module, state, path, remedy, how)
    else:
        unloaded = load_state(module, state, path.name, remedy=remedy, left=left, strict=options.strict)
        module = how.placed(module if isinstance(dtype, str) else module.to(dtype))
    return Subject(module, options.name or path.stem, str(path), unloaded=unloaded, streamed=streamed)


def _open_adapter(path: Path, base: Subject, dtype: torch.dtype | str, name: str | None) -> Subject:
    """Return the base model with an adapter merged into its weights."""
    model = base.model
    own = model.state_dict()
    names = {plain: key for key, plain in unwrapped_names(own).items()}
    held = {plain: LazyTensor.of(own[key]) for plain, key in names.items() if isinstance(own[key], torch.Tensor)}
    state = merged(path, held, kind_of_matrix(model, names))
    load_state(model, state, path.name, remedy="pass the model that it was trained on", left="the base model's values")
    if dtype != "auto":
        model.to(dtype)
    folder = path if (path / "tokenizer_config.json").exists() else base.folder
    return replace(base, name=name or path.name, source=str(path), folder=folder)


def _open_hub(hub_name: str, options: _Options) -> Subject:
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(hub_name, "config.json")
    except HFValidationError as error:
        raise CheckpointError(f"'{hub_name}' is neither a path nor a name on the hub; check the spelling.") from error
    is_cached, short = isinstance(cached, str), options.name or hub_name.split("/")[-1]
    if not is_cached and (constants.HF_HUB_OFFLINE or not _can_reach(constants.ENDPOINT)):
        raise CheckpointError(
            f"'{hub_name}' is not a local folder, and the Hugging Face hub cannot be reached; "
            "check the spelling, go online, or pass a local folder."
        )

    def downloaded(patterns: list[str]) -> Path:
        with errors_in_one_sentence(hub_name, remedy="try again, or pass a local folder"):
            return Path(snapshot_download(hub_name, allow_patterns=patterns, local_files_only=is_cached))

    if options.how.streaming is True:
        folder = downloaded(["*token*", "*.model", "*.json", "*.safetensors", "*.py"])
        return _open_folder(folder, options._replace(name=short), source=f"hub {hub_name}")
    model, unloaded = open_pretrained(
        hub_name,
        Path(cached).parent if isinstance(cached, str) else None,
        trust_remote_code=options.trust_remote_code,
        dtype=options.dtype,
        is_local=is_cached,
        strict=options.strict,
    )
    folder = downloaded(["*token*", "*.model", "config.json"])
    model, trusts = options.how.placed(model.eval()), options.trust_remote_code
    return Subject(model, short, f"hub {hub_name}", folder, unloaded, trusts_code=trusts)


def _can_reach(endpoint: str) -> bool:
    """Return whether the address of the hub can be resolved; its own client would retry for half a minute."""
    if any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    host = endpoint.split("://")[-1].split("/")[0].split(":")[0]
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


_NAME = re.compile(r"step-(\d{8})")
#: File with the trained parameters of a parametrized model; model.safetensors holds its effective weights.
PARAMETRIZED = "parametrized.safetensors"


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step in increasing order; empty if there are none."""
    places = folder.glob("step-*") if folder.is_dir() else ()
    found = {int(match.group(1)): place for place in places if (match := _NAME.fullmatch(place.name))}
    return dict(sorted(found.items()))


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the largest step; None if there is none."""
    found = list_checkpoints(folder)
    return found[max(found)] if found else None


def is_sharded(value: Any) -> bool:
    """Return whether a value is a tensor of which each rank holds a part, without importing what torch needs for it."""
    return hasattr(value, "full_tensor")


def divided(value: Any, like: Any) -> Any:
    """Return a complete tensor sharded as another one of its shape; other values as they are."""
    if not is_sharded(like) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def load_weights(model: nn.Module, place: Path) -> None:
    """Load the weights of a checkpoint into a model of the same shape."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file, load_model

    is_parametrized = any(parametrize.is_parametrized(module) for module in model.modules())
    file = place / (PARAMETRIZED if is_parametrized else "model.safetensors")
    try:
        if any(map(is_sharded, model.parameters())):
            state, saved = model.state_dict(), load_file(file)
            with torch.no_grad():
                for name, value in state.items():
                    if name in saved:  # only one of several tied parameters is
                        value.copy_(divided(saved[name], value))
        else:
            load_model(model, file)
    except (OSError, SafetensorError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"The weights in {place} are damaged or belong to another model ({first}); pass the model of this run."
        ) from error
