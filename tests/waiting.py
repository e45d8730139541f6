"""What tests wait for, and on how many threads."""

import time
from contextlib import contextmanager

import torch


def wait_for(condition, seconds=120):
    """Until something has become true in another thread or process."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def on_one_thread():
    """One thread of torch: as recorded data were made, and faster for tiny models."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)
