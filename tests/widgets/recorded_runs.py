"""Short recorded runs with known features: drifting eigenvalues, a decreasing loss, a divergence."""

import numpy as np
import xarray as xr

from tests.plots.conftest import spectra_of


def spectra_over(steps, *, radius=1.0, drift=0.02, **options):
    """Spectra with a leading dimension ``step``; the radius of the known maps grows by ``drift`` per step."""
    parts = [spectra_of(radius * (1 + drift * step), **options).expand_dims(step=[step]) for step in steps]
    return xr.concat(parts, "step", combine_attrs="override").assign_coords(step=np.array(steps, np.int64))


def run_of(steps, *, n_steps=None, diverges=False, seed=0, **options):
    """A run of ``n_steps`` training steps with spectra at some steps, which finishes or diverges."""
    n_steps = steps[-1] if n_steps is None else n_steps
    step = np.arange(n_steps + 1)
    generator = np.random.default_rng(seed)
    loss = 4 * np.exp(-step / (0.4 * n_steps + 1)) + 0.05 * generator.random(len(step))
    norm = 1 + 0.2 * generator.random(len(step))
    if diverges:
        loss[-4:] *= [2, 5, 12, 30]
        norm[-4:] *= [4, 20, 100, 900]
    monitors = xr.Dataset(
        {
            "loss": ("step", loss),
            "auxiliary_loss": ("step", np.full(len(step), np.nan)),
            "accuracy": ("step", 1 - np.exp(-step / (0.6 * n_steps + 1))),
            "grad_norm": ("step", norm),
            "learning_rate": ("step", np.full(len(step), 1e-3)),
        },
        {"step": step},
    )
    kind, source = ("divergence", "grad_norm") if diverges else ("finished", "")
    events = xr.Dataset(
        {
            "step": ("event", [n_steps]),
            "kind": ("event", [kind]),
            "source": ("event", [source]),
            "score": ("event", [float(norm[-1]) if diverges else np.nan]),
            "message": ("event", [f"{kind} at step {n_steps}"]),
        }
    )
    parts = {"spectra": spectra_over(steps, seed=seed, **options), "monitors": monitors, "events": events}
    return xr.DataTree.from_dict({f"/{name}": part for name, part in parts.items()})
