"""Models that transformers opens: the class for a config.json, and whether all its parameters were present."""

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
from workbench.models.folder_weights import FolderWeights, folder_weights
from workbench.models.lazy_tensor import LazyTensor
from workbench.models.state_fit import Misfit, in_order, plain_names, shapes_differ, some

#: What the config's type may be opened as where config.json names no class: the first that the weights fit exactly.
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
#: Log messages of transformers on parameters that do not fit, which are reported once here instead.
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
    """The model of a Hugging Face folder or hub name, with all its weights.

    Args:
        source: Source as transformers takes it.
        folder: Folder of its files; None if they must be fetched first.
        trust_remote_code: Whether it may run its own Python code.
        dtype: Type of the parameters, or "auto".
        is_local: Whether to stay off the network.
        strict: Whether to refuse parameters that do not fit; otherwise those that fit are loaded.
        without_memory: Whether to leave the model on the meta device; its weights are compared with the files all the
            same.

    Returns:
        The model, and one clause on what was not loaded: of strict models at most tensors of another head.

    Raises:
        CheckpointError: If config.json is wrong, or the weights are damaged, hold code or do not fit.
    """
    import transformers

    with errors_in_one_sentence(source), quiet_transformers() as reports:
        options: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
        config = transformers.AutoConfig.from_pretrained(
            source, local_files_only=is_local, trust_remote_code=trust_remote_code
        )
        loader = _Loader(source, config, {**options, "dtype": dtype, "local_files_only": is_local}, reports, folder)
        cls = loader.choose(_model_classes(config, trust_remote_code=trust_remote_code))
        model, misfit = loader.load_well(cls, strict=strict, without_memory=without_memory)
        refuse_misfit(model, misfit, source, strict=strict, remedy="fetch the checkpoint again or correct config.json")
    return model, misfit.unloaded(left="random values")


def read_misfit(model: nn.Module, loading_info: Mapping[str, Any]) -> Misfit:
    """The tensors that transformers could not load into a model; tied and ignored tensors are left out already."""
    own = model.state_dict()
    shapes = {name: shapes_differ(found, expected) for name, found, expected in loading_info["mismatched_keys"]}
    # Tables of indices and of rotary frequencies, which older versions did not save, are computed and never random.
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


def refuse_misfit(model: nn.Module, misfit: Misfit, source: str, *, strict: bool, remedy: str) -> None:
    """Refuse a model some of whose weights are random, or all of them where ``strict`` is off.

    Raises:
        CheckpointError: If parameters do not fit.
    """
    is_empty = bool(misfit) and {name for name, _ in model.named_parameters()} <= {*misfit.left}
    if misfit and (strict or is_empty):
        lenient = "" if is_empty else ", or pass strict=False to open it with what fits"
        raise CheckpointError(f"{source} does not fit {type(model).__name__}: it {misfit.found()}; {remedy}{lenient}.")


@dataclass
class _Loader:
    """One checkpoint, loaded repeatedly until a class fits.

    Attributes:
        source: Source as transformers takes it.
        config: Config of transformers.
        options: Arguments of every ``from_pretrained``.
        reports: Log messages of transformers for each load.
        folder: Folder of its files, once they are fetched.
        weights: Tensors in the files, once known.
    """

    source: str
    config: Any
    options: dict[str, Any]
    reports: list[str]
    folder: Path | None
    weights: FolderWeights | None = None

    def choose(self, classes: Sequence[Any]) -> Any:
        """The first class that the weights fit exactly, else the first that they fill."""
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
        """The model and what does not fit it, under the names that fit better: those of the files or the plain ones."""
        self._find_weights()
        can_read_files = self.weights is None or self.weights.is_usual
        plain = self._is_wrapped or not can_read_files
        # Weights that do not fit would be made up, in memory that there may not be.
        is_short = strict and self.weights is not None and self._n_parameters(cls) > self.weights.n_elements
        is_short = is_short or without_memory
        model, misfit = self._load(cls, plain=plain, without_memory=is_short)
        self._find_weights()  # from the hub they are here by now
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
        names = () if self.weights is None else self.weights.names
        return any(name != plain for name, plain in plain_names(names).items())

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
        """The misfit, with the tensors of other heads of the family set apart: they say nothing against the fit."""
        if not misfit.unexpected:
            return misfit
        known = _names_in_family(cls, self.config)
        return replace(
            misfit,
            unexpected=tuple(name for name in misfit.unexpected if name not in known),
            of_another_head=tuple(name for name in misfit.unexpected if name in known),
        )

    def _load(self, cls: Any, *, plain: bool, without_memory: bool) -> tuple[nn.Module, Misfit]:
        """The model as transformers loads it; on the meta device if only the fit is asked for.

        Args:
            cls: A model class or an auto class.
            plain: Whether to use names without wrappers.
            without_memory: Whether to use the meta device.
        """
        options = {**self.options, "config": self.config, "ignore_mismatched_sizes": True, "output_loading_info": True}
        if without_memory and not self._is_quantized:
            options["device_map"] = {"": "meta"}
        self.reports.clear()
        try:
            if self.weights is None or not plain:
                model, info = cls.from_pretrained(self.source, **options)
            else:
                if not hasattr(cls, "base_model_prefix"):  # an auto class, which finds code of its own by the path only
                    cls = type(self._load(cls, plain=False, without_memory=True)[0])
                names = plain_names(self.weights.names)
                state = _meta(self.weights.state) if "device_map" in options else self.weights.read()
                state = {names[name]: tensor for name, tensor in state.items()}
                model, info = cls.from_pretrained(None, state_dict=state, **options)
                self._add_what_no_path_gave(model)
        except RuntimeError as error:
            if broken := re.findall(r"^(\S.*?)\s*\|\s*\S*CONVERSION", "\n".join(self.reports), re.MULTILINE):
                raise CheckpointError(
                    f"{self.source} does not fit {cls.__name__}: it lacks parts of {some(broken)}, or has them in "
                    "several shapes; fetch the checkpoint again or correct config.json."
                ) from error
            raise
        except TypeError as error:
            if "storage object" not in str(error):
                raise
            raise CheckpointError(
                f"{self.source} holds weights in 8 bits or fewer, in which no model runs; "
                "pass dtype=torch.bfloat16 or torch.float32 to convert them."
            ) from error
        return model, read_misfit(model, info)

    def _add_what_no_path_gave(self, model: Any) -> None:
        """The arguments that from_pretrained adds to a model from a path, but not to one from a state dict."""
        from transformers import GenerationConfig

        model.config.name_or_path = model.name_or_path = self.source
        if model.can_generate() and self.folder is not None and (self.folder / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(self.folder, local_files_only=True)


def _meta(state: Mapping[str, LazyTensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same shapes without values."""
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state.items()}


def _model_classes(config: Any, *, trust_remote_code: bool) -> list[Any]:
    """The class that the checkpoint was saved from, so that its head is there too; several if no one says which."""
    import transformers

    given = getattr(config, "architectures", None)
    names = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"config.json has architectures = {given!r}, expected a list with the name of a class; correct it."
        )
    config.architectures = list(names) or None
    has_own_code = trust_remote_code and bool(getattr(config, "auto_map", None))
    foreign = []
    for name in names:
        cls = getattr(transformers, name, None) if name.isidentifier() else None
        if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
            continue
        if name.endswith("PreTrainedModel"):
            continue
        if isinstance(config, cls.config_class or ()) or cls in _of_type(config, _all_mappings()):
            return [cls]
        foreign.append(name)
    if foreign and not has_own_code:
        raise CheckpointError(
            f"config.json names {foreign[0]}, which is no model of its model_type '{config.model_type}'; "
            "correct one of the two."
        )
    if has_own_code:
        has_head = "AutoModelForCausalLM" in config.auto_map
        return [transformers.AutoModelForCausalLM if has_head else transformers.AutoModel]
    if found := _of_type(config, _MAPPINGS):
        return found
    raise CheckpointError(f"transformers has no model of the type '{config.model_type}'; update transformers.")


def _of_type(config: Any, mappings: Sequence[str]) -> list[Any]:
    """The model classes that transformers' own tables have for a config's type."""
    import transformers

    classes: list[Any] = []
    for mapping in mappings:
        with suppress(ImportError, ValueError):  # a class that needs a package which is not here
            found = getattr(transformers, mapping).get(type(config), ())
            classes += found if isinstance(found, (list, tuple)) else [found]
    return list(dict.fromkeys(classes))


def _all_mappings() -> list[str]:
    import transformers

    return [name for name in dir(transformers) if name.startswith("MODEL_") and name.endswith("MAPPING")]


def _without_memory(cls: Any, config: Any) -> nn.Module | None:
    """The model on the meta device; None if it cannot be built there."""
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
    """Names of the tensors of every class beside a model's own: of other heads on the same blocks."""
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
    """Integer tensors of the files that transformers took for floats: quantized weights without their scales."""
    if not weights.integers:
        return ()
    own = model.state_dict()
    names = plain_names(weights.names)
    base = f"{getattr(model, 'base_model_prefix', '')}."
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"position_ids$"]
    taken = []
    for file_name in weights.integers:
        name = names[file_name]
        target = next((own[n] for n in (name, base + name, name.removeprefix(base)) if n in own), None)
        if target is None:  # put together with others, renamed, or ignored
            is_float = name.endswith("weight") and name not in misfit.unexpected
            is_float = is_float and not any(re.search(pattern, name) for pattern in ignored)
        else:
            is_float = target.is_floating_point()
        taken += [file_name] if is_float else []
    return in_order(taken)


@contextmanager
def errors_in_one_sentence(
    source: str, *, remedy: str = "check its config.json, or fetch the checkpoint again"
) -> Iterator[None]:
    """Context that turns every error of transformers at a checkpoint into a CheckpointError.

    Args:
        source: Source that is read.
        remedy: What to do, if the error does not state it.

    Raises:
        CheckpointError: With the first line of the error.
    """
    try:
        yield
    except WorkbenchError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{source} holds a pickle with more than tensors, possibly code, and was not loaded; "
            "ask for a safetensors version."
        ) from error
    except Exception as error:  # a wrong config.json makes foreign code fail in any way
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{source} needs Python code of its own; read that code, then pass trust_remote_code=True."
            ) from error
        raise CheckpointError(f"transformers cannot open {source}: {_reason(error)}; {remedy}.") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of tokenizers, which is written in Rust; it is no Exception
            raise
        raise CheckpointError(f"transformers cannot open {source}: {_reason(error)}; {remedy}.") from error


def _reason(error: BaseException) -> str:
    """The first line of an error, or first sentence if that is long, without the full stop."""
    from huggingface_hub.errors import StrictDataclassError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, KeyError):
        return f"it does not know {error}"
    if isinstance(error, StrictDataclassError):  # the first line says only which field
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
    """No bars and no load reports of transformers' own; the user's setting comes back.

    Yields:
        The load reports, as they come.
    """
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
