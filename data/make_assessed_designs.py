"""Record what assessments rest on: what healthy fresh models show, and how trials of a plan foretell its outcome.

    python data/make_assessed_designs.py
    python data/make_assessed_designs.py --again    # concludes again from what was recorded; no trial, no training

Every design (a model and a plan: one cell of the recorded sweep at one rate) is looked at as `wb.assess` looks at it
before training: spectra and first gradient as the sweep recorded them, information flow, and the first 60 updates tried
twice on batches that the recorded runs never saw. Writes

- ``data/assessed_designs.nc``: one row a design, with what its recorded runs did,
- ``workbench/assessment/shipped/healthy.json``: the healthy bands, with the sizes of the models behind each, from the
  studies ``fit``, ``norms`` and ``scales`` and from the deep controls below. Nothing in it comes from ``held out``.

Deep controls are healthy models of 8 to 24 blocks, deeper than any of the sweep, trained for 120 updates to know it.
Interrupted, it goes on where it stopped. Concluding again looks at the fresh models once more, takes the trials from
``data/assessed_designs.nc``, keeps the bands if they are what these models show, and judges every design anew.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

import workbench as wb
from workbench.assessment.assess import initialization
from workbench.assessment.failure_modes import CRITERIA, Criterion, CriterionReading, HealthyBand, band_of, judged
from workbench.assessment.failure_modes.size_ranges import Sizes
from workbench.assessment.flow_numbers import flow_numbers
from workbench.assessment.pilot_run import N_TRIALS, N_UPDATES, pilot_run
from workbench.assessment.plan_risk import plan_risk
from workbench.assessment.verdict import verdict_of
from workbench.io.atomic import replacing
from workbench.koopman.spectra import RankWarning
from workbench.models.model_sizes import model_sizes

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "workbench" / "assessment" / "shipped" / "healthy.json"
#: A design is healthy if none of its runs diverged at a rate of at least this.
USEFUL_RATE = {"AdamW": 1e-3, "RMSprop": 1e-4, "SGD": 1e-2}
#: Of a healthy run in the end, over that of a guess.
WORST_LOSS = 1.02
WORST = ("attention_entropy_share_min", "attention_logit_max", "routing_change", "max_violation")
DEEP = {
    "Pre-LN": {"norm": "pre_ln"},
    "Post-LN": {"norm": "post_ln"},
    "RMSNorm": {"norm": "rms_norm", "position": "rotary", "mlp": "swiglu", "has_bias": False},
    "DeepNorm, DeepNet's": {"norm": "deep_norm_post"},
    "MoE top-2": {"family": "moe", "norm": "pre_ln", "n_experts": 4, "top_k": 2},
    "Mamba": {"family": "mamba"},
}
DEEP_DEPTHS, DEEP_RATE, DEEP_SEED = (8, 16, 24), 1e-3, 301
DEEP_TASK = {"name": "synthetic_lm", "length": 16, "vocab_size": 64, "batch_size": 16}
DEEP_SIZE = {"d_model": 64, "vocab_size": 64, "max_length": 16}


def designs() -> xr.Dataset:
    """One row a design: the first of its recorded runs, and the share that diverged."""
    sweep = wb.samples.divergence_sweep()
    keys = [
        f"{cell} {rate:.6g}" for cell, rate in zip(sweep["cell"].values, sweep["learning_rate"].values, strict=True)
    ]
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    n = np.bincount(index)
    rows = sweep.isel(run=first).rename(run="design")
    return rows.assign(
        share_diverged=("design", np.bincount(index, weights=sweep["has_diverged"].values) / n),
        n_runs=("design", n),
    )


def to_try(rows: xr.Dataset) -> list[int]:
    """Which designs are tried: those recorded; of ``held out`` all, of the others some and those with routers."""
    recorded = set(wb.samples.assessed_designs()["settings"].values.astype(str).tolist())
    return [i for i, settings in enumerate(rows["settings"].values.astype(str)) if settings in recorded]


def tried(settings: str) -> dict[str, Any]:
    """What the trials of one design showed."""
    run = wb.sweeps.RunSettings.from_dict(json.loads(settings))
    found = pilot_run(run.make_model(), run.make_task(), run.plan())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a model without routers
        worst = {name: float((np.nanmin if name.endswith("min") else np.nanmax)(found[name].values)) for name in WORST}
    return {"share_broken": float(found["has_diverged"].mean())} | worst


def deep_controls() -> Iterator[wb.sweeps.RunSettings]:
    """Deep models that train."""
    for name, model in DEEP.items():
        for depth in DEEP_DEPTHS:
            yield wb.sweeps.RunSettings(
                architecture=name,
                model={**model, **DEEP_SIZE, "n_layers": depth},
                task=DEEP_TASK,
                training={
                    "n_steps": 120,
                    "learning_rate": DEEP_RATE,
                    "warmup": 20,
                    "optimizer_options": {"fused": True},
                },
                seed=DEEP_SEED,
                study="deep controls",
                n_snapshots=512,
            )


def try_all(rows: xr.Dataset, folder: Path) -> dict[int, dict[str, Any]]:
    """Trials of every chosen design, two at a time; those in the folder already are not made again."""
    from concurrent.futures import ProcessPoolExecutor, as_completed

    path = folder / "tried.jsonl"
    done = {line["design"]: line for line in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    chosen = to_try(rows)
    settings = rows["settings"].values
    with ProcessPoolExecutor(2, initializer=_one_thread) as pool, path.open("a") as file:
        waiting = {pool.submit(tried, str(settings[i])): i for i in chosen if i not in done}
        for future in as_completed(waiting):
            line = {"design": waiting[future], **future.result()}
            done[line["design"]] = line
            file.write(json.dumps(line) + "\n")
            file.flush()
    return {i: done[i] for i in chosen}


def numbers_of(
    row: xr.Dataset, run: wb.sweeps.RunSettings, trials: Mapping[str, Any] | None, flows: Flows
) -> dict[str, Any]:
    """What `wb.assess` judges of one design, by criterion.

    Args:
        row: One run of a sweep, dim ``run`` of one.
        run: Its settings.
        trials: From `tried`; None: it was not tried.
        flows: Of all models.
    """
    tree = parts_of(row, run, trials, flows)
    found = {}
    for criterion in CRITERIA:
        reading = criterion.reads(tree)
        if isinstance(reading, CriterionReading) and criterion.name not in _FROM_RULES:
            found[criterion.name] = reading.value
    return found


_FROM_RULES = {criterion.name for criterion in CRITERIA if criterion.band is not None}


class Flows:
    """Information flow of fresh models in numbers, each measured once and kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        self._known = {line.pop("key"): line for line in lines}

    def of(self, run: wb.sweeps.RunSettings) -> xr.Dataset:
        """As `wb.assess` has it of a model that is measured whole."""
        key = f"{run.configuration} {run.seed}"
        if key not in self._known:
            inputs, targets = next(iter(run.make_task().stream(0)))
            flow = wb.flow.measure(run.make_model(), inputs[:8], targets=targets[:8], jacobian=False)
            self._known[key] = {name: float(value) for name, value in flow_numbers([flow]).items()}
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, **self._known[key]}) + "\n")
        return xr.Dataset(self._known[key])


def parts_of(
    row: xr.Dataset, run: wb.sweeps.RunSettings, trials: Mapping[str, Any] | None, flows: Flows
) -> xr.DataTree:
    """The measured parts of an assessment of a design that is small enough to be measured whole."""
    parts = {
        "/spectra": row.isel(run=0, drop=True)[["spectral_radius", "energy_gain"]],
        "/flow_numbers": flows.of(run),
        "/initialization": initialization(row, run.make_task()),
    }
    if trials is not None:
        parts["/rehearsal"] = xr.Dataset({name: trials[name] for name in ("share_broken", *WORST)})
        parts["/risk"] = plan_risk(row)
    tree = xr.DataTree.from_dict(parts)
    tree.attrs = sizes_of(row, run).attributes
    return tree


def sizes_of(row: xr.Dataset, run: wb.sweeps.RunSettings) -> Sizes:
    """Of a design that is measured whole."""
    width, blocks = int(row["d_model"][0]), int(row["n_layers"][0])
    experts = model_sizes(run.model).n_experts if run.model.get("family") == "moe" else 0
    return Sizes(width, blocks, width, blocks, experts or 0)


def is_useful(row: xr.Dataset, run: wb.sweeps.RunSettings) -> bool:
    """Whether a design is healthy at a rate that anyone would train at, and no worse than a guess in the end."""
    rate, optimizer = float(row["learning_rate"][0]), str(row["optimizer"].values[0])
    task = run.make_task()
    guess = np.log(getattr(task, "vocab_size", None) or task.n_classes)
    is_stable = float(row["share_diverged"][0]) == 0 and rate >= USEFUL_RATE[optimizer]
    return is_stable and float(row["final_loss"][0]) <= WORST_LOSS * guess


#: Values of healthy models by architecture and criterion, one for each configuration, and the sizes of each model.
Healthy = dict[str, dict[str, list[tuple[float, Sizes]]]]


def healthy_numbers(
    rows: xr.Dataset, trials: Mapping[int, Mapping[str, Any]], deep: Iterable[xr.Dataset], flows: Flows
) -> tuple[Healthy, int]:
    """What healthy models show, and how many there are."""
    found: Healthy = {}
    seen, n = set(), 0
    for i in range(rows.sizes["design"]):
        row = rows.isel(design=[i]).rename(design="run")
        is_new = str(row["configuration"].values[0]) not in seen
        run = wb.sweeps.RunSettings.from_dict(json.loads(str(row["settings"].values[0])))
        if run.study == "held out" or not is_useful(row, run) or not (is_new or i in trials):
            continue
        values = numbers_of(row, run, trials.get(i), flows)
        keep = set(values) if is_new else {name for name in values if name.endswith("_rehearsed")}
        seen.add(run.configuration)
        n += is_new
        for name in keep:
            own = (values[name], sizes_of(row, run))
            found.setdefault(run.architecture, {}).setdefault(name, []).append(own)
    for row in deep:
        run = wb.sweeps.RunSettings.from_dict(json.loads(str(row["settings"].values[0])))
        if not bool(row["has_diverged"][0]):
            n += 1
            for name, value in numbers_of(row, run, None, flows).items():
                own = (value, sizes_of(row, run))
                found.setdefault(run.architecture, {}).setdefault(name, []).append(own)
    return found, n


def bands(found: Healthy, *, without: str = "", margin: float | None = None) -> dict[str, HealthyBand]:
    """The band of each criterion, from all architectures but one."""
    result = {}
    for criterion in CRITERIA:
        if criterion.name in _FROM_RULES:
            continue
        of = (
            criterion.name.removesuffix("_extrapolated")
            if criterion.variable.endswith("_extrapolated")
            else criterion.name
        )
        values = [v for name, numbers in found.items() if name != without for v in numbers.get(of, ())]
        options = {} if margin is None else {"margin": margin}
        band = band_of([value for value, _ in values], scale=criterion.scale, **options)
        result[criterion.name] = replace(band, sizes=ranges_of(criterion, values))
    return result


def ranges_of(criterion: Criterion, values: Iterable[tuple[float, Sizes]]) -> dict[str, tuple[float, float]]:
    """The smallest and the largest of the models whose values are behind a band."""
    # As `band_of` leaves values out.
    sizes = [own for value, own in values if np.isfinite(value) and (value > 0 or criterion.scale != "log")]
    names = ("width", "blocks", *(["experts"] if criterion.failure_mode == "routing_oscillation" else []))
    if not sizes:
        return {}
    ends = {name: [getattr(own, name) for own in sizes] for name in names}
    return {name: (min(of), max(of)) for name, of in ends.items()}


def false_alarms(found: Healthy, margin: float) -> float:
    """Share of healthy values outside of the bands that all other architectures make."""
    outside = total = 0
    for name, numbers in found.items():
        others = bands(found, without=name, margin=margin)
        for criterion, values in numbers.items():
            band = others[criterion]
            finite = [value for value, _ in values if np.isfinite(value)]
            outside += sum(not band.low <= value <= band.high for value in finite)
            total += len(finite)
    return outside / total


def judged_designs(rows: xr.Dataset, trials: Mapping[int, Mapping[str, Any]], flows: Flows) -> xr.Dataset:
    """The verdict on every design that was tried, beside what its recorded runs did."""
    lines = []
    for i in sorted(trials):
        row = rows.isel(design=[i]).rename(design="run")
        run = wb.sweeps.RunSettings.from_dict(json.loads(str(row["settings"].values[0])))
        tree = parts_of(row, run, trials[i], flows)
        criteria, modes = judged(tree)
        bad = [
            str(m)
            for m, s in zip(modes["failure_mode"].values, modes["state"].values, strict=True)
            if s in ("at risk", "failing")
        ]
        lines.append(
            {
                "study": run.study, "architecture": run.architecture, "cell": run.cell,
                "settings": str(row["settings"].values[0]), "learning_rate": float(row["learning_rate"][0]),
                "n_runs": int(row["n_runs"][0]), "share_diverged": float(row["share_diverged"][0]),
                "failure": float(tree["risk"]["failure"][0]), "explosion": float(tree["risk"]["explosion"][0]),
                **{name: trials[i][name] for name in ("share_broken", *WORST)},
                "verdict": verdict_of(criteria, modes), "modes": ", ".join(bad),
            }
        )  # fmt: skip
    return xr.Dataset({name: ("design", np.array([line[name] for line in lines])) for name in lines[0]})


def deep_rows(folder: Path) -> list[xr.Dataset]:
    """The deep controls, trained."""
    sweep = wb.sweeps.run(list(deep_controls()), folder / "deep.zarr", n_workers=2, progress=False)
    return [sweep.isel(run=[i]) for i in range(sweep.sizes["run"])]


def deep_rows_again() -> Iterator[xr.Dataset]:
    """The deep controls as they began; all of them were healthy when they were trained."""
    for run in deep_controls():
        settings = run.plan().as_dict()
        row = wb.sweeps.measure_case(
            run.make_model(), run.make_task(), architecture=run.architecture, n_snapshots=run.n_snapshots,
            runs_pilot=False, **settings,
        )  # fmt: skip
        yield row.assign(has_diverged=("run", [False])).assign_coords(settings=("run", [json.dumps(run.as_dict())]))


def recorded_trials(rows: xr.Dataset) -> dict[int, dict[str, Any]]:
    """The trials of ``data/assessed_designs.nc``, by design."""
    recorded = wb.samples.assessed_designs()
    names = ("share_broken", *WORST)
    by_settings = {
        str(settings): {name: float(recorded[name].values[i]) for name in names}
        for i, settings in enumerate(recorded["settings"].values)
    }
    settings = rows["settings"].values
    return {i: by_settings[str(settings[i])] for i in to_try(rows)}


def is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two bands as mappings have the same limits and models."""
    limits = ("low", "high", "failing_low", "failing_high", "n_reference")
    return all(np.isclose(one[name], other[name], rtol=1e-3) for name in limits)


def _one_thread() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RankWarning)


def main() -> None:
    """Try, fit, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "data" / "parts" / "assessed_designs", help="of the parts"
    )
    parser.add_argument("--again", action="store_true", help="conclude again from what was recorded")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    _one_thread()
    rows, flows = designs(), Flows(given.folder / "flows.jsonl")
    trials = recorded_trials(rows) if given.again else try_all(rows, given.folder)
    found, n_healthy = healthy_numbers(
        rows, trials, deep_rows_again() if given.again else deep_rows(given.folder), flows
    )
    own = {name: asdict(band) for name, band in bands(found).items() if band.n_reference}
    if given.again:
        shipped = json.loads(SHIPPED.read_text())
        changed = [name for name, band in shipped["bands"].items() if not is_same(band, own[name])]
        if changed or n_healthy != shipped["n_healthy"]:
            raise SystemExit(f"Fresh models show other numbers than the recorded ones: {', '.join(changed)}.")
        for name, band in shipped["bands"].items():
            band["sizes"] = own[name]["sizes"]
    else:
        shipped = {
            "about": "made by data/make_assessed_designs.py",
            "n_healthy": n_healthy,
            "bands": own,
            "false_alarms": {f"{margin:g}": false_alarms(found, margin) for margin in (0.0, 0.25, 0.5)},
        }
    with replacing(SHIPPED) as path:
        path.write_text(json.dumps(shipped, indent=1) + "\n")
    table = judged_designs(rows, trials, flows)
    table.attrs = {
        "call": "python data/make_assessed_designs.py" + " --again" * given.again,
        "n_updates": N_UPDATES,
        "n_trials": N_TRIALS,
        "versions": wb.koopman.spectra.versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "duration_of_last_call": time.monotonic() - start,
    }
    with replacing(ROOT / "data" / "assessed_designs.nc") as path:
        table.to_netcdf(
            path, encoding={name: {"zlib": True} for name in table.data_vars if table[name].dtype.kind in "fi"}
        )


if __name__ == "__main__":
    main()
