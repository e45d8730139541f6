"""Fit the risk of a planned training to the recorded study of learning rates, and evaluate it.

    python data/fit_risk.py                          # fits to the set "fit", chooses and evaluates on "choose"
    python data/fit_risk.py --locked                 # also evaluates once on "locked", after a fit to both others

Reads ``rates.nc`` and ``rate_pilots.jsonl``. The baseline is a table of optimizer and normalization. Groups of features
are added in sequence. A group is kept if the gain in likelihood of the useful edges of the validation set ("choose") is
positive in the mean over its families and in 99 % of bootstrap samples of them. The kept features are fitted to both
sets and written to ``workbench/risk/shipped/edges.json``, the gains to ``risk_gains.csv``, and the accuracy of several
predictors to ``risk_accuracy.csv``. The accuracy of the kept features on "choose" is optimistic, because they were
chosen there. Designs that learned at no rate are excluded.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from fit_rates import FACTORS, drift_of, inputs, read, shipped_features, table, truths
from make_pilots import recorded
from rate_designs import designs

import workbench as wb
from workbench.io.atomic import replacing
from workbench.rates.find_rate import SOURCES
from workbench.rates.outcomes import design_key
from workbench.risk.edge_model import (
    EDGES,
    Edges,
    Floats,
    best_penalty,
    fit_edges,
    groups_of,
    in_enough_families,
    log_likelihood,
)
from workbench.risk.features import FEATURES, feature_table
from workbench.risk.scores import auroc

if TYPE_CHECKING:
    import pandas as pd

SHIPPED = Path(wb.risk.__file__).parent / "shipped" / "edges.json"
SEED, N_BOOTSTRAP = 0, 1000
#: Fraction of the bootstrap samples of families in which a group of features must help. Twelve groups are tried, so by
#: chance alone one is kept in about one of eight studies.
SHARE_THAT_GAINS = 0.99
SPECTRAL = tuple(name for name, one in FEATURES.items() if one.measures is None and name.endswith(("mean", "max")))
#: Groups of features in addition to the table, in the order in which they are added: cheap ones first.
GROUPS: dict[str, tuple[str, ...]] = {
    "settings": ("d_model", "n_layers", "n_steps", "warmup_share", "mean_rate_share", "is_clipped", "weight_decay"),
    "horizon": ("n_steps",),
    "scale response": ("scale_response", "stream_growth", "logit_std"),
    "M": ("near_unit_mass mean",),
    "all of RKSP": SPECTRAL,
    "gradient": ("initial_grad_norm", "overshoot_rate", "breaking_rate"),
    "change by the first update": ("unit_change_rate",),
    "ten trial updates": ("rehearsed_rate",),
    "curvature after 100 updates": ("curvature",),
}
#: Groups that are evaluated but never kept, because they need a pilot.
OF_PILOTS = ("curvature after 100 updates",)
#: Grid of rates for all designs, and factors relative to the measured edge of each design.
GRID, AROUND = np.geomspace(1e-6, 30, 60), 1.5 ** np.arange(-4.0, 5.0)
#: Number of standard deviations from the mean to an end of an 80 % interval.
_REACH = NormalDist().inv_cdf(0.9)


@dataclass(frozen=True)
class Study:
    """The designs of the study that learned, with one row for each horizon of each design.

    Attributes:
        rows: Set, family, key and horizon.
        columns: Features by name, means over seeds, shape (row,); NaN if unknown.
        groups: Optimizer, with or without normalization, shape (row,).
        edges: Measured edges by name.
        cases: The same designs as cases of `wb.risk`, with the measurements of one seed.
    """

    rows: pd.DataFrame
    columns: Mapping[str, Floats]
    groups: np.ndarray
    edges: Mapping[str, Edges]
    cases: xr.Dataset

    @classmethod
    def of(cls, rates: xr.Dataset, pilots: list[dict[str, Any]]) -> Study:
        """Read the recorded study.

        Args:
            rates: Training runs at all rates.
            pilots: Pilots of the same designs.
        """
        named = {design_key(one.run(0, 1).as_dict()): one for one in designs()}
        rows = truths(rates)
        rows = rows[rows["is_learned"]].reset_index(drop=True)
        rows["set"] = [named[key].set for key in rows["key"]]
        rows["family"] = [named[key].architecture.family for key in rows["key"]]
        measured = rates.isel(run=rates["stage"].values == "measures")
        keys = np.array([design_key(json.loads(str(text))) for text in measured["settings"].values])
        seeds = []
        for seed in np.unique(measured["seed"].values):
            of = {key: measured.isel(run=[i]) for i, key in enumerate(keys) if measured["seed"].values[i] == seed}
            pairs = zip(rows["key"], rows["horizon"], strict=True)
            seeds.append(xr.concat([wb.sweeps.replan(of[key], n_steps=n) for key, n in pairs], "run"))
        names = [name for of_group in GROUPS.values() for name in of_group if name != "curvature"]
        values = np.mean([feature_table(cases, names, allow_missing=True).values for cases in seeds], axis=0)
        columns = dict(zip(names, values.T, strict=True))
        of_cell = {one["cell"]: one["curvature"] for one in pilots if np.isfinite(one["curvature"])}
        curvature = {key: of_cell.get(one.run(0, 1).cell, np.nan) for key, one in named.items()}
        columns["curvature"] = np.log10([max(curvature[key], 1e-6) for key in rows["key"]])
        edges = {
            "slow_edge": _edges(rows["slow_edge"], high=rows["smallest"]),
            "useful_edge": _edges(rows["useful_edge"], low=rows["largest"]),
            "explosion_edge": _edges(rows["explosion_edge"], low=rows["largest"]),
        }
        return cls(rows, columns, groups_of(seeds[0]), edges, seeds[0])

    def inputs(self, groups: list[str], *, has_table: bool = True) -> Floats:
        """Return the features of all rows, shape (row, feature).

        Args:
            groups: Names in ``GROUPS``.
            has_table: Whether to include the optimizer, with or without normalization.
        """
        names = dict.fromkeys(name for group in groups for name in GROUPS[group])
        found = [_filled(self.columns[name], self.is_of("fit")) for name in names]
        if has_table:
            found += [(self.groups == one).astype(float) for one in np.unique(self.groups)]
        return np.stack(found, axis=1) if found else np.empty((len(self.rows), 0))

    def is_of(self, *sets: str) -> np.ndarray:
        """Return which rows belong to the given sets."""
        return self.rows["set"].isin(sets).to_numpy()


def _filled(values: Floats, is_fit: np.ndarray) -> Floats:
    """Return values clipped to the range of the rows for the fit, with NaN replaced by their median."""
    known = values[is_fit & np.isfinite(values)]
    return np.clip(np.where(np.isnan(values), np.median(known), values), known.min(), known.max())


def _edges(rate: pd.Series, *, low: pd.Series | None = None, high: pd.Series | None = None) -> Edges:
    """Return logarithms of edges; an edge that is NaN lies beyond the rates that were tried.

    Args:
        rate: Measured edges.
        low: Largest tried rates, if an edge that is NaN lies above them; None if it does not.
        high: Smallest tried rates, if an edge that is NaN lies below them; None if it does not.
    """
    known, nowhere = np.log(rate.to_numpy()), np.full(len(rate), np.inf)
    below, above = (nowhere if one is None else np.log(one.to_numpy()) for one in (low, high))
    is_known = np.isfinite(known)
    return Edges(
        np.where(is_known, known, -nowhere if low is None else below),
        np.where(is_known, known, nowhere if high is None else above),
    )


def likelihoods(study: Study, x: Floats, edge: str) -> Floats:
    """Return the log-likelihood of edges of the set "choose" after a fit to the set "fit", shape (row,), in nat.

    Args:
        study: The study.
        x: Features, shape (row, feature).
        edge: Name of the edge.
    """
    of_fit, of_choose = study.is_of("fit"), study.is_of("choose")
    edges, families = study.edges[edge], study.rows["family"].to_numpy()
    penalty, deviation = best_penalty(x[of_fit], edges[of_fit], families[of_fit])
    found = fit_edges(x[of_fit], edges[of_fit], penalty=penalty)
    return log_likelihood(found.mean(x[of_choose]), deviation, edges[of_choose])


def chosen(study: Study, pilots: pd.DataFrame) -> tuple[list[str], pd.DataFrame]:
    """Return the groups of features that are kept, and the gain of each group alone over the table.

    Args:
        study: The study.
        pilots: Pilots from `fit_rates.table`.

    Returns:
        Names of groups, and a table of gains: nat per design, means over families with 80 % intervals.
    """
    import pandas as pd

    families = study.rows["family"].to_numpy()[study.is_of("choose")]
    kept: list[str] = []
    rows = []
    base = likelihoods(study, study.inputs([]), "useful_edge")
    alone = likelihoods(study, study.inputs([], has_table=False), "useful_edge")
    rows.append({"features": "rate alone", **_gain(alone - base, families)})
    for group in GROUPS:
        gain = _gain(likelihoods(study, study.inputs([group]), "useful_edge") - base, families)
        rows.append({"features": f"table, {group}", **gain})
        if group in OF_PILOTS:
            continue
        more = likelihoods(study, study.inputs([*kept, group]), "useful_edge")
        before = likelihoods(study, study.inputs(kept), "useful_edge")
        stays = _gain(more - before, families)
        if stays["share that gains"] >= SHARE_THAT_GAINS and stays["gain"] > 0:
            kept.append(group)
    of_table, with_curvature = (
        predictions(study, study.inputs(list(more)), study.is_of("fit")) for more in ((), OF_PILOTS)
    )
    of_pilots = after_pilots(study, pilots, ("fit",))
    after = {
        "pilot": of_pilots,
        "pilot and table": joined(of_pilots, of_table),
        f"pilot and table, {OF_PILOTS[0]}": joined(of_pilots, with_curvature),
    }
    for name, found in after.items():
        more, before, is_known = (_density(study, one) for one in (found, of_table, of_pilots))
        difference = (more - before)[np.isfinite(is_known + before)]
        rows.append({"features": name, **_gain(difference, families[np.isfinite(is_known + before)])})
    return kept, pd.DataFrame(rows)


def _density(study: Study, predicted: dict[str, Floats]) -> Floats:
    """Return the log-likelihood of the useful edges of the set "choose", with the mean deviation; NaN: no answer."""
    mean, *deviations = predicted["useful_edge"][study.is_of("choose")].T
    return log_likelihood(mean, np.mean(deviations, axis=0), study.edges["useful_edge"][study.is_of("choose")])


def _gain(difference: Floats, families: np.ndarray) -> dict[str, float]:
    """Return the mean over families, its 80 % interval, and the fraction of bootstrap samples with a gain."""
    means = np.array([difference[families == one].mean() for one in np.unique(families)])
    draws = np.random.default_rng(SEED).choice(means, (N_BOOTSTRAP, len(means))).mean(axis=1)
    low, high = np.quantile(draws, [0.1, 0.9])
    return {"gain": means.mean(), "low": low, "high": high, "share that gains": float((draws > 0).mean())}


def figures(study: Study, predicted: Mapping[str, dict[str, Floats]], is_judged: np.ndarray) -> pd.DataFrame:
    """Return AUROC and calibration of the probability of not learning well, by predictor.

    They are computed on a grid of rates from 1e-6 to 30, most of which are far from any edge, so that the AUROC is high
    for every predictor, and on rates within a factor of 5 of each design's useful edge. A rate fails if it lies outside
    of the measured band; rates for which this is unknown are excluded. Rows without an answer are counted and excluded,
    so the figures of predictors with different fractions of answers refer to different designs.

    Args:
        study: The study.
        predicted: Predictor -> edge -> mean of its logarithm, and deviations below and above it, shape (row, 3); NaN
            without an answer.
        is_judged: Which rows to evaluate.

    Returns:
        One row for each predictor and choice of rates: AUROC with a 95 % interval from a bootstrap of families,
        expected calibration error, fraction of rows without an answer, and fractions of the answers whose useful edge
        is within several factors of the measured one.
    """
    import pandas as pd
    from scipy.stats import norm

    found = []
    edge = study.edges["useful_edge"]
    for where in ("grid", "around the edge"):
        rate = np.log(GRID)[None].repeat(len(edge.low), 0)
        if where != "grid":
            rate = np.where(np.isfinite(edge.high), edge.low, np.nan)[:, None] + np.log(AROUND)
        slow = study.edges["slow_edge"]
        is_failure = np.where((rate > edge.high[:, None]) | (rate < slow.low[:, None]), 1.0, np.nan)
        is_failure[(rate <= edge.low[:, None]) & (rate >= slow.high[:, None])] = 0.0
        for name, edges in predicted.items():
            below = {}
            for one in ("slow_edge", "useful_edge"):
                mean, *deviations = np.moveaxis(edges[one][:, None], -1, 0)
                with np.errstate(divide="ignore", invalid="ignore"):  # deviations of 0 and NaN
                    below[one] = norm.cdf((rate - mean) / np.where(rate < mean, *deviations))
            chance = np.minimum(below["useful_edge"] + 1 - below["slow_edge"], 1.0)
            is_known = is_judged[:, None] & np.isfinite(is_failure) & np.isfinite(chance)
            if not is_known.any():
                continue  # pilots of this set are not recorded
            row, _ = np.nonzero(is_known)
            label, score = is_failure[is_known] > 0, chance[is_known]
            families = study.rows["family"].to_numpy()[row]
            area = auroc(score, label, groups=families, n_bootstrap=200)
            answered = np.isfinite(edges["useful_edge"][is_judged, 0]).mean()
            error = edges["useful_edge"][is_judged, 0] - edge.low[is_judged]
            error = error[np.isfinite(edge.high[is_judged]) & np.isfinite(error)]
            found.append(
                {
                    "predictor": name,
                    "rates": where,
                    "AUROC": area.value,
                    "low": area.low,
                    "high": area.high,
                    "ECE": wb.risk.reliability(score, label).attrs["ece"],
                    "no answer": 1 - answered,
                    **{f"edge within {one}": (np.abs(error) <= math.log(one)).mean() for one in FACTORS},
                }
            )
    return pd.DataFrame(found)


def predictions(study: Study, x: Floats, is_fit: np.ndarray) -> dict[str, Floats]:
    """Return distributions of the edges of all rows from a regression, in the form that `figures` uses.

    As in `wb.risk.fit`, rows whose optimizer, with or without normalization, occurs in too few families are not used
    and have no answer, whether or not it is a feature, so that predictors are compared on the same rows.

    Args:
        study: The study.
        x: Features, shape (row, feature).
        is_fit: Rows of the fit.
    """
    families, found = study.rows["family"].to_numpy(), {}
    is_fit = is_fit.copy()
    is_fit[is_fit] = in_enough_families(study.groups[is_fit], families[is_fit])
    has_answer, families = np.isin(study.groups, study.groups[is_fit]), families[is_fit]
    for name, edges in study.edges.items():
        penalty, deviation = best_penalty(x[is_fit], edges[is_fit], families)
        mean = fit_edges(x[is_fit], edges[is_fit], penalty=penalty).mean(x)
        mean = np.where(has_answer, mean, np.nan)
        found[name] = np.stack([mean, *2 * [np.full(len(mean), deviation)]], axis=1)
    return found


def after_pilots(study: Study, pilots: pd.DataFrame, fitted: tuple[str, ...]) -> dict[str, Floats]:
    """Return distributions from the pilots of the largest budget, extrapolated as in `wb.find_rate`.

    Args:
        study: The study.
        pilots: Pilots from `fit_rates.table`.
        fitted: Sets that the extrapolation is fitted to, with the shipped features.
    """
    drift = drift_of(pilots[pilots["set"].isin(fitted)], shipped_features())
    pilots = pilots[(pilots["kind"] == "model") & (pilots["budget"] == pilots["budget"].max())]
    places = {row: i for i, row in enumerate(zip(study.rows["key"], study.rows["horizon"], strict=True))}
    result = {name: np.full((len(study.rows), 3), np.nan) for name in EDGES}
    for which, rows in pilots[pilots["is_last"] & (pilots["round"] != "")].groupby("round"):
        is_known = [(row.key, row.horizon) in places for row in rows.itertuples()]
        rows = rows[is_known]
        at = [places[row.key, row.horizon] for row in rows.itertuples()]
        for name in set(EDGES) & set(SOURCES):
            fit = drift["model"][which][name]
            change = inputs(rows, tuple(fit["weights"])) @ np.array(list(fit["weights"].values()))
            result[name][at, 0] = np.log(rows[f"{SOURCES[name]}_pilot"].to_numpy()) + change
            result[name][at, 1:] = -fit["low"] / _REACH, fit["high"] / _REACH
    return result


def joined(one: dict[str, Floats], other: dict[str, Floats]) -> dict[str, Floats]:
    """Return the product of two distributions, or the one that has an answer if the other has none."""
    found = {}
    for name in one:
        weight = other[name][:, 1:].mean(1) ** -2 / (one[name][:, 1:].mean(1) ** -2 + other[name][:, 1:].mean(1) ** -2)
        mean = (1 - weight) * one[name][:, 0] + weight * other[name][:, 0]
        deviations = np.sqrt(1 - weight)[:, None] * one[name][:, 1:]
        both = np.concatenate([mean[:, None], deviations], axis=1)
        found[name] = np.where(np.isfinite(both), both, np.where(np.isfinite(one[name]), one[name], other[name]))
    return found


def judged(study: Study, on: str, fitted: tuple[str, ...], kept: list[str], pilots: pd.DataFrame) -> pd.DataFrame:
    """Return the figures of all predictors on one set.

    Args:
        study: The study.
        on: Set to evaluate.
        fitted: Sets that the regressions are fitted to.
        kept: Groups of features that are kept in addition to the table.
        pilots: Pilots from `fit_rates.table`.
    """
    is_fit, of_table = study.is_of(*fitted), study.inputs([])
    by_name = {"rate alone": study.inputs([], has_table=False), "table": of_table}
    by_name |= {f"table, {name}": study.inputs([name]) for name in ("M", "all of RKSP", *OF_PILOTS)}
    if kept:
        by_name[f"table, {', '.join(kept)}"] = study.inputs(kept)
    predicted = {name: predictions(study, x, is_fit) for name, x in by_name.items()}
    of_pilots = after_pilots(study, pilots, fitted)
    predicted |= {"pilot": of_pilots, "pilot and table": joined(of_pilots, predicted["table"])}
    predicted["table, where the pilot answers"] = {
        name: np.where(np.isfinite(of_pilots["useful_edge"]), values, np.nan)
        for name, values in predicted["table"].items()
    }
    found = figures(study, predicted, study.is_of(on))
    found.insert(0, "set", on)
    return found


def main() -> None:
    """Choose, fit, evaluate and write the files."""
    import pandas as pd

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent
    parser.add_argument("--rates", type=Path, default=here / "rates.nc")
    parser.add_argument("--pilots", type=Path, default=here / "rate_pilots.jsonl")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    parser.add_argument("--table", type=Path, default=here / "risk_accuracy.csv")
    parser.add_argument("--gains", type=Path, default=here / "risk_gains.csv")
    parser.add_argument("--locked", action="store_true", help="also evaluate on the test set (locked)")
    args = parser.parse_args()
    rates, pilots = read(args.rates, has_locked=args.locked), recorded(args.pilots)
    study = Study.of(rates, pilots)
    of_pilots = table(rates, pilots)
    kept, gains = chosen(study, of_pilots)
    print(gains.to_string(index=False, float_format=lambda value: f"{value:.3f}"))
    print(f"Kept in addition to the table: {', '.join(kept) or 'none'}.")
    found = judged(study, "choose", ("fit",), kept, of_pilots)
    if args.locked:
        found = pd.concat([found, judged(study, "locked", ("fit", "choose"), kept, of_pilots)])
    print(found.to_string(index=False, float_format=lambda value: f"{value:.2f}"))
    for what, file in ((gains, args.gains), (found, args.table)):
        with replacing(file) as partial:
            what.to_csv(partial, index=False, float_format="%.3f")
    is_known = study.is_of("fit", "choose")
    model = wb.risk.fit(
        study.cases.isel(run=is_known),
        {name: edges[is_known] for name, edges in study.edges.items()},
        study.rows["family"].to_numpy()[is_known],
        features=[name for group in kept for name in GROUPS[group]],
    )
    model.save(args.out, overwrite=True)


if __name__ == "__main__":
    main()
