import shutil

import pytest

from tests.models.model_families import BY_NAME, build
from tests.waiting import on_one_thread


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tiny models are slower on two threads than on one."""
    with on_one_thread():
        yield


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Return a function from a family to the model and its folder, which is written once and must not be changed."""
    models = {}

    def model_and_folder(name, max_shard_size="1GB"):
        if (name, max_shard_size) not in models:
            folder = tmp_path_factory.mktemp("saved") / name
            model = build(BY_NAME[name])
            model.save_pretrained(folder, max_shard_size=max_shard_size)
            models[name, max_shard_size] = model, folder
        return models[name, max_shard_size]

    return model_and_folder


@pytest.fixture
def copy_of(saved, tmp_path):
    """Return a function from a family to the model and a separate copy of its folder."""

    def model_and_copy(name, **options):
        model, folder = saved(name, **options)
        return model, shutil.copytree(folder, tmp_path / name)

    return model_and_copy
