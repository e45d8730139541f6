"""Designs with known edges: cases with all variables of the features, and their edges, some of them censored."""

import numpy as np
import xarray as xr

from workbench.risk import Edges

#: Names of edges.
EDGES = ("slow_edge", "useful_edge", "explosion_edge")
#: True changes of the logarithm of the useful edge: by a tenfold unit-change rate, by SGD, without a norm.
SLOPE, SGD, WITHOUT_NORM = 1.5, 3.0, -2.0
#: Logarithms of the slow and the explosion edge less that of the useful edge, and of the largest rate tried.
SLOW, EXPLOSION, LARGEST = -2.5, 0.7, np.log(30.0)
_N_PADDED = 6


def known_designs(*, n_families=12, n_of_family=8, seed=0, of_family=0.3, noise=0.2):
    """Return cases, the logarithms of their true edges by name, the measured edges, and the family of each case.

    Models with a norm do not diverge up to the largest rate tried.

    Args:
        of_family: Standard deviation between families of the logarithm of the useful edge.
        noise: Standard deviation between the designs of a family.
    """
    random = np.random.default_rng(seed)
    n = n_families * n_of_family
    family = np.repeat(np.arange(n_families), n_of_family)
    is_sgd = random.random(n) < 0.4
    is_normed = (family % 3 > 0) if n_families > 3 else random.random(n) < 0.5
    log_unit_rate = random.normal(-2, 0.5, size=n)
    useful = (
        -4 + SLOPE * (log_unit_rate + 2) + SGD * is_sgd + WITHOUT_NORM * ~is_normed
        + of_family * random.normal(size=n_families)[family] + noise * random.normal(size=n)
    )  # fmt: skip
    truth = {"slow_edge": useful + SLOW, "useful_edge": useful, "explosion_edge": useful + EXPLOSION}
    edges = {name: Edges(truth[name], truth[name]) for name in ("slow_edge", "useful_edge")}
    edges["explosion_edge"] = Edges(
        np.where(is_normed, LARGEST, truth["explosion_edge"]), np.where(is_normed, np.inf, truth["explosion_edge"])
    )
    cases = _cases(random, n, is_sgd, is_normed, 10**log_unit_rate).assign_coords(
        learning_rate=("run", np.exp(useful)), architecture=("run", [f"kind {i}" for i in family])
    )
    return cases, truth, edges, family.astype(str)


def _cases(random, n, is_sgd, is_normed, unit_change_rate):
    n_layers = random.integers(2, 5, size=n)
    is_there = np.arange(_N_PADDED) < n_layers[:, None]
    mass = random.uniform(0.05, 0.95, size=(n, _N_PADDED))
    layers = {
        "near_unit_mass": mass,
        "expansive_mass": 0.5 * (1 - mass),
        "contractive_mass": 0.3 * (1 - mass),
        "intermediate_mass": 0.2 * (1 - mass),
        "spectral_radius": 10 ** random.normal(0.1, 0.2, size=mass.shape),
        "eigenvector_condition": 10 ** random.uniform(0.5, 2, size=mass.shape),
        "nonlinearity_ratio": random.uniform(0.3, 0.7, size=mass.shape),
        "kreiss_constant": np.where(random.random(n)[:, None] < 0.5, np.inf, 2.0) * np.ones(mass.shape),
        "energy_gain": 10 ** random.normal(0, 0.2, size=mass.shape),
        "update_norm": 10 ** random.normal(-0.5, 0.1, size=mass.shape),
        "is_informative": np.ones(mass.shape),
    }
    data = {
        "initial_loss": 4.2 + 0.1 * random.normal(size=n),
        "logit_std": 10 ** random.normal(0, 0.1, size=n),
        "scale_response": np.where(is_normed, 0.0, 1.0) + 0.02 * random.normal(size=n),
        "stream_rms_first": 0.03 * 10 ** random.normal(0, 0.05, size=n),
        "stream_rms_last": 0.1 * 10 ** random.normal(0, 0.1, size=n),
        "initial_grad_norm": 10 ** random.normal(0.5, 0.3, size=n),
        "overshoot_rate": np.where(random.random(n) < 0.7, 0.5, np.inf),
        "breaking_rate": np.where(random.random(n) < 0.3, 5.0, np.inf),
        "unit_change_rate": unit_change_rate,
        "rehearsed_rate": 10 ** random.normal(-1, 0.3, size=n),
    }
    coords = {
        "optimizer": np.where(is_sgd, "SGD", "AdamW"),
        "d_model": random.choice([48, 64, 96], size=n),
        "n_layers": n_layers,
        "n_weights": random.integers(20_000, 200_000, size=n),
        "batch_size": np.full(n, 8),
        "n_tokens": np.full(n, 256),
        "n_steps": random.choice([240, 480], size=n),
        "warmup": random.choice([10, 30, 90], size=n),
        "mean_rate_share": random.choice([0.5, 0.9], size=n),
        "weight_decay": random.choice([0.0, 0.1], size=n),
        "momentum": np.full(n, 0.9),
        "clip_norm": np.where(random.random(n) < 0.5, 1.0, np.nan),
    }
    return xr.Dataset(
        {name: (("run", "layer"), np.where(is_there, values, np.nan)) for name, values in layers.items()}
        | {name: ("run", values) for name, values in data.items()},
        {name: ("run", values) for name, values in coords.items()},
    )
