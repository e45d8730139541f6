"""Forwarding of recorded values to TensorBoard, Weights & Biases or another logger."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError
from workbench.io.background_writer import RecordingWarning
from workbench.schema.runs import PARTS

if TYPE_CHECKING:
    from workbench.callbacks.observation import Observation

#: Statistics over layers, heads, experts or modules.
_SUMMARIES: dict[str, Callable[[np.ndarray], Any]] = {"mean": np.nanmean, "min": np.nanmin, "max": np.nanmax}


def logging_observer(log: Any) -> Callable[[Observation], None]:
    """Return an observer for `Recorder.observe` that passes numbers on to another logger.

    An exception of the logger does not stop the training; the first one is reported as a `RecordingWarning`.

    Args:
        log: An object with ``add_scalar(tag, value, step)``, such as ``torch.utils.tensorboard.SummaryWriter``; or a
            function of a dictionary of numbers, called as ``log(numbers, step=...)`` like ``wandb.log``, or as
            ``log(numbers)`` with ``"step"`` among the numbers.

    Returns:
        A function of an observation. See `numbers` for the names.

    Raises:
        OptionError: If ``log`` is neither.
    """
    send = _sender(log)
    has_warned = False

    def send_on(observation: Observation) -> None:
        nonlocal has_warned
        try:
            send(numbers(observation), int(observation.step))
        except Exception as error:  # noqa: BLE001  (third-party code; training continues)
            if not has_warned:
                has_warned = True
                warnings.warn(
                    f"The logger failed at step {observation.step} ({type(error).__name__}: {error}); training "
                    "continues, and the run's record contains the values that the logger missed.",
                    RecordingWarning,
                    stacklevel=2,
                )

    return send_on


def numbers(observation: Observation) -> dict[str, float]:
    """Return an observation as named numbers.

    Args:
        observation: Observation of one part at one step.

    Returns:
        Scalars unchanged (``monitors/loss``); of arrays, the mean, minimum and maximum over layers, heads, experts and
        modules, ignoring NaN (``router/max_violation/mean``), separately for each term if there are terms
        (``attention/effective_rank/D2/min``). Arrays of NaN alone, complex numbers and text are left out.
    """
    named: dict[str, float] = {}
    rules = PARTS.get(observation.part, {})
    for name, value in observation.values.items():
        values = np.asarray(value)
        if values.dtype.kind not in "biuf":
            continue
        tag = f"{observation.part}/{name}"
        if values.ndim == 0:
            named[tag] = float(values)
        elif name in rules and rules[name].dims[-1] == "term":
            for term, of_term in zip(observation.coords["term"], np.moveaxis(values, -1, 0), strict=True):
                named |= _summary(f"{tag}/{term}", of_term)
        else:
            named |= _summary(tag, values)
    return named


def _summary(tag: str, values: np.ndarray) -> dict[str, float]:
    values = values.astype(np.float64)
    if np.isnan(values).all():
        return {}
    with np.errstate(invalid="ignore"):  # the mean of inf and -inf
        return {f"{tag}/{word}": float(summary(values)) for word, summary in _SUMMARIES.items()}


def _sender(log: Any) -> Callable[[dict[str, float], int], None]:
    """Return a function that passes the numbers of a step to a logger."""
    if hasattr(log, "add_scalar"):

        def send_each(named: dict[str, float], step: int) -> None:
            for tag, value in named.items():
                log.add_scalar(tag, value, step)

        return send_each
    if not callable(log):
        expected = "an object with add_scalar(tag, value, step) or a function of a dictionary, such as wandb.log"
        raise OptionError.of("log", log, expected)
    try:
        parameters = list(inspect.signature(log).parameters.values())
    except (TypeError, ValueError):  # a compiled function
        parameters = []
    if any(parameter.name == "step" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return lambda named, step: log(named, step=step)
    return lambda named, step: log({"step": step, **named})
