"""Readings of a pass: no side effects, few waits for the device, and correct numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.probes.bad_passes import Do, Plant, line, of_line, place
from workbench.probes import pass_readings
from workbench.probes.failed_pass import first_bad_tensor


def test_a_failure_in_train_mode_is_reproduced_exactly():
    class Fragile(nn.Module):
        def forward(self, x):
            return x / (torch.rand_like(x) > 0.5) if self.training else x

    model = line(Fragile())
    torch.manual_seed(3)
    n_bad = int((~model[:2](torch.ones(3, 4)).isfinite()).sum())
    torch.manual_seed(3)
    bad = first_bad_tensor(model, of_line)
    assert (place(bad), bad.n_bad, bad.operation) == (("forward", "1", "output"), n_bad, "div")
    assert first_bad_tensor(model.eval(), of_line) is None


class Waits(TorchFunctionMode):
    """Counts operations that make the host wait for its device."""

    n = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.n += func.__name__ in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ends", ["finite", "forward", "backward"])
def test_the_number_of_device_reads_does_not_depend_on_depth(ends):
    functions = {
        "finite": lambda x: x,
        "forward": lambda x: (x + 100).exp(),
        "backward": lambda x: Plant.apply(x, torch.nan),
    }
    for depth in (1, 6):
        model = line(*(nn.Linear(4, 4) for _ in range(depth)), Do(functions[ends]))
        waits = Waits()
        with waits:
            bad = first_bad_tensor(model, of_line)
        assert (bad and bad.pass_) == (None if ends == "finite" else ends)
        assert waits.n == 2


def test_large_tensors_are_read_in_parts(monkeypatch):
    values = torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    values[2, 3], values[5, 5], values[6, 10] = torch.nan, torch.inf, -torch.inf
    found = []
    for size in (1 << 22, 5):
        monkeypatch.setattr(pass_readings, "_CHUNK", size)
        readings = pass_readings.readings_of([values, values.T, values[:, :0], values.bfloat16(), values.long()])
        pass_readings.read(readings)
        found.append([(r.n_values, r.n_bad, r.n_nan, r.n_lowest, r.largest) for r in readings])
    assert str(found[0]) == str(found[1])
    largest = float(values[values.isfinite()].abs().max())
    assert found[0][:2] == [(77, 3, 1, 1, largest)] * 2
    assert str(found[0][2]) == "(0, 0, 0, 0, nan)"
    assert len(found[0]) == 4
