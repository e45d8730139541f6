"""Open a checkpoint, whatever it is kept in: what comes out is a `Subject` that `profile` can look at."""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from workbench.errors import CheckpointError, WorkbenchError

if TYPE_CHECKING:
    from torch import Tensor

#: The key in a folder's config.json that names one of our own architectures.
ZOO_KEY = "workbench_architecture"
_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_STATE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Subject:
    """A model under study.

    Attributes:
        model: The module, in eval mode as opened; its mode is left alone afterwards.
        name: Short name for titles and stores.
        source: Where it came from, for provenance.
        folder: Folder with tokenizer files, where there is one.
    """

    model: nn.Module
    name: str
    source: str
    folder: Path | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer that lies beside the weights.

        Raises:
            CheckpointError: If there is none.
        """
        if self.folder is not None and (self.folder / "tokenizer_config.json").exists():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        raise CheckpointError(f"{self.name} comes without a tokenizer; pass token ids instead of text.")

    def tokenize(self, texts: str | Sequence[str], *, max_length: int = 64) -> dict[str, Tensor]:
        """Token ids of texts, padded on the right to one length and at most ``max_length`` long.

        Returns:
            ``input_ids`` and ``attention_mask``, int64, shape (text, token).
        """
        tokenizer = self.tokenizer
        texts = [texts] if isinstance(texts, str) else list(texts)
        rows = [row[:max_length] for row in tokenizer(texts, add_special_tokens=True)["input_ids"]]
        filler = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
        length = max(len(row) for row in rows)
        ids = torch.tensor([row + [filler] * (length - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": mask}


def open_checkpoint(
    source: str | os.PathLike[str] | nn.Module,
    *,
    module: nn.Module | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | str = "auto",
    name: str | None = None,
) -> Subject:
    """Open a model for study.

    Args:
        source: A Hugging Face folder or hub name; a folder saved by `save_checkpoint`; a ``.safetensors``, ``.bin``,
            ``.pt`` or ``.pth`` state dict together with ``module``; a ``.gguf`` file; or any ``nn.Module``. A GGUF
            file is converted once and kept under the user's cache folder.
        module: The module that a state dict belongs to; its weights are replaced.
        trust_remote_code: Let a Hugging Face checkpoint run Python code of its own.
        dtype: Of the weights, as transformers understands it; "auto" keeps what the checkpoint has.
        name: For titles and stores; made from the source if not given.

    Returns:
        The subject, in eval mode unless a module was passed, which is left as it is.

    Raises:
        CheckpointError: If there is nothing to open, or what is there is damaged, unsafe or does not fit.
    """
    if isinstance(source, nn.Module):
        return Subject(source, name or type(source).__name__, f"module {type(source).__qualname__}")
    path = Path(source).expanduser()
    if path.is_dir():
        return _open_folder(path, trust_remote_code, dtype, name)
    if path.is_file():
        if path.suffix == ".gguf":
            from workbench.subjects.gguf_cache import converted_folder

            folder = converted_folder(path)
            return _open_folder(folder, trust_remote_code, dtype, name or path.stem, source=str(path))
        if path.suffix in _STATE_SUFFIXES:
            return _open_state(path, module, name)
        raise CheckpointError(
            f"{path} is no checkpoint format known here; pass a folder, a .safetensors, .bin, .pt or .gguf file."
        )
    text = os.fspath(source)
    looks_like_path = path.suffix in (*_STATE_SUFFIXES, ".gguf") or text.startswith((".", "/", "~"))
    if looks_like_path or not _HUB_NAME.match(text):
        raise CheckpointError(f"There is no file or folder {text}; check the path.")
    return _open_hub(text, trust_remote_code, dtype, name)


def save_checkpoint(model: nn.Module, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Save a model of the zoo so that `open_checkpoint` reads it back: config.json and model.safetensors.

    Args:
        model: From ``wb.zoo``.
        folder: Where to; made if need be.
        overwrite: Replace a checkpoint that is there.

    Returns:
        The folder.

    Raises:
        CheckpointError: If the folder holds a checkpoint already, the model is not of the zoo, or the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from workbench.subjects.zoo import is_zoo_model

    folder = Path(folder)
    if not is_zoo_model(model):
        raise CheckpointError(f"{type(model).__name__} is not of the zoo; save it with its own save_pretrained().")
    if (folder / "model.safetensors").exists() and not overwrite:
        raise CheckpointError(f"{folder} holds a checkpoint already; pass overwrite=True to replace it.")
    if any(parametrize.is_parametrized(module) for module in model.modules()):
        raise CheckpointError(
            "The model's weights are parametrized, which no configuration says; save wb.baselines.plain_copy(model)."
        )
    options = model.config.as_dict()
    config = {ZOO_KEY: options.pop("family"), **options}
    state = model.state_dict()
    tied = _tied_names(state)
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


def cache_folder() -> Path:
    """Where converted and downloaded checkpoints are kept: $WORKBENCH_CACHE, or the user's cache folder."""
    if "WORKBENCH_CACHE" in os.environ:
        return Path(os.environ["WORKBENCH_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "stability-workbench"


def _open_folder(
    folder: Path, trust_remote_code: bool, dtype: torch.dtype | str, name: str | None, source: str | None = None
) -> Subject:
    config_file = folder / "config.json"
    if not config_file.exists():
        gguf = sorted(folder.glob("*.gguf"))
        hint = f"pass the file {gguf[0]}" if gguf else "pass the folder that save_pretrained() wrote"
        raise CheckpointError(f"{folder} has no config.json, so it is no checkpoint folder; {hint}.")
    try:
        config = json.loads(config_file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{config_file} is no valid JSON ({error}); fetch the checkpoint again.") from error
    for file in sorted(folder.glob("*.safetensors")):
        _check_safetensors(file)
    if ZOO_KEY in config:
        model = _open_zoo(folder, config, dtype)
    else:
        model = _from_pretrained(str(folder), trust_remote_code, dtype, is_local=True)
    return Subject(model.eval(), name or folder.name, source or str(folder), folder)


def _open_zoo(folder: Path, config: dict[str, Any], dtype: torch.dtype | str) -> nn.Module:
    from safetensors import safe_open

    from workbench.subjects import zoo

    options = dict(config)
    family = options.pop(ZOO_KEY)
    if family not in zoo.FAMILIES:
        raise CheckpointError(f"{folder} holds a '{family}', which this version does not know; update the workbench.")
    try:
        model = zoo.build(zoo.ArchitectureConfig.from_dict({**options, "family": family}))
    except WorkbenchError as error:
        raise CheckpointError(f"{folder / 'config.json'} does not describe a {family}: {error}") from error
    weights = folder / "model.safetensors"
    if dtype == "auto" and weights.exists():
        with safe_open(weights, framework="pt") as file:
            dtype = file.get_tensor(next(iter(file.keys()))).dtype
    if dtype != "auto":
        model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    return _load_state(model, weights)


def _open_state(path: Path, module: nn.Module | None, name: str | None) -> Subject:
    if module is None:
        raise CheckpointError(
            f"{path.name} holds weights without an architecture; pass module=, or the folder with its config.json."
        )
    return Subject(_load_state(module, path), name or path.stem, str(path))


def _load_state(module: nn.Module, path: Path) -> nn.Module:
    state = read_state(path)
    own = module.state_dict()
    tied = _tied_names(own)
    missing, extra = sorted(own.keys() - state.keys() - tied), sorted(state.keys() - own.keys())
    wrong = [key for key in own.keys() & state.keys() if own[key].shape != state[key].shape]
    if missing or extra or wrong:
        kinds = (("lacks", missing), ("has too many", extra), ("has other shapes for", sorted(wrong)))
        found = "; ".join(f"{kind} {len(keys)} tensors ({', '.join(keys[:3])}, ...)" for kind, keys in kinds if keys)
        raise CheckpointError(
            f"{path.name} does not fit {type(module).__name__}: it {found}; pass the module that it was saved from."
        )
    module.load_state_dict(state, strict=False)  # all is there but what comes with a tensor that it is tied to
    return module


def _tied_names(state: dict[str, Tensor]) -> set[str]:
    """Names of tensors that an earlier one of the state dict is: safetensors keeps none twice."""
    seen, tied = set(), set()
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.data_ptr() and place in seen:
            tied.add(name)
        seen.add(place)
    return tied


def read_state(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` file or of a pickle, which is read without running code.

    Raises:
        CheckpointError: If the file is missing, damaged, holds code, or holds no state dict.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"There is no file {path}; check the path.")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        _check_safetensors(path)
        return load_file(path)
    damaged = f"{path.name} is damaged or incomplete; fetch it again."
    with path.open("rb") as file:
        # torch takes a zip archive without its end for an old pickle and then suspects code in it.
        if file.read(2) == b"PK" and not zipfile.is_zipfile(path):
            raise CheckpointError(damaged)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path.name} holds more than tensors, possibly code, and was not loaded; "
            "save its state dict as .safetensors where you trust it."
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise CheckpointError(damaged) from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(f"{path.name} holds no state dict; save module.state_dict() into it.")
    return state


def _check_safetensors(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} is truncated or no safetensors file; fetch it again.") from error


def _open_hub(hub_name: str, trust_remote_code: bool, dtype: torch.dtype | str, name: str | None) -> Subject:
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache

    is_cached = isinstance(try_to_load_from_cache(hub_name, "config.json"), str)
    if not is_cached and (constants.HF_HUB_OFFLINE or not _can_reach(constants.ENDPOINT)):
        raise CheckpointError(
            f"'{hub_name}' is no folder here, and the Hugging Face hub cannot be reached; "
            "check the spelling, go online, or pass a local folder."
        )
    model = _from_pretrained(hub_name, trust_remote_code, dtype, is_local=is_cached)
    tokenizer_files = ["*token*", "*.model", "config.json"]
    folder = Path(snapshot_download(hub_name, allow_patterns=tokenizer_files, local_files_only=is_cached))
    return Subject(model.eval(), name or hub_name.split("/")[-1], f"hub {hub_name}", folder)


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


def _from_pretrained(source: str, trust_remote_code: bool, dtype: torch.dtype | str, is_local: bool) -> nn.Module:
    import transformers
    from safetensors import SafetensorError

    try:
        with _quiet_transformers():
            config = transformers.AutoConfig.from_pretrained(
                source, trust_remote_code=trust_remote_code, local_files_only=is_local
            )
            cls = _model_class(config, trust_remote_code)
            return cls.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                local_files_only=is_local,
                **({"trust_remote_code": True} if trust_remote_code else {}),
            )
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{source} holds a pickle with more than tensors, possibly code, and was not loaded; "
            "ask for a safetensors version."
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{source} needs Python code of its own; read that code, then pass trust_remote_code=True."
            ) from error
        raise CheckpointError(f"transformers cannot open {source}: {first}") from error


def _model_class(config: Any, trust_remote_code: bool) -> Any:
    """The class that the checkpoint was saved from, so that its head is there too."""
    import transformers

    for architecture in getattr(config, "architectures", None) or []:
        if hasattr(transformers, architecture):
            return getattr(transformers, architecture)
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars of transformers' own while it loads; the user's setting comes back."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
