"""Where files are kept that were downloaded or converted once."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where converted and downloaded checkpoints are kept: $WORKBENCH_CACHE, or the user's cache folder."""
    if "WORKBENCH_CACHE" in os.environ:
        return Path(os.environ["WORKBENCH_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "stability-workbench"
