"""The share of the training time that observation takes, on a clock that the test sets."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.callbacks.alarms.replaying import replay
from workbench.callbacks.recorder.budget import LONGEST_ROW, OF_UPDATE, Budget, intervals, rounded
from workbench.callbacks.recorder.options import CADENCE
from workbench.io import run_output

COSTS = st.dictionaries(
    st.sampled_from(["alarms", "batch", "c", "d", "e", "f"]),
    st.tuples(st.floats(1e-6, 1.0), st.integers(1, 50)),
    min_size=1,
    max_size=6,
)


class Clock:
    """A clock that moves only when it is told to, and by ``tick`` whenever it is read."""

    def __init__(self, tick=0.0):
        self.now, self.tick = 0.0, tick

    def __call__(self):
        self.now += self.tick
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock of all costs."""
    found = Clock()
    monkeypatch.setattr(run_output, "stopwatch", found)
    return found


@given(COSTS, st.floats(1e-6, 1.0))
def test_intervals_spend_what_is_allowed_and_give_the_smallest_weighted_sum_of_relative_intervals(parts, allowed):
    found = intervals(parts, allowed)
    spent = sum(cost / found[part] for part, (cost, _) in parts.items())
    assert all(found[part] >= base for part, (_, base) in parts.items())
    assert spent <= allowed * (1 + 1e-9)
    longer = [part for part, (_, base) in parts.items() if found[part] > base * (1 + 1e-9)]
    if longer:
        assert spent == pytest.approx(allowed)
    # A little more for one part and less for another never pays: marginal gains are equal, and smaller at the cadence.
    weight = {part: 10 if part in OF_UPDATE else 1 for part in parts}
    gain = {part: weight[part] * found[part] ** 2 / (cost * base) for part, (cost, base) in parts.items()}
    for part in longer:
        assert all(gain[part] <= other * (1 + 1e-6) or other == gain[part] for other in gain.values())


@given(st.floats(1, 1e5), st.integers(1, 50))
def test_a_rounded_interval_is_a_multiple_of_the_cadence_and_at_most_half_again_as_long(interval, base):
    interval = max(interval, base)
    found = rounded(interval, base)
    assert found % base == 0
    assert interval * (1 - 1e-9) <= found <= max(2.0 * base, 1.5 * (interval + base))


def simulated(clock, budget, costs, *, step=0.02, n_steps=3000, row=0.0001, start=0):
    """Run a training whose parts cost given seconds; returns the steps at which each part was measured."""
    due_at = {part: [] for part in costs}
    for i in range(start, start + n_steps):
        due = budget.due(i, i, lambda part: True)
        clock.now += step
        with budget.timed("row"):
            clock.now += row
            for part in [part for part in costs if part in due]:
                with budget.timed(part):
                    clock.now += costs[part]
                due_at[part].append(i)
        budget.end_step(due)
        if budget.is_plan_due:
            budget.plan(budget.known())
    return due_at


def budget_of(share, *, fixed=(), costs=None, every=CADENCE):
    return Budget(every, fixed=fixed, share=share, device=torch.device("cpu"), costs=costs or {})


PARTS = {
    "alarms": 4e-4, "batch": 1e-3, "settings": 3e-4, "sketch": 3e-4, "attention": 0.012, "precision": 0.008,
    "reduction": 0.003,
}  # fmt: skip


@pytest.mark.parametrize("share", [0.005, 0.02, 0.1])
@pytest.mark.parametrize("step", [0.005, 0.02, 1.0])
def test_the_share_is_kept_on_any_machine(clock, share, step):
    budget = budget_of(share)
    due_at = simulated(clock, budget, PARTS, step=step, row=0.1 * share * step)
    found = budget.cost()
    first = 3 * sum(PARTS.values()) / (3000 * step)  # measurements from which the costs are learned
    assert found.share <= share + first
    if step < 1.0:
        assert found.share > 0.4 * share  # and it is used, with a reserve for the store
        assert budget.slowed
    cheap = 0.2 * step * share / PARTS["alarms"]
    assert due_at["alarms"][-20:] == [*range(2980, 3000)] or cheap < 20
    assert all(len(steps) > 1 for steps in due_at.values())


def test_a_plan_accepts_parts_that_only_another_rank_has_measured_and_parts_switched_on_later(clock):
    every = {"precision": 20, "attention": None}
    budget = budget_of(0.02, every=every)
    every["attention"] = 10
    budget.plan({"step": 0.02, "precision": 1.0, "attention": 0.1})
    assert budget.in_turn == {"precision"}
    assert budget.slowed.keys() == {"precision", "attention"}


def test_without_a_limit_every_part_keeps_its_cadence(clock):
    due_at = simulated(clock, budget_of(None), PARTS, n_steps=100)
    assert due_at["attention"] == [*range(9, 100, 10)]
    assert due_at["reduction"] == [*range(4, 100, 5)]
    assert due_at["alarms"] == [*range(100)]


def rows_of(clock, budget, *, n_steps=3000, step=0.02, row=0.001, costs=PARTS):
    """Run a training whose updates may have no row; returns the steps with a row, and those at which a part was due."""
    rows, with_parts = [], []
    for i in range(n_steps):
        due = budget.due(i, i, lambda part: True)
        has_row = budget.row_is_due(i, due)
        budget.begin_batch()
        clock.now += step
        if not has_row:
            budget.skip_step()
            continue
        rows.append(i)
        with_parts += [i] if due else []
        with budget.timed("row"):
            clock.now += row
            for part in due & costs.keys():
                with budget.timed(part):
                    clock.now += costs[part]
        budget.end_step(due)
        if budget.is_plan_due:
            budget.plan(budget.known())
    return rows, with_parts


@pytest.mark.parametrize("step", [0.004, 0.02, 0.1, 10.0])
def test_rows_are_spread_last_and_at_most_ten_updates_apart(clock, step):
    budget = budget_of(0.02)
    rows, with_parts = rows_of(clock, budget, step=step)
    interval = budget.cost().parts["row"].every
    gaps = np.diff(rows)
    assert gaps.max() <= LONGEST_ROW
    assert set(with_parts) <= set(rows)
    assert gaps[-100:].max() == interval or interval == 1
    assert budget.slowed.get("rows", 1) == interval
    known = budget.known()
    assert known["step"] == pytest.approx(step)
    assert known["row"] == pytest.approx(0.001)
    assert interval == 1 or interval < min(budget.slowed[part] for part in ("alarms", "batch"))
    assert (interval == 1) == (step == 10.0)
    assert (interval == LONGEST_ROW) == (step == 0.004)
    if step >= 0.02:
        assert budget.cost().share <= 0.03  # some of which was spent before the costs were known


def test_rows_that_cannot_be_spread_keep_their_cadence(clock):
    budget = budget_of(0.02)
    budget.spreads_rows = False
    rows, _ = rows_of(clock, budget, n_steps=500)
    assert rows == [*range(500)]
    assert "rows" not in budget.slowed


def test_an_update_at_which_a_window_opens_has_a_row(clock):
    budget, opened = budget_of(0.02), []
    rows_of(clock, budget, n_steps=100)
    for i in range(100, 2000):
        due = budget.due(i, i, lambda part: True)
        opened += [i] if budget.opens_window("attention", i) else []
        assert budget.row_is_due(i, due) or (not due and i not in opened)
    assert opened


def test_a_part_whose_cadence_is_fixed_keeps_it_and_the_others_pay(clock):
    budget = budget_of(0.02, fixed={"reduction"})
    due_at = simulated(clock, budget, PARTS)
    assert due_at["reduction"] == [*range(4, 3000, 5)]
    assert "reduction" not in budget.slowed
    free = budget_of(0.02)
    simulated(clock, free, PARTS)
    assert budget.interval["attention"] > free.interval["attention"]


def test_intervals_settle_and_are_regular(clock):
    due_at = simulated(clock, budget_of(0.02), PARTS, n_steps=6000)
    for part, steps in due_at.items():
        gaps = np.diff([step for step in steps if step > 1000])  # each part was measured twice by then
        assert len(set(gaps.tolist())) <= 1, part


def test_a_first_measurement_that_takes_long_does_not_count(clock):
    budget = budget_of(0.02)
    for cost in (10.0, 0.012, 0.012):
        with budget.timed("attention"):
            clock.now += cost
        budget.end_step({"attention"})
    assert budget.known()["attention"] == pytest.approx(0.012)


def test_blocks_take_turns_once_they_are_too_expensive_together(clock):
    budget = budget_of(0.02)
    simulated(clock, budget, {"precision": 1e-6}, n_steps=200)
    assert not budget.in_turn
    simulated(clock, budget, {"precision": 0.2}, n_steps=200, start=200)
    assert budget.in_turn == {"precision"}


def test_blocks_of_a_large_model_take_turns_from_the_beginning():
    options = {"share": 0.02, "device": torch.device("cpu"), "costs": {}, "n_parameters": 10**9}
    assert Budget(CADENCE, fixed=(), **options).in_turn == {"precision"}
    assert Budget(CADENCE, fixed={"precision"}, **options).in_turn == set()


def test_a_resumed_run_starts_from_the_costs_that_it_knew(clock):
    first = budget_of(0.02)
    simulated(clock, first, PARTS)
    again = budget_of(0.02, costs={part: cost for part, cost in first.known().items() if part != "step"})
    simulated(clock, again, {"row": 0.0}, n_steps=10)
    ratio = [again.interval[part] / first.interval[part] for part in PARTS]
    assert max(ratio) <= 2
    assert min(ratio) >= 0.5


def test_a_window_opens_one_cadence_before_its_part_is_due(clock):
    budget = budget_of(0.02)
    opened = []
    for i in range(2000):
        due = budget.due(i, i, lambda part: True)
        clock.now += 0.02
        if "attention" in due:
            with budget.timed("attention"):
                clock.now += 0.02
            if i > 100:
                assert opened[-1] == i - CADENCE["attention"]
        if budget.opens_window("attention", i):
            opened.append(i)
        budget.end_step(due)
        if budget.is_plan_due:
            budget.plan(budget.known())
    assert budget.interval["attention"] > CADENCE["attention"]


def test_parts_of_one_pass_are_measured_together(clock):
    budget = budget_of(0.02)
    due_at = simulated(clock, budget, {"attention": 0.02, "router": 1e-4, "activations": 1e-4})
    assert set(due_at["router"]) <= set(due_at["attention"])
    assert set(due_at["activations"]) <= set(due_at["attention"])
    assert len(due_at["router"]) == len(due_at["attention"])
    assert budget.slowed["router"] == budget.slowed["attention"] == budget.cost().parts["attention"].every
    assert "nan" not in str(budget.cost())


def train(clock, watched, model, optimizer, n_steps, *, broken_at=None):
    """Train in a loop whose steps take 20 ms; from a step on the labels are random."""
    task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)
    for i in range(n_steps):
        clock.now += 1.0  # what happens between updates does not count
        inputs, targets = task.batch(i)
        if broken_at is not None and i >= broken_at:
            targets = torch.randint(16, targets.shape, generator=torch.Generator().manual_seed(i))
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        clock.now += 0.02
        if broken_at is not None and i == broken_at:
            loss = loss * math.nan
        loss.backward()
        watched.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def watched_run(clock, tmp_path):
    clock.tick = 5e-6  # of everything that is timed

    def run(n_steps, name="a.zarr", **options):
        broken_at = options.pop("broken_at", None)
        model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with wb.watch(model, optimizer, store=tmp_path / name, shows=False, **options) as watched:
            train(clock, watched, model, optimizer, n_steps, broken_at=broken_at)
        return watched, wb.open_run(tmp_path / name)

    return run


def test_a_watched_run_records_every_loss_and_says_what_was_examined(watched_run, clock):
    watched, run = watched_run(260, budget=0.002)
    monitors = run["monitors"].to_dataset()
    assert monitors["step"].values.tolist() == [*range(260)]
    assert np.isfinite(monitors["loss"].values).all()
    examined = monitors["examined"].values
    assert set(examined.tolist()) == {0.0, 1.0, 2.0}
    has_batch = np.isfinite(monitors["token_entropy"].values)
    assert (has_batch == (examined == 2)).all()
    assert np.isfinite(monitors["grad_norm"].values[has_batch]).all()
    status = watched.status
    assert status.slowed["batch"] > 1
    assert f"batch every {status.slowed['batch']} updates" in status.as_html()
    cost = watched.cost
    assert 0.002 < cost.share <= 0.005  # rows alone are more than the budget
    assert {"row", "attention", "precision", *OF_UPDATE} <= cost.parts.keys()
    assert "attention" in str(cost)
    kept = json.loads(run.attrs["recorder_state"])["costs"]
    assert {"attention", "row"} <= kept.keys()


def test_batches_are_examined_at_their_own_steps_and_nothing_for_parts_that_a_model_lacks(watched_run, monkeypatch):
    def plan(budget, known):
        budget.interval |= dict.fromkeys(known.keys() & budget.interval.keys(), 1000) | {"batch": 30, "alarms": 40}

    monkeypatch.setattr(Budget, "plan", plan)
    _, run = watched_run(260, budget=0.02)
    examined = run["monitors"]["examined"].values
    expected = dict.fromkeys(range(70, 260, 30), 2.0) | dict.fromkeys((90, 170, 210), 1.0)
    assert {step: examined[step] for step in range(60, 260) if examined[step]} == expected


def test_alarms_of_a_budgeted_run_are_those_of_its_replay(watched_run):
    watched, run = watched_run(700, budget=0.01, broken_at=500)
    raised = [(alarm.step, alarm.signal) for alarm in watched.alarms.raised]
    assert raised
    assert [(alarm.step, alarm.signal) for alarm in replay(run, wb.Alarms())] == raised


def test_a_loss_that_is_not_finite_does_not_wait_for_its_turn(watched_run):
    watched, run = watched_run(300, budget=0.002, broken_at=290)
    examined = run["monitors"]["examined"].values
    assert examined[290] >= 1
    assert (examined[200:290] == 0).any()
    assert (watched.alarms.raised[0].signal, watched.alarms.raised[0].step) == ("loss", 290)


def test_the_training_is_identical_whatever_is_examined(watched_run, clock):
    losses = [watched_run(120, f"{share}.zarr", budget=share)[1]["monitors"]["loss"].values for share in (0.001, None)]
    np.testing.assert_array_equal(*losses)


def lean_loop(clock, model, optimizer, n_steps, *, each=lambda i, loss: None, breaks=lambda i: False, step=0.004):
    """Train in a loop that logs nothing, with steps of 4 ms; returns the losses of all updates."""
    task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)
    losses = []
    for i in range(n_steps):
        inputs, targets = task.batch(i)
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        clock.now += step
        losses.append(loss.item())
        if not breaks(i):
            optimizer.step()
        each(i, loss)
        optimizer.zero_grad()
    return losses


@pytest.fixture
def lean_run(clock, tmp_path):
    """Function that watches a loop whose rows cost more than the budget; returns the watch, its run and all losses."""
    clock.tick = 5e-5

    def run(n_steps, name="lean.zarr", *, act=lambda watched, i, loss: None, breaks=lambda i: False, **options):
        model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with wb.watch(model, optimizer, store=tmp_path / name, shows=False, **options) as watched:
            losses = lean_loop(
                clock, model, optimizer, n_steps, each=lambda i, loss: act(watched, i, loss), breaks=breaks
            )
        return watched, wb.open_run(tmp_path / name), np.array(losses), model

    return run


def test_updates_without_a_row_change_nothing_and_rows_have_the_right_steps_and_losses(lean_run):
    watched, run, losses, model = lean_run(400)
    monitors = run["monitors"].to_dataset()
    steps = monitors["step"].values
    assert watched.cost.parts["row"].every == LONGEST_ROW
    assert len(steps) < 200
    assert np.diff(steps).max() <= LONGEST_ROW
    np.testing.assert_allclose(monitors["loss"].values, losses[steps], rtol=1e-6)
    assert np.isfinite(monitors["learning_rate"].values).all()
    assert (monitors["batch_size"].values == 8).all()
    assert (monitors["is_skipped"].values == 0).all()
    assert watched.status.step == 399
    assert f"rows every {LONGEST_ROW} updates" in watched.status.as_html()
    assert json.loads(run.attrs["recorder_state"])["step"] == 400
    assert set(run["monitors"]["examined"].values.tolist()) == {0.0, 1.0, 2.0}
    for part in ("attention", "optimizer", "reduction"):
        assert set(run[part]["step"].values.tolist()) <= set(steps.tolist())
    _, every, of_every, other = lean_run(400, "every.zarr", budget=None)
    assert every["monitors"]["step"].values.tolist() == [*range(400)]
    np.testing.assert_array_equal(losses, of_every)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


def test_a_run_with_few_rows_is_diagnosed_and_shown(lean_run):
    _, run, _, _ = lean_run(400)
    assert wb.diagnose(run) is not None
    timeline = wb.widgets.Timeline(run)
    assert timeline is not None


def is_lean(watched):
    return watched._attached.batches.rests


@pytest.mark.parametrize("is_before", [True, False])
def test_metrics_that_are_logged_end_it_and_belong_to_their_update(clock, tmp_path, is_before):
    clock.tick = 5e-5
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)
    logged_at = None
    with wb.watch(model, optimizer, store=tmp_path / "a.zarr", shows=False) as watched:
        for i in range(200):
            inputs, targets = task.batch(i)
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            now = logged_at is None and i > 100 and is_lean(watched)
            if now and is_before:
                watched.log(accuracy=0.25)
                logged_at = i
            clock.now += 0.004
            optimizer.step()
            optimizer.zero_grad()
            if now and not is_before:
                watched.log(accuracy=0.25)
                logged_at = i
    monitors = wb.open_run(tmp_path / "a.zarr")["monitors"].to_dataset()
    steps = monitors["step"].values
    assert steps[steps < logged_at].size < logged_at
    assert steps[steps >= logged_at].tolist() == [*range(logged_at, 200)]
    accuracy = monitors["accuracy"].values
    assert steps[np.isfinite(accuracy)].tolist() == [logged_at]
    assert np.isfinite(monitors["loss"].values[steps > logged_at]).all()
    assert "rows" not in watched.status.slowed


def test_an_update_that_is_skipped_is_counted_and_ends_it(lean_run):
    _, run, losses, _ = lean_run(300, breaks=lambda i: i == 205)
    monitors = run["monitors"].to_dataset()
    steps = monitors["step"].values
    assert len(steps[steps < 205]) < 150
    assert steps[steps >= 205].tolist() == [*range(205, 300)]
    assert steps[monitors["is_skipped"].values == 1].tolist() == [205]
    known = np.isfinite(monitors["loss"].values)
    np.testing.assert_allclose(monitors["loss"].values[known], losses[steps[known]], rtol=1e-6)


def test_with_a_gradient_scaler_all_updates_have_a_row(clock, tmp_path):
    clock.tick = 5e-5
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)
    with wb.watch(model, optimizer, store=tmp_path / "a.zarr", shows=False):
        for i in range(100):
            inputs, targets = task.batch(i)
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            scaler.scale(loss).backward()
            clock.now += 0.004
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert wb.open_run(tmp_path / "a.zarr")["monitors"]["step"].values.tolist() == [*range(100)]


def test_accumulated_batches_count_fully_in_the_rows(clock, tmp_path):
    clock.tick = 5e-5
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)
    with wb.watch(model, optimizer, store=tmp_path / "a.zarr", shows=False):
        for i in range(400):
            inputs, targets = task.batch(i)
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            (loss / 2).backward()
            clock.now += 0.002
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    monitors = wb.open_run(tmp_path / "a.zarr")["monitors"].to_dataset()
    assert len(monitors["step"]) < 120
    assert (monitors["batch_size"].values == 16).all()
    assert (monitors["is_skipped"].values == 0).all()


@pytest.mark.parametrize("n_steps", [101, 106, 113])
def test_a_run_is_resumed_after_its_last_update_though_that_has_no_row(clock, tmp_path, n_steps):
    clock.tick = 5e-5
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for n in (n_steps, 20):
        with wb.watch(model, optimizer, store=tmp_path / "a.zarr", shows=False, resume=True) as watched:
            lean_loop(clock, model, optimizer, n)
            watched.recorder._attached.flush()
    run = wb.open_run(tmp_path / "a.zarr")
    assert n_steps in run["monitors"]["step"].values
    assert json.loads(run.attrs["recorder_state"])["step"] == n_steps + 20


def test_a_loss_that_is_not_finite_is_noticed_at_the_next_row(lean_run):
    def act(watched, i, loss):
        if i == 250:
            for p in watched._attached._optimizer.parameters:
                p.data.fill_(math.nan)

    watched = lean_run(300, act=act)[0]
    first = watched.alarms.raised[0]
    assert first.signal == "loss"
    assert 251 <= first.step <= 250 + LONGEST_ROW


@pytest.mark.parametrize("budget", [0, 1.0, -0.1, "a", True])
def test_a_budget_is_a_share(budget):
    with pytest.raises(wb.errors.OptionError, match="budget"):
        wb.Recorder(budget=budget)
