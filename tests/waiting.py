"""Wait for conditions, and limit the threads of torch."""

import time
from contextlib import contextmanager

import torch


def wait_for(condition, seconds=120):
    """Wait until a condition becomes true in another thread or process."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def on_one_thread():
    """Limit torch to one thread, with which recorded data were generated, and which is faster for tiny models."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)
