"""Spectra of the weights themselves: singular values, heavy tails, spikes beyond a random bulk; no data is needed."""

from workbench.weights.eigenvalue_tails import Bulk, PowerLaw, power_law_tail, random_bulk
from workbench.weights.matrix_spectra import weight_spectra

__all__ = ["Bulk", "PowerLaw", "power_law_tail", "random_bulk", "weight_spectra"]


def __dir__() -> list[str]:
    return sorted(__all__)
