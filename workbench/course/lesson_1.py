"""Exercises of lesson 1: what a residual stream is, and what its modes say."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from workbench.course.exercises import ChoiceExercise, FunctionExercise, NumberExercise
from workbench.models.profile import profile
from workbench.tasks.sequences import text_bytes
from workbench.zoo.architecture_config import Norm
from workbench.zoo.constructors import transformer
from workbench.zoo.decoders import Transformer

#: The models of the notebook.
_SIZE: dict[str, Any] = {"d_model": 32, "n_layers": 8, "n_heads": 4, "vocab_size": 256, "seed": 42}
#: Number of tokens of exercise 1.6, fewer than the width of the models.
_FEW = 20


def _text() -> Tensor:
    return text_bytes(batch_size=64, split="validation", seed=1).batch(0)[0]


@cache
def _model(norm: Norm) -> Transformer:
    return transformer(norm, **_SIZE)


@cache
def _states() -> list[tuple[Tensor, Tensor]]:
    """States of Pre-LN before and after each block, each of shape (token, feature)."""
    model, found = _model("pre_ln"), []
    hooks = [
        block.register_forward_hook(
            lambda _, before, after: found.append((before[0].flatten(0, 1), after.flatten(0, 1)))
        )
        for block in model.blocks
    ]
    with torch.no_grad():
        model(_text())
    for hook in hooks:
        hook.remove()
    return found


def _norms(block: int) -> tuple[float, float, float]:
    """Norms of the states before a block, after it, and of its update."""
    before, after = _states()[block]
    return float(before.norm()), float(after.norm()), float((after - before).norm())


def _update(block: int) -> float:
    before, _, update = _norms(block)
    return update / before


@cache
def _spectra(norm: Norm) -> xr.Dataset:
    return profile(_model(norm), _text(), n_snapshots=4096, progress=False)


def _mean(name: str, norm: Norm = "pre_ln") -> float:
    return float(_spectra(norm)[name].mean())


def _reliable(block: int, norm: Norm = "pre_ln") -> float:
    return float(_spectra(norm)["is_reliable"][block].mean())


def _is_near() -> xr.DataArray:
    """Whether the modes of Pre-LN are near the unit circle, for each block and mode."""
    modulus = abs(_spectra("pre_ln")["eigenvalue"])
    return (modulus >= 0.90) & (modulus <= 1.05)


def _reliable_masses() -> xr.DataArray:
    """M of the reliable modes of each block."""
    return _is_near().where(_spectra("pre_ln")["is_reliable"]).mean("mode")


def _reliable_mass() -> float:
    return float(_reliable_masses().mean())


def _pooled_mass() -> float:
    """Fraction of the reliable modes of all blocks together."""
    return float(_is_near().where(_spectra("pre_ln")["is_reliable"]).mean())


def _ratio_of_few_states() -> str:
    """What the nonlinearity ratio does if it is measured on fewer states than features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # too few states are the purpose
        few = profile(_model("pre_ln"), _text()[:1, :_FEW], n_snapshots=None, progress=False)
    ratio = float(few["nonlinearity_ratio"].mean())
    return "falls to 0" if ratio < 0.01 else "rises to 1" if ratio > 0.99 else "stays"


def _eigenvalue() -> complex:
    return 0.8 + 0.5j


def _near_unit_mass(modulus: np.ndarray) -> float:
    used = modulus[~np.isnan(modulus)]
    return float(np.mean((used >= 0.90) & (used <= 1.05)))


EXERCISES = (
    NumberExercise(
        number="1.1",
        question=(
            "How large is the update of the first block, compared with the states that enter it? "
            "Divide the norm of all updates by the norm of all states that enter."
        ),
        answer=lambda: _update(0),
        mistakes={
            "You divided the states that leave the block by those that enter. The update is their difference, "
            "`leaving[0] - entering[0]`; take the norm of that.": lambda: _norms(0)[1] / _norms(0)[0],
            "You subtracted two norms, which says by how much the stream becomes longer. An update may also turn a "
            "state without making it longer: subtract the states first, then take the norm.": lambda: (
                (_norms(0)[1] - _norms(0)[0]) / _norms(0)[0]
            ),
            "This is the update of the second block. Blocks are counted from 0, so that the first one is "
            "`entering[0]` and `leaving[0]`.": lambda: _update(1),
            "This is the update of the last block. An index of -1 counts from the end.": lambda: _update(-1),
            "You divided by the states that leave the block. Compare the update with the states that enter.": lambda: (
                _norms(0)[2] / _norms(0)[1]
            ),
            "The ratio is upside down: the norm of the update belongs above the fraction bar.": lambda: 1 / _update(0),
            "You divided sums of squares. The norm is the square root of the sum of squares.": lambda: _update(0) ** 2,
            "This is the norm of the update alone. Divide it by the norm of the states that enter.": lambda: _norms(0)[
                2
            ],
        },
        look_at="Look at `(leaving[0] - entering[0]).norm()` and at `entering[0].norm()`.",
        is_fraction=True,
        hints=(
            "A block adds its update to the state. What must you subtract to get the update?",
            "The method `norm()` of a tensor is the square root of the sum of its squared entries.",
            "Divide `(leaving[0] - entering[0]).norm()` by the norm of the states that enter.",
        ),
        solution="""\
update = leaving[0] - entering[0]
answer = update.norm() / entering[0].norm()
""",
        explanation=(
            "The block changes its states, but much of each state passes through. "
            "This is what makes the stream residual."
        ),
    ),
    NumberExercise(
        number="1.2",
        question=(
            "A mode has the eigenvalue 0.8 + 0.5i. Ten identical, linear blocks follow one another. "
            "By which factor do they change the size of this mode?"
        ),
        answer=lambda: abs(_eigenvalue()) ** 10,
        mistakes={
            "This is the factor of one block. Ten blocks multiply the mode ten times.": lambda: abs(_eigenvalue()),
            "You used the real part alone. The size of a mode changes by the modulus, to which the imaginary part "
            "contributes.": lambda: _eigenvalue().real ** 10,
            "You added real and imaginary part. The modulus is the square root of the sum of their squares.": lambda: (
                (_eigenvalue().real + _eigenvalue().imag) ** 10
            ),
            "You multiplied the modulus by 10. Each block multiplies the mode again, so that the factors are "
            "multiplied, not added.": lambda: 10 * abs(_eigenvalue()),
            "You left out the square root: the modulus is the root of the sum of squares.": lambda: (
                abs(_eigenvalue()) ** 20
            ),
            "This is the loss of size. The factor is what remains.": lambda: 1 - abs(_eigenvalue()) ** 10,
            "You took nine blocks. Each of the ten blocks multiplies the mode once.": lambda: abs(_eigenvalue()) ** 9,
        },
        look_at="The modulus is abs(0.8 + 0.5j) in Python. Which power of it do ten blocks give?",
        hints=(
            "One block multiplies the size of the mode by the modulus of its eigenvalue.",
            "The modulus of a + bi is the square root of a² + b². In Python: `abs(0.8 + 0.5j)`.",
            "Ten blocks multiply by the modulus ten times.",
        ),
        solution="answer = abs(0.8 + 0.5j) ** 10\n",
        explanation=(
            "A modulus only a little below 1 takes away a large part of a mode within ten blocks. "
            "The angle of the eigenvalue turns the mode and does not change its size."
        ),
    ),
    FunctionExercise(
        number="1.3",
        question=(
            "Write the near-unit mass M of one block: the fraction of the modes with a modulus from 0.90 to 1.05, "
            "both included. A modulus of NaN stands for a mode that is not used; do not count it."
        ),
        answer=lambda: _near_unit_mass,
        cases=lambda: [
            (np.array([0.5, 0.95, 1.0, 1.2]),),
            (np.array([0.90, 1.05, 0.3, 2.0, 0.91]),),
            (np.array([1.0, 0.97, 0.2, np.nan, np.nan]),),
            (np.array([1.08, 0.93, 1.2, 0.99, 0.96, 1.01]),),
            (np.array([0.1, 3.0]),),
        ],
        mistakes={
            "Your function leaves out modes at exactly 0.90 or 1.05. Both limits are included: use <= and >=.": (
                lambda m: np.mean((m > 0.90) & (m < 1.05)) * len(m) / np.sum(~np.isnan(m))
            ),
            "Your function counts the modes that are not used in the denominator. Remove the entries that are NaN "
            "first, for example with `modulus[~np.isnan(modulus)]`.": lambda m: np.mean((m >= 0.90) & (m <= 1.05)),
            "Your function returns a number of modes. Divide it by the number of modes that are used.": lambda m: (
                np.sum((m >= 0.90) & (m <= 1.05))
            ),
            "Your function returns percent. M is a fraction of 1.": lambda m: 100 * _near_unit_mass(m),
            "Your band is symmetric, 0.95 to 1.05. The lower limit of M is 0.90.": lambda m: (
                np.mean((m >= 0.95) & (m <= 1.05)) * len(m) / np.sum(~np.isnan(m))
            ),
            "Your band is symmetric, 0.90 to 1.10. The upper limit of M is 1.05.": lambda m: (
                np.mean((m >= 0.90) & (m <= 1.10)) * len(m) / np.sum(~np.isnan(m))
            ),
            "Your function has no upper limit. Modes above 1.05 grow and do not belong to M.": lambda m: (
                np.sum(m >= 0.90) / np.sum(~np.isnan(m))
            ),
            "Your function has no lower limit. Modes below 0.90 decay and do not belong to M.": lambda m: (
                np.sum(m <= 1.05) / np.sum(~np.isnan(m))
            ),
            "Your function returns the modes that are not near 1. M is the fraction of those that are.": lambda m: (
                1 - _near_unit_mass(m)
            ),
            "Your function returns the mean modulus. M counts modes: it is the fraction of them in a band.": lambda m: (
                np.nanmean(m)
            ),
        },
        hints=(
            "A comparison such as `modulus >= 0.90` gives True or False for each mode, and the mean of those is a "
            "fraction.",
            "Combine two comparisons with `&`, each in parentheses.",
            "Remove unused modes first: `used = modulus[~np.isnan(modulus)]`.",
        ),
        solution="""\
def near_unit_mass(modulus):
    used = modulus[~np.isnan(modulus)]
    return np.mean((used >= 0.90) & (used <= 1.05))

answer = near_unit_mass
""",
        explanation="Some blocks have fewer modes than features, for example if they are measured on too few states.",
    ),
    NumberExercise(
        number="1.4",
        question="Which fraction of the modes of the first block of Pre-LN is reliable?",
        answer=lambda: _reliable(0),
        mistakes={
            "This is the mean over all blocks. The question is about the first block alone.": lambda: _mean(
                "is_reliable"
            ),
            "This is the second block. Layers are counted from 0, so that the first block is layer 0.": lambda: (
                _reliable(1)
            ),
            "This is the fraction of modes that are not reliable.": lambda: 1 - _reliable(0),
            "The last block of Pre-LN has this fraction, and so has the model without normalization. The question is "
            "about the first block of Pre-LN, which is layer 0.": lambda: _reliable(0, "none"),
            "This is a number of modes. Divide it by the number of modes of the block.": lambda: float(
                _spectra("pre_ln")["is_reliable"][0].sum()
            ),
            "This is the mean residual of the modes. A mode is reliable if its residual is at most 0.1; "
            "`is_reliable` says so for each mode.": lambda: float(_spectra("pre_ln")["residual"][0].mean()),
        },
        look_at="Look at `is_reliable` of layer 0, which is True or False for each mode.",
        is_fraction=True,
        hints=(
            "The variable `is_reliable` has the dimensions `layer` and `mode`.",
            "Select the first block with `.sel(layer=0)`. The mean of True and False is a fraction.",
        ),
        solution='answer = spectra["Pre-LN"]["is_reliable"].sel(layer=0).mean()\n',
        explanation=(
            "Most modes of this block do not describe what it does to its states. "
            "Do not draw conclusions from single eigenvalues of such a block."
        ),
    ),
    NumberExercise(
        number="1.5",
        question=(
            "Compute M of Pre-LN from reliable modes alone: in each block the fraction of its reliable modes that are "
            "near the unit circle, then the mean over the eight blocks."
        ),
        answer=_reliable_mass,
        mistakes={
            "You counted all modes. Keep those for which `is_reliable` is true, and divide by their number.": lambda: (
                _mean("near_unit_mass")
            ),
            "You averaged over the modes of all blocks together, so that blocks with more reliable modes count more. "
            "Compute M of each block first, then the mean over the blocks.": _pooled_mass,
            "You divided by all modes of a block. Divide by the number of its reliable modes.": lambda: float(
                (_is_near() & _spectra("pre_ln")["is_reliable"]).mean()
            ),
            "This is the fraction of modes that are reliable. Which of those are near the unit circle?": lambda: _mean(
                "is_reliable"
            ),
            "This is the reverse: the fraction of the modes near the unit circle that are reliable.": lambda: float(
                _spectra("pre_ln")["is_reliable"].where(_is_near()).mean()
            ),
            "This is the first block alone. Take the mean over all blocks.": lambda: float(_reliable_masses()[0]),
            "This is the last block alone. Take the mean over all blocks.": lambda: float(_reliable_masses()[-1]),
            "You added the blocks up. Take the mean over them.": lambda: float(_reliable_masses().sum()),
            "This is the mean spectral radius, the largest modulus of each block. M is the fraction of modes near the "
            "unit circle, `near_unit_mass`.": lambda: _mean("spectral_radius"),
            "You averaged the moduli. M counts modes within a band.": lambda: float(
                abs(_spectra("pre_ln")["eigenvalue"]).where(_spectra("pre_ln")["is_reliable"]).mean()
            ),
            "This is the model without normalization. Use the spectra of Pre-LN.": lambda: _mean(
                "near_unit_mass", "none"
            ),
        },
        look_at="`wb.remeasure` computes all masses again, and has the option `reliable_only`.",
        tolerance=0.01,
        is_fraction=True,
        hints=(
            'The modulus of each mode is `abs(of["eigenvalue"])`, and `is_reliable` has the same dimensions.',
            "Apply your function of exercise 1.3 to the reliable modes of each block, or use `wb.remeasure`.",
            'The widget counts again if you tick *Reliable modes only*; `wb.remeasure(spectra["Pre-LN"], '
            "reliable_only=True)` returns the same numbers as a dataset.",
        ),
        solution="""\
reliable = wb.remeasure(spectra["Pre-LN"], reliable_only=True)
answer = reliable["near_unit_mass"].mean()
""",
        explanation=(
            "Here M changes little, but the expansive mass falls by more than a third: many of the modes that seem to "
            "grow do not describe the block."
        ),
    ),
    ChoiceExercise(
        number="1.6",
        question=(
            "The nonlinearity ratio is the part of the update that no linear map explains. Now Pre-LN is measured on "
            "20 tokens, although its states have 32 features. What does the ratio do: `'falls to 0'`, `'stays'` or "
            "`'rises to 1'`?"
        ),
        answer=_ratio_of_few_states,
        choices={
            "falls to 0": "With fewer states than features there are more unknowns than equations.",
            "stays": (
                "It would stay if the map were still determined by many states. Here it has 32 unknowns for each "
                "feature, and only 20 states to fit."
            ),
            "rises to 1": (
                "A ratio of 1 means that a linear map explains nothing of the update. With fewer states than features "
                "a linear map can do the opposite: think of a line through two points."
            ),
        },
        hints=(
            "How well does a straight line fit two points?",
            "A linear map with 32 unknowns for each feature is fitted to 20 states.",
        ),
        solution="answer = 'falls to 0'\n",
        explanation=(
            "A linear map fits so few states exactly, whatever the block does. A spectrum from too few states looks "
            "perfect and says nothing; `rank` shows how many directions were measured."
        ),
    ),
)
