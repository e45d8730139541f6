"""The folder of downloaded files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Folder of downloaded checkpoints: $WORKBENCH_CACHE, or the user's cache folder."""
    if "WORKBENCH_CACHE" in os.environ:
        return Path(os.environ["WORKBENCH_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "stability-workbench"
