"""Synthetic runs with all parts that a recorder writes, and an injected fault: one head collapses before the rest."""

import numpy as np
import xarray as xr

from tests.widgets.recorded_runs import spectra_over
from workbench.io.run_writer import RunWriter

TERMS = ("D2", "D3", "dWq", "dWk", "W")
#: Layer and head of the fault.
LAYER, HEAD = 1, 2


def monitored_run(
    n_steps=600, *, fault_at=None, diverges=False, seed=0, n_layers=3, n_heads=4, n_experts=4, every=10, spectra=True
):
    """Generate a run; with ``fault_at``, D2 of one head collapses immediately, and the gradient norm increases later.

    The alarm of D2 is raised 40 steps after the fault, that of the gradient norm halfway to the end, and that of the
    loss at three quarters of the way.
    """
    draws = np.random.default_rng(seed)
    step, measured = np.arange(n_steps), np.arange(0, n_steps, every)
    loss = 4 * np.exp(-step / (0.8 * n_steps)) * (1 + 0.03 * draws.normal(size=n_steps))
    norm = 4 * np.exp(0.15 * draws.normal(size=n_steps))
    rank = 1.6 * np.exp(0.12 * draws.normal(size=(len(measured), n_layers, n_heads, len(TERMS)))) + 0.3
    events = []
    if fault_at is not None:
        half, late = (fault_at + n_steps) // 2, (fault_at + 3 * n_steps) // 4
        since = np.maximum(measured - fault_at, 0)
        rank[:, LAYER, HEAD, 0] = 1 + (rank[:, LAYER, HEAD, 0] - 1) * np.exp(-since / 25)
        norm *= np.exp(np.maximum(step - half + 40, 0) / (0.08 * n_steps))
        loss *= np.exp(np.maximum(step - late + 20, 0) / (0.3 * n_steps))
        events = [
            (fault_at, "fault", "low precision attention", np.nan, "low precision attention switched on", -1, -1),
            (fault_at + 40, "alarm", "effective_rank D2", 3.4, "One head turns only in one direction.", LAYER, HEAD),
            (fault_at + 90, "alarm", "effective_rank D2", 4.1, "One head turns only in one direction.", LAYER, 0),
            (half, "alarm", "grad_norm", 2.2, "The gradient norm leaves its range.", -1, -1),
            (late, "alarm", "loss", 1.8, "The loss leaves its range.", -1, -1),
        ]
    if diverges:
        events.append((n_steps - 1, "divergence", "grad_norm", float(norm[-1]), "grad_norm above its bound", -1, -1))
    else:
        events.append((n_steps, "finished", "", np.nan, f"finished after {n_steps} steps", -1, -1))
    layers, heads = np.arange(n_layers), np.arange(n_heads)
    entropy = np.log(n_experts) * (0.8 + 0.02 * draws.normal(size=(len(measured), n_layers)))
    parts = {
        "monitors": xr.Dataset(
            {
                "loss": ("step", loss),
                "grad_norm": ("step", norm),
                "accuracy": ("step", np.where(step % 5 == 0, 1 - np.exp(-step / n_steps), np.nan)),
                "learning_rate": ("step", np.full(n_steps, 1e-3)),
                "kss_enabled": ("step", np.zeros(n_steps, bool)),
            },
            {"step": step},
        ),
        "attention": xr.Dataset(
            {
                "effective_rank": (("step", "layer", "head", "term"), rank),
                "attention_logit_max": (
                    ("step", "layer", "head"),
                    5 + draws.random((len(measured), n_layers, n_heads)),
                ),
            },
            {"step": measured, "layer": layers, "head": heads, "term": list(TERMS)},
        ),
        "router": xr.Dataset(
            {
                "routing_entropy": (("step", "layer"), entropy),
                "expert_load": (
                    ("step", "layer", "expert"),
                    draws.dirichlet(np.full(n_experts, 50), (len(measured), n_layers)),
                ),
            },
            {"step": measured, "layer": layers},
        ),
        "optimizer": xr.Dataset(
            {
                "update_ratio": (
                    ("step", "module"),
                    1e-3 * np.exp(0.1 * draws.normal(size=(len(measured), n_layers + 1))),
                )
            },
            {
                "step": measured,
                "module": np.arange(n_layers + 1),
                "module_name": ("module", [*(f"block {i}" for i in layers), "outside"]),
                "layer": ("module", [*layers, -1]),
            },
        ),
        "events": events_dataset(events),
    }
    if spectra:
        steps = list(range(0, n_steps, max(n_steps // 4, 1)))
        parts["spectra"] = spectra_over(steps, drift=0.3 / n_steps, seed=seed, n_layers=n_layers, width=8)
    return xr.DataTree.from_dict({f"/{name}": part for name, part in parts.items()})


def watched_run(n_steps=400, *, fault_at=None, **options):
    """Generate a run with evidence and probes; the probe finds a fault immediately, and D2 40 steps later."""
    run = monitored_run(n_steps, fault_at=fault_at, **options)
    step = np.arange(9, n_steps, 10)
    names = ["loss", "grad_norm", "effective_rank D2", "effective_rank W", "kurtosis", "log_z", "state_norm"]
    evidence = np.tile([0.2, 0.3, 0.25, 0.01, np.nan, 0.15, 0.12], (len(step), 1))
    evidence[step < n_steps // 8] = np.nan
    excess = np.ones((len(step), 3))
    if fault_at is not None:
        evidence[step >= fault_at + 20, 2] = 0.7
        evidence[step >= fault_at + 40, 2] = 3.4
        evidence[-1, 0] = np.inf
        excess[step >= fault_at, LAYER] = 5000.0
        found = int(step[step >= fault_at][0])
        rows = [
            (found, "alarm", "arithmetic", 50.0, "The gradient has an error of 3 %.", LAYER, 0),
            (found, "attribution", "low_precision_attention", 1.0, "This looks like it.", -1, -1),
        ]
        run["events"] = xr.DataTree(xr.concat([run["events"].to_dataset(), events_dataset(rows)], "event"))
    run["evidence"] = xr.DataTree(
        xr.Dataset({"evidence": (("step", "signal"), evidence)}, {"step": step, "signal": names})
    )
    heads = np.ones((len(step), 3, 4))
    heads[..., 0] = excess
    precision = {
        "output_error": (("step", "layer"), 1e-7 * excess),
        "gradient_error": (("step", "layer"), 1e-7 * excess),
        "error_excess": (("step", "layer"), excess),
        "query_gradient_error": (("step", "layer", "head"), 1e-7 * heads),
        "query_error_excess": (("step", "layer", "head"), heads),
        "query_gradient_bias": (("step", "layer", "head"), 0 * heads),
        "excess_limit": ("step", np.full(len(step), 25.0)),
    }
    run["precision"] = xr.DataTree(xr.Dataset(precision, {"step": step, "layer": np.arange(3), "head": np.arange(4)}))
    return run


def events_dataset(rows):
    """Convert tuples (step, kind, source, score, message, layer, head) to events."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * 7
    kinds = (np.int64, np.str_, np.str_, float, np.str_, np.int64, np.int64)
    names = ("step", "kind", "source", "score", "message", "layer", "head")
    return xr.Dataset(
        {name: ("event", np.array(column, kind)) for name, column, kind in zip(names, columns, kinds, strict=True)}
    )


def part_until(run, part, start, stop):
    """Return the rows of a part from step ``start`` up to, but not including, step ``stop``."""
    data = run[part].to_dataset(inherit=False)
    step = data["step"]
    (dim,) = step.dims
    return data.isel({dim: np.flatnonzero((step.values >= start) & (step.values < stop))})


class GrowingRun:
    """Store to which the rows of a run are written in blocks, as during training."""

    def __init__(self, run, path, **attrs):
        self.run, self.path, self.n_done = run, path, 0
        self._writer = RunWriter(path, {"subject": "synthetic", "state": "running", "created": "now", **attrs})

    def grow(self, stop, **attrs):
        """Write and commit all rows before step ``stop``."""
        for part in self.run.children:
            rows = part_until(self.run, part, self.n_done, stop)
            if rows["step"].size:
                self._writer.append(part, rows)
        self._writer.commit(**attrs)
        self.n_done = stop
        return self
