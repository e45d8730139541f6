"""Tasks: what a model learns. Made on the fly from a seed, or from any data a user has."""

from workbench.tasks.images import Digits, digits
from workbench.tasks.recall import PADDING, AssociativeRecall, associative_recall
from workbench.tasks.synthetic import SyntheticLM, synthetic_lm
from workbench.tasks.task import Inputs, Task
from workbench.tasks.text import TextBytes, reference_passages, text_bytes
from workbench.tasks.uniform import RandomTokens, random_tokens
from workbench.tasks.user_data import as_task

__all__ = [
    "PADDING",
    "AssociativeRecall",
    "Digits",
    "Inputs",
    "RandomTokens",
    "SyntheticLM",
    "Task",
    "TextBytes",
    "as_task",
    "associative_recall",
    "digits",
    "random_tokens",
    "reference_passages",
    "synthetic_lm",
    "text_bytes",
]


def __dir__() -> list[str]:
    return sorted(__all__)
