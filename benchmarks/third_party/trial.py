"""A trial: a model with random parameters, independently recorded states, and the comparison with its profile."""

from __future__ import annotations

import copy
import re
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import workbench as wb
from workbench.errors import MissingPackageError, WorkbenchError

#: State entering and state leaving each block, both of shape (..., feature).
Pairs = list[tuple[Tensor, Tensor]]
#: Condition number of the covariance beyond which eigenvalues are not compared, and relative tolerance.
_ILL_CONDITIONED, _TOLERANCE = 1e9, 2e-3
OUTCOMES = ("works", "rejected as listed", "rejected unexpectedly", "wrong", "crash", "skipped")


@dataclass(frozen=True)
class Trial:
    """A model and the expected results.

    Attributes:
        name: Name of the model.
        build: Function that returns the model and inputs; called with a fixed seed.
        states: Pattern of the paths of the blocks (``*`` matches an index), whose calls are recorded, or a function of
            model and inputs that returns the states or the pairs of states.
        n_blocks: Number of calls of blocks in one forward pass.
        width: Width of the stream.
        rejection: Reason for which the model must be rejected; empty if it must work.
        options: Further options of ``wb.profile``.
        change: Function applied after the states are recorded, which wraps, compiles or shards the model; None if the
            model is profiled unchanged.
        needs: Packages that must be installed.
        axis: Feature axis of the states.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Any]]
    states: str | Callable[[nn.Module, Any], Sequence[Tensor] | Pairs] = "layers.*"
    n_blocks: int = 3
    width: int = 24
    rejection: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[nn.Module], nn.Module] | None = None
    needs: tuple[str, ...] = ()
    axis: int = -1


@dataclass(frozen=True)
class Result:
    """The result of a trial.

    Attributes:
        outcome: One of `OUTCOMES`.
        found: Number of blocks and width found.
        note: Sentence of a rejection, or what is wrong.
        seconds: Duration in seconds.
    """

    outcome: str
    found: str = ""
    note: str = ""
    seconds: float = 0.0


def run(trial: Trial) -> Result:
    """Build the model, profile it, and compare the profile with the recorded states."""
    start = time.perf_counter()
    missing = [name for name in trial.needs if find_spec(name) is None]
    if missing:
        return Result("skipped", note=f"{' and '.join(missing)} not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = _outcome(trial)
        except Exception as error:  # noqa: BLE001  (the other trials must still run)
            result = Result("crash", note=f"the trial itself: {note_of(error)}")
    return Result(result.outcome, result.found, result.note, time.perf_counter() - start)


def _outcome(trial: Trial) -> Result:
    """Return the result of a trial without its duration; exceptions of the trial itself propagate."""
    torch.manual_seed(0)
    model, inputs = trial.build()
    model.eval()
    expected = [] if trial.rejection else _centered_states(trial, model, inputs)
    if trial.change is not None:
        torch.manual_seed(1)
        model = trial.change(model)
    before = _model_state(trial, model, inputs)
    n_states = n_hidden_states(copy.deepcopy(model), inputs) if trial.change is None and not trial.rejection else None
    try:
        options = {"n_snapshots": None, "progress": False, "n_workers": 1, **trial.options}
        spectra = wb.profile(model, inputs, **options)
    except MissingPackageError as error:
        return Result("skipped", note=str(error))
    except WorkbenchError as error:
        if trial.rejection and (wrong := _changes(before, _model_state(trial, model, inputs))):
            return Result("wrong", note=wrong)
        return Result("rejected as listed" if trial.rejection else "rejected unexpectedly", note=str(error))
    except Exception as error:  # noqa: BLE001  (any other exception is a defect)
        return Result("crash", note=note_of(error))
    anatomy = wb.read_anatomy(
        model, inputs, **{k: v for k, v in trial.options.items() if k in ("stack", "batch_first")}
    )
    found = f"{len(anatomy.sites)} x {anatomy.width}"
    if trial.rejection:
        return Result("wrong", found, f"was measured, expected a rejection: {trial.rejection}")
    wrong = _difference(spectra, expected, trial) or _changes(before, _model_state(trial, model, inputs))
    if not wrong and n_states is not None and n_hidden_states(model, inputs) != n_states:
        wrong = "output_hidden_states=True returns a different number of states"
    if not wrong and anatomy.width != trial.width:
        wrong = f"a width of {anatomy.width}, expected {trial.width}"
    return Result("wrong" if wrong else "works", found, wrong)


def note_of(error: Exception) -> str:
    """Return type, text and place of an exception."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"


# --- recorded states -------------------------------------------------------------------------------------------------


def _centered_states(trial: Trial, model: nn.Module, inputs: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the states of each block as float64 matrices (snapshot, feature) whose columns have mean 0."""
    with torch.no_grad():
        if isinstance(trial.states, str):
            pairs = hooked(model, inputs, trial.states, trial.width, trial.axis)
        else:
            states = list(trial.states(model, inputs))
            pairs = list(pairwise(states)) if isinstance(states[0], Tensor) else states

    def flat(state: Tensor) -> np.ndarray:
        x = state.movedim(trial.axis, -1).reshape(-1, trial.width).double().numpy()
        return x - x.mean(0)

    return [(flat(x), flat(y)) for x, y in pairs]


def hooked(model: nn.Module, inputs: Any, pattern: str, width: int, axis: int = -1) -> Pairs:
    """Record with hooks the states entering and leaving each call of the modules whose path matches a pattern."""
    matches = re.compile(pattern.replace(".", r"\.").replace("*", r"\w+")).fullmatch
    blocks = [module for name, module in model.named_modules() if matches(name)]
    entered: list[Tensor] = []
    pairs: Pairs = []

    def state(values: Any) -> Tensor | None:
        return next(
            (v for v in tensors(values) if v.ndim > 1 and v.is_floating_point() and v.shape[axis] == width), None
        )

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        entered.append(state((args, kwargs)).clone())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        pairs.append((entered.pop(), state(output).clone()))

    hooks = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    hooks += [block.register_forward_hook(leave) for block in blocks]
    call(model, inputs)
    for hook in hooks:
        hook.remove()
    return pairs


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors of nested arguments or outputs, in order."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors(item)]


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model with a tensor, a tuple of positional arguments or a mapping of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    config = getattr(model, "config", None)
    both = getattr(config, "is_encoder_decoder", False) and not inputs.is_floating_point()
    return model(inputs, decoder_input_ids=inputs) if both else model(inputs)


# --- comparison ------------------------------------------------------------------------------------------------------


def _difference(spectra: Any, expected: list[tuple[np.ndarray, np.ndarray]], trial: Trial) -> str:
    """Compare a profile with the recorded states; return the first difference, or an empty text if there is none."""
    if len(expected) != trial.n_blocks:
        return f"the trial itself recorded {len(expected)} states for {trial.n_blocks} blocks"
    if spectra.sizes["layer"] != trial.n_blocks:
        return f"{spectra.sizes['layer']} blocks, expected {trial.n_blocks} (stack {spectra.attrs['stack']})"
    for layer, (X, Y) in enumerate(expected):
        found = spectra.isel(layer=layer)
        counts = spectra.get("layer_snapshots")
        n_snapshots = spectra.attrs["n_snapshots"] if counts is None else int(counts[layer])
        if n_snapshots != len(X):
            return f"layer {layer}: {n_snapshots} states, expected {len(X)}"
        gain, update = (float(found[name]) for name in ("energy_gain", "update_norm"))
        expected_gain, expected_update = gain_and_update(X, Y)
        if abs(gain / expected_gain - 1) > _TOLERANCE or abs(update - expected_update) > _TOLERANCE * (1e-3 + update):
            return (
                f"layer {layer}: energy gain {gain:.6g} and update norm {update:.6g}, expected {expected_gain:.6g} and "
                f"{expected_update:.6g}"
            )
        if float(found["covariance_condition"]) < _ILL_CONDITIONED:
            modulus = np.abs(found["eigenvalue"].values)
            modulus = np.sort(modulus[np.isfinite(modulus)])
            operator = np.linalg.lstsq(X, Y, rcond=1e-6)[0]
            truth = np.sort(np.abs(np.linalg.eigvals(operator)))[-len(modulus) :]
            if np.abs(modulus - truth).max() > _TOLERANCE * max(1.0, truth.max()):
                return f"layer {layer}: spectral radius {modulus.max():.6g}, expected {truth.max():.6g}"
    return ""


def gain_and_update(X: np.ndarray, Y: np.ndarray, *, ridge: float = 1e-5) -> tuple[float, float]:
    """Return energy gain |Yw|^2 / |Xw|^2 and update norm |Yw - Xw| / sqrt(N d) of centered X, Y (snapshot, feature)."""
    n_snapshots = len(X)
    covariance = X.T @ X / (n_snapshots - 1)
    values, vectors = np.linalg.eigh(covariance)
    kept = values > 1e-12 * values.max()
    whitening = vectors[:, kept] / np.sqrt(values[kept] + ridge * values.mean())
    Xw, Yw = X @ whitening, Y @ whitening
    update = np.linalg.norm(Yw - Xw) / np.sqrt(n_snapshots * kept.sum())
    return np.linalg.norm(Yw) ** 2 / np.linalg.norm(Xw) ** 2, update


def _model_state(trial: Trial, model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Return copies of everything that a profile must not change; outputs only if the model must work."""
    found: dict[str, Any] = {
        "random state": [torch.get_rng_state()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "modes": [module.training for module in model.modules()],
        "weights": [value.clone() for value in model.state_dict().values() if type(value) is Tensor],
    }
    if trial.rejection:
        return found
    with torch.no_grad(), torch.random.fork_rng(), suppress(NotImplementedError):  # a LightningModule without forward
        torch.manual_seed(0)  # some models draw random numbers
        found["outputs"] = [value.clone() for value in tensors(call(model, inputs))]
    return found


def n_hidden_states(model: nn.Module, inputs: Any) -> int | None:
    """Return the number of tensors that a model of transformers returns with output_hidden_states=True.

    Returns:
        None if the model has no such option.
    """
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        return None
    with torch.no_grad(), torch.random.fork_rng():
        config, model.config.output_hidden_states = model.config.output_hidden_states, True
        try:
            return len(tensors(call(model, inputs)))
        finally:
            model.config.output_hidden_states = config


def _changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Describe the first change between two snapshots; empty if there is none."""

    def same(a: Any, b: Any) -> bool:
        if not isinstance(a, Tensor):
            return a == b
        return a.is_meta or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))

    for name, values in before.items():
        if len(values) != len(after[name]) or not all(map(same, values, after[name])):
            return f"{name} of the model changed"
    return ""
