"""One JupyterLab and one Chromium for all browser tests, with separate folders and without a network."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = Path(os.environ.get("WORKBENCH_CHROMIUM", "/usr/bin/chromium"))
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
#: Every name but the server's own fails to resolve, as on a machine without a network.
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
TOKEN = "workbench"


@dataclass
class Lab:
    """A running JupyterLab."""

    url: str
    root: Path
    log: Path

    def address(self, notebook: str) -> str:
        return f"{self.url}/lab/tree/{notebook}?token={TOKEN}&reset"


@pytest.fixture(scope="session")
def artifacts():
    folder = Path(os.environ.get("WORKBENCH_ARTIFACTS", ROOT / "artifacts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    home = tmp_path_factory.mktemp("jupyter")
    root = home / "root"
    notebooks = Path(os.environ.get("WORKBENCH_NOTEBOOKS", ROOT / "notebooks"))
    shutil.copytree(notebooks, root / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    (root / "data").symlink_to(ROOT / "data")
    _write_settings(home / "settings")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "IPYTHONDIR": "ipython",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    }
    environment = os.environ | {name: str(home / folder) for name, folder in folders.items()}
    command = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--ip=127.0.0.1"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}"]
    command += [f"--ServerApp.root_dir={root}", "--LabApp.expose_app_in_browser=True"]
    running = Lab(f"http://127.0.0.1:{port}", root, home / "log")
    with running.log.open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_until_up(running, server)
        yield running
    finally:
        server.terminate()
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.fixture(scope="session")
def playwright():
    """The only driver of a process; a second one would fail, because the event loop of the first one is running."""
    from playwright.sync_api import sync_playwright

    if not CHROMIUM.exists():
        pytest.skip(f"no browser at {CHROMIUM}: apt-get install chromium, or set WORKBENCH_CHROMIUM")
    with sync_playwright() as driver:
        yield driver


@pytest.fixture(scope="session")
def page(playwright, lab, artifacts, tmp_path_factory):
    context = playwright.chromium.launch_persistent_context(
        str(tmp_path_factory.mktemp("chromium")),
        executable_path=str(CHROMIUM),
        headless=True,
        args=[*CHROMIUM_FLAGS, OFFLINE],
        viewport={"width": 1280, "height": 1000},
    )
    page = context.pages[0]
    with (artifacts / "browser_console.log").open("w", buffering=1) as log:
        page.on("console", lambda message: log.write(f"{message.type}: {message.text}\n"))
        page.on("pageerror", lambda error: log.write(f"error: {error}\n"))
        yield page
    # A screenshot of the last state of the page, for debugging after a failure.
    page.screenshot(path=artifacts / "last.png")
    context.close()


def _write_settings(folder):
    quiet = folder / "@jupyterlab" / "apputils-extension"
    quiet.mkdir(parents=True)
    (quiet / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
    widgets = folder / "@jupyter-widgets" / "jupyterlab-manager"
    widgets.mkdir(parents=True)
    (widgets / "plugin.jupyterlab-settings").write_text('{"saveState": false}')


def _wait_until_up(lab, server):
    for _ in range(300):
        assert server.poll() is None, lab.log.read_text()
        try:
            urllib.request.urlopen(f"{lab.url}/api/status?token={TOKEN}").read()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(lab.log.read_text())
