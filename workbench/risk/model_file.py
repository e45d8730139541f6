"""Load risk models from files: those that `RiskModel.save` wrote, and the shipped ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import OptionError, StoreError
from workbench.risk.applicability import Applicability
from workbench.risk.feature_map import FeatureMap
from workbench.risk.features import FEATURE_SETS, FEATURES, SIZES
from workbench.risk.model_json import read
from workbench.risk.risk_model import RiskModel

_SHIPPED = Path(__file__).parent / "shipped"


def load(path: str | Path) -> RiskModel:
    """Read a model that `RiskModel.save` wrote; its predictions are exactly those of the saved one.

    Raises:
        StoreError: If the file is missing, no risk model, damaged, or written by a newer version.

    Example:
        >>> import workbench as wb
        >>> path = wb.risk.shipped("forward").save("risk.json")
        >>> wb.risk.load(path).features == wb.risk.shipped("forward").features
        True
    """
    path = Path(path)
    content = read(path)
    try:
        model = _model(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{path} is a damaged risk model ({error!r}); write it again.") from error
    if problem := _problem(model):
        raise StoreError(f"{path} is a damaged risk model: {problem}; write it again.")
    return model


def shipped(features: str = "forward") -> RiskModel:
    """The shipped model, fitted to the recorded sweep; its card states its quality.

    Args:
        features: ``"forward"`` (forward passes alone), ``"gradient"`` (and one batch of gradients) or ``"pilot"``
            (and ten updates on a copy, at a few rates).

    Raises:
        OptionError: If there is no such set.
        StoreError: If the file is missing.

    Example:
        >>> import workbench as wb
        >>> model = wb.risk.shipped("forward")
        >>> "near_unit_mass mean" in model.features, model.level
        (True, 0.95)
    """
    if features not in FEATURE_SETS:
        raise OptionError(f"features is '{features}', expected {', '.join(FEATURE_SETS)}.")
    path = _SHIPPED / f"risk_{features}.json"
    if not path.exists():
        raise StoreError(f"There is no {path}; install the workbench again, or fit a model with wb.risk.fit(sweep).")
    return load(path)


def _model(content: Mapping[str, Any]) -> RiskModel:
    parts = content["design"]
    feature_map = FeatureMap(
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
    sizes = {name: _pair(pair) for name, pair in content["familiarity"].get("sizes", {}).items()}
    return RiskModel(
        feature_map,
        Applicability(points.reshape(len(points), feature_map.n_base), float(content["familiarity"]["unit"]), sizes),
        np.array(content["weights"], dtype=float),
        seen=_pair(content["seen"]),
        log_rate=_pair(content["log_rate"]),
        spread=_pair(content["spread"]),
        about=dict(content["about"]),
        validation=dict(content["validation"]),
    )


def _pair(values: Sequence[float]) -> tuple[float, float]:
    """Two numbers, such as the ends of a range."""
    low, high = map(float, values)
    return low, high


def _problem(model: RiskModel) -> str:
    """The first inconsistency of a model; empty if there is none."""
    feature_map, n_columns = model.feature_map, len(model.feature_map.columns)
    if unknown := [name for name in feature_map.features if name not in FEATURES]:
        return f"it knows a feature '{unknown[0]}' that there is not"
    if any(
        name not in SIZES or not 0 < low <= high < math.inf for name, (low, high) in model.applicability.sizes.items()
    ):
        return "the range of a size is none"
    if any(
        ends.shape != (len(feature_map.numeric),)
        for ends in (feature_map.lowest, feature_map.highest, feature_map.has_infinite)
    ):
        return "the ranges do not fit the features"
    if feature_map.center.shape != (n_columns,) or feature_map.scale.shape != (n_columns,):
        return "the scales do not fit the columns"
    if model.weights.ndim != 2 or not len(model.weights) or model.weights.shape[1] != 2 + n_columns:
        return "the weights do not fit the columns"
    numbers: tuple[Any, ...] = (
        model.seen,
        model.log_rate,
        model.spread,
        model.weights,
        feature_map.lowest,
        feature_map.highest,
        feature_map.center,
        feature_map.scale,
        model.applicability.points,
    )
    if not all(np.isfinite(values).all() for values in numbers):
        return "some numbers are not finite"
    if not (model.weights[:, 0] > 0).all() or not (feature_map.scale > 0).all() or not model.applicability.unit > 0:
        return "a slope or scale is not positive"
    options = model.about.get("options")
    if not isinstance(options, dict) or not isinstance(options.get("level"), float):
        return "its options are gone"
    return ""
