"""Spectra of weight matrices: singular values, heavy tails, and spikes beyond a random bulk; no data are needed.

Example:
    >>> import workbench as wb
    >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
    >>> spectra = wb.weights.weight_spectra(model, layers=[0], progress=False)
    >>> spectra["matrix"].values[0].item()
    'blocks.0.attention.query.weight'

See Also:
    `workbench.koopman`: Spectra of the residual stream.
    `workbench.monitors`: Monitors of weights along a run.
"""

from workbench.option_checks import publish
from workbench.weights.matrix_spectra import power_law_tail, random_bulk, weight_spectra

__all__ = ["power_law_tail", "random_bulk", "weight_spectra"]

__dir__ = publish(__name__)
