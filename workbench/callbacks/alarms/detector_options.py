"""How a signal is compared with the past of its own run."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.errors import OptionError


@dataclass(frozen=True)
class DetectorOptions:
    """How a signal is compared with the run's own past; all in steps, so that cadences may differ.

    Attributes:
        settle: Steps at the start that are not judged; a warm-up that lasts longer is not judged either, see
            `Settling`.
        start: Steps after these that count as the run's healthy start.
        smooth: Steps over which the latest values are averaged.
        smooth_attention: The same for the part ``attention``, whose ranks of single heads jump between measurements.
        lag: Steps between the latest values and the past that they are compared with.
        past: Length of that past in steps.

    Example:
        >>> import workbench as wb
        >>> options = wb.alarms.DetectorOptions(smooth=10, smooth_attention=50)
        >>> options.smooth_of("monitors"), options.smooth_of("attention")
        (10, 50)
    """

    settle: int = 100
    start: int = 100
    smooth: int = 10
    smooth_attention: int = 50
    lag: int = 50
    past: int = 150

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < (0 if name in ("settle", "lag") else 1):
                raise OptionError(f"{name} is {value} steps, expected a positive number.")

    def smooth_of(self, part: str) -> int:
        """Steps over which the latest values of a part of the run are averaged."""
        return self.smooth_attention if part == "attention" else self.smooth
