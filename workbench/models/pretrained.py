"""Models that transformers opens: the class that a config.json names, and a check that all parameters were present."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.errors import CheckpointError, WorkbenchError
from workbench.models.state_files import Misfit, in_order, shapes_differ, some, unwrapped_names
from workbench.models.weight_folders import FolderWeights, folder_weights

#: Tables of the classes that are tried where config.json names none; the first that the weights fit exactly is used.
_MAPPINGS = (
    "MODEL_MAPPING",
    "MODEL_FOR_PRETRAINING_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
)
#: Log messages of transformers about parameters that do not fit; the workbench reports these itself, once.
_LOAD_REPORTS = ("LOAD REPORT", "checkpoint seem corrupted")


def open_pretrained(
    source: str,
    folder: Path | None,
    *,
    trust_remote_code: bool = False,
    dtype: torch.dtype | str = "auto",
    is_local: bool = True,
    strict: bool = True,
    without_memory: bool = False,
) -> tuple[nn.Module, str]:
    """Open the model of a Hugging Face folder or hub name; also return a clause that describes what was not loaded.

    The folder holds the files; it is None if they must be downloaded first. If not ``strict``, the parameters that fit
    are loaded. ``without_memory`` leaves the model on the meta device; its parameters are compared with the files too.
    """
    import transformers

    with errors_in_one_sentence(source), quiet_transformers() as reports:
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": is_local}
        config = transformers.AutoConfig.from_pretrained(source, **options)
        # A config.json may name kernels, which transformers would download and run.
        config._attn_implementation = "eager" if config._attn_implementation == "eager" else None
        config._experts_implementation = None
        loader = _Loader(source, config, {**options, "dtype": dtype}, reports, folder)
        cls = loader.choose(_model_classes(config, trust_remote_code=trust_remote_code))
        model, misfit = loader.load_well(cls, strict=strict, without_memory=without_memory)
        require_fit(model, misfit, source, strict=strict, remedy="download the checkpoint again or correct config.json")
    return model, misfit.unloaded(left="random values")


def read_misfit(model: nn.Module, loading_info: Mapping[str, Any]) -> Misfit:
    """Return the tensors that transformers could not load into a model, without tied and ignored tensors."""
    own = model.state_dict()
    shapes = {name: shapes_differ(found, expected) for name, found, expected in loading_info["mismatched_keys"]}
    # Index tables and rotary frequencies, which older versions did not save, are computed and never random.
    learned = [
        name
        for name in loading_info["missing_keys"]
        if name not in own or (own[name].is_floating_point() and not name.endswith("inv_freq"))
    ]
    return Misfit(
        missing=in_order(learned),
        unexpected=in_order(loading_info["unexpected_keys"]),
        misshapen=tuple((name, shapes[name]) for name in in_order(shapes)),
    )


def require_fit(model: nn.Module, misfit: Misfit, source: str, *, strict: bool, remedy: str) -> None:
    """Raise CheckpointError if some parameters do not fit or, if not ``strict``, if none of them fits."""
    is_empty = bool(misfit) and {name for name, _ in model.named_parameters()} <= {*misfit.left}
    if misfit and (strict or is_empty):
        lenient = "" if is_empty else ", or pass wb.open_checkpoint(..., strict=False) to load the parameters that fit"
        raise CheckpointError(f"{source} does not fit {type(model).__name__}: it {misfit.found()}; {remedy}{lenient}.")


@dataclass
class _Loader:
    """A checkpoint that is loaded repeatedly until a class fits."""

    source: str  # path or name as transformers takes it
    config: Any
    options: dict[str, Any]  # of every from_pretrained
    reports: list[str]  # log messages of transformers from the last load
    folder: Path | None  # None if the files have not been downloaded
    weights: FolderWeights | None = None  # tensors in the files; None if unknown

    def choose(self, classes: Sequence[Any]) -> Any:
        """Return the first class that the weights fit exactly, else the first whose parameters are all present."""
        if len(classes) == 1:
            return classes[0]
        self._find_weights()
        filled = []
        for cls in classes:
            with suppress(Exception):  # a class that this config cannot build
                _, misfit = self._load(cls, plain=self._is_wrapped, without_memory=True)
                if not misfit:
                    return cls
                if not self._without_heads(cls, misfit):
                    filled.append(cls)
        return (filled or classes)[0]

    def load_well(self, cls: Any, *, strict: bool, without_memory: bool = False) -> tuple[nn.Module, Misfit]:
        """Load the model under the tensor names that fit better: those of the files, or those without wrappers."""
        self._find_weights()
        can_read_files = self.weights is None or self.weights.is_usual
        plain = self._is_wrapped or not can_read_files
        # Missing parameters would be initialized at random, in memory that may not be available.
        n_held = sum(t.n_elements for t in self.weights.state.values()) if self.weights is not None else 0
        is_short = strict and self.weights is not None and self._n_parameters(cls) > n_held
        is_short = is_short or without_memory
        model, misfit = self._load(cls, plain=plain, without_memory=is_short)
        self._find_weights()  # the files of a hub name have been downloaded by now
        if misfit and self._is_wrapped and can_read_files:
            other, its = self._load(cls, plain=not plain, without_memory=is_short)
            if its.n_tensors < misfit.n_tensors:
                model, misfit, plain = other, its, not plain
        if self.weights is not None and not self._is_quantized:
            misfit = replace(misfit, integers=_integers(model, self.weights, misfit))
        misfit = self._without_heads(type(model), misfit)
        if is_short and not misfit and not without_memory:
            model, _ = self._load(cls, plain=plain, without_memory=False)
        return model, misfit

    @property
    def _is_quantized(self) -> bool:
        return getattr(self.config, "quantization_config", None) is not None

    @property
    def _is_wrapped(self) -> bool:
        names = () if self.weights is None else self.weights.state
        return any(name != plain for name, plain in unwrapped_names(names).items())

    def _find_weights(self) -> None:
        if self.folder is None:
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(self.source, "config.json")
            self.folder = Path(found).parent if isinstance(found, str) else None
        is_usual = getattr(self.config, "transformers_weights", None) is None
        if self.weights is None and self.folder is not None and is_usual:
            self.weights = folder_weights(self.folder, is_fetched=self.source == str(self.folder))

    def _n_parameters(self, cls: Any) -> int:
        model = None if self._is_quantized else _without_memory(cls, self.config)
        return 0 if model is None else sum(parameter.numel() for parameter in model.parameters())

    def _without_heads(self, cls: Any, misfit: Misfit) -> Misfit:
        """Return the misfit with tensors of the family's other heads listed separately; these are harmless."""
        if not misfit.unexpected:
            return misfit
        known = _names_in_family(cls, self.config)
        return replace(
            misfit,
            unexpected=tuple(name for name in misfit.unexpected if name not in known),
            of_another_head=tuple(name for name in misfit.unexpected if name in known),
        )

    def _load(self, cls: Any, *, plain: bool, without_memory: bool) -> tuple[nn.Module, Misfit]:
        """Load the model with transformers, with ``plain`` tensor names; ``without_memory`` on the meta device."""
        import transformers

        options = {**self.options, "config": self.config, "ignore_mismatched_sizes": True, "output_loading_info": True}
        if without_memory and not self._is_quantized:
            options["device_map"] = {"": "meta"}
        self.reports.clear()
        try:
            # Without values transformers need not open the files, which it would map into memory.
            has_state = plain or ("device_map" in options and hasattr(cls, "base_model_prefix"))
            if self.weights is None or not has_state:
                model, info = cls.from_pretrained(self.source, **options)
            else:
                if not hasattr(cls, "base_model_prefix"):  # an auto class, which finds custom code only by the path
                    cls = type(self._load(cls, plain=False, without_memory=True)[0])
                held = self.weights.state
                names = unwrapped_names(held) if plain else dict(zip(held, held, strict=True))
                if "device_map" in options:
                    state = {names[n]: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in held.items()}
                else:
                    state = {names[name]: tensor for name, tensor in self.weights.read().items()}
                model, info = cls.from_pretrained(None, state_dict=state, **options)
                # What from_pretrained adds to a model loaded from a path, but not to one loaded from a state dict.
                model.config.name_or_path = model.name_or_path = self.source
                if self.folder and model.can_generate() and (self.folder / "generation_config.json").exists():
                    generation = transformers.GenerationConfig.from_pretrained(self.folder, local_files_only=True)
                    model.generation_config = generation
        except RuntimeError as error:
            if broken := re.findall(r"^(\S.*?)\s*\|\s*\S*CONVERSION", "\n".join(self.reports), re.MULTILINE):
                raise CheckpointError(
                    f"{self.source} does not fit {cls.__name__}: parts of {some(broken)} are missing or differ in "
                    "shape; download the checkpoint again or correct config.json."
                ) from error
            raise
        except TypeError as error:
            if "storage object" not in str(error):
                raise
            raise CheckpointError(
                f"{self.source} contains weights of 8 bits or fewer, with which no model can run; "
                "pass wb.open_checkpoint(..., dtype=torch.bfloat16) or torch.float32 to convert them."
            ) from error
        return model, read_misfit(model, info)


def _model_classes(config: Any, *, trust_remote_code: bool) -> list[Any]:
    """Return the class that the checkpoint was saved from, with its head; several if config.json names none."""
    import transformers

    given = getattr(config, "architectures", None)
    names = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"config.json has architectures = {given!r}, expected a list with the name of a class; correct it."
        )
    config.architectures = list(names) or None
    has_own_code = trust_remote_code and bool(getattr(config, "auto_map", None))
    every = [name for name in dir(transformers) if name.startswith("MODEL_") and name.endswith("MAPPING")]
    unrelated = []
    for name in names:
        cls = getattr(transformers, name, None) if name.isidentifier() else None
        if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
            continue
        if name.endswith("PreTrainedModel"):
            continue
        if isinstance(config, cls.config_class or ()) or cls in _of_type(config, every):
            return [cls]
        unrelated.append(name)
    if unrelated and not has_own_code:
        raise CheckpointError(
            f"config.json names {unrelated[0]}, no model of its model_type '{config.model_type}'; correct one of them."
        )
    if has_own_code:
        has_head = "AutoModelForCausalLM" in config.auto_map
        return [transformers.AutoModelForCausalLM if has_head else transformers.AutoModel]
    if found := _of_type(config, _MAPPINGS):
        return found
    raise CheckpointError(f"transformers has no model of the type '{config.model_type}'; update transformers.")


def _of_type(config: Any, mappings: Sequence[str]) -> list[Any]:
    """Return the model classes that the tables of transformers list for a config's type."""
    import transformers

    classes: list[Any] = []
    for mapping in mappings:
        with suppress(ImportError, ValueError):  # a class whose package is not installed
            found = getattr(transformers, mapping).get(type(config), ())
            classes += found if isinstance(found, (list, tuple)) else [found]
    return list(dict.fromkeys(classes))


def _without_memory(cls: Any, config: Any) -> nn.Module | None:
    """Build the model on the meta device; return None if that fails."""
    from transformers.utils import logging as its_logging

    verbosity = its_logging.get_verbosity()
    its_logging.set_verbosity_error()
    try:
        with suppress(Exception), torch.device("meta"):
            return cls(copy.deepcopy(config))  # a model may write into its config
    finally:
        its_logging.set_verbosity(verbosity)
    return None


def _names_in_family(cls: Any, config: Any) -> set[str]:
    """Return the tensor names of all classes in a model's module, which put other heads on the same blocks."""
    from transformers import PreTrainedModel

    names: set[str] = set()
    for other in list(vars(sys.modules[cls.__module__]).values()):
        if isinstance(other, type) and issubclass(other, PreTrainedModel) and other.__module__ == cls.__module__:
            base = f"{other.base_model_prefix}."
            model = _without_memory(other, config) if isinstance(config, other.config_class or ()) else None
            for name in () if model is None else model.state_dict():
                names |= {name, name.removeprefix(base), base + name}
    return names


def _integers(model: nn.Module, weights: FolderWeights, misfit: Misfit) -> tuple[str, ...]:
    """Return integer tensors of the files that transformers loaded as floats: quantized weights without scales."""
    integers = [name for name, t in weights.state.items() if not (t.dtype.is_floating_point or t.dtype.is_complex)]
    if not integers:
        return ()
    own = model.state_dict()
    names = unwrapped_names(weights.state)
    base = f"{getattr(model, 'base_model_prefix', '')}."
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"position_ids$"]
    taken = []
    for file_name in integers:
        name = names[file_name]
        target = next((own[n] for n in (name, base + name, name.removeprefix(base)) if n in own), None)
        if target is None:  # merged with others, renamed, or ignored
            is_float = name.endswith("weight") and name not in misfit.unexpected
            is_float = is_float and not any(re.search(pattern, name) for pattern in ignored)
        else:
            is_float = target.is_floating_point()
        taken += [file_name] if is_float else []
    return in_order(taken)


@contextmanager
def errors_in_one_sentence(
    source: str, *, remedy: str = "check its config.json, or download the checkpoint again"
) -> Iterator[None]:
    """Convert every error that transformers raises for a checkpoint into a CheckpointError with its first line."""
    try:
        yield
    except WorkbenchError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{source} was not loaded: its pickle holds more than tensors; use a safetensors version."
        ) from error
    except Exception as error:  # an invalid config.json can cause any error in third-party code
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{source} needs its own code; read it, then pass wb.open_checkpoint(..., trust_remote_code=True)."
            ) from error
        raise CheckpointError(f"transformers cannot open {source}: {_reason(error)}; {remedy}.") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # raised by tokenizers, which is written in Rust; no Exception
            raise
        raise CheckpointError(f"transformers cannot open {source}: {_reason(error)}; {remedy}.") from error


def _reason(error: BaseException) -> str:
    """Return the first line of an error, or its first sentence if the line is long, without the period."""
    from huggingface_hub.errors import StrictDataclassError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, KeyError):
        return f"it does not know {error}"
    if isinstance(error, StrictDataclassError):  # the first line only names the field
        text = re.sub(r"^\w+: ", "", lines[-1])
    elif isinstance(error, (OSError, ValueError, RuntimeError, ImportError)):
        text = lines[0]
    else:
        text = f"{type(error).__name__}: {lines[0]}"
    if len(text) > 160:
        text = re.split(r"\. (?=[A-Z])", text)[0]
    return text.rstrip(".:")


@contextmanager
def quiet_transformers() -> Iterator[list[str]]:
    """Suppress the progress bars and load reports of transformers, and yield the list to which reports are appended."""
    from transformers.utils import logging as its_logging

    reports: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_report = any(words in message for words in _LOAD_REPORTS)
        reports.extend([message] if is_report else [])
        return not is_report

    logger = logging.getLogger("transformers.modeling_utils")
    was_enabled = its_logging.is_progress_bar_enabled()
    its_logging.disable_progress_bar()
    logger.addFilter(keep)
    try:
        yield reports
    finally:
        logger.removeFilter(keep)
        if was_enabled:
            its_logging.enable_progress_bar()
