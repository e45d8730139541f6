"""Folder of downloaded files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of downloaded checkpoints: $WORKBENCH_CACHE, or a folder in the cache of the user."""
    if "WORKBENCH_CACHE" in os.environ:
        return Path(os.environ["WORKBENCH_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "stability-workbench"
