"""Learning rates: the best rate, the band of useful rates, and the rates from which runs diverge.

Example:
    >>> import workbench as wb
    >>> study = wb.samples.open("rate_study", "fit")
    >>> losses = wb.rates.loss_over_rates(study.isel(run=(study.cell == study.cell[0]).values))
    >>> bool(losses.slow_edge < losses.best_rate < losses.useful_edge)
    True

See Also:
    `workbench.find_rate`: Finds the rates for a planned training by a pilot.
    `workbench.plots.rate_bands`: Draws the bands of useful rates.
"""

from __future__ import annotations

from workbench.option_checks import publish
from workbench.rates.find_rate import Estimate, FoundRates
from workbench.rates.outcomes import (
    UsefulBand,
    count_lasting_spikes,
    loss_over_rates,
    rate_outcomes,
    rate_sensitivity,
    useful_band,
)

__all__ = [
    "Estimate", "FoundRates", "UsefulBand", "count_lasting_spikes", "loss_over_rates", "rate_outcomes",
    "rate_sensitivity", "useful_band",
]  # fmt: skip

__dir__ = publish(__name__)
