"""Open a checkpoint of any supported format as a `Subject`, which `profile` can measure."""

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
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from workbench.errors import CheckpointError, WorkbenchError
from workbench.models.adapters import base_model, kind_of_matrix, merged
from workbench.models.diffusers_models import diffusers_model
from workbench.models.folder_weights import folder_weights
from workbench.models.lazy_state import LazyTensor, lazy_state
from workbench.models.state_files import STATE_SUFFIXES, check_safetensors
from workbench.models.state_fit import load_state, matched_state, plain_names, tied_names
from workbench.models.streaming import StreamedWeights
from workbench.models.streaming_choice import StreamingChoice
from workbench.models.subject import ByteTokenizer, Subject
from workbench.models.weight_folders import (
    ZOO_KEY,
    diffusers_config,
    is_adapter,
    is_without_architecture,
    own_checkpoint,
)
from workbench.zoo.module_of import module_of

#: Its key that states how texts become tokens, if known: "bytes".
TOKENIZER_KEY = "tokenizer"
_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?$")


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

    Names of tensors may have been changed by torch.compile (``_orig_mod.``) and by data parallelism (``module.``
    before every name); they are read without these. So are those of a module that was a part of what was saved, as
    Lightning saves it, if the tensors below one prefix, and no other, fill ``module``.

    Args:
        source: A Hugging Face folder or hub name; a folder saved by `save_checkpoint`; a Trainer's folder with one
            checkpoint; an adapter of PEFT (LoRA), which is merged into ``module`` or into the base model that it
            names, if that is a local path; a ``.gguf`` file; any ``nn.Module``; or a subject. Together with
            ``module`` weights alone: a ``.safetensors``, ``.bin``, ``.pt``, ``.pth`` or Lightning's ``.ckpt`` file,
            in which they may be below "model", "model_state_dict", "state_dict" or "module"; a folder of PyTorch's
            distributed checkpoint, of Megatron (``torch_dist``), DeepSpeed or diffusers; shards with or without an
            index. A folder with a config.json of Hugging Face may hold its weights in any of these forms. Objects
            beside the weights of a pickle are never made; one that calls a function is refused.
            Quantized weights of a GGUF file come out as float32, or as ``dtype``, with the noise of quantization.
        module: Module that a state dict belongs to; its parameters are replaced, unless an error is raised.
        trust_remote_code: Whether a Hugging Face checkpoint may run its own Python code.
        dtype: Type of the parameters, one that torch computes in; "auto" keeps what the checkpoint has, or what
            ``module`` has.
        name: Name for titles and stores; made from the source if not given.
        strict: Whether to refuse missing or unused parameters, except for those of another head of the same
            family. Otherwise open with those that fit: the rest of the model has random values, or those of
            ``module``, and `Subject.unloaded` lists them.
        streaming: Whether the weights stay on disk and fill each block while it runs, so that the model is never whole
            in memory; such a subject can be run and profiled, not trained. "auto": if they would take more than half
            of the free memory, and can. Quantized checkpoints of Hugging Face, adapters, and weights that do not fit
            cannot.
        device: Device on which the model runs; streamed, one block at a time is moved there. None: the CPU, or where
            ``module`` is.

    Returns:
        The subject, in eval mode unless a module was passed, which is left as it is.

    Raises:
        CheckpointError: If the checkpoint does not exist, is damaged, unsafe or does not fit.

    Example:
        >>> import workbench as wb
        >>> subject = wb.open_checkpoint(wb.samples.embedded("pre_ln"))
        >>> subject.name, type(subject.model).__name__
        ('pre_ln', 'Transformer')
    """
    wanted = _as_dtype(dtype)
    if name is not None and not isinstance(name, str):
        raise CheckpointError(f"name={name!r} is no text; pass a string, or leave it out.")
    if module is not None and not isinstance(module, nn.Module):
        raise CheckpointError(f"module= is of type {type(module).__name__}, expected the nn.Module of the weights.")
    if isinstance(source, nn.Module):
        source = Subject(source, name or type(source).__name__, f"module {type(source).__qualname__}")
    if isinstance(source, Subject):
        return _opened_already(source, module, wanted, name)
    path, text = _as_path(source)
    looks_like_path = path.suffix in (*STATE_SUFFIXES, ".gguf") or text.startswith((".", "/", "~"))
    if not path.is_dir() and not path.is_file() and (looks_like_path or not _HUB_NAME.match(text)):
        raise CheckpointError(f"There is no file or folder {text}; check the path.")
    if path.is_file() and path.suffix not in (*STATE_SUFFIXES, ".gguf"):
        raise CheckpointError(
            f"{path} is no checkpoint format known here; pass a folder, a .safetensors, .bin, .pt or .gguf file."
        )
    how = StreamingChoice.of(streaming, device)
    if path.is_dir():
        path = own_checkpoint(path)
    if path.is_dir():
        is_state = is_without_architecture(path, has_module=module is not None)
    else:
        is_state = path.is_file() and path.suffix in STATE_SUFFIXES
    if is_state:
        return _open_state(path, module, wanted, name, strict, how)
    if path.is_dir() and is_adapter(path):
        if streaming is True:
            raise CheckpointError(f"{path} is an adapter, which is merged in memory; open it with streaming=False.")
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": wanted, "strict": strict}
        options |= {"streaming": False, "device": device}
        opened = open_checkpoint(base_model(path), **options) if module is None else open_checkpoint(module)
        return _open_adapter(path, opened, wanted, name)
    if path.is_dir() and not (path / "config.json").exists():
        raise CheckpointError(f"{path} has no config.json, so it is no checkpoint folder; {_hint(path)}.")
    if module is not None:
        raise CheckpointError(f"module= goes with a file of weights, which {text} is not; leave it out.")
    if path.is_dir():
        return _open_folder(path, trust_remote_code, wanted, name, strict, how)
    if path.is_file():
        from workbench.models.gguf_file import GgufFile

        file = GgufFile.read(path)
        is_streamed = how.is_wanted(file.n_bytes(wanted), why_not=file.why_whole, is_strict=strict)
        model, unloaded = file.model(dtype=wanted, strict=strict, without_memory=is_streamed)
        streamed = _stream_pretrained(model.eval(), file.state(), path, how) if is_streamed else None
        model = model if is_streamed else how.placed(model)
        return Subject(model, name or path.stem, str(path), path, unloaded, streamed=streamed)
    return _open_hub(text, trust_remote_code, wanted, name, strict, how)


def save_checkpoint(model: nn.Module | Subject, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Save a model of the zoo so that `open_checkpoint` reads it back: config.json and model.safetensors.

    Args:
        model: Model from ``wb.zoo``, or its subject, of which the folder notes whether its tokens are bytes.
        folder: Folder to write to; made if needed.
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
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from workbench.zoo import ZooModel

    tokenizer = model.own_tokenizer if isinstance(model, Subject) else None
    folder, model = Path(folder), module_of(model)
    if not isinstance(model, ZooModel):
        raise CheckpointError(f"{type(model).__name__} is not of the zoo; save it with its own save_pretrained().")
    if (folder / "model.safetensors").exists() and not overwrite:
        raise CheckpointError(f"{folder} holds a checkpoint already; pass overwrite=True to replace it.")
    if any(parametrize.is_parametrized(module) for module in model.modules()):
        raise CheckpointError(
            "The model's weights are parametrized, which no configuration says; save wb.baselines.plain_copy(model)."
        )
    options = model.config.as_dict()
    config = {ZOO_KEY: options.pop("family"), **options}
    if isinstance(tokenizer, ByteTokenizer):
        config[TOKENIZER_KEY] = tokenizer.name
    state = model.state_dict()
    tied = tied_names(state)
    weights = {name: tensor.contiguous() for name, tensor in state.items() if name not in tied}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as scratch:
            save_file(weights, Path(scratch) / "model.safetensors")
            (Path(scratch) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            for file in sorted(Path(scratch).iterdir()):
                file.chmod(0o644)  # safetensors writes for the owner alone
                file.replace(folder / file.name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be written ({error}); check its folder and the space left.") from error
    return folder


def _as_dtype(dtype: Any) -> torch.dtype | str:
    """The dtype itself, or "auto".

    Raises:
        CheckpointError: If torch has no such dtype, or does not compute in it.
    """
    if dtype is None or dtype == "auto":
        return "auto"
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise CheckpointError(
            f"dtype={dtype!r} is no dtype of weights; pass 'auto', 'float32', 'bfloat16' or 'float16'."
        )
    return found


def _opened_already(subject: Subject, module: nn.Module | None, dtype: torch.dtype | str, name: str | None) -> Subject:
    """The subject, under another name if one is given."""
    if module is not None and module is not subject.model:
        raise CheckpointError(
            f"Both a {type(subject.model).__name__} and module= are given; pass one of them, or a file of weights for "
            "the module."
        )
    if dtype != "auto" and any(p.is_floating_point() and p.dtype != dtype for p in subject.model.parameters()):
        raise CheckpointError(
            f"dtype= holds for weights that are read from a file; convert the {type(subject.model).__name__} with "
            ".to() and pass it without dtype=."
        )
    return replace(subject, name=name) if name and name != subject.name else subject


def _as_path(source: Any) -> tuple[Path, str]:
    """The argument, as a path and as text.

    Raises:
        CheckpointError: If it cannot be a path.
    """
    if isinstance(source, type):
        raise CheckpointError(
            f"The model is the class {source.__name__}; pass a model, not its class, such as {source.__name__}(...)."
        )
    text = os.fspath(source) if isinstance(source, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise CheckpointError(
            f"open_checkpoint() got an object of type {type(source).__name__}; "
            "pass the path of a folder or file, a hub name, or an nn.Module."
        )
    try:
        path = Path(text).expanduser()
        path.is_dir()
    except (OSError, RuntimeError) as error:  # too long, not readable, or the home of an unknown user
        raise CheckpointError(
            f"{_shortened(text)} cannot be opened ({_shortened(str(error))}); check the path."
        ) from error
    if not text.strip():
        raise CheckpointError("The path is empty; pass a folder, a file, a hub name, or an nn.Module.")
    return path, text


def _shortened(text: str) -> str:
    """A text of any length as part of a line."""
    text = " ".join(text.split())
    return text if len(text) <= 120 else text[:117] + "..."


def _hint(folder: Path) -> str:
    """What to pass instead of a folder that is no checkpoint."""
    if (folder / "model_index.json").exists():
        models = sorted(file.parent for file in folder.glob("*/config.json"))
        such = f", such as {models[0]}" if models else ""
        return f"it holds a pipeline of diffusers: pass the folder of one of its models{such}"
    files = [file for file in sorted(folder.iterdir()) if file.suffix in (".gguf", *STATE_SUFFIXES)]
    return f"pass the file {files[0]}" if files else "pass the folder that save_pretrained() wrote"


def _open_folder(
    folder: Path,
    trust_remote_code: bool,
    dtype: torch.dtype | str,
    name: str | None,
    strict: bool,
    how: StreamingChoice,
    source: str | None = None,
) -> Subject:
    config_file = folder / "config.json"
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{config_file} is no valid JSON ({error}); fetch the checkpoint again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{config_file} holds a JSON {type(config).__name__}, expected an object with the options of a model; "
            "fetch the checkpoint again."
        )
    if not isinstance(model_type := config.get("model_type", ""), str):
        raise CheckpointError(
            f"{config_file} has model_type = {_shortened(repr(model_type))}, expected a name; "
            "fetch the checkpoint again."
        )
    for file in sorted(folder.glob("*.safetensors")):
        check_safetensors(file)
    tokenizer, streamed = None, None
    if ZOO_KEY in config:
        tokenizer = _tokenizer_of(config_file, config)
        model, unloaded, streamed = _open_zoo(folder, config, dtype, strict, how)
    else:
        from workbench.models.pretrained import errors_in_one_sentence, open_pretrained

        with errors_in_one_sentence(str(folder)):
            weights = folder_weights(folder)
        why_not = "it is quantized" if config.get("quantization_config") else ""
        why_not = why_not if weights is not None else "its weights are in no file that is known here"
        n_bytes = weights.n_bytes if weights is not None else 0
        is_streamed = how.is_wanted(n_bytes, why_not=why_not, is_strict=strict)
        model, unloaded = open_pretrained(
            str(folder),
            folder,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            strict=strict,
            without_memory=is_streamed,
        )
        if is_streamed and weights is not None:
            streamed = _stream_pretrained(model.eval(), weights.state, folder, how)
    model = model.eval() if streamed else how.placed(model.eval())
    return Subject(model, name or folder.name, source or str(folder), folder, unloaded, tokenizer, streamed)


def _stream_pretrained(
    model: nn.Module, state: Mapping[str, LazyTensor], path: Path, how: StreamingChoice
) -> StreamedWeights:
    from workbench.models.streamed_models import files_identity, stream_pretrained

    return stream_pretrained(model, state, identity=files_identity(path), device=how.device or "cpu")


def _tokenizer_of(file: Path, config: dict[str, Any]) -> ByteTokenizer | None:
    """Takes the note on the tokenizer out of a configuration of the zoo.

    Raises:
        CheckpointError: If it names one that is not known here.
    """
    kind = config.pop(TOKENIZER_KEY, None)
    if kind is None:
        return None
    if kind != ByteTokenizer.name:
        raise CheckpointError(
            f"{file} names the tokenizer {_shortened(repr(kind))}, which this version does not know; update the "
            "workbench, or remove the entry and pass token ids."
        )
    return ByteTokenizer(config.get("max_length"))


def _open_zoo(
    folder: Path, config: dict[str, Any], dtype: torch.dtype | str, strict: bool, how: StreamingChoice
) -> tuple[nn.Module, str, StreamedWeights | None]:
    from accelerate import init_empty_weights

    from workbench import zoo

    options = dict(config)
    family = options.pop(ZOO_KEY)
    if not isinstance(family, str) or family not in zoo.FAMILIES:
        raise CheckpointError(f"{folder} holds a '{family}', which this version does not know; update the workbench.")
    file = folder / "model.safetensors"
    is_streamed = file.is_file() and how.is_wanted(file.stat().st_size, is_strict=strict)
    try:
        with init_empty_weights(include_buffers=False) if is_streamed else nullcontext():
            model = zoo.build(zoo.ArchitectureConfig.from_dict({**options, "family": family}))
    except WorkbenchError as error:
        raise CheckpointError(f"{folder / 'config.json'} does not describe a {family}: {error}") from error
    except Exception as error:  # an option of a wrong type or size fails wherever it is used first
        reason = f"{type(error).__name__}: {_shortened(str(error))}"
        raise CheckpointError(
            f"{folder / 'config.json'} does not describe a {family} ({reason}); fetch the checkpoint again."
        ) from error
    state = lazy_state(file)
    if dtype == "auto":
        dtype = next((tensor.dtype for tensor in state.values() if tensor.dtype.is_floating_point), torch.float32)
    remedy = "fetch the checkpoint again or correct its config.json"
    model = model.to(dtype)
    if is_streamed:
        return model, "", _stream_plain(model, state, file, remedy, how)
    return model, load_state(model, state, file.name, remedy=remedy, left="random values", strict=strict), None


def _stream_plain(
    module: nn.Module, state: Mapping[str, LazyTensor], path: Path, remedy: str, how: StreamingChoice
) -> StreamedWeights:
    from workbench.models.streamed_models import files_identity, stream_plain

    fitting, _ = matched_state(module, state, path.name, remedy=remedy)
    lazy = {name: found if isinstance(found, LazyTensor) else LazyTensor.of(found) for name, found in fitting.items()}
    return stream_plain(module, lazy, identity=files_identity(path), device=how.device or "cpu")


def _open_state(
    path: Path, module: nn.Module | None, dtype: torch.dtype | str, name: str | None, strict: bool, how: StreamingChoice
) -> Subject:
    if module is None and (config := diffusers_config(path)):
        module = diffusers_model(path, config).eval()
    if module is None:
        raise CheckpointError(
            f"{path.name} holds weights without an architecture; pass module=, or the folder with its config.json."
        )
    remedy = "pass the module that it was saved from"
    left = "the module's own values"
    state = lazy_state(path)
    if how.is_wanted(sum(tensor.n_bytes for tensor in state.values()), is_strict=strict):
        matched_state(module, state, path.name, remedy=remedy)
        module = module if isinstance(dtype, str) else module.to(dtype)
        streamed = _stream_plain(module, state, path, remedy, how)
        return Subject(module, name or path.stem, str(path), streamed=streamed)
    unloaded = load_state(module, state, path.name, remedy=remedy, left=left, strict=strict)
    module = how.placed(module if isinstance(dtype, str) else module.to(dtype))
    return Subject(module, name or path.stem, str(path), unloaded=unloaded)


def _open_adapter(path: Path, base: Subject, dtype: torch.dtype | str, name: str | None) -> Subject:
    """The base model with an adapter merged into its weights."""
    model = base.model
    own = model.state_dict()
    names = {plain: key for key, plain in plain_names(own).items()}
    held = {plain: LazyTensor.of(own[key]) for plain, key in names.items() if isinstance(own[key], torch.Tensor)}
    state = merged(path, held, kind_of_matrix(model, names))
    load_state(model, state, path.name, remedy="pass the model that it was made for", left="the base model's values")
    if dtype != "auto":
        model.to(dtype)
    folder = path if (path / "tokenizer_config.json").exists() else base.folder
    return replace(base, name=name or path.name, source=str(path), folder=folder)


def _open_hub(
    hub_name: str,
    trust_remote_code: bool,
    dtype: torch.dtype | str,
    name: str | None,
    strict: bool,
    how: StreamingChoice,
) -> Subject:
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from workbench.models.pretrained import errors_in_one_sentence, open_pretrained

    try:
        cached = try_to_load_from_cache(hub_name, "config.json")
    except HFValidationError as error:
        raise CheckpointError(
            f"'{hub_name}' is no path and cannot be the name of a model; check the spelling."
        ) from error
    is_cached = isinstance(cached, str)
    if not is_cached and (constants.HF_HUB_OFFLINE or not _can_reach(constants.ENDPOINT)):
        raise CheckpointError(
            f"'{hub_name}' is no folder here, and the Hugging Face hub cannot be reached; "
            "check the spelling, go online, or pass a local folder."
        )
    if how.streaming is True:
        patterns = ["*token*", "*.model", "*.json", "*.safetensors", "*.py"]
        with errors_in_one_sentence(hub_name, remedy="try again, or pass a local folder"):
            folder = Path(snapshot_download(hub_name, allow_patterns=patterns, local_files_only=is_cached))
        short = name or hub_name.split("/")[-1]
        return _open_folder(folder, trust_remote_code, dtype, short, strict, how, source=f"hub {hub_name}")
    model, unloaded = open_pretrained(
        hub_name,
        Path(cached).parent if isinstance(cached, str) else None,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
        is_local=is_cached,
        strict=strict,
    )
    tokenizer_files = ["*token*", "*.model", "config.json"]
    with errors_in_one_sentence(hub_name, remedy="try again, or pass a local folder"):
        folder = Path(snapshot_download(hub_name, allow_patterns=tokenizer_files, local_files_only=is_cached))
    return Subject(how.placed(model.eval()), name or hub_name.split("/")[-1], f"hub {hub_name}", folder, unloaded)


def _can_reach(endpoint: str) -> bool:
    """Whether the hub's address can be looked up: the hub's own client retries for half a minute before it gives up."""
    if any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    host = endpoint.split("://")[-1].split("/")[0].split(":")[0]
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True
