"""Sweeps whose truth is planted: the log-odds of divergence are known, so that a fit can be held against them."""

import numpy as np
import xarray as xr

#: Slope of the log-odds in log10 rate.
SLOPE = 12.0
_N_PADDED = 6


#: Features of a planted sweep: all that its edge depends on, and more.
PLANTED = (
    "near_unit_mass mean", "near_unit_mass change", "expansive_mass mean", "contractive_mass mean",
    "spectral_radius mean", "spectral_radius max", "eigenvector_condition mean", "nonlinearity_ratio mean",
    "energy_gain mean", "energy_gain change", "update_norm mean", "update_norm change", "is_informative mean",
    "initial_loss", "logit_std", "stream_rms_first", "stream_growth", "d_model", "n_layers", "n_weights", "n_tokens",
    "warmup", "mean_rate_share", "weight_decay", "momentum", "momentum_gain", "is_clipped", "clip_norm", "optimizer",
)  # fmt: skip


def made_sweep(
    *, n_configurations=40, n_cells=2, n_rates=8, n_seeds=2, seed=0, slope=SLOPE, noise=0.0, edge_of=None, spread=0.6
):  # fmt: skip
    """A sweep of the shape of real ones, and its truth.

    Each configuration has spectra and sizes of its own, each cell its batch, warm-up and optimizer; the rates straddle
    the cell's edge.

    Args:
        noise: Standard deviation of what no feature explains of a cell's log10 edge.
        edge_of: From a cell's facts to log10 of its edge; `edge` by default.
        spread: The rates cover this many decades to both sides of the edge.

    Returns:
        The sweep, and the planted probability and log10 edge of each run.
    """
    random = np.random.default_rng(seed)
    rows, truth = [], []
    for i in range(n_configurations):
        n_layers = int(random.integers(1, _N_PADDED + 1))
        own = {
            "mass": random.uniform(0.05, 0.95),
            "radius": 10 ** random.normal(0.3, 0.3),
            "gain": 10 ** random.normal(0.0, 0.2),
            "d_model": int(2 ** random.integers(4, 9)),
            "n_layers": n_layers,
            "grad_norm": 10 ** random.normal(0.5, 0.4),
        }
        for j in range(n_cells):
            cell = own | {
                "n_tokens": int(16 * 2 ** random.integers(4, 8)),
                "warmup": int(random.choice([0, 20, 100])),
                "optimizer": str(random.choice(["AdamW", "SGD"])),
                "schedule": str(random.choice(["constant", "cosine"])),
            }
            log_edge = (edge_of or edge)(cell)
            shifted = log_edge + noise * random.normal()
            for log_rate in shifted + np.linspace(-spread, spread, n_rates):
                for k in range(n_seeds):
                    probability = 1 / (1 + np.exp(-slope * (log_rate - shifted)))
                    has_diverged = bool(random.random() < probability)
                    rows.append(
                        _row(cell | {"rehearsed": 10 ** (log_edge + 0.3)}, i, j, k, 10**log_rate, has_diverged, random)
                    )
                    truth.append((1 / (1 + np.exp(-slope * (log_rate - log_edge))), log_edge))
    probability, log_edges = np.array(truth).T
    planted = xr.Dataset({"probability": ("run", probability), "log_edge": ("run", log_edges)})
    return _dataset(rows), planted


def edge(cell):
    """log10 of the edge: linear in some of ``PLANTED``."""
    return (
        -1.5
        - 0.8 * (cell["mass"] - 0.5)
        - 0.5 * (np.log10(cell["radius"]) - 0.3)
        - 0.4 * (np.log10(cell["d_model"]) - 1.9)
        + (0.7 if cell["optimizer"] == "SGD" else 0.0)
        + 0.15 * np.log10(1 + cell["warmup"])
    )


def _row(cell, i, j, k, rate, has_diverged, random):
    n = cell["n_layers"]
    layers = {
        "near_unit_mass": np.clip(cell["mass"] + 0.01 * random.normal(size=n), 0, 1),
        "spectral_radius": cell["radius"] * 10 ** (0.01 * random.normal(size=n)),
        "eigenvector_condition": 10 ** (1 + 0.1 * random.normal(size=n)),
        "nonlinearity_ratio": np.clip(0.5 + 0.1 * random.normal(size=n), 0, 1),
        "kreiss_constant": np.where(cell["radius"] > 1, np.inf, 2.0) * np.ones(n),
        "energy_gain": cell["gain"] * np.ones(n),
        "update_norm": 10 ** (-0.5 + 0.1 * random.normal(size=n)),
        "is_informative": np.ones(n),
        "rank": np.full(n, 32.0),
    }
    rest = 1 - layers["near_unit_mass"]
    layers |= {"expansive_mass": 0.5 * rest, "contractive_mass": 0.3 * rest, "intermediate_mass": 0.2 * rest}
    return {
        "layers": layers,
        "coords": {
            "study": "made",
            "architecture": f"kind {i % 8}",
            "configuration": f"{i:012x}",
            "cell": f"{100 * i + j:012x}",
            "family": "transformer",
            "norm": "pre_ln",
            "initialization": "normal",
            "init_std": 0.02,
            "task": "associative_recall",
            "schedule": cell["schedule"],
            "mean_rate_share": 0.9 if cell["schedule"] == "constant" else 0.5,
            "optimizer": cell["optimizer"],
            "d_model": cell["d_model"],
            "n_layers": n,
            "n_weights": 12 * n * cell["d_model"] ** 2,
            "batch_size": cell["n_tokens"] // 16,
            "n_tokens": cell["n_tokens"],
            "learning_rate": rate,
            "warmup": cell["warmup"],
            "n_steps": 200,
            "clip_norm": np.nan,
            "weight_decay": 0.01,
            "momentum": 0.9 if cell["optimizer"] == "AdamW" else 0.0,
            "seed": k,
        },
        "data": {
            "initial_loss": 4.2 + 0.1 * random.normal(),
            "initial_accuracy": 0.02,
            "logit_std": 10 ** (0.1 * random.normal()),
            "scale_response": 0.05 * (cell["mass"] - 0.5),
            "stream_rms_first": 0.03 * 10 ** (0.05 * random.normal()),
            "stream_rms_last": 0.1 * 10 ** (0.1 * random.normal()),
            "initial_grad_norm": cell["grad_norm"],
            "overshoot_rate": 0.5 if random.random() < 0.7 else np.inf,
            "breaking_rate": 5.0 if random.random() < 0.3 else np.inf,
            "rehearsed_rate": cell["rehearsed"],
            "grad_norm_step_100": random.exponential(),
            "grad_norm_variance": random.exponential(),
            "n_loss_spikes": float(random.poisson(2)),
            "has_diverged": has_diverged,
            "divergence_step": 50.0 if has_diverged else np.nan,
            "final_loss": 60.0 if has_diverged else 3.5,
            "accuracy": 0.1,
        },
    }


def _dataset(rows):
    variables = {name: ("run", np.array([row["data"][name] for row in rows])) for name in rows[0]["data"]}
    for name in rows[0]["layers"]:
        values = np.full((len(rows), _N_PADDED), np.nan)
        for i, row in enumerate(rows):
            values[i, : len(row["layers"][name])] = row["layers"][name]
        variables[name] = (("run", "layer"), values)
    variables["cause"] = ("run", np.where(variables["has_diverged"][1], "loss", ""))
    coords = {name: ("run", np.array([row["coords"][name] for row in rows])) for name in rows[0]["coords"]}
    return xr.Dataset(variables, coords)
