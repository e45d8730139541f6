"""Sizes of the measured model and of the subject, and whether healthy models of these sizes were recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr

#: Size -> phrases for several healthy models and for one model; ``{}`` is a number or a range.
_WORDS = {
    "width": ("were {} wide", "is {} wide"),
    "blocks": ("had {} blocks", "has {}"),
    "experts": ("had {} experts", "has {}"),
}
#: Range of sizes behind a band: size -> smallest and largest.
Ranges = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of an assessment.

    Attributes:
        width, blocks: Those of the subject.
        run_width, run_blocks: Those of the model that was run.
        experts: Experts in each block; 0: none, or unknown.
        is_stand_in: Whether the model that was run is not the subject, but smaller, or with a smaller vocabulary.
    """

    width: int
    blocks: int
    run_width: int
    run_blocks: int
    experts: int = 0
    is_stand_in: bool = False

    @classmethod
    def of(cls, tree: xr.DataTree) -> Sizes | None:
        """Read the sizes from the attributes of an assessment; None where it has none."""
        names = ("width", "depth", "measured_width", "measured_depth")
        if any(name not in tree.attrs for name in names):
            return None
        width, blocks, run_width, run_blocks = (int(tree.attrs[name]) for name in names)
        is_other = (width, blocks) != (run_width, run_blocks)
        return cls(
            width,
            blocks,
            run_width,
            run_blocks,
            int(tree.attrs.get("n_experts", 0)),
            bool(tree.attrs.get("is_stand_in", is_other)),  # trees of an older workbench lack it
        )

    @property
    def attributes(self) -> dict[str, int]:
        """The sizes as attributes of an assessment."""
        return {
            "width": self.width,
            "depth": self.blocks,
            "measured_width": self.run_width,
            "measured_depth": self.run_blocks,
            "n_experts": self.experts,
            "is_stand_in": int(self.is_stand_in),
        }

    @property
    def stand_in(self) -> str:
        """A description of the model that was run."""
        return f"a stand-in {self.run_width:,} wide with {self.run_blocks:,} block{'s' * (self.run_blocks != 1)}"

    def outside(self, ranges: Ranges) -> str:
        """Why a band of healthy models of some sizes does not apply to this one; empty if it does.

        The measured model and the subject must both be inside: a stand-in has the variances of a wide model, so that
        its gains are those of that one, and cannot be compared with thin healthy models.
        """
        theirs, own = [], []
        both = {
            "width": (self.run_width, self.width),
            "blocks": (self.run_blocks, self.blocks),
            "experts": (self.experts,),
        }
        for name, (low, high) in ranges.items():
            beyond = [size for size in both[name] if not low <= size <= high]
            if beyond:
                many, one = _WORDS[name]
                theirs.append(many.format(f"{low:,g}" if low == high else f"{low:,g} to {high:,g}"))
                own.append(one.format(f"{beyond[-1]:,g}"))
        if not own:
            return ""
        return f"the healthy models behind this band {' and '.join(theirs)}, this one {' and '.join(own)}"
