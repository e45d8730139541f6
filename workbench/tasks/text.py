"""Byte-level language modeling on English text, and passages of the text."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch

from workbench.errors import OptionError, WorkbenchError
from workbench.option_checks import PositiveInt, Seed, at_least, checked
from workbench.tasks.task import SequenceTask, Split, batch_generator

if TYPE_CHECKING:
    from torch import Tensor

#: Fraction of the text in the validation split.
_HELD_OUT_FRACTION = 0.1


@checked
@dataclass(frozen=True)
class TextBytes(SequenceTask):
    """Byte-level language modeling on English text that is part of every CPython.

    The text is Python's language reference (module ``pydoc_data.topics``, about 0.7 MB, PSF license 2.0). It differs
    slightly between Python versions; a seed yields the same batches on the same version.

    Attributes:
        length: Tokens in a sequence.
        batch_size: Sequences in a batch.
        seed: Seed of the stream of batches.
        split: ``"train"``, or ``"validation"`` for the last tenth of the text.
        vocab_size: 256, the values of a byte.
    """

    name: ClassVar[str] = "text_bytes"
    length: PositiveInt = 64
    batch_size: PositiveInt = 32
    seed: Seed = 0
    split: Split = "train"
    vocab_size: Annotated[int, at_least(256)] = 256

    def __post_init__(self) -> None:
        longest = len(split_text("validation")) - 2
        if self.length > longest:
            raise OptionError.of("length", self.length, f"at most {longest}, the length of the validation text")

    def batch(self, index: int, *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return batch number ``index`` of the stream.

        Returns:
            tokens: Bytes as int64, shape (batch, token).
            targets: The next byte at each position, same shape.
        """
        text = split_text(self.split)
        generator = batch_generator(self.seed, index)
        start = torch.randint(len(text) - self.length - 1, (self.batch_size, 1), generator=generator)
        window = text[start + torch.arange(self.length + 1)]
        return window[:, :-1].to(device), window[:, 1:].to(device)

    def describe(self) -> dict[str, str | int | float | bool]:
        """Return the name of the task, its fields, and a checksum of the text, which depends on the Python version."""
        return super().describe() | {"text_crc32": zlib.crc32(_text_bytes())}


def text_bytes(
    *, length: PositiveInt = 64, batch_size: PositiveInt = 32, seed: Seed = 0, split: Split = "train"
) -> TextBytes:
    """Create a task of byte-level language modeling on Python's language reference.

    Args:
        length: See `TextBytes`; likewise the others.
        batch_size: See `TextBytes`.
        seed: See `TextBytes`.
        split: See `TextBytes`.

    Example:
        >>> import workbench as wb
        >>> tokens, targets = wb.tasks.text_bytes(length=16, batch_size=2).batch(0)
        >>> tuple(tokens.shape), bool((tokens[:, 1:] == targets[:, :-1]).all())
        ((2, 16), True)

    See Also:
        `workbench.tasks.synthetic_lm`: Makes a task of synthetic language.
    """
    return TextBytes(length=length, batch_size=batch_size, seed=seed, split=split)


def split_text(split: str) -> Tensor:
    """Return the first nine tenths of the text (``"train"``) or the last one (``"validation"``), int64, (byte,)."""
    text = _reference_text()
    border = int(len(text) * (1 - _HELD_OUT_FRACTION))
    return text[:border] if split == "train" else text[border:]


@checked
def reference_passages(n_passages: PositiveInt, *, n_characters: PositiveInt = 400) -> list[str]:
    """Return passages of English text, evenly spaced in Python's language reference.

    Args:
        n_passages: Number of passages.
        n_characters: Length of each.

    Returns:
        Passages that do not overlap, the same on the same Python version.

    Raises:
        OptionError: If the text is too short.

    Example:
        >>> import workbench as wb
        >>> passages = wb.tasks.reference_passages(3, n_characters=50)
        >>> [len(passage) for passage in passages]
        [50, 50, 50]

    See Also:
        `workbench.tasks.text_bytes`: Creates a task from the same text.
        `workbench.profile`: Measures a language model on text.
    """
    text = _text_bytes().decode()
    stride = len(text) // n_passages
    if stride < n_characters:
        limit = len(text) // n_characters
        raise OptionError.of("n_passages", n_passages, f"at most {limit} for passages of {n_characters} characters")
    return [text[i * stride : i * stride + n_characters] for i in range(n_passages)]


@cache
def _text_bytes() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise WorkbenchError(
            "This Python has no pydoc_data.topics, the text of the task; use a Python with its documentation."
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


@cache
def _reference_text() -> Tensor:
    return torch.frombuffer(bytearray(_text_bytes()), dtype=torch.uint8).long()
