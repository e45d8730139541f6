"""A risk model as a file: JSON that anybody can read, written whole or not at all."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import StoreError, ThresholdError
from workbench.io.atomic import check_free, replacing
from workbench.risk.applicability import Familiarity
from workbench.risk.feature_map import Design
from workbench.risk.features import FEATURE_SETS, FEATURES, SIZES
from workbench.risk.risk_model import RiskModel

if TYPE_CHECKING:
    from collections.abc import Mapping

#: 2: says which sizes of models were seen; a file of version 1 opens, and is not asked about sizes.
SCHEMA_VERSION = 2
_KIND = "stability-workbench risk model"
_SHIPPED = Path(__file__).parent / "shipped"


def save(model: RiskModel, path: Path, *, overwrite: bool = False) -> Path:
    """Write a model; see `RiskModel.save`."""
    check_free(path, overwrite=overwrite)
    design = {item.name: getattr(model.design, item.name) for item in fields(Design)}
    content = {
        "kind": _KIND,
        "schema_version": SCHEMA_VERSION,
        "about": model.about,
        "validation": model.validation,
        "design": design,
        "seen": model.seen,
        "log_rate": model.log_rate,
        "spread": model.spread,
        "weights": model.weights,
        "familiarity": {
            "unit": model.familiarity.unit,
            "sizes": model.familiarity.sizes,
            "points": model.familiarity.points,
        },
    }
    with replacing(path) as partial:
        partial.write_text(_text(_plain(content)) + "\n")
    return path


def load(path: str | Path) -> RiskModel:
    """Read what `RiskModel.save` wrote; it predicts exactly as before.

    Raises:
        StoreError: If it is not there, something else, damaged, or written by a newer version.
    """
    path = Path(path)
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} is no risk model ({error}); pass a file from RiskModel.save().") from error
    if not isinstance(content, dict) or content.get("kind") != _KIND:
        raise StoreError(f"{path} is JSON but no risk model; pass a file from RiskModel.save().")
    version = content.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} follows version {version} of risk models, this workbench reads up to {SCHEMA_VERSION}; update it."
        )
    try:
        model = _model(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{path} is a damaged risk model ({error!r}); write it again.") from error
    if problem := _problem(model):
        raise StoreError(f"{path} is a damaged risk model: {problem}; write it again.")
    return model


def shipped(features: str = "forward") -> RiskModel:
    """The model that ships with the workbench, fitted to its recorded sweep; its card says how good it is.

    Args:
        features: ``"forward"`` (forward passes alone), ``"gradient"`` (and one batch of gradients) or ``"rehearsal"``
            (and ten updates on a copy, at a few rates).

    Raises:
        ThresholdError: If there is no such set.
        StoreError: If it is not there.
    """
    if features not in FEATURE_SETS:
        raise ThresholdError(f"features is '{features}', expected {', '.join(FEATURE_SETS)}.")
    path = _SHIPPED / f"risk_{features}.json"
    if not path.exists():
        raise StoreError(f"There is no {path}; install the workbench again, or fit a model with wb.risk.fit(sweep).")
    return load(path)


def _model(content: Mapping[str, Any]) -> RiskModel:
    parts = content["design"]
    design = Design(
        features=tuple(parts["features"]),
        optimizers=tuple(parts["optimizers"]),
        lowest=np.array(parts["lowest"], dtype=float),
        highest=np.array(parts["highest"], dtype=float),
        has_infinite=np.array(parts["has_infinite"], dtype=bool),
        squares=tuple(parts["squares"]),
        interactions=tuple((a, b) for a, b in parts["interactions"]),
        center=np.array(parts["center"], dtype=float),
        scale=np.array(parts["scale"], dtype=float),
    )
    points = np.array(content["familiarity"]["points"], dtype=float)
    pairs = [tuple(map(float, content[name])) for name in ("seen", "log_rate", "spread")]
    sizes = {name: tuple(map(float, pair)) for name, pair in content["familiarity"].get("sizes", {}).items()}
    if any(len(pair) != 2 for pair in (*pairs, *sizes.values())):
        raise ValueError("a pair of numbers is none")
    return RiskModel(
        design,
        Familiarity(points.reshape(len(points), design.n_base), float(content["familiarity"]["unit"]), sizes),
        np.array(content["weights"], dtype=float),
        *pairs,
        dict(content["about"]),
        dict(content["validation"]),
    )


def _problem(model: RiskModel) -> str:
    """What does not fit together; empty if all does."""
    design, n_columns = model.design, len(model.design.columns)
    if unknown := [name for name in design.features if name not in FEATURES]:
        return f"it knows a feature '{unknown[0]}' that there is not"
    if any(
        name not in SIZES or not 0 < low <= high < math.inf for name, (low, high) in model.familiarity.sizes.items()
    ):
        return "the range of a size is none"
    if any(ends.shape != (len(design.numeric),) for ends in (design.lowest, design.highest, design.has_infinite)):
        return "the ranges do not fit the features"
    if design.center.shape != (n_columns,) or design.scale.shape != (n_columns,):
        return "the scales do not fit the columns"
    if model.weights.ndim != 2 or not len(model.weights) or model.weights.shape[1] != 2 + n_columns:
        return "the weights do not fit the columns"
    numbers: tuple[Any, ...] = (
        model.seen,
        model.log_rate,
        model.spread,
        model.weights,
        design.lowest,
        design.highest,
        design.center,
        design.scale,
        model.familiarity.points,
    )
    if not all(np.isfinite(values).all() for values in numbers):
        return "some numbers are not finite"
    if not (model.weights[:, 0] > 0).all() or not (design.scale > 0).all() or not model.familiarity.unit > 0:
        return "a slope or scale is not positive"
    options = model.about.get("options")
    if not isinstance(options, dict) or not isinstance(options.get("level"), float):
        return "its options are gone"
    return ""


def _plain(value: Any) -> Any:
    """A value as JSON takes it; what is not finite becomes null."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(content: dict[str, Any]) -> str:
    """JSON with one row of numbers a line, so that people can read it and versions can be compared."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_lines(value, 1)}" for key, value in content.items()) + "\n}"


def _lines(value: Any, depth: int) -> str:
    if isinstance(value, dict) and value and depth < 3:
        pad = " " * (depth + 1)
        rows = ",\n".join(f"{pad}{json.dumps(key)}: {_lines(item, depth + 1)}" for key, item in value.items())
        return f"{{\n{rows}\n{' ' * depth}}}"
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + ",\n".join(" " * (depth + 1) + json.dumps(row) for row in value) + "]"
    return json.dumps(value, allow_nan=False)
