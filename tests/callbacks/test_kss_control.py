import json
import math
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from workbench.callbacks.kss import BandController, ControlValues, KSSOptions, PenaltyShape
from workbench.errors import OptionError


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("strength", -1.0, "strength is -1.0, expected a number of at least 0"),
        ("strength", math.nan, "strength is nan, expected a number of at least 0"),
        ("strength", math.inf, "strength is inf, expected a number of at least 0"),
        ("strength", "5", "strength is 5, expected a number of at least 0"),
        ("gamma", 1.2, "gamma is 1.2, expected a share between 0 and 1"),
        ("gamma", -0.1, "gamma is -0.1, expected a share between 0 and 1"),
        ("interval", 0, "interval is 0, expected a whole number of steps, at least 1"),
        ("interval", 2.5, "interval is 2.5, expected a whole number of steps, at least 1"),
        ("interval", True, "interval is True, expected a whole number of steps, at least 1"),
        ("interval", "2", "interval is 2, expected a whole number of steps, at least 1"),
        ("interval", math.inf, "interval is inf, expected a whole number of steps, at least 1"),
        ("strength", None, "strength is None, expected a number of at least 0"),
        ("layers", "third", "layers is 'third', expected 'half', 'all', or numbers of layers counted from 0"),
        ("layers", (), r"layers is \(\), expected 'half', 'all', or numbers"),
        ("layers", (-1,), r"layers is \(-1,\), expected 'half', 'all', or numbers"),
        ("layers", (True,), r"layers is \(True,\), expected 'half', 'all', or numbers"),
        ("layers", ("a",), r"layers is \('a',\), expected 'half', 'all', or numbers"),
        ("layers", 3, "layers is 3, expected 'half', 'all', or numbers"),
    ],
)
def test_a_control_out_of_range_is_refused_everywhere_and_changes_nothing(name, value, sentence):
    with pytest.raises(OptionError, match=sentence):
        wb.KSS(**{name: value})
    kss = wb.KSS(strength=3.0, interval=4, gamma=0.3, layers=(1, 2))
    before = kss.control
    with pytest.raises(OptionError, match=sentence):
        setattr(kss, name, value)
    with pytest.raises(OptionError, match=sentence):
        kss.set(enabled=False, **{name: value})
    assert kss.control == before


def test_a_misspelled_control_is_refused_with_the_nearest_name():
    kss = wb.KSS()
    before = dict(vars(kss))
    for set_it in (lambda: setattr(kss, "stregth", 3), lambda: kss.set(stregth=3)):
        with pytest.raises(OptionError, match=r"no control 'stregth' \(did you mean 'strength'\?\); choose from"):
            set_it()
    with pytest.raises(OptionError, match="KSS has no control 'power'; choose from enabled, strength, interval"):
        kss.power = 3
    assert vars(kss) == before
    kss.controller = controller = BandController()  # what it has may be set
    assert kss.controller is controller


def test_an_unknown_control_is_named():
    kss = wb.KSS()
    with pytest.raises(OptionError, match="KSS has no control 'power'; choose from enabled, strength, interval"):
        kss.set(enabled=False, power=3)
    assert kss.enabled


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: KSSOptions(n_snapshots=2), "n_snapshots is 2, expected at least 3"),
        (lambda: KSSOptions(side="inside"), "side is 'inside', expected one of both, output, input"),
        (lambda: KSSOptions(coupling="loose"), "coupling is 'loose', expected one of gradient, decoupled, projection"),
        (lambda: KSSOptions(trigger=-1.0), "trigger is -1.0, expected a spectral radius of at least 0"),
        (lambda: KSSOptions(skip_first=-1), "skip_first is -1, expected at least 0"),
        (lambda: BandController(quantity="loss"), "quantity is 'loss', expected 'spectral_radius' or 'near_unit_mass'"),
        (lambda: BandController(low=2.0, high=1.0), "The band is 2.0 to 1.0, expected 0 <= low <= high"),
        (lambda: BandController(factor=1.0), "factor is 1.0, expected more than 1"),
        (
            lambda: BandController(weakest=0.0),
            "The strength may run from 0.0 to 1000.0, expected 0 < weakest <= strongest",
        ),
    ],
)
def test_impossible_options_are_refused(make, sentence):
    with pytest.raises(OptionError, match=sentence):
        make()


def test_values_come_in_the_type_of_the_control():
    kss = wb.KSS(strength=3, interval=2.0, enabled=1, layers=[2, 0, 2])
    assert kss.control == ControlValues(True, 3.0, 2, 0.4, (0, 2))
    assert isinstance(kss.strength, float)
    assert isinstance(kss.interval, int)
    assert repr(kss) == "KSS(enabled=True, strength=3.0, interval=2, gamma=0.4, layers=(0, 2))"


def test_published_settings():
    assert wb.KSS.published().control == ControlValues(True, 0.15, 10, 0.4, "half")
    assert wb.KSS.published().options.penalty == PenaltyShape(
        upper=1.05, lower=0.9, sharpness=20, unstable_term="softplus", rank=32
    )


@given(step=st.integers(0, 1000), interval=st.integers(1, 50), strength=st.floats(0, 10), enabled=st.booleans())
def test_when_the_penalty_is_due(step, interval, strength, enabled):
    control = wb.KSS(strength=strength, interval=interval, enabled=enabled).control
    assert control.is_due(step) == (enabled and strength > 0 and step % interval == 0)


def test_observers_hear_every_change_and_nothing_else():
    kss = wb.KSS(strength=1.0)
    heard, others = [], []
    stop = kss.observe(lambda *change: heard.append((*change, threading.get_ident())))
    kss.observe(lambda *change: others.append(change))
    kss.strength = 2.0
    kss.strength = 2.0  # no change
    kss.set(enabled=False, gamma=0.4, interval=3)  # gamma is as it was
    own = threading.get_ident()
    assert heard == [("strength", 1.0, 2.0, own), ("enabled", True, False, own), ("interval", 10, 3, own)]
    thread = threading.Thread(target=lambda: kss.set(gamma=0.5))
    thread.start()
    thread.join()
    assert heard[-1] == ("gamma", 0.4, 0.5, thread.ident)
    stop()
    stop()  # twice does no harm
    kss.strength = 9.0
    assert len(heard) == 4
    assert others[-1] == ("strength", 2.0, 9.0)


def test_an_observer_may_read_turn_and_leave():
    """A schedule that reacts to a button, for one."""
    kss = wb.KSS(strength=1.0, gamma=0.4)

    def follow(name, before, after):
        if name == "strength":
            kss.gamma = min(1.0, kss.strength / 10)
            stop()

    stop = kss.observe(follow)
    kss.strength = 5.0
    kss.strength = 7.0
    assert kss.gamma == 0.5


def test_several_controls_change_at_once_for_whoever_reads_from_another_thread():
    kss = wb.KSS(strength=1.0, interval=1)
    is_over = threading.Event()
    seen = set()

    def read():
        while not is_over.is_set():
            control = kss.control
            seen.add((control.strength, control.interval))

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(1, 3000):
        kss.set(strength=float(i), interval=i)
    is_over.set()
    reader.join()
    assert all(strength == interval for strength, interval in seen)


def test_threads_that_turn_different_controls_lose_nothing():
    kss = wb.KSS()
    n_heard = []
    kss.observe(lambda *change: n_heard.append(change))

    def turn(name, values):
        for value in values:
            setattr(kss, name, value)

    threads = [
        threading.Thread(target=turn, args=("strength", [float(i) for i in range(1, 501)])),
        threading.Thread(target=turn, args=("interval", range(11, 511))),
        threading.Thread(target=turn, args=("enabled", [False, True] * 250)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (kss.strength, kss.interval, kss.enabled) == (500.0, 510, True)
    assert len(n_heard) == 1500


@pytest.mark.parametrize("layers", ["half", "all", (0, 3)])
def test_the_state_survives_json(layers):
    kss = wb.KSS(strength=2.5, interval=3, enabled=False, gamma=0.2, layers=layers)
    state = json.loads(json.dumps(kss.state_dict()))
    other = wb.KSS()
    other.load_state_dict(state)
    assert other.control == kss.control
    assert ControlValues.of_dict(state) == kss.control


def test_what_stays_fixed_is_described_in_plain_values():
    options = KSSOptions(penalty=PenaltyShape(rank=None, beta=0.0), coupling="projection")
    described = wb.KSS(options=options, controller=BandController(high=1.3)).describe()
    assert json.loads(json.dumps(described)) == described
    assert described["penalty"]["beta"] == 0.0
    assert described["coupling"] == "projection"
    assert described["controller"]["high"] == 1.3
    assert wb.KSS().describe()["controller"] is None


@given(
    strength=st.floats(1e-3, 1e3),
    measure=st.floats(0, 10),
    edges=st.tuples(st.floats(0, 5), st.floats(0, 5)).map(sorted),
)
@settings(max_examples=100)
def test_a_band_turns_the_strength_the_right_way_within_its_limits(strength, measure, edges):
    band = BandController(low=edges[0], high=edges[1])
    after = band.adjusted(strength, measure)
    if band.low <= measure <= band.high:
        assert after == strength
    elif measure > band.high:
        assert after == min(strength * band.factor, band.strongest)
    else:
        assert after == max(strength / band.factor, band.weakest)


def test_a_band_leaves_the_strength_alone_where_nothing_was_measured():
    assert BandController().adjusted(2.0, math.nan) == 2.0
