"""Loops of other people train the same with and without a watch, in turn."""

import pytest

from benchmarks import foreign
from benchmarks.foreign import LOOPS, Times, Turns, in_processes, in_turn, row

N_STEPS = 3


@pytest.mark.medium
@pytest.mark.parametrize("name", ["nanoGPT", "nanoGPT, 2 batches accumulated", "nanoGPT, autocast to bfloat16"])
def test_plain_loops(name):
    times = in_turn(LOOPS[name][0], N_STEPS)
    assert {key: len(found) for key, found in times.wall.items()} == {"without": N_STEPS, "with": N_STEPS}


@pytest.mark.framework
@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerate", "Trainer of transformers"])
def test_frameworks(name):
    pytest.importorskip(LOOPS[name][1])
    assert len(in_turn(LOOPS[name][0], N_STEPS).processor["with"]) == N_STEPS


@pytest.mark.subprocess
@pytest.mark.slow
def test_processes_that_train_together():
    assert len(in_processes(foreign.of_ddp, N_STEPS).wall["with"]) == N_STEPS


def test_a_watch_that_changes_the_training_is_noticed(monkeypatch):
    given = foreign.nanogpt

    def changed(attach):
        is_watched = attach.__name__ == "watching"
        for model in given(lambda *_: foreign.nullcontext()):
            if is_watched:
                model.ln_f.bias.data[0] += 1
            yield model

    with pytest.raises(AssertionError, match=r"ln_f\.\w+ differs|differs"):
        in_turn(changed, N_STEPS)


def test_a_thread_takes_turns_and_passes_its_errors_on():
    seen, turns = [], Turns()

    def train():
        for i in range(3):
            seen.append(i)
            turns.pause()
        raise ValueError("no more")

    steps = turns.of(train)
    for i in range(3):
        next(steps)
        assert seen == [*range(i + 1)]
    with pytest.raises(ValueError, match="no more"):
        next(steps)


def test_the_row_shows_what_is_added_after_the_first_steps():
    times = Times({"without": [9.0, 0.1, 0.1, 0.1], "with": [99.0, 0.1, 0.1, 0.4]}, end=2.0)
    times.processor = {"without": [9.0, 0.1, 0.1, 0.1], "with": [99.0, 0.2, 0.2, 0.2]}
    assert row("a", times, 1) == "| a | 100.0 ms | **+100.0%** | +0.0% | +100.0% | 100.00 ms | 400 ms | 2.0 s |"
