"""Parts of LiveTraining: one state in transit, traces that keep extremes, runs that take turns."""

import asyncio
import contextvars
import os
import pickle
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.monitored_runs import watched_run
from tests.plots.conftest import spectra_of
from tests.waiting import wait_for
from workbench.callbacks.kss import Shaping
from workbench.plots.style import BROKEN
from workbench.training.callback import StepRecord
from workbench.widgets.live.history import TRACES, LiveModes, RunHistory, StepNews
from workbench.widgets.live.latest_state import LatestState, SwitchPanel
from workbench.widgets.live.live_canvas import LiveCanvas
from workbench.widgets.live.live_runs import Switches
from workbench.widgets.live.starts import SavedStep, best_step, remarks_on
from workbench.widgets.live.training_process import Worker


class Number(LatestState):
    """A widget that shows a number and keeps its messages."""

    _esm = "export default { render() {} }"

    def __init__(self):
        self.value = 0
        self.sent = []
        super().__init__()

    def state(self):
        return {"value": self.value}, []

    def send(self, content, buffers=None):
        self.sent.append(content)

    def answer(self, **content):
        self._receive(self, content, [])


def test_nothing_is_sent_before_a_page_asks_and_everything_at_once_when_it_does():
    number = Number()
    number.value = 3
    number.refresh()
    assert number.sent == []
    number.answer(painted=0)
    assert number.sent == [{"value": 3, "number": 1}]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["change", "paint", "reload"]), max_size=40))
def test_one_state_is_in_flight_and_the_last_one_arrives(acts):
    number = Number()
    number.answer(painted=0)
    for act in acts:
        if act == "change":
            number.value += 1
            number.refresh()
        elif act == "paint":
            number.answer(painted=number.sent[-1]["number"])
        else:  # the page loses its state and the messages in transit
            number.answer(painted=0)
        n_answers = 1 + sum(a != "change" for a in acts)
        assert len(number.sent) <= n_answers + 1
    n_sent = 0
    while n_sent < len(number.sent):  # the page paints the messages in transit and their successors
        n_sent = len(number.sent)
        number.answer(painted=number.sent[-1]["number"])
    assert number.sent[-1]["value"] == number.value


def test_a_kernel_that_cannot_read_answers_sends_once_a_second_and_a_page_that_is_gone_is_only_asked(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("workbench.widgets.live.latest_state.time.monotonic", lambda: now[0])
    number = Number()
    number.answer(painted=0)
    for tenth in range(12_000):
        now[0] = tenth / 10
        number.value = tenth
        number.refresh()
    blind = [content for content in number.sent if "number" in content]
    questions = [content for content in number.sent if "number" not in content]
    assert 595 <= len(blind) <= 602
    assert [content["value"] for content in blind[:3]] == [0, 10, 20]
    assert 5 < len(questions) < 20
    assert all(question == {"are_you_there": True} for question in questions)
    number.answer(painted=0, again=True)
    assert number.sent[-1]["value"] == 11_999


def test_answers_to_earlier_states_do_not_let_another_leave_while_a_later_one_is_on_its_way(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("workbench.widgets.live.latest_state.time.monotonic", lambda: now[0])
    number = Number()
    number.answer(painted=0)
    for second in (1.5, 3.0):
        now[0] = second
        number.refresh()
    assert [content["number"] for content in number.sent] == [1, 2, 3]
    number.answer(painted=1)
    number.answer(painted=2)
    assert len(number.sent) == 3
    number.answer(painted=3)
    # The latest is sent again, because it was stale.
    assert [content["number"] for content in number.sent] == [1, 2, 3, 4]


def test_what_is_sent_leaves_in_the_context_of_the_page():
    place = contextvars.ContextVar("place", default="kernel")
    seen = []

    class Placed(Number):
        def send(self, content, buffers=None):
            seen.append(place.get())

    placed = Placed()

    def page():
        place.set("page")
        placed.answer(painted=0)

    contextvars.copy_context().run(page)
    contextvars.copy_context().run(lambda: (place.set("page"), placed.answer(painted=1)))
    thread = threading.Thread(target=placed.refresh)
    thread.start()
    thread.join()
    assert set(seen) == {"page"}
    assert len(seen) == 2


def news_of(step, **values):
    return StepNews.of(record_of(step, **values))


def record_of(step, **values):
    given = {"loss": 2.0, "auxiliary_loss": np.nan, "accuracy": 0.1, "grad_norm": 1.0, "learning_rate": 1e-3}
    return StepRecord(step=step, **{**given, **values})


def test_long_traces_keep_their_extremes_their_order_and_their_end():
    loss = np.random.default_rng(0).lognormal(size=5000).astype(np.float32)
    history = RunHistory(5000)
    for step, value in enumerate(loss):
        history.add(news_of(step, loss=float(value)))
    step, value = history.trace("loss")
    assert len(step) < 700
    assert value.min() == loss.min()
    assert value.max() == loss.max()
    assert (np.diff(step) >= 0).all()
    assert (step[-1], value[-1]) == (4999, loss[-1])


def test_what_is_not_finite_is_left_out_of_a_trace():
    history = RunHistory(4)
    for step, loss in enumerate([1.0, np.nan, np.inf, 2.0]):
        history.add(news_of(step, loss=loss))
    step, value = history.trace("loss")
    assert (step.tolist(), value.tolist()) == ([0, 3], [1, 2])


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=60))
def test_stretches_with_kss_are_found_again_from_their_ends(switched):
    history = RunHistory(60)
    for step, is_on in enumerate(switched):
        history.add(news_of(step, outcomes={"kss": Shaping(step, wb.KSS(enabled=is_on).control)}))
    found = [any(start <= step < end for start, end in history.kss_spans()) for step in range(len(switched))]
    assert found == switched


def test_of_a_thousand_stretches_as_many_are_told_as_can_be_seen():
    history = RunHistory(60_000)
    history._has_kss[:] = np.arange(60_000) % 20 < 10
    history.n_done = 60_000
    assert history.kss_spans() == [(0, 59_990)]
    history._has_kss[30_000:40_000] = False
    assert history.kss_spans() == [(0, 29_990), (40_000, 59_990)]


def test_modes_are_those_of_the_spectra_and_packed_in_order():
    spectra = spectra_of(0.9, n_layers=3).expand_dims(step=[7])
    spectra["eigenvalue"][0, 1, 2:] = np.nan
    modes = LiveModes.of(spectra)
    eigenvalue = spectra["eigenvalue"].values[0]
    for layer in range(3):
        found = modes.points[modes.layer == layer].astype(float)
        known = eigenvalue[layer][np.isfinite(eigenvalue[layer])]
        np.testing.assert_allclose(found[:, 0] + 1j * found[:, 1], known, rtol=1e-6)
    history = RunHistory(10)
    history.add(news_of(7, spectra=spectra))
    content, buffers = canvas_over({"a": history}).state()
    (run,) = content["runs"]
    assert (run["modes_step"], run["n_layers"], len(buffers)) == (7, 3, 3 + 2 * len(TRACES))
    np.testing.assert_array_equal(np.frombuffer(buffers[0], np.float32).reshape(-1, 2), modes.points)
    mass = float(spectra["near_unit_mass"].mean())
    assert run["near_unit_mass"] == pytest.approx(mass)
    assert np.frombuffer(buffers[3 + 2 * TRACES.index("near_unit_mass") + 1], np.float32) == pytest.approx([mass])


def test_a_history_hears_the_first_alarm_its_cause_the_probes_and_the_evidence(tmp_path):
    fault = wb.faults.low_precision_attention(n_bits=6, start=6)
    every = {
        **dict.fromkeys(("attention", "router", "optimizer", "activations", "reduction", "update")),
        "precision": 4,
    }
    alarms = wb.Alarms()
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0)
    task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)
    history, store = RunHistory(14), tmp_path / "a.zarr"
    assert history.account == ""
    recorder = wb.Recorder(every=every)
    for record in wb.train(model, task, n_steps=14, faults=[fault], recorder=recorder, alarms=alarms, store=store):
        history.add(StepNews.of(record, alarms))
        if record.step == 5:
            assert history.account == "No alarm up to step 5."
            assert history.first_alarm is None
    assert history.account.startswith("First alarm: step 7, 1 step after the fault: arithmetic")
    assert "(probe). Likely cause: low precision attention." in history.account
    # An alarm makes the probe check again at the next update.
    assert (history.checked(is_sound=True), history.checked(is_sound=False)) == ([3], [7, 8, 11])
    again = RunHistory.of(wb.open_run(store), 14)
    assert again.account == history.account
    assert (again.checked(is_sound=True), again.checked(is_sound=False)) == ([3], [7, 8, 11])
    (run,) = canvas_over({"a": again}).state()[0]["runs"]
    assert (run["account"], run["has_alarm"], run["is_watched"]) == (history.account, True, True)
    assert (run["sound"], run["broken"]) == ([3], [7, 8, 11])


def test_the_strongest_evidence_is_a_trace_and_its_signal_has_a_name():
    run = watched_run(400, fault_at=100, seed=2, spectra=False)
    history = RunHistory.of(run, 400)
    step, value = history.trace("evidence")
    assert (step[0], value[0]) == (59, np.float32(0.3))
    assert value[step == 149] == np.float32(3.4)
    assert (value[-1], history.nearest) == (1000.0, "loss")
    assert history.account.startswith("First alarm: step 109, 9 steps after the fault: arithmetic of attention")
    assert len(history.checked(is_sound=False)) == 30
    assert RunHistory.of(run, 20).trace("evidence")[0].tolist() == []


def test_a_changed_setting_is_told_as_one():
    history, alarms = RunHistory(9), wb.Alarms()
    alarm = wb.alarms.Alarm(4, "learning_rate", -1, -1, np.inf, 3.0, is_outcome=False, message="It rose.")
    history.add(StepNews.of(record_of(4, outcomes={"guard": (alarm,)}), alarms))
    assert history.account.startswith("First alarm: step 4: learning_rate (setting). Likely cause: ")
    assert history.first_alarm == 4
    batches = wb.alarms.Alarm(6, "data", -1, -1, np.inf, 1.0, is_outcome=False, message="They repeat themselves.")
    history.add(StepNews.of(record_of(6, outcomes={"guard": (batches,)}), alarms))
    assert history.checked(is_sound=False) == [6]


def spectra_with(mark, step):
    """Spectra that can be distinguished by their first eigenvalue."""
    spectra = spectra_of(0.9, n_layers=2).expand_dims(step=[step]).copy(deep=True)
    spectra["eigenvalue"][0, 0, 0] = mark
    return spectra


def test_modes_of_an_earlier_step_are_those_of_the_latest_recorded_one_up_to_it_and_come_from_the_store_when_old(
    tmp_path,
):
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8, seed=0)
    task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)
    store = tmp_path / "a.zarr"
    history, eigenvalues = RunHistory(20, store, n_kept=2), {}
    assert history.modes_at(3) is None
    options = {"spectra_every": 3, "profile_options": {"n_snapshots": 96}, "store": store, "flush_every": 4}
    for record in wb.train(model, task, n_steps=20, learning_rate=1e-2, **options):
        history.add(StepNews.of(record))
        if record.spectra is not None:
            eigenvalues[record.step] = record.spectra["eigenvalue"].values[0]
    assert history.recorded_steps.tolist() == [0, 3, 6, 9, 12, 15, 18, 19] == sorted(eigenvalues)
    for step, at in ((0, 0), (2, 0), (3, 3), (11, 9), (18, 18), (19, 19), (500, 19)):
        modes = history.modes_at(step)
        known = eigenvalues[at][np.isfinite(eigenvalues[at])]
        assert modes.step == at
        np.testing.assert_allclose(modes.points[:, 0] + 1j * modes.points[:, 1], known.astype(np.complex64))
    assert RunHistory(20, tmp_path / "none.zarr").spectra_at(3) is None
    again = RunHistory.of(wb.open_run(store), 20, store)
    assert again.recorded_steps.tolist() == history.recorded_steps.tolist()
    assert again.modes_at(7).step == 6
    assert again.values_at(7)["loss"] == pytest.approx(history.values_at(7)["loss"])


def test_spectra_that_were_never_written_are_missing_and_nothing_else_fails(tmp_path):
    history = RunHistory(9, tmp_path / "gone.zarr", n_kept=2)
    for step in range(4):
        history.add(news_of(step, spectra=spectra_with(step, step)))
    assert history.spectra_at(0) is None
    assert history.modes_at(1) is None
    assert [history.modes_at(step).points[0, 0] for step in (2, 3)] == [2, 3]


def canvas_over(histories, **options):
    moved = []
    canvas = LiveCanvas(lambda: "ready", lambda name: "", lambda callback: callback, lambda: moved.append(1), **options)
    canvas.show(histories, {}, 9)
    canvas.sent = []
    canvas.send = lambda content, buffers=None: canvas.sent.append((content, buffers))
    canvas.moved = moved
    return canvas


def test_a_canvas_without_runs_and_without_modes_can_be_sent():
    canvas = canvas_over({})
    content, buffers = canvas.state()
    assert (content["runs"], content["broken"], content["n_recorded"], buffers) == ([], BROKEN, 0, [])
    canvas.show({"a": RunHistory(5)}, {}, 5)
    content, buffers = canvas.state()
    assert content["runs"][0]["modes_step"] is None
    assert set(buffers) == {b""}


def test_the_page_goes_to_a_recorded_step_and_back_to_the_latest():
    histories = {"a": RunHistory(9), "b": RunHistory(9)}
    for step in range(7):
        histories["a"].add(news_of(step, spectra=spectra_with(step, step) if step % 2 == 0 else None))
        if step < 3:  # it diverged
            histories["b"].add(news_of(step, spectra=spectra_with(10 + step, step) if step % 2 == 0 else None))
    canvas = canvas_over(histories)

    def seen():
        content, buffers = canvas.state()
        points = [np.frombuffer(buffers[i], np.float32)[0] for i in (0, 3 + 2 * len(TRACES))]
        return content["step"], content["place"], [run["modes_step"] for run in content["runs"]], points

    assert seen() == (None, None, [6, 2], [6, 12])
    canvas._receive(canvas, {"go": {"place": 1}}, [])
    assert seen() == (2, 1, [2, 2], [2, 12])
    canvas._receive(canvas, {"go": {"step": 5}}, [])
    assert seen() == (4, 2, [4, 2], [4, 12])
    assert canvas.state()[0]["values"]["b"]["loss"] is None
    histories["a"].add(news_of(7))
    histories["a"].add(news_of(8, spectra=spectra_with(8, 8)))
    assert seen() == (4, 2, [4, 2], [4, 12])  # the displayed step stays while it trains
    canvas._receive(canvas, {"go": {"place": 99}}, [])
    assert seen()[0] == 8
    canvas._receive(canvas, {"go": None}, [])
    assert seen() == (None, None, [8, 2], [8, 12])
    assert len(canvas.moved) == 4


def test_traces_are_left_out_while_they_hardly_change_and_never_at_the_end():
    canvas = canvas_over({"a": RunHistory(9)})
    canvas.histories["a"].add(news_of(0))
    canvas.is_active = True
    canvas._receive(canvas, {"painted": 0}, [])
    canvas._receive(canvas, {"painted": 1}, [])
    for number in (2, 3):
        canvas.refresh()
        canvas._receive(canvas, {"painted": number}, [])
    canvas.is_active = False
    canvas.refresh()
    found = [(content["has_traces"], len(buffers)) for content, buffers in canvas.sent]
    assert found == [(True, 13), (False, 3), (False, 3), (True, 13)]


def test_earlier_runs_are_drawn_in_the_color_of_the_run_of_their_name():
    old = RunHistory(9)
    old.add(news_of(0, loss=7.0, cause="loss"))
    canvas = canvas_over({"with KSS": RunHistory(9), "without KSS": RunHistory(9)})
    canvas.show(canvas.histories, {("without KSS", 2): old}, 9)
    content, buffers = canvas.state()
    (earlier,) = content["earlier"]
    assert earlier["name"] == "without KSS (start 2)"
    assert earlier["verdict"] == "diverged at step 0"
    assert earlier["color"] == content["runs"][1]["color"]
    assert np.frombuffer(buffers[-2 * len(TRACES) + 1], np.float32).tolist() == [7.0]


def test_a_restart_goes_back_to_before_the_divergence_and_says_which_checkpoint_is_before_what():
    def saved_at(step, run="a", start=2):
        return SavedStep(start, run, step, None)

    saved = [saved_at(60, "b"), saved_at(40), saved_at(40, "b"), saved_at(30), saved_at(20), saved_at(90, "a", 1)]
    sound, broken = RunHistory(99), RunHistory(99)
    assert best_step(saved, 2, {"a": sound, "b": sound}) == saved[0]
    assert remarks_on(saved, 2, {"a": sound, "b": sound}) == {}
    broken.add(news_of(40, cause="loss"))  # at 40 the next update is the one that diverged
    assert best_step(saved, 2, {"a": broken, "b": sound}) == saved_at(30)
    assert remarks_on(saved, 2, {"a": broken}) == {saved_at(30): "last before the divergence at step 40"}
    alarm = wb.alarms.Alarm(25, "loss", -1, -1, 2.0, 1.0, is_outcome=True, message="It rose.")
    broken.add(StepNews.of(record_of(25, outcomes={"guard": (alarm,)}), wb.Alarms()))
    assert list(remarks_on(saved, 2, {"a": broken}).items()) == [
        (saved_at(30), "last before the divergence at step 40"),
        (saved_at(20), "last before the first alarm at step 25"),
    ]
    early = RunHistory(99)
    early.add(news_of(5, cause="loss"))
    assert best_step(saved, 2, {"a": early}) == saved[0]  # it has none before
    assert best_step([], 1, {}) is None


def test_the_panel_applies_the_users_changes_shows_the_kernels_state_and_rejects_invalid_values():
    kss, complaints = wb.KSS(strength=1.0, interval=2), []

    def guarded(callback):
        def run(*args):
            try:
                callback(*args)
            except wb.WorkbenchError as error:
                complaints.append(str(error))

        return run

    panel, sent = SwitchPanel(kss, [], guarded), []
    panel.send = lambda content, buffers=None: sent.append(content)
    panel._receive(panel, {"painted": 0}, [])
    panel._receive(panel, {"kss": {"enabled": False, "strength": 5}}, [])
    assert (kss.enabled, kss.strength) == (False, 5.0)
    kss.strength = 2  # by code, before the page has painted the change by the user
    panel._receive(panel, {"painted": 1}, [])
    panel._receive(panel, {"painted": 2}, [])
    assert kss.strength == 2.0
    assert sent[-1] == {"kss": {"enabled": False, "strength": 2.0, "interval": 2}, "faults": [], "number": 2}
    panel._receive(panel, {"kss": {"interval": 0}}, [])
    assert complaints == ["interval must be an integer of at least 1, got 0."]
    assert sent[-1] == {"kss": {"enabled": False, "strength": 2.0, "interval": 2}, "faults": [], "number": 3}
    panel.close()
    kss.strength = 3
    assert len(sent) == 3


class Turns(Worker):
    """A worker over counters in a thread, and its messages."""

    def __init__(self, **runs):
        self.seen, self.told = [], []
        self.place, end = os.pipe()
        self.end = os.fdopen(end, "wb", buffering=0)
        super().__init__(os.fdopen(self.place, "rb"), None)
        self.thread = threading.Thread(target=self.take_turns, args=(runs, lambda *seen: self.seen.append(seen)))
        self.thread.start()

    def _tell(self, *message):
        if message != ("beat",):
            self.told.append(message)

    def command(self, what):
        self.end.write(pickle.dumps((what,)))

    def join(self):
        self.thread.join(120)
        self._is_over.set()
        self.end.close()
        return not self.thread.is_alive()


def counting(n, closings=(), fails_at=None):
    try:
        for i in range(n):
            if i == fails_at:
                raise wb.WorkbenchError("No space.")
            time.sleep(0.001)
            yield i
    finally:
        if isinstance(closings, list):
            closings.append(n)


def test_runs_take_turns_and_a_failing_one_leaves_the_other_alone():
    turns = Turns(a=counting(4), b=counting(9, fails_at=2))
    assert turns.join()
    assert turns.seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("a", 3)]
    assert turns.told == [("end", "b", "No space."), ("end", "a", None)]


@pytest.mark.parametrize("kernel_ends", [False, True])
def test_a_paused_process_holds_says_so_and_a_stopped_one_closes_its_runs(kernel_ends):
    closings = []
    turns = Turns(a=counting(10**6, closings), b=counting(10**6, closings))
    wait_for(lambda: len(turns.seen) > 5)
    turns.command("pause")
    wait_for(lambda: turns.told == [("held", True)])
    n_seen = len(turns.seen)
    time.sleep(0.1)
    assert len(turns.seen) == n_seen
    turns.command("resume")
    wait_for(lambda: len(turns.seen) > n_seen + 5)
    assert [name for name, _ in turns.seen[:6]] == ["a", "b"] * 3
    turns.command("pause")
    if not kernel_ends:
        turns.command("stop")  # also during a pause
    else:
        turns.end.close()
    assert turns.join()
    assert closings == [10**6, 10**6]
    assert turns.told == [("held", True), ("held", False), ("held", True)]


def test_switches_tell_what_changed_once_and_not_what_they_were_told():
    kss, fault = wb.KSS(strength=1.0, interval=2), wb.faults.large_rate(start=3, stop=5)
    told = []
    switches = Switches(kss, [fault], told.append)
    kss.set(enabled=False, strength=5)
    fault.enabled = True
    assert told == [{"kss": {"enabled": False, "strength": 5.0}}, {"large_rate": {"by_hand": True}}]
    switches.load({"kss": {"strength": 7.0}, "large_rate": {"by_hand": None}})
    assert (kss.strength, fault.enabled, len(told)) == (7.0, False, 2)
    for step in (2, 3, 4, 5):
        switches.follow_schedule(step)
        assert fault.enabled == (3 <= step < 5)
    kss.strength = 8
    assert told[2:] == [{"kss": {"strength": 8.0}}]
    switches.close()
    kss.strength = 9
    assert len(told) == 3


def test_states_leave_from_any_thread_one_at_a_time():
    number, loops = Number(), []

    async def answer():
        while not loops:
            n_sent = len(number.sent)
            if n_sent and number.sent[-1].get("number", 0) > answer.told:
                answer.told = number.sent[-1]["number"]
                number.answer(painted=answer.told)
            await asyncio.sleep(0)

    answer.told = 0

    def change(n):
        for _ in range(n):
            number.value += 1
            number.refresh()
        loops.append(True)

    number.answer(painted=0)
    thread = threading.Thread(target=change, args=(2000,))
    thread.start()
    asyncio.run(answer())
    thread.join()
    assert [content["number"] for content in number.sent] == list(range(1, len(number.sent) + 1))
    assert len(number.sent) <= answer.told + 1
