"""The JSON of a risk model's file: written atomically, and read with a check of kind and version."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import StoreError
from workbench.io.atomic import check_free, replacing

#: 2: records the sizes of the training models; a file of version 1 opens, and its sizes are not checked.
SCHEMA_VERSION = 2
_KIND = "stability-workbench risk model"


def write(content: Mapping[str, Any], path: Path, *, overwrite: bool = False) -> Path:
    """Write the content of a model, from `RiskModel.content`.

    Raises:
        StoreError: If there is something at the path, or it cannot be written.
    """
    check_free(path, overwrite=overwrite)
    with replacing(path) as partial:
        partial.write_text(_text(_plain({"kind": _KIND, "schema_version": SCHEMA_VERSION, **content})) + "\n")
    return path


def read(path: Path) -> dict[str, Any]:
    """Read the content that `write` wrote.

    Raises:
        StoreError: If the file is missing, no risk model, or written by a newer version.
    """
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
    return content


def _plain(value: Any) -> Any:
    """Convert a value for JSON; numbers that are not finite become null."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(content: dict[str, Any]) -> str:
    """JSON with one row of numbers on each line, for reading and for comparing versions."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_lines(value, 1)}" for key, value in content.items()) + "\n}"


def _lines(value: Any, depth: int) -> str:
    if isinstance(value, dict) and value and depth < 3:
        pad = " " * (depth + 1)
        rows = ",\n".join(f"{pad}{json.dumps(key)}: {_lines(item, depth + 1)}" for key, item in value.items())
        return f"{{\n{rows}\n{' ' * depth}}}"
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + ",\n".join(" " * (depth + 1) + json.dumps(row) for row in value) + "]"
    return json.dumps(value, allow_nan=False)
