"""Stages of a pipeline are recorded as one model, and never wait for each other; results come from ranked_stages.py."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import workbench as wb
from tests.callbacks import ranked_stages
from tests.callbacks.ranked_shards import batch
from tests.callbacks.sharded_models import titan
from workbench.monitors import ModelProbe

pytestmark = pytest.mark.subprocess

TOLERANCE = 1e-5
SLOW = pytest.mark.slow
#: Metrics of inputs and outputs of the whole model together, which no stage sees.
OF_WHOLE = ("lookahead", "label_agreement")
#: Those measured before an update, on the first micro-batch.
OF_BATCH = ("attention_entropy", "attention_entropy_share", "attention_logit_max")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return a function from a number of ranks and a scenario to the folder of its stores."""
    found = {}

    def results(n_ranks, *names):
        for name in names:
            if (n_ranks, name) not in found:
                found[n_ranks, name] = folder = tmp_path_factory.mktemp("stages")
                command = [sys.executable, "-m", "tests.callbacks.ranked_stages", str(folder), str(n_ranks), name]
                subprocess.run(command, check=True, timeout=180, capture_output=True)
        return found[n_ranks, names[-1]]

    return results


def in_one_process(store):
    """Train the whole model on the same micro-batches, watched; return losses, weights and measures of the batches."""
    model = titan(n_layers=ranked_stages.N_BLOCKS)
    optimizer, losses, measured = torch.optim.AdamW(model.parameters(), lr=1e-2), [], []
    with wb.watch(model, optimizer, store=store, every=ranked_stages.EVERY, shows=False):
        for step in range(ranked_stages.N_STEPS):
            optimizer.zero_grad()
            parts = [*zip(*(each.chunk(ranked_stages.N_PASSES) for each in batch(step)), strict=True)]
            losses.append(0.0)
            for tokens, targets in parts:
                logits = model(tokens)  # which stays alive, as in a schedule
                loss = ranked_stages.loss_of(logits, targets) / len(parts)
                loss.backward()
                losses[-1] += loss.item()
            if step % 2 == 1:
                tokens = parts[0][0]
                taken = ModelProbe(model, wb.read_anatomy(model, tokens), tokens).take(["attention", "activations"])
                measured.append(taken["attention"] | taken["activations"])
            optimizer.step()
    of_batch = {name: np.array([each[name] for each in measured]) for name in measured[0]}
    return losses, [each.detach() for each in model.parameters()], of_batch


def assert_close(found, expected, name):
    scale = np.nan_to_num(np.abs(expected)).max(initial=1e-12)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * scale, err_msg=name)


CASES = [
    pytest.param(2, "1f1b", id="1f1b"),
    pytest.param(2, "gpipe", marks=SLOW, id="gpipe"),
    pytest.param(4, "1f1b", marks=SLOW, id="1f1b 4"),
    pytest.param(4, "gpipe", marks=SLOW, id="gpipe 4"),
    pytest.param(2, "interleaved", marks=SLOW, id="interleaved"),
]


@pytest.mark.parametrize(("n_ranks", "name"), CASES)
def test_stages_are_recorded_as_one_process(ran, tmp_path, n_ranks, name):
    folder = ran(n_ranks, name)
    for rank in range(n_ranks):
        found = torch.load(folder / f"{name}.{rank}.pt", weights_only=False)
        plain, watched = found["plain"], found["watched"]
        assert plain["losses"] == watched["losses"]
        assert all(torch.equal(a, b) for a, b in zip(plain["weights"], watched["weights"], strict=True))
        assert watched["alarms"] == []
        assert not any("recorded" in sentence for sentence in found["warnings"])
    run = wb.open_run(folder / f"{name}.zarr")
    assert run.attrs["state"] == "finished"
    assert [*run["events"]["kind"].values] == ["started", *["not recorded"] * 3, "finished"]
    assert {*run["events"]["source"].values} == {"", "precision", "reduction", "update"}
    losses, _, of_batch = in_one_process(tmp_path / "one.zarr")
    one = wb.open_run(tmp_path / "one.zarr")
    assert_close(run["monitors"]["loss"].values, losses, "loss")
    assert {*run.children} == {"monitors", "attention", "activations", "optimizer", "events"}
    for part in ("monitors", "attention"):
        for variable in one[part].data_vars:
            if variable not in (*OF_WHOLE, *OF_BATCH):
                assert_close(run[part][variable].values, one[part][variable].values, variable)
    for variable, values in of_batch.items():
        part = "attention" if variable in OF_BATCH else "activations"
        assert_close(run[part][variable].values, values, variable)
    modules, expected = (each["optimizer"].to_dataset().load() for each in (run, one))
    blocks, outside = modules["layer"].values >= 0, modules["layer"].values < 0
    assert modules["module_name"].values[blocks].tolist() == expected["module_name"].values[:-1].tolist()
    for variable in expected.data_vars:
        assert_close(modules[variable].values[:, blocks], expected[variable].values[:, :-1], variable)
    for variable in ("module_grad_norm", "module_weight_norm"):
        norm = np.sqrt((modules[variable].values[:, outside] ** 2).sum(1))
        assert_close(norm, expected[variable].values[:, -1], variable)
    assert wb.list_runs(folder).index.tolist() == [name]


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("of", [0, -1])
@pytest.mark.parametrize("how", ranked_stages.HOW)
def test_a_rank_that_fails_leaves_the_others_able_to_end(ran, n_ranks, how, of):
    folder, name = ran(n_ranks, f"{how} {of}"), f"{how} {of}"
    failed = of % n_ranks
    told = {rank: folder / f"{name}.{rank}.json" for rank in range(n_ranks)}
    for rank, file in told.items():
        if rank == failed and how in ("killed", "silent"):
            continue
        found = json.loads(file.read_text())
        assert ("planted" in found["error"]) == (rank == failed)
        assert found["seconds"] < 60
    run = wb.open_run(folder / f"{name.replace(' ', '_')}.zarr")
    assert run["monitors"]["step"].values.tolist()[:3] == [0, 1, 2]
    assert np.isfinite(run["monitors"]["grad_norm"].values[:3]).all()
    assert run["optimizer"]["layer"].values.max() == ranked_stages.N_BLOCKS - 1
    assert run.attrs["state"] == ("ended without being closed" if how == "killed" else "stopped")


@pytest.mark.slow
def test_each_stage_raises_alarms_about_its_own_modules(ran):
    folder = ran(2, "exploding")
    ranks = [torch.load(folder / f"exploding.{rank}.pt", weights_only=False)["alarms"] for rank in range(2)]
    first, second = ({signal for step, signal, _ in alarms if step == 3} for alarms in ranks)
    assert {"activation_max", "log_z"} <= second
    assert not {"activation_max", "log_z"} & first  # its own activations are sound
    events = wb.open_run(folder / "exploding.zarr")["events"].to_dataset()
    of_states = events.isel(event=(events["source"].values == "activation_max") & (events["step"].values == 3))
    assert of_states["layer"].values.tolist() == [2]
    assert of_states["message"].values.tolist() == ["Stage 1: activation_max is no longer finite."]
    assert wb.list_runs(folder)["alarm"].item() == "adam_staleness"


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_all_stages_have_rows(ran):
    run = wb.open_run(ran(2, "resumed") / "resumed.zarr")
    assert run["monitors"]["step"].values.tolist() == [*range(4 + ranked_stages.N_STEPS)]
    assert run["monitors"]["loss"].notnull().all()
    resumed = run["events"].to_dataset().isel(event=run["events"]["kind"].values == "resumed")
    assert resumed["step"].values.tolist() == [4]
