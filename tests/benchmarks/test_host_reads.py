import pytest
import torch

import workbench as wb
from benchmarks.host_reads import HostReads
from workbench.callbacks.recorder.options import CADENCE
from workbench.models.batches import Batches, TokenSelection
from workbench.models.capture import capture_layers

N_STEPS = 10


def waits_per_step(n_layers=2, **settings):
    """Return the number of waits of the host in each of ten steps, after ten steps that are not counted."""
    model = wb.zoo.transformer(d_model=16, n_layers=n_layers, n_heads=2)
    run = wb.train(model, wb.tasks.associative_recall(batch_size=2), n_steps=2 * N_STEPS + 1, **settings)
    for _ in range(N_STEPS):
        next(run)
    found = []
    for _ in range(N_STEPS):
        with HostReads() as reads:
            next(run)
        found.append(reads.n)
    run.close()
    return found


class TestCounter:
    def test_each_kind_of_read_counts_once(self):
        x = torch.arange(6.0)
        with HostReads() as reads:
            assert reads.n == 0
            _ = x.sum() + x.mean()
            assert reads.n == 0
            for n, read in enumerate((x.sum().item, lambda: float(x[0]), lambda: bool(x.any()), x.cpu, x.tolist), 1):
                read()
                assert reads.n == n
            _ = x[x > 2]
            assert reads.n == 6
        x.sum().item()
        assert reads.n == 6
        assert all(place.startswith("tests/benchmarks/test_host_reads.py:") for place in reads.places)

    def test_reads_of_the_step_count_of_an_optimizer_are_not_counted(self):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight])
        weight.sum().backward()
        with HostReads() as reads:
            optimizer.step()
        assert reads.n == 0


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}, {"optimizer": "SGD"}], ids=str)
def test_training_waits_for_the_device_once_per_step(settings):
    assert waits_per_step(**settings) == [1] * N_STEPS


@pytest.mark.slow
def test_recording_adds_one_wait_per_step_and_a_few_at_measurements():
    """The loop waits before the update, the recorder after it, for its measurements of the batch and the update."""
    assert waits_per_step(recorder=wb.Recorder(every=None)) == [2] * N_STEPS
    found = waits_per_step(recorder=wb.Recorder())
    is_checked = [(step + 1) % CADENCE["reduction"] == 0 for step in range(N_STEPS)]
    assert found[:-1] == [2 + checked for checked in is_checked[:-1]]  # gradients are read immediately
    assert 3 < found[-1] <= 16  # monitors and probes are measured at this step
    assert waits_per_step(n_layers=4, recorder=wb.Recorder()) == found


def test_waits_of_an_optimizer_measurement_do_not_depend_on_the_number_of_parameters():
    recorder = wb.Recorder(every=dict.fromkeys(CADENCE) | {"optimizer": 1})
    assert waits_per_step(recorder=recorder) == [3] * N_STEPS


def test_a_recorded_custom_loop_waits_once_per_step():
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(32).reshape(2, 16)
    with wb.Recorder(every=None).attach(model, optimizer) as recorder:
        for step in range(4):
            with HostReads() as reads:
                loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                optimizer.zero_grad()
                loss.backward()
                recorder.log(loss=loss)
                optimizer.step()
            assert reads.n == 1 or step == 0, reads.places  # the anatomy is read in the first step


@pytest.mark.parametrize(
    ("kss", "extra"),
    [(wb.KSS.recommended, 1), (wb.KSS.published, 2)],  # the norm of the gradient is known only after the spectra
    ids=["trust region", "gradient"],
)
def test_kss_waits_once_per_step_for_all_layers(kss, extra):
    """Every tenth step measures spectra (in a trust region also the gains); a gradient that acts is checked once."""
    found = waits_per_step(kss=kss())
    assert max(found) <= 1 + extra
    assert len(set(found)) == 1 or found.count(1) == N_STEPS - 1


def test_a_batch_of_a_profile_waits_once_for_all_layers():
    model = wb.zoo.transformer(d_model=16, n_layers=5, n_heads=2)
    batches = [torch.randint(200, (4, 16), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    anatomy = wb.read_anatomy(model, batches[0])
    for selected in (batches, batches[:1]):
        found = {}
        with HostReads() as reads:
            capture_layers(model, anatomy, Batches.of(selected), TokenSelection(None), found.__setitem__)
        assert reads.n == len(selected), reads.places
        assert len(found) == 5
