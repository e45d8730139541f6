"""Configuration of a training run as plain values, stored with it and compared before it is resumed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn.utils import parametrize

if TYPE_CHECKING:
    from torch import nn

    from workbench.tasks import Task
    from workbench.training.callback import Callback
    from workbench.training.recording import Recording
    from workbench.training.training_plan import TrainingPlan

#: Entries of a Hugging Face config that describe its origin rather than the model.
_PROVENANCE = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype")


def describe_run(
    model: nn.Module,
    task: Task,
    plan: TrainingPlan,
    recording: Recording,
    loss: Callable[..., Any],
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Return all settings that affect the results of a run, as values of JSON; functions by their names.

    Returns:
        ``model``, ``task``, ``training`` and ``spectra``, each a mapping; and, by name, the configuration of each
        callback, without settings that may change during the run and are recorded at each step, such as switches.
    """
    training = plan.as_dict() | {"loss": getattr(loss, "__qualname__", None) or str(loss)}
    if callable(plan.schedule) or plan.schedule == "constant":
        del training["n_steps"]  # steps do not depend on the length of the run, which may be extended
    configuration = {
        "model": describe_model(model),
        "task": task.describe(),
        "training": training,
        "spectra": {"every": recording.spectra_every, **recording.profile_options},
    }
    configuration |= {callback.name: dict(about) for callback in callbacks if (about := callback.describe())}
    return json.loads(json.dumps(configuration, default=str))


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Return the name, number of parameters and configuration of a model; else a digest of its tensor shapes."""
    config: Any = getattr(model, "config", None)
    about: dict[str, Any] = {"name": type(model).__name__}
    if hasattr(config, "as_dict"):
        about["config"] = config.as_dict()
    elif hasattr(config, "to_dict"):
        about["config"] = {name: value for name, value in config.to_dict().items() if name not in _PROVENANCE}
    else:
        shapes = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in model.state_dict().items()]
        about["shapes"] = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    if counts := _parametrizations(model):
        about["parametrizations"] = counts
    return about | {"n_weights": sum(parameter.numel() for parameter in model.parameters())}


def _parametrizations(model: nn.Module) -> dict[str, int]:
    """Count the tensors of a model that are computed by each parametrization, such as ``_SpectralNorm()``."""
    tables: list[Any] = [module.parametrizations for module in model.modules() if parametrize.is_parametrized(module)]
    return dict(Counter(repr(item) for table in tables for chain in table.values() for item in chain))


def first_difference(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Find the first difference between two configurations.

    Returns:
        Dotted name, recorded value and current value ("nothing" if one lacks it); None if they are equal.
    """
    old, new = dict(_flat(recorded)), dict(_flat(current))
    for name in [*new, *(name for name in old if name not in new)]:
        if old.get(name, "nothing") != new.get(name, "nothing"):
            return name, old.get(name, "nothing"), new.get(name, "nothing")
    return None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
