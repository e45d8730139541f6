import random

import numpy as np
import torch

from workbench.tasks.random_stream import RandomStream


def draw():
    # NumPy keeps every second normal number for the next call.
    return random.random(), float(np.random.randn()), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def test_streams_are_independent_and_do_not_change_the_global_states():
    expected = draw_alone(3)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    outside = draw(), draw()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    one, other = RandomStream(3), RandomStream(4)
    found, first = [], draw()
    for _ in range(4):
        with one.active():
            found.append(draw())
        with other.active():
            draw()
    assert found == expected
    assert (first, draw()) == outside


def draw_alone(seed):
    stream = RandomStream(seed)
    with stream.active():
        return [draw() for _ in range(4)]


def test_a_stream_continues_from_its_stored_state(tmp_path):
    stream = RandomStream(5)
    with stream.active():
        np.random.randn()  # noqa: NPY002  (keeps a second normal number for the next call)
        draw()
    torch.save(stream.state_dict(), tmp_path / "state.pt")
    restored = RandomStream(99)
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    with stream.active():
        expected = [*draw(), np.random.randn()]  # noqa: NPY002
    with restored.active():
        assert [*draw(), np.random.randn()] == expected  # noqa: NPY002
