"""Fit the risk models that ship to the recorded sweep, and say how good they are on what they have not seen.

    python data/fit_risk.py                 # into workbench/risk/shipped
    python data/fit_risk.py --out elsewhere

Fitted to the study ``fit`` alone. Judged on the study ``held out``, whose sizes, init scales and seeds occur nowhere in
it: once as it is (every configuration is new), and once with each architecture's runs left out of the fit as well.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import workbench as wb

#: Set of features -> options of the fit. Chosen by cross-validation within the study ``fit``.
OPTIONS: dict[str, dict[str, Any]] = {
    # Without a norm a larger stream makes larger gradients, which plain descent feels and scaled updates do not.
    "forward": {"method": "edge", "interactions": [("scale_response", "optimizer SGD")]},
    "gradient": {"method": "edge", "interactions": [("scale_response", "optimizer SGD")]},
    "pilot": {"method": "edge"},
}
SHIPPED = Path(wb.risk.__file__).parent / "shipped"


def fitted(features: str, *, n_bootstrap: int = 200) -> wb.risk.RiskModel:
    """The model of one set of features."""
    runs = wb.samples.divergence_sweep("fit")
    return wb.risk.fit(runs, features=features, n_bootstrap=n_bootstrap, **OPTIONS[features])


def main() -> None:
    """Fit, validate and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    out = parser.parse_args().out
    runs, held_out = wb.samples.divergence_sweep("fit"), wb.samples.divergence_sweep("held out")
    for features, options in OPTIONS.items():
        start = time.monotonic()
        figures = wb.risk.validate(runs, test=held_out, features=features, **options)
        model = fitted(features).with_validation(figures)
        model.save(out / f"risk_{features}.json", overwrite=True)
        print(model.card())
        print(f"{features}: {time.monotonic() - start:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
