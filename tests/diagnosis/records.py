"""Synthetic runs with known faults."""

import json

import numpy as np
import xarray as xr

from workbench.diagnosis.failed_run import read_record


def monitors(loss, *, grad_norm=None, rate=None, rows=None, step=None):
    n = len(loss)
    columns = {"loss": np.asarray(loss, dtype=float)}
    columns["grad_norm"] = np.ones(n) if grad_norm is None else np.asarray(grad_norm, dtype=float)
    columns["learning_rate"] = np.full(n, 1e-3) if rate is None else np.asarray(rate, dtype=float)
    if rows is not None:
        columns["batch_size"] = np.asarray(rows, dtype=float)
    coords = {"step": np.arange(n) if step is None else np.asarray(step)}
    return xr.Dataset({name: ("step", values) for name, values in columns.items()}, coords=coords)


def descent(n=200, *, first=3.0, last=1.0, noise=0.02, seed=0):
    """Return a loss that decreases exponentially to its last value, with noise."""
    shape = last + (first - last) * np.exp(-np.arange(n) / (n / 6))
    return shape + noise * np.random.default_rng(seed).standard_normal(n)


def tree(parts, *, configuration=None, events=()):
    run = xr.DataTree.from_dict({f"/{name}": data for name, data in parts.items()})
    if events:
        steps, kinds = zip(*events, strict=True)
        run["events"] = xr.DataTree(
            xr.Dataset({"step": ("event", np.array(steps)), "kind": ("event", np.array(kinds, dtype=str))})
        )
    run.attrs["configuration"] = json.dumps(configuration or {})
    run.attrs["subject"] = "made by hand"
    return run


def record(parts, **options):
    return read_record(tree(parts, **options))


def optimizer(
    n_measurements=20,
    n_blocks=4,
    *,
    every=10,
    weight=5.0,
    gradient=0.3,
    ratio=0.01,
    over_eps=1e5,
    n_weights=1000,
    signal=0.3,
    unchanged=0.0,
):
    """Return the part ``optimizer``; arrays of shape (block,) set the values of each block."""
    shape = (n_measurements, n_blocks + 1)

    def table(value):
        row = np.broadcast_to(np.asarray(value, dtype=float), (n_blocks,))
        return np.tile(np.append(row, row.mean()), (n_measurements, 1))

    variables = {
        "module_weight_norm": table(weight),
        "module_grad_norm": table(gradient),
        "gradient_rms": table(gradient) / np.sqrt(n_weights),
        "update_ratio": table(ratio),
        "gradient_rms_over_eps": table(over_eps),
        "adam_staleness": np.ones(shape),
        "gradient_signal_share": table(signal),
        "unchanged_share": table(unchanged),
    }
    coords = {
        "step": np.arange(n_measurements) * every + every - 1,
        "module": np.arange(n_blocks + 1),
        "layer": ("module", np.append(np.arange(n_blocks), -1)),
    }
    return xr.Dataset({name: (("step", "module"), values) for name, values in variables.items()}, coords=coords)
