"""Sizes of the measured model and of the subject, and whether healthy models of these sizes were recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.formatting import counted

if TYPE_CHECKING:
    import xarray as xr

#: Size -> phrase; ``{}`` is a number or a range.
_WORDS = {"width": "width {}", "blocks": "{} blocks", "experts": "{} experts"}
#: Range of sizes of the models behind a band: size -> smallest and largest.
Ranges = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the subject and of the measured model of an assessment.

    Attributes:
        width, blocks: Width and number of blocks of the subject.
        run_width, run_blocks: Width and number of blocks of the model that was run.
        experts: Number of experts in each block; 0 if there are none or the number is unknown.
        is_stand_in: Whether a proxy model was run, which is smaller than the subject or has a smaller vocabulary.
    """

    width: int
    blocks: int
    run_width: int
    run_blocks: int
    experts: int = 0
    is_stand_in: bool = False

    @classmethod
    def of(cls, tree: xr.DataTree) -> Sizes | None:
        """Return the sizes from the attributes of an assessment; None if it has none."""
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
            bool(tree.attrs.get("is_stand_in", is_other)),  # trees of older versions lack it
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
    def proxy(self) -> str:
        """Description of the proxy model that was run."""
        return f"a proxy model of width {self.run_width:,} with {counted(self.run_blocks, 'block')}"

    def outside(self, ranges: Ranges) -> str:
        """Return why a band of healthy models of these sizes does not apply, as a clause; empty if it applies.

        Both the measured model and the subject must be within the ranges: a proxy model has the variances and gains of
        a wide model, so it cannot be compared with narrow healthy models.
        """
        healthy, own = [], []
        both = {
            "width": (self.run_width, self.width),
            "blocks": (self.run_blocks, self.blocks),
            "experts": (self.experts,),
        }
        for name, (low, high) in ranges.items():
            beyond = [size for size in both[name] if not low <= size <= high]
            if beyond:
                healthy.append(_WORDS[name].format(f"{low:,g}" if low == high else f"{low:,g} to {high:,g}"))
                own.append(_WORDS[name].format(f"{beyond[-1]:,g}"))
        if not own:
            return ""
        return f"the healthy reference models have {' and '.join(healthy)}, while this model has {' and '.join(own)}"
