import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.about import about
from workbench.callbacks.kss import ControlValues, KSSOptions, PenaltyShape
from workbench.errors import OptionError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strength", -1.0),
        ("gamma", 1.2),
        ("interval", 2.5),
        ("layers", "third"),
        ("layers", ()),
        ("layers", (-1,)),
    ],
)
def test_a_control_out_of_range_is_rejected_and_changes_nothing(name, value):
    error = about(name, value)
    with pytest.raises(OptionError, check=error):
        wb.KSS(**{name: value})
    kss = wb.KSS(strength=3.0, interval=4, gamma=0.3, layers=(1, 2))
    before = kss.control
    with pytest.raises(OptionError, check=error):
        setattr(kss, name, value)
    with pytest.raises(OptionError, check=error):
        kss.set(enabled=False, **{name: value})
    assert kss.control == before


def test_a_misspelled_control_is_rejected_with_a_suggestion():
    kss = wb.KSS()
    before = dict(vars(kss))
    for set_it in (lambda: setattr(kss, "stregth", 3), lambda: kss.set(stregth=3)):
        with pytest.raises(OptionError, match="use 'strength'", check=about("stregth")):
            set_it()
    with pytest.raises(OptionError, check=about("power", expected=wb.KSS.CONTROLS)):
        kss.power = 3
    assert vars(kss) == before
    kss.options = options = KSSOptions()  # existing attributes may be set
    assert kss.options is options


def test_values_are_converted_to_the_type_of_the_control():
    kss = wb.KSS(strength=3, interval=np.int64(2), enabled=np.True_, layers=[2, 0, 2])
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


def test_observers_receive_changes_and_nothing_else():
    kss = wb.KSS(strength=1.0)
    received, others = [], []
    remove = kss.observe(lambda *change: received.append((*change, threading.get_ident())))
    kss.observe(lambda *change: others.append(change))
    kss.strength = 2.0
    kss.strength = 2.0  # no change
    kss.set(enabled=False, gamma=0.4, interval=3)  # gamma is unchanged
    this = threading.get_ident()
    assert received == [("strength", 1.0, 2.0, this), ("enabled", True, False, this), ("interval", 10, 3, this)]
    thread = threading.Thread(target=lambda: kss.set(gamma=0.5))
    thread.start()
    thread.join()
    assert received[-1] == ("gamma", 0.4, 0.5, thread.ident)
    remove()
    remove()  # a second call has no effect
    kss.strength = 9.0
    assert len(received) == 4
    assert others[-1] == ("strength", 2.0, 9.0)


def test_controls_that_are_set_together_change_together_for_other_threads():
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


@pytest.mark.parametrize("layers", ["half", "all", (0, 3)])
def test_the_state_survives_json(layers):
    kss = wb.KSS(strength=2.5, interval=3, enabled=False, gamma=0.2, layers=layers)
    state = json.loads(json.dumps(kss.state_dict()))
    other = wb.KSS()
    other.load_state_dict(state)
    assert other.control == kss.control
    assert ControlValues(**state) == kss.control


def test_fixed_options_are_described_as_plain_values():
    options = KSSOptions(penalty=PenaltyShape(rank=None, beta=0.0), coupling="projection")
    described = wb.KSS(options=options).describe()
    assert json.loads(json.dumps(described)) == described
    assert described["penalty"]["beta"] == 0.0
    assert described["coupling"] == "projection"
