"""Options of a recorder, the metrics that a loop logs, and the probe as JSON values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.errors import OptionError, require_listed
from workbench.io.run_output import issue_warning
from workbench.models.readable_weights import read_numbers

#: Default number of steps between two measurements of each part; None if it is not measured.
CADENCE: dict[str, int | None] = {
    "attention": 10,
    "router": 10,
    "optimizer": 10,
    "activations": 50,
    "precision": 20,
    "reduction": 5,
    "update": 50,
    "curvature": None,
    "spectra": None,
}
#: Smallest recommended number of updates in a window of queries and keys; with fewer, noise outweighs their sum.
_SHORTEST_WINDOW = 10


def checked_cadence(every: Mapping[str, int | None] | int | None) -> dict[str, int | None]:
    """Return the number of steps between two measurements of each part."""
    if every is None:
        return dict.fromkeys(CADENCE)
    if isinstance(every, Mapping):
        require_listed("every", every, CADENCE)
        given = dict(every)
    else:
        given = {name: every for name, default in CADENCE.items() if default is not None}
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise OptionError.of(f"every['{name}']", value, "a whole number of steps, at least 1, or None")
    cadence = CADENCE | given
    if cadence["attention"] is not None and cadence["attention"] < _SHORTEST_WINDOW:
        issue_warning(
            f"Updates of queries and keys are compared over {cadence['attention']} steps, too few to detect their "
            "common direction: it grows with the number of updates, and noise only with its square root. Use "
            f"{_SHORTEST_WINDOW} steps or more."
        )
    return cadence


def is_due(step: int, every: int | None) -> bool:
    """Return whether a part is measured after the update of a step, that is, after every ``every`` updates."""
    return every is not None and (step + 1) % every == 0


def plain(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return values as float64 arrays."""
    return {name: np.asarray(value, dtype=np.float64) for name, value in values.items()}


@dataclass(frozen=True)
class RecorderOptions:
    """Options of a recorder that its measurements need; see `workbench.Recorder`."""

    every: Mapping[str, int | None]
    alpha: float
    loss_of: Callable[[nn.Module, Any], torch.Tensor] | None = None
    profile_options: Mapping[str, Any] = field(default_factory=dict)
    planned: Mapping[str, Any] = field(default_factory=dict)
    n_probe_tokens: int = 512


@dataclass
class RecorderMemory:
    """What a recorder keeps from one attachment to the next."""

    step: int = 0
    probe: Any = None
    recent_examples: list[int] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


#: Metrics of every update, in the order in which they are stored; NaN if unknown.
NUMBERS = (
    "loss", "auxiliary_loss", "accuracy", "grad_norm", "learning_rate", "batch_size", "n_tokens", "token_entropy",
    "label_entropy", "label_agreement", "largest_losses", "ignored_labels", "repeated_examples", "loss_weight",
    "is_training", "loss_scale", "is_skipped", "repeated_batch", "lookahead", "update_ratio", "spike_score",
)  # fmt: skip


def as_number(name: str, value: Any) -> float | Tensor:
    """Return a metric as a number, or as a 0-dim tensor that may not be computed yet."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, np.ndarray) and value.size == 1:
        return float(value.item())
    if isinstance(value, Real):
        return float(value)
    raise OptionError.of(name, value, "one number", remedy="log its mean or another number")


def as_floats(numbers: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Return metrics as floats in their order; the host waits once for those that are still being computed."""
    late = {name: value for name, value in numbers.items() if isinstance(value, Tensor)}
    read = dict(zip(late, read_numbers([*late.values()]), strict=True))
    return {name: read[name] if name in read else float(value) for name, value in numbers.items()}


#: A probe with more numbers, such as images, is not stored with the run.
_MOST_NUMBERS = 1 << 16


def to_plain(probe: Any) -> Any:
    """Return a probe as JSON values; None if it contains floating-point tensors or is large."""
    try:
        plain, n_numbers = _plain(probe)
    except TypeError:
        return None
    return plain if n_numbers <= _MOST_NUMBERS else None


def of_plain(plain: Any) -> Any:
    """Return the probe from the result of `to_plain`; None for None."""
    if not isinstance(plain, Mapping):
        return plain
    if "dtype" in plain:
        return torch.tensor(plain["values"], dtype=getattr(torch, plain["dtype"]))
    if "mapping" in plain:
        return {name: of_plain(value) for name, value in plain["mapping"].items()}
    return tuple(of_plain(value) for value in plain["tuple"])


def _plain(value: Any) -> tuple[Any, int]:
    if isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex():
        return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}, value.numel()
    if isinstance(value, Mapping):
        named = {name: _plain(part) for name, part in value.items()}
        return {"mapping": {name: part for name, (part, _) in named.items()}}, sum(n for _, n in named.values())
    if isinstance(value, tuple | list):
        parts = [_plain(part) for part in value]
        return {"tuple": [part for part, _ in parts]}, sum(n for _, n in parts)
    if value is None or isinstance(value, bool | int | float | str):
        return value, 1
    raise TypeError(f"{type(value).__name__} is not stored")
