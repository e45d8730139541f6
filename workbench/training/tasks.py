"""Tasks, made on the fly from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from workbench.errors import ThresholdError, WorkbenchError

if TYPE_CHECKING:
    from torch import Tensor

PADDING = 0
#: Share of the text kept for validation.
_HELD_OUT = 0.1


@dataclass(frozen=True)
class AssociativeRecall:
    """Associative recall (RKSP): read key-value pairs, then answer for one key at the last position.

    A sequence is ``n_pairs`` pairs key, value, then padding, then the query key. Keys of a sequence differ. The paper
    does not say how keys and values share the vocabulary; here keys are the lower half (without padding, token 0) and
    values the upper half, so that a value is never mistaken for a key.

    Attributes:
        length: Tokens in a sequence.
        vocab_size: Tokens in the vocabulary.
        n_pairs: Pairs in a sequence.
        batch_size: Sequences in a batch.
        seed: Of the stream of batches.
    """

    length: int = 64
    vocab_size: int = 256
    n_pairs: int = 4
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_pairs < 1 or self.batch_size < 1:
            raise ThresholdError("n_pairs and batch_size must be at least 1.")
        if self.length < 2 * self.n_pairs + 1:
            raise ThresholdError(
                f"length is {self.length}, expected at least {2 * self.n_pairs + 1}: {self.n_pairs} pairs and a query."
            )
        if self.vocab_size // 2 - 1 < self.n_pairs:
            raise ThresholdError(f"vocab_size is {self.vocab_size}, too small for {self.n_pairs} different keys.")

    def batch(self, index: int, *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Batch number ``index`` of the stream.

        Returns:
            tokens: int64, shape (batch, token).
            targets: int64, shape (batch, token): the value at the last position, -100 (ignored by cross entropy)
                elsewhere.
        """
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        half = self.vocab_size // 2
        n, pairs = self.batch_size, self.n_pairs
        keys = torch.rand(n, half - 1, generator=generator).argsort(1)[:, :pairs] + 1
        values = torch.randint(half, self.vocab_size, (n, pairs), generator=generator)
        asked = torch.randint(pairs, (n, 1), generator=generator)
        tokens = torch.full((n, self.length), PADDING, dtype=torch.int64)
        tokens[:, 0 : 2 * pairs : 2] = keys
        tokens[:, 1 : 2 * pairs : 2] = values
        tokens[:, -1:] = keys.gather(1, asked)
        targets = torch.full_like(tokens, -100)
        targets[:, -1:] = values.gather(1, asked)
        return tokens.to(device), targets.to(device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end."""
        index = 0
        while True:
            yield self.batch(index)
            index += 1


def associative_recall(
    *, length: int = 64, vocab_size: int = 256, n_pairs: int = 4, batch_size: int = 32, seed: int = 0
) -> AssociativeRecall:
    """The paper's associative recall; see `AssociativeRecall`."""
    return AssociativeRecall(length=length, vocab_size=vocab_size, n_pairs=n_pairs, batch_size=batch_size, seed=seed)


@dataclass(frozen=True)
class TextBytes:
    """Byte-level language modelling on English text that ships with every CPython.

    The text is Python's own language reference (module ``pydoc_data.topics``, about 0.7 MB, PSF licence 2.0). It
    differs a little between Python versions; a seed gives the same batches on the same Python.

    Attributes:
        length: Tokens in a sequence.
        batch_size: Sequences in a batch.
        seed: Of the stream of batches.
        split: ``"train"``, or ``"validation"`` for the last tenth of the text.
    """

    length: int = 64
    batch_size: int = 32
    seed: int = 0
    split: str = "train"
    vocab_size: int = 256

    def __post_init__(self) -> None:
        if self.split not in ("train", "validation"):
            raise ThresholdError(f"split is '{self.split}', expected 'train' or 'validation'.")
        if self.length < 1 or self.batch_size < 1:
            raise ThresholdError("length and batch_size must be at least 1.")

    def batch(self, index: int, *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Batch number ``index`` of the stream.

        Returns:
            tokens: Bytes as int64, shape (batch, token).
            targets: The byte after each of them, same shape.
        """
        text = _reference_text()
        border = int(len(text) * (1 - _HELD_OUT))
        text = text[:border] if self.split == "train" else text[border:]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        start = torch.randint(len(text) - self.length - 1, (self.batch_size, 1), generator=generator)
        window = text[start + torch.arange(self.length + 1)]
        return window[:, :-1].to(device), window[:, 1:].to(device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end."""
        index = 0
        while True:
            yield self.batch(index)
            index += 1


def text_bytes(*, length: int = 64, batch_size: int = 32, seed: int = 0, split: str = "train") -> TextBytes:
    """Bytes of Python's language reference; see `TextBytes`."""
    return TextBytes(length=length, batch_size=batch_size, seed=seed, split=split)


def reference_passages(n_passages: int, *, n_characters: int = 400) -> list[str]:
    """Passages of English text, evenly spread over Python's language reference.

    Args:
        n_passages: How many.
        n_characters: Length of each.

    Returns:
        The passages, different from each other; the same on the same Python.
    """
    text = bytes(_reference_text().to(torch.uint8).numpy()).decode()
    stride = len(text) // n_passages
    if stride < n_characters:
        raise ThresholdError(f"The text holds fewer than {n_passages} passages of {n_characters} characters.")
    return [text[i * stride : i * stride + n_characters] for i in range(n_passages)]


@cache
def _reference_text() -> Tensor:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise WorkbenchError(
            "This Python comes without pydoc_data.topics, the text of the task; use a Python with its documentation."
        ) from error
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
