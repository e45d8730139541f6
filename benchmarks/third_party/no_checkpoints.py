"""Trials of sources that are not checkpoints."""

from __future__ import annotations

import os

import torch
from safetensors.torch import save_file

from benchmarks.third_party.checkpoint_trial import Saved, state_of, trial, zoo

SOURCE = "source"

for name, source in {"None": None, "3": 3, "empty text": "", "blank text": " ", "bytes": b"x"}.items():
    trial(SOURCE, name, "no such source")(lambda folder, source=source: Saved(source))
for name in ("missing", "missing.safetensors", "missing.gguf"):
    trial(SOURCE, f"path that does not exist, {name}", "no such source")(lambda folder, name=name: Saved(folder / name))
trial(SOURCE, "empty folder", "no such source")(Saved)
trial(SOURCE, "name on the Hugging Face Hub, without a network", "no such source")(
    lambda folder: Saved("nobody/no-such-model")
)
trial(SOURCE, "path longer than file systems allow", "no such source")(lambda folder: Saved("/" + "x" * 5000))


@trial(SOURCE, "broken link", "no such source")
def _(folder):
    (folder / "model.safetensors").symlink_to(folder / "nothing")
    return Saved(folder / "model.safetensors")


for file in ("weights.safetensors", "weights.pt"):

    def _write(folder, file=file):
        if os.geteuid() == 0:
            raise PermissionError("the superuser may read every file")
        (save_file if file.endswith("s") else torch.save)(state_of(zoo()), folder / file)
        (folder / file).chmod(0)
        return Saved(folder / file, module=zoo)

    trial(SOURCE, f"file without read permission, {file}", "no such source")(_write)


@trial(SOURCE, "folder with the name of a file", "no such source")
def _(folder):
    (folder / "model.safetensors").mkdir()
    return Saved(folder / "model.safetensors", module=zoo)
