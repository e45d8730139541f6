"""Open JupyterLab on notebooks of this repository side by side, in a browser if there is one.

Call: python tools/lab.py notebooks/00_start.ipynb notebooks/workbench.ipynb [options of jupyter lab]
"""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from itertools import takewhile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Name of JupyterLab's workspace for these notebooks. The user's other workspaces are not changed.
WORKSPACE = "stability-workbench"


def has_browser() -> bool:
    """Return whether this machine can open a browser window."""
    has_screen = sys.platform in ("darwin", "win32") or any(os.environ.get(k) for k in ("DISPLAY", "WAYLAND_DISPLAY"))
    if not has_screen:
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def workspace(notebooks: list[str]) -> dict[str, Any]:
    """Return the content of a workspace with the notebooks side by side, the last one active, and no sidebars."""
    names = [f"notebook:{path}" for path in notebooks]
    areas = [{"type": "tab-area", "currentIndex": 0, "widgets": [name]} for name in names]
    # The first notebook is text to read, and the last one contains a widget that needs more room.
    sizes = [1 / len(areas)] * len(areas) if len(areas) != 2 else [0.35, 0.65]
    dock = {"type": "split-area", "orientation": "horizontal", "sizes": sizes, "children": areas}
    layout = {
        "main": {"dock": dock if len(areas) > 1 else areas[0], "current": names[-1]},
        "left": {"collapsed": True, "visible": True, "widgets": ["filebrowser"]},  # a current one would be open
        "right": {"collapsed": True, "visible": True, "widgets": []},
        "relativeSizes": [0, 1, 0],
    }
    opened = {
        name: {"data": {"path": path, "factory": "Notebook"}} for name, path in zip(names, notebooks, strict=True)
    }
    return {"data": {"layout-restorer:data": layout, **opened}, "metadata": {"id": WORKSPACE}}


def save_workspace(notebooks: list[str], folder: Path | None = None) -> None:
    """Write the workspace to a folder, by default JupyterLab's, in place of the one of the last start."""
    from jupyterlab.commands import get_workspaces_dir
    from jupyterlab_server.workspaces_handler import WorkspacesManager

    WorkspacesManager(str(folder or get_workspaces_dir())).save(WORKSPACE, json.dumps(workspace(notebooks)))


def command(extra: list[str]) -> list[str]:
    """Return the command line of JupyterLab."""
    words = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={ROOT}"]
    words.append(f"--LabApp.default_url=/lab/workspaces/{WORKSPACE}")
    if not has_browser():
        words.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        words.append("--allow-root")
    return words + extra


def main() -> None:
    """Save the workspace, and replace this process by JupyterLab."""
    words = sys.argv[1:]
    notebooks = list(takewhile(lambda word: word.endswith(".ipynb"), words))
    extra = words[len(notebooks) :]
    for notebook in notebooks:
        if not (ROOT / notebook).exists():
            sys.exit(f"There is no notebook {notebook}; choose one from the folder notebooks.")
    save_workspace(notebooks or ["notebooks/00_start.ipynb"])
    words = command(extra)
    if "--no-browser" in words:
        print("No browser was found: open the address below, which ends with the token, in your browser.", flush=True)
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
