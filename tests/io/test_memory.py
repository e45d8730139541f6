"""Free memory, in a container and outside of one, and freed memory."""

import platform
import threading
from pathlib import Path

import psutil
import pytest
import torch

from workbench.io import memory


def test_outside_of_a_container(monkeypatch):
    monkeypatch.setattr(memory, "_LIMITS", (("/nowhere/max", "/nowhere/current"),))
    assert memory.free_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.3)


@pytest.mark.parametrize(("limit", "usage", "free"), [("3000", "1000", 2000), ("1000", "3000", 0), ("max", "5", None)])
def test_the_limit_of_a_container_applies(tmp_path, monkeypatch, limit, usage, free):
    (tmp_path / "max").write_text(limit)
    (tmp_path / "current").write_text(usage)
    monkeypatch.setattr(memory, "_LIMITS", ((str(tmp_path / "max"), str(tmp_path / "current")),))
    found = memory.free_memory()
    assert found == free if free is not None else found > 1e6


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed blocks")
def test_memory_freed_by_a_thread_is_returned_to_the_system():
    def anonymous():
        return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

    def work():
        kept.append(torch.ones(1))
        blocks = [torch.ones(2**20 + i) for i in range(60)]  # 4 MB each
        kept.append(torch.ones(1))  # above the blocks, so that the thread keeps them
        del blocks

    kept = []
    torch.ones(2**22)  # freed, after which blocks of this size come from the heap
    before = anonymous()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    memory.give_back()
    assert anonymous() - before < 60 * 2**22 / 4
