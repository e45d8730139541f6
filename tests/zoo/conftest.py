import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tiny models are slower on two threads than on one."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)
