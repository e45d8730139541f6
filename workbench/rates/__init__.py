"""Learning rates: which is the best, which are useful, from which runs diverge; the names of `wb.rates`."""

from __future__ import annotations

from workbench.rates.drift import Estimate
from workbench.rates.find_rate import FoundRates
from workbench.rates.outcomes import count_lasting_spikes, loss_over_rates, rate_outcomes
from workbench.rates.rate_search import Round
from workbench.rates.useful_band import UsefulBand, rate_sensitivity, useful_band

__all__ = [
    "Estimate",
    "FoundRates",
    "Round",
    "UsefulBand",
    "count_lasting_spikes",
    "loss_over_rates",
    "rate_outcomes",
    "rate_sensitivity",
    "useful_band",
]


def __dir__() -> list[str]:
    return sorted(__all__)
