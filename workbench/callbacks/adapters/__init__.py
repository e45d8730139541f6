"""Callbacks of the workbench in the trainers of Hugging Face and Lightning, which are imported only when used."""

from workbench.callbacks.adapters.hugging_face_adapter import trainer_callback
from workbench.callbacks.adapters.lightning_adapter import lightning_callback

__all__ = ["lightning_callback", "trainer_callback"]


def __dir__() -> list[str]:
    return sorted(__all__)
