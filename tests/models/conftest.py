import pytest

from tests.waiting import on_one_thread


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tiny models are slower on two threads than on one."""
    with on_one_thread():
        yield
