"""The small model and task that training tests share."""

from tests.small_training import make_model, task  # noqa: F401 (fixtures)
