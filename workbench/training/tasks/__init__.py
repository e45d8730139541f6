"""Tasks: what a model learns. Made on the fly from a seed, or from any data a user has."""

from workbench.training.tasks.base import Inputs, Task
from workbench.training.tasks.images import Digits, digits
from workbench.training.tasks.recall import PADDING, AssociativeRecall, associative_recall
from workbench.training.tasks.synthetic import SyntheticLM, synthetic_lm
from workbench.training.tasks.text import TextBytes, reference_passages, text_bytes
from workbench.training.tasks.uniform import RandomTokens, random_tokens
from workbench.training.tasks.user_data import as_task

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
