"""Recorded fits of the package ``powerlaw``, which imports matplotlib and takes seconds per fit.

Create the table again with: pip install powerlaw==2.0.0; python -m tests.weights.powerlaw_table
"""

import json
from pathlib import Path

import numpy as np

TABLE = Path(__file__).with_name("powerlaw_table.json")


def samples():
    """Return name -> values: Pareto laws, a Pareto tail of another distribution, and no power law."""
    u = np.random.default_rng(0).random((6, 400))
    body = np.concatenate([u[2, :250], (1 - u[2, 250:]) ** (-1 / 1.5)])
    matrix = (u[4] - 0.5).reshape(20, 20) @ (u[5] - 0.5).reshape(20, 20)
    return {
        "pareto 2": (1 - u[0]) ** -1.0,
        "pareto 3.5": 1e-6 * (1 - u[1]) ** (-1 / 2.5),
        "tail 2.5 of a uniform body": body,
        "exponential": -np.log(1 - u[3]),
        "products": np.abs(matrix).ravel(),
    }


if __name__ == "__main__":
    import powerlaw

    table = {"package": f"powerlaw {powerlaw.__version__}"}
    for name, values in samples().items():
        # By default, the package restricts alpha to values below 3.
        fit = powerlaw.Fit(values, discrete=False, verbose=False, parameter_ranges={"alpha": [1, 1000]})
        found = {"alpha": fit.alpha, "error": fit.sigma, "distance": fit.D, "start": fit.xmin}
        table[name] = {key: float(value) for key, value in found.items()}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
