"""Tasks on which models are trained, generated from a seed or created from any data.

Example:
    >>> import torch
    >>> import workbench as wb
    >>> tokens, targets = wb.tasks.associative_recall(length=16, batch_size=4).batch(0)
    >>> tuple(tokens.shape)
    (4, 16)
    >>> task = wb.tasks.as_task(torch.arange(80).reshape(10, 8), batch_size=4)
    >>> tuple(next(task.stream())[0].shape)
    (4, 8)

See Also:
    `workbench.tasks.as_task`: Creates a task from data.
    `workbench.train`: Trains a model on a task.
"""

from workbench.option_checks import publish
from workbench.tasks.images import digits
from workbench.tasks.sequences import associative_recall, random_tokens, reference_passages, synthetic_lm, text_bytes
from workbench.tasks.task import Inputs, Task
from workbench.tasks.user_data import as_task

__all__ = [
    "Inputs", "Task", "as_task", "associative_recall", "digits", "random_tokens", "reference_passages", "synthetic_lm",
    "text_bytes",
]  # fmt: skip

__dir__ = publish(__name__)
