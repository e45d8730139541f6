"""Faults written by hand in the test set of the study of alarms: what each does, and the recorded rows."""

import numpy as np
import pandas as pd
import pytest
import torch

from tests.data_scripts import FOLDER, load_script
from workbench.models.losses import prediction_of


@pytest.fixture(scope="module")
def script():
    return load_script("record_hand_faults_locked")


@pytest.fixture(scope="module")
def cases(script):
    import warning_cases

    return warning_cases


def begun(cases, setup, kind):
    """Return model, task, optimizer and the fault at its first step."""
    model, task, _ = cases.build(cases.Case(setup, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    [fault] = cases.BY_HAND[kind].make(cases.BY_HAND[kind].doses[0], 3)["callbacks"]
    fault._run = type("Run", (), {"model": model, "optimizer": optimizer})()
    fault.begin_step(2)
    batch = task.batch(2)
    changed = fault.change_batch(*batch)
    assert all(a is b for a, b in zip(changed, batch, strict=True))
    fault.begin_step(3)
    return model, task, optimizer, fault


def sees_later_tokens(model, inputs):
    other = inputs.clone()
    other[:, -1] = (other[:, -1] + 1) % inputs.max()
    with torch.no_grad():
        first, second = (prediction_of(model(each))[:, :-1] for each in (inputs, other))
    return not torch.equal(first, second)


@pytest.mark.parametrize(("setup", "n_classes"), [("nemotron lm", 40), ("kan recall", 10), ("rms vit", 10)])
def test_a_tenth_of_the_labels_is_random(cases, setup, n_classes):
    _, task, _, fault = begun(cases, setup, "random labels")
    batches = [task.batch(i) for i in range(200)]
    pairs = [(fault.change_batch(*batch), batch) for batch in batches]
    assert all(changed[0] is batch[0] for changed, batch in pairs)
    new, old = (torch.cat([pair[i][1].flatten() for pair in pairs]) for i in (0, 1))
    counts = old >= 0
    assert torch.equal(new[~counts], old[~counts])
    assert (new[counts] != old[counts]).double().mean() == pytest.approx(0.1 * (1 - 1 / n_classes), rel=0.2)
    assert set(new[new != old].tolist()) == set(range(n_classes))


def test_the_same_batch_comes_for_ever(cases):
    _, task, _, fault = begun(cases, "kan recall", "same batch")
    first = task.batch(3)
    for step in range(3, 8):
        fault.begin_step(step)
        changed = fault.change_batch(*(first if step == 3 else task.batch(step)))
        assert all(a is b for a, b in zip(changed, first, strict=True))


def test_gradients_are_kept(cases):
    model, task, optimizer, _ = begun(cases, "rms vit", "gradients kept")
    parameter = next(model.parameters())
    norms = []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        prediction_of(model(task.batch(0)[0])).square().sum().backward()
        norms.append(float(parameter.grad.norm()))
    np.testing.assert_allclose(norms, [norms[0], 2 * norms[0], 3 * norms[0]], rtol=1e-4)


def test_models_without_a_causal_mask_cannot_lose_it(script, cases):
    lost = {name for name in cases.LOCKED if not cases.causal_modules(cases.build(cases.Case(name, 1))[0])}
    assert lost == {"rms vit"}


@pytest.mark.slow
def test_the_lost_mask_acts_in_every_causal_model(cases):
    for name in set(cases.LOCKED) - {"rms vit"}:
        model, task, _ = cases.build(cases.Case(name, 1))
        assert not sees_later_tokens(model, task.batch(0)[0])
        model, task, *_ = begun(cases, name, "lost mask")
        assert sees_later_tokens(model, task.batch(0)[0])


@pytest.mark.slow
def test_runs_are_recorded_with_their_faults(script, cases, tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "EARLIEST", 20)
    monkeypatch.setattr(cases, "LATEST", 25)
    monkeypatch.setattr(script, "N_HEALTHY", 30)
    monkeypatch.setattr(script, "N_WATCHED", 4)
    control = cases.Case("kan recall", 1)
    script.record(control, tmp_path)
    rows = {row["kind"]: row for row in map(script.row, tmp_path.glob("*.json"))}
    assert set(rows) == {"", *cases.BY_HAND}
    assert rows[""]["n_steps"] == 30
    for kind in cases.BY_HAND:
        assert rows[kind]["start"] == script.replace(control, kind=kind, dose=1).start
        assert rows[kind]["n_steps"] == rows[kind]["start"] + 4
    assert rows["same batch"]["first_step"] == rows["same batch"]["start"] + 1
    assert (rows["same batch"]["first_cause"], rows["same batch"]["loss_step"]) == ("repeated_data", "")
    before = {place: place.stat().st_mtime_ns for place in tmp_path.iterdir()}
    script.record(control, tmp_path)
    assert before == {place: place.stat().st_mtime_ns for place in tmp_path.iterdir()}


@pytest.mark.recorded
def test_the_recorded_rows_are_those_of_the_plan(script, cases):
    rows = pd.read_csv(FOLDER / "hand_faults_locked.csv")
    healthy, faulted = rows[rows["kind"].isna()], rows[rows["kind"].notna()]
    assert set(healthy["setup"]) == set(cases.LOCKED)
    assert set(rows["plan"]) <= set(script.PLANS)
    assert (healthy["n_steps"] == script.N_HEALTHY).all()
    for row in faulted.itertuples():
        assert row.start == cases.Case(row.setup, row.plan, row.kind, 1).start
        assert row.n_steps == row.start + script.N_WATCHED or isinstance(row.divergence, str)
        assert row.expected_cause == cases.BY_HAND[row.kind].cause
    for (setup, _), own in faulted.groupby(["setup", "plan"]):
        assert set(own["kind"]) == set(cases.BY_HAND) - ({"lost mask"} if setup == "rms vit" else set())
    for name in ("first_step", "floor_step", "loss_step", "grad_norm_step"):
        found = faulted[faulted[name].notna()]
        assert found[name].between(found["start"], found["n_steps"] - 1).all()
    np.testing.assert_array_equal(faulted["first_step"].notna(), faulted["n_alarms"] > 0)
