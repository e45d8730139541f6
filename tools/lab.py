"""Open JupyterLab on a notebook of this repository, in a browser if there is one.

Call: python tools/lab.py notebooks/00_start.ipynb [further options of jupyter lab]
"""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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


def command(notebook: str, extra: list[str]) -> list[str]:
    """Return the command line of JupyterLab."""
    words = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={ROOT}"]
    words.append(f"--LabApp.default_url=/lab/tree/{notebook}")
    if not has_browser():
        words.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        words.append("--allow-root")
    return words + extra


def main() -> None:
    """Replace this process by JupyterLab."""
    notebook = sys.argv[1] if len(sys.argv) > 1 else "notebooks/00_start.ipynb"
    if not (ROOT / notebook).exists():
        sys.exit(f"There is no notebook {notebook}; README.md lists the notebooks.")
    words = command(notebook, sys.argv[2:])
    if "--no-browser" in words:
        print("No browser was found: open the address below, which ends with the token, in your browser.", flush=True)
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
