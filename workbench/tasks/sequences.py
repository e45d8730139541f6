"""Tasks of token sequences: synthetic language, associative recall, random tokens and English text."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from workbench.errors import OptionError, WorkbenchError
from workbench.option_checks import checked
from workbench.option_kinds import PositiveInt, Seed, at_least
from workbench.tasks.task import SequenceTask, Split, batch_generator, mixed_seed, shuffled_rows

KINDS = ("repetition", "integer_run", "random_run")
#: The lowest token id; those below are reserved for special tokens.
FIRST_TOKEN = 10
_LONGEST_RUN = 15


@checked
@dataclass(frozen=True)
class SyntheticLM(SequenceTask):
    """Synthetic language modeling (RKSP): next-token prediction on sequences of random segments.

    A segment is a repeated pattern of 2 to 5 tokens, a run of consecutive token ids, or a run of random tokens. Every
    sequence is a function of the seed, the split and its number. An epoch reads all sequences of the split once, in a
    different order each time; the last batch of an epoch is completed with sequences of the next.
    """

    name: ClassVar[str] = "synthetic_lm"
    length: PositiveInt = 256
    vocab_size: Annotated[int, at_least(FIRST_TOKEN + _LONGEST_RUN)] = 10_000
    batch_size: PositiveInt = 32
    seed: Seed = 0
    split: Split = "train"
    n_sequences: PositiveInt = 20_000
    n_validation_sequences: PositiveInt = 2_000

    @property
    def n_held_out(self) -> int:
        """Sequences in the validation split."""
        return self.n_validation_sequences

    def sequence(self, row: int) -> Tensor:
        """Return sequence ``row`` of the split and the token that follows it, int64, (``length`` + 1,)."""
        generator = random.Random(mixed_seed(self.name, self.split, self.seed, row))
        tokens: list[int] = []
        for _, segment in segments(generator, vocab_size=self.vocab_size):
            tokens += segment
            if len(tokens) > self.length:
                break
        return torch.tensor(tokens[: self.length + 1])

    def batch(self, index: int, *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return batch ``index`` of the stream: tokens and the next token at each position, int64 (batch, token)."""
        n_rows = self.n_sequences if self.split == "train" else self.n_validation_sequences
        key = (self.name, "order", self.split, self.seed)
        rows = shuffled_rows(n_rows, batch_size=self.batch_size, index=index, key=key)
        sequences = torch.stack([self.sequence(row) for row in rows.tolist()])
        return sequences[:, :-1].to(device), sequences[:, 1:].to(device)


def synthetic_lm(
    *,
    length: PositiveInt = 256,
    vocab_size: int = 10_000,
    batch_size: PositiveInt = 32,
    seed: Seed = 0,
    split: Split = "train",
    n_sequences: int = 20_000,
    n_validation_sequences: int = 2_000,
) -> SyntheticLM:
    """Create a task of synthetic language modeling.

    Args:
        length: See `SyntheticLM`; likewise the others.
        vocab_size: See `SyntheticLM`.
        batch_size: See `SyntheticLM`.
        seed: See `SyntheticLM`.
        split: See `SyntheticLM`.
        n_sequences: See `SyntheticLM`.
        n_validation_sequences: See `SyntheticLM`.

    Example:
        >>> import workbench as wb
        >>> task = wb.tasks.synthetic_lm(length=16, vocab_size=64, batch_size=2)
        >>> [tuple(part.shape) for part in task.batch(0)]
        [(2, 16), (2, 16)]

    See Also:
        `workbench.tasks.associative_recall`: Makes a task of recall.
    """
    return SyntheticLM(length, vocab_size, batch_size, seed, split, n_sequences, n_validation_sequences)


def segments(generator: random.Random, *, vocab_size: int = 10_000) -> Iterator[tuple[str, list[int]]]:
    """Generate the segments of a sequence, without end.

    The paper states the three kinds and their lengths:

    - ``"repetition"``: a pattern of 2 to 5 random tokens, repeated 2 to 4 times;
    - ``"integer_run"``: 5 to 15 consecutive token ids, increasing;
    - ``"random_run"``: 5 to 15 random tokens.

    The following is not in the paper: the kinds are equally likely and independent; lengths and counts are uniform over
    their ranges; random tokens are uniform over the ids from 10 up and may repeat; integer runs stay below
    ``vocab_size``; there is no separator between segments; the last segment is truncated at the end of the sequence.
    """
    vocabulary = range(FIRST_TOKEN, vocab_size)

    while True:
        kind = generator.choice(KINDS)
        if kind == "repetition":
            pattern = generator.choices(vocabulary, k=generator.randint(2, 5))
            yield kind, pattern * generator.randint(2, 4)
        elif kind == "integer_run":
            n_tokens = generator.randint(5, _LONGEST_RUN)
            start = generator.randint(FIRST_TOKEN, vocab_size - n_tokens)
            yield kind, list(range(start, start + n_tokens))
        else:
            yield kind, generator.choices(vocabulary, k=generator.randint(5, _LONGEST_RUN))


PADDING = 0


@checked
@dataclass(frozen=True)
class AssociativeRecall(SequenceTask):
    """Associative recall (RKSP): read key-value pairs, then predict the value of one key at the last position.

    A sequence consists of ``n_pairs`` pairs (key, value), padding, and the query key. The keys of a sequence differ.
    The paper does not state how keys and values share the vocabulary; here keys are from the lower half (without token
    0, the padding) and values from the upper half, so that they cannot be confused.
    """

    name: ClassVar[str] = "associative_recall"
    length: PositiveInt = 64
    vocab_size: PositiveInt = 256
    n_pairs: PositiveInt = 4
    batch_size: PositiveInt = 32
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.length < 2 * self.n_pairs + 1:
            raise OptionError.of(
                "length", self.length, f"at least {2 * self.n_pairs + 1} for {self.n_pairs} pairs and a query"
            )
        if self.vocab_size // 2 - 1 < self.n_pairs:
            raise OptionError.of(
                "vocab_size", self.vocab_size, f"at least {2 * self.n_pairs + 2} for {self.n_pairs} different keys"
            )

    def batch(self, index: int, *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return batch ``index``: tokens and targets, int64 (batch, token), -100 except at the last position."""
        generator = batch_generator(self.seed, index)
        half = self.vocab_size // 2
        n, pairs = self.batch_size, self.n_pairs
        keys = torch.rand(n, half - 1, generator=generator).argsort(1)[:, :pairs] + 1
        values = torch.randint(half, self.vocab_size, (n, pairs), generator=generator)
        query = torch.randint(pairs, (n, 1), generator=generator)
        tokens = torch.full((n, self.length), PADDING, dtype=torch.int64)
        tokens[:, 0 : 2 * pairs : 2] = keys
        tokens[:, 1 : 2 * pairs : 2] = values
        tokens[:, -1:] = keys.gather(1, query)
        targets = torch.full_like(tokens, -100)
        targets[:, -1:] = values.gather(1, query)
        return tokens.to(device), targets.to(device)


def associative_recall(
    *,
    length: PositiveInt = 64,
    vocab_size: PositiveInt = 256,
    n_pairs: PositiveInt = 4,
    batch_size: PositiveInt = 32,
    seed: Seed = 0,
) -> AssociativeRecall:
    """Create a task of associative recall.

    Args:
        length: See `AssociativeRecall`; likewise the others.
        vocab_size: See `AssociativeRecall`.
        n_pairs: See `AssociativeRecall`.
        batch_size: See `AssociativeRecall`.
        seed: See `AssociativeRecall`.

    Example:
        >>> import workbench as wb
        >>> task = wb.tasks.associative_recall(length=6, vocab_size=16, n_pairs=2)
        >>> task.describe()
        {'task': 'associative_recall', 'length': 6, 'vocab_size': 16, 'n_pairs': 2, 'batch_size': 32, 'seed': 0}

    See Also:
        `workbench.tasks.synthetic_lm`: Makes a task of synthetic language.
    """
    return AssociativeRecall(length=length, vocab_size=vocab_size, n_pairs=n_pairs, batch_size=batch_size, seed=seed)


@checked
@dataclass(frozen=True)
class RandomTokens(SequenceTask):
    """Next-token prediction on uniformly random tokens, on which RKSP trains its MoE, Mamba and KAN models.

    The lowest possible loss is ln ``vocab_size`` nats. The paper does not state length and vocabulary; the defaults are
    those of associative recall.
    """

    name: ClassVar[str] = "random_tokens"
    length: PositiveInt = 64
    vocab_size: Annotated[int, at_least(2)] = 256
    batch_size: PositiveInt = 32
    seed: Seed = 0

    def batch(self, index: int, *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return batch ``index`` of the stream: tokens and the next token at each position, int64 (batch, token)."""
        shape = (self.batch_size, self.length + 1)
        tokens = torch.randint(self.vocab_size, shape, generator=batch_generator(self.seed, index))
        return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def random_tokens(
    *, length: PositiveInt = 64, vocab_size: int = 256, batch_size: PositiveInt = 32, seed: Seed = 0
) -> RandomTokens:
    """Create a task of uniformly random tokens.

    Args:
        length: See `RandomTokens`; likewise the others.
        vocab_size: See `RandomTokens`.
        batch_size: See `RandomTokens`.
        seed: See `RandomTokens`.

    Example:
        >>> import workbench as wb
        >>> task = wb.tasks.random_tokens(length=8, vocab_size=16)
        >>> tuple(task.probe(32).shape)
        (4, 8)

    See Also:
        `workbench.tasks.synthetic_lm`: Makes a task that can be learned.
    """
    return RandomTokens(length=length, vocab_size=vocab_size, batch_size=batch_size, seed=seed)


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
        """Return batch ``index`` of the stream: bytes and the next byte at each position, int64 (batch, token)."""
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
