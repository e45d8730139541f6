"""Classification of handwritten digits, for vision transformers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from workbench.errors import OptionError
from workbench.option_checks import checked
from workbench.option_kinds import PositiveInt, Seed, at_least, at_most
from workbench.tasks.random_stream import RandomStream
from workbench.tasks.task import STATES_PER_IMAGE, SeededTask, Split, mixed_seed, shuffled_rows

_SIDE, _N_DIGITS = 8, 10
#: Fraction of the images in the validation split.
_HELD_OUT_FRACTION = 0.2


@checked
@dataclass(frozen=True)
class Digits(SeededTask):
    """Classification of 1,797 gray images of handwritten digits, 8 by 8 pixels.

    The images ship with scikit-learn (``load_digits``; BSD-3-Clause). They are the test part of "Optical Recognition of
    Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, doi:10.24432/C50P49, CC BY 4.0.

    The validation split has one fifth of the images (360), drawn at random and stratified by digit. An epoch reads all
    images of the split once, in a different order each time; the last batch of an epoch is completed with images of
    the next.

    Attributes:
        image_size: Pixels along a side: 8, or a multiple of 8, for which each pixel is repeated (a vision transformer
            then has more patches, but no more information).
        n_channels: Number of channels, all equal; 3 for models of color images.
        batch_size: Images in a batch.
        seed: Seed of the split and the order.
        split: ``"train"`` or ``"validation"``.
        n_classes: Number of classes from 2 to 10; with fewer than 10 the class is the digit modulo this number.
    """

    name: ClassVar[str] = "digits"
    image_size: PositiveInt = _SIDE
    batch_size: PositiveInt = 32
    seed: Seed = 0
    split: Split = "train"
    n_channels: PositiveInt = 1
    n_classes: Annotated[int, at_least(2), at_most(_N_DIGITS)] = _N_DIGITS

    def __post_init__(self) -> None:
        if self.image_size % _SIDE:
            raise OptionError.of("image_size", self.image_size, f"a multiple of {_SIDE}")

    @property
    def states_per_row(self) -> int:
        """Number of token states that `probe` counts for an image, whose number of patches depends on the model."""
        return STATES_PER_IMAGE

    @property
    def n_held_out(self) -> int:
        """Images in the validation split."""
        return len(split_rows(self.seed, "validation"))

    def batch(self, index: int, *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return batch ``index``: images in [0, 1], (batch, channel, height, width), 1 is ink; and classes, int64."""
        rows = split_rows(self.seed, self.split)
        key = (self.name, "order", self.split, self.seed)
        chosen = rows[shuffled_rows(len(rows), batch_size=self.batch_size, index=index, key=key)]
        images, digits = _images_and_digits()
        factor = self.image_size // _SIDE
        larger = images[chosen, None].repeat_interleave(factor, 2).repeat_interleave(factor, 3)
        return larger.repeat(1, self.n_channels, 1, 1).to(device), (digits[chosen] % self.n_classes).to(device)

    def describe(self) -> dict[str, str | int | float | bool]:
        """Return the name of the task and its fields; ``n_channels`` and ``n_classes`` only if not the defaults."""
        # Descriptions in runs recorded before these fields were added do not have them.
        added = {"n_channels": 1, "n_classes": _N_DIGITS}
        return {name: value for name, value in super().describe().items() if added.get(name) != value}


def digits(
    *,
    image_size: PositiveInt = _SIDE,
    n_channels: PositiveInt = 1,
    n_classes: int = _N_DIGITS,
    batch_size: PositiveInt = 32,
    seed: Seed = 0,
    split: Split = "train",
) -> Digits:
    """Create a task of handwritten digits from scikit-learn.

    Args:
        image_size: See `Digits`; likewise the others.
        n_channels: See `Digits`.
        n_classes: See `Digits`.
        batch_size: See `Digits`.
        seed: See `Digits`.
        split: See `Digits`.

    Example:
        >>> import workbench as wb
        >>> images, labels = wb.tasks.digits(n_channels=3, batch_size=4).batch(0)
        >>> tuple(images.shape)
        (4, 3, 8, 8)

    See Also:
        `workbench.tasks.text_bytes`: Makes a task of text.
    """
    return Digits(image_size, batch_size, seed, split, n_channels, n_classes)


@lru_cache(maxsize=8)
def split_rows(seed: int, split: str) -> Tensor:
    """Return the indices of the images of a split: int64, increasing."""
    with RandomStream(0).active():  # importing scikit-learn draws from Python's global generator
        from sklearn.model_selection import train_test_split

    classes = _images_and_digits()[1].numpy()
    random_state = mixed_seed("digits", "split", seed) % 2**32
    rows = torch.arange(len(classes)).numpy()
    train, validation = train_test_split(
        rows, test_size=_HELD_OUT_FRACTION, stratify=classes, random_state=random_state
    )
    return torch.from_numpy(train if split == "train" else validation).sort().values


@cache
def _images_and_digits() -> tuple[Tensor, Tensor]:
    """Load the images as float32 in [0, 1], shape (image, height, width), and their digits."""
    with RandomStream(0).active():
        from sklearn.datasets import load_digits

    data = load_digits()
    return torch.from_numpy(data.images / data.images.max()).float(), torch.from_numpy(data.target).long()
