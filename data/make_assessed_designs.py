"""Record measurements before training of designs that train and designs with an injected fault, and their pilots.

    python data/make_assessed_designs.py          # everything; resumable

There are three kinds of designs: *published* designs that trained (`trained_designs`), measured as narrow models with
all blocks, the gains of the full width and the published initialization; healthy small designs (kind "sound"), trained
here; and the same small designs with an injected fault (kind "planted", `planted_designs`), also trained here. Families
are divided into the training set ("fit"), the validation set ("choose") and the test set ("locked") before the first
measurement.

Writes ``data/assessed_designs.nc``, with one row per design, and ``workbench/assessment/shipped/healthy.json``, the
bands of the designs of "fit" and "choose" that train.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import planted_designs as planted
import rate_designs
import torch
import trained_designs as trained
import xarray as xr
from torch import nn

import workbench as wb
from workbench.assessment.criteria import RATE, SLOW_RATE, STRUCTURE, Sizes
from workbench.assessment.measured_model import PROXY_WIDTH, measured_model, planned_task, with_few_patches
from workbench.assessment.plan_trials import rate_pilot, try_plan
from workbench.assessment.structure import ALL, measure_structure
from workbench.assessment.verdict import COLUMNS, HealthyBand, band_of, column_state, evaluate_criteria, verdict_of
from workbench.hardware import read_plan
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.models.batches import take_examples
from workbench.rates.outcomes import REFERENCE_SHARE
from workbench.schema.statuses import BAD_STATES
from workbench.training.training_plan import TrainingPlan

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "workbench" / "assessment" / "shipped" / "healthy.json"
#: Fraction of the families in each set, and the seed of the division.
SHARES, SEED = {"fit": 0.5, "choose": 0.2, "locked": 0.3}, 19
#: Number of models of each design, and of examples in a batch.
N_SEEDS, N_ROWS = 2, 8
#: Smallest improvement of a design of the study of learning rates over the predictor of the frequencies alone, in nat.
LEARNED = 0.4
#: Rate times width for published designs whose rate is unknown: the median of the known ones.
TYPICAL_RATE = 0.6
#: Margins of the bands as fractions of their widths, in the order in which they are tried, and the largest fraction of
#: designs that train which a margin may flag.
MARGINS, MOST_FLAGGED = (0.0, 0.1, 0.25, 0.5, 1.0), 0.05
#: Time limit of a pilot in seconds, longer than any pilot needs, so that results do not depend on the machine.
PILOT_SECONDS = 3600.0
#: Seed of the pilots of designs of the study of learning rates; no run of that study has it.
PILOT_SEED = 7
#: Recorded variables of pilots and trials.
PILOTED = (RATE, SLOW_RATE, "useful_edge", "useful_edge_low", "useful_edge_high", "best_rate", "share_broken")
#: Name of the variable that is 1 if gain and growth are those between blocks.
BETWEEN = "between_blocks"
_ADAMW = {"betas": [0.9, 0.95], "weight_decay": 0.1}


@dataclass(frozen=True)
class Case:
    """A design of the study.

    Attributes:
        name: Name of the design.
        family: Family with which the design is held out.
        kind: "published", "sound" or "planted".
        base: Name of the design into which a fault is injected.
        fault: Name of the fault.
        cell: Cell of a design of the study of learning rates.
        rate: Best rate of a design of that study.
        size: Width and number of blocks.
    """

    name: str
    family: str
    kind: str
    base: str = ""
    fault: str = ""
    cell: str = ""
    rate: float = math.nan
    size: tuple[int, int] = (0, 0)

    @property
    def set_of_family(self) -> str:
        """Set of the case; families that only the study of learning rates has keep their set."""
        return sets().get(self.family) or next(
            name for name, families in rate_designs.FAMILIES.items() if self.family in families
        )


def sets() -> dict[str, str]:
    """Return family -> set."""
    families = trained.FAMILIES
    order = np.random.default_rng(SEED).permutation(len(families))
    ends = np.cumsum([round(share * len(families)) for share in SHARES.values()])
    names = list(SHARES)
    places = np.minimum(np.searchsorted(ends, np.arange(len(families)), side="right"), 2)
    return {families[i]: names[place] for i, place in zip(order, places, strict=True)}


def cases() -> list[Case]:
    """Return all designs; every fault is injected into a third of the base designs."""
    found = [Case(each.name, each.family, "published") for each in trained.TRAINED]
    found += [Case(base.name, base.family, "sound", base.name) for base in planted.BASES]
    found += of_study(xr.load_dataset(ROOT / "data" / "rates.nc"))
    for i, fault in enumerate(planted.FAULTS):
        for j, base in enumerate(planted.BASES):
            if planted.applies(base, fault) and (fault.needs or (i + j) % 3 == 0):
                found.append(Case(f"{base.name}; {fault.name}", base.family, "planted", base.name, fault.name))
    return found


def of_study(rates: xr.Dataset) -> list[Case]:
    """Return the designs of the study of learning rates that learn, at their best rates."""
    found = []
    for design in rate_designs.designs():
        cell = design.run(0, 1).cell
        own = rates.isel(
            run=(rates["cell"].values == cell) & np.isin(rates["stage"].values, ("coarse", "fine", "wider"))
        )
        rate = own["learning_rate"].values.astype(float)
        tried = np.unique(rate)
        last = own["held_out_loss"].values[:, -1]
        loss = np.array([np.mean(last[rate == each]) for each in tried])
        if np.isfinite(loss).any() and np.nanmin(loss) < float(own["trivial_loss"][0]) - LEARNED:
            name = f"{design.architecture.name} ({cell[:6]})"
            best = float(tried[np.nanargmin(loss)])
            size = int(own["d_model"].values[0]), int(own["n_layers"].values[0])
            found.append(Case(name, design.architecture.family, "sound", cell=cell, rate=best, size=size))
    return found


def _structure_of_study(case: Case) -> dict[str, float]:
    design = next(each for each in rate_designs.designs() if each.run(0, 1).cell == case.cell)

    def run(seed: int) -> wb.sweeps.RunSettings:
        return design.run(0, seed)

    task = run(1).make_task()
    batches = [batch for _, batch in zip(range(2), task.stream(0), strict=False)]
    plan = replace(run(1).plan(), learning_rate=case.rate)
    models = (run(seed).make_model() for seed in range(1, N_SEEDS + 1))
    numbers, _ = measure_structure(models, batches[0], batches[1][0], plan)
    return _plain(numbers) | {"width": case.size[0], "depth": case.size[1]}


def structure_of(case: Case) -> dict[str, float]:
    """Measure the structure of a design."""
    if case.cell:
        return _structure_of_study(case)
    if case.kind == "published":
        return _structure_of_published(next(each for each in trained.TRAINED if each.name == case.name))
    base, fault = _parts(case)
    plan = TrainingPlan(**settings_of(base, fault))
    task = wb.tasks.text_bytes(length=planted.LENGTH, batch_size=N_ROWS, seed=1)
    batches = [batch for _, batch in zip(range(2), task.stream(0), strict=False)]
    models = (planted.build(base, fault, seed) for seed in range(1, N_SEEDS + 1))
    numbers, _ = measure_structure(models, batches[0], batches[1][0], plan)
    return _plain(numbers) | {"width": 64, "depth": wb.design(base.options).depth}


def _structure_of_published(each: trained.Trained) -> dict[str, float]:
    design = with_few_patches(trained.design_of(each))
    thin = design.nearest_width(min(PROXY_WIDTH, design.width))
    choices = 10 if design.n_classes else min(256, design.vocabulary or 256)

    def models() -> Iterator[nn.Module]:
        for seed in range(N_SEEDS):
            model = wb.scaling.matched_width(design, thin, seed=seed, vocabulary=choices)
            trained.initialize(model, each, design.width, design.depth, seed)
            yield model.eval()

    task = planned_task(next(models()), read_plan(None), seed=0)
    batches = [batch for _, batch in zip(range(2), task.stream(0), strict=False)]
    first, others = ((take_examples(part, slice(0, N_ROWS)) for part in batch) for batch in batches)
    rate = each.rate or TYPICAL_RATE / design.width
    plan = TrainingPlan(1, rate, optimizer_options=_ADAMW, clip_norm=1.0)
    ratio = design.width / thin
    numbers, _ = measure_structure(models(), tuple(first), next(others), plan, width_ratio=ratio)
    found = _plain(numbers) | {"width": design.width, "depth": design.depth, "rate": each.rate or math.nan}
    return found if each.rate else found | {"function_change": math.nan}  # the rate is unknown


def _plain(numbers: xr.Dataset) -> dict[str, float]:
    found = {str(name): float(value) for name, value in numbers.items()}
    return found | {BETWEEN: float(numbers.attrs.get(BETWEEN, 0))}


def _parts(case: Case) -> tuple[planted.Base, planted.Fault | None]:
    return planted.base_of(case.base), next((each for each in planted.FAULTS if each.name == case.fault), None)


def settings_of(base: planted.Base, fault: planted.Fault | None) -> dict[str, Any]:
    """Return the planned training of a small design."""
    settings = {
        "n_steps": planted.N_STEPS, "warmup": planted.WARMUP, "learning_rate": base.rate, "clip_norm": 1.0,
        "optimizer_options": _ADAMW, "stops_at_divergence": False,
    }  # fmt: skip
    if fault is not None:
        settings |= {"learning_rate": base.rate * fault.rate, **fault.training}
    return settings


def trained_here(case: Case) -> dict[str, Any]:
    """Train a small design and return means of its losses over 20 updates each; NaN once they are not finite."""
    base, fault = _parts(case)
    task = wb.tasks.text_bytes(length=planted.LENGTH, batch_size=planted.BATCH_SIZE, seed=1)
    losses = np.full(planted.N_STEPS, math.nan)
    for record in wb.train(planted.build(base, fault, 1), task, **settings_of(base, fault)):
        losses[record.step] = record.loss
        if not (math.isfinite(record.loss) and math.isfinite(record.grad_norm)):
            break
    smooth = losses.reshape(-1, 20).mean(1)
    return {"losses": np.round(smooth, 4).tolist()}


def piloted(case: Case) -> dict[str, float]:
    """Return the results of the pilot and the trials of `wb.assess` for a design under its plan."""
    if case.kind == "published":
        each = next(each for each in trained.TRAINED if each.name == case.name)
        measured = measured_model(each.options or each.name)
        rate, ratio = _rate(case), measured.design.width / measured.width
        plan = TrainingPlan(10_000, rate, 1_000, optimizer_options=_ADAMW, clip_norm=1.0)
        model, task = measured.model, planned_task(measured.model, read_plan(None), seed=0)
    elif case.cell:
        run = next(each for each in rate_designs.designs() if each.run(0, 1).cell == case.cell).run(0, PILOT_SEED)
        model, task, plan, ratio = run.make_model(), run.make_task(), replace(run.plan(), learning_rate=case.rate), 1.0
    else:
        base, fault = _parts(case)
        model, plan, ratio = planted.build(base, fault, 2), TrainingPlan(**settings_of(base, fault)), 1.0
        task = wb.tasks.text_bytes(length=planted.LENGTH, batch_size=planted.BATCH_SIZE, seed=2)
    pilot = rate_pilot(model, task, plan, width_ratio=ratio, seconds=PILOT_SECONDS)
    trials = try_plan(model, task, replace(plan, learning_rate=plan.learning_rate * ratio))
    found = {name: float(pilot[name]) for name in PILOTED if name != "share_broken"}
    return found | {"share_broken": float(trials["share_broken"]), "reason": pilot.attrs["reason"]}


def has_failed(losses: list[float], sound: list[float]) -> bool:
    """Return whether a training ends above the loss of the healthy design after 4/5 of the updates."""
    last = round(REFERENCE_SHARE * len(sound))
    return not np.mean(losses[-2:]) <= np.mean(sound[last - 1 : last + 1])


@dataclass(frozen=True)
class Judged:
    """A design with all recorded data.

    Attributes:
        case: The design.
        structure: Measurements of its structure.
        pilot: Results of the pilot; None if it was not run.
        fails: Whether its training fails.
    """

    case: Case
    structure: dict[str, Any]
    pilot: dict[str, Any] | None
    fails: bool

    @property
    def is_known_to_train(self) -> bool:
        """Whether bands include it; a fault without harm in a few hundred updates does not prove a healthy design."""
        return self.case.kind != "planted" and "refused" not in self.structure

    @property
    def rate(self) -> float:
        """Peak learning rate of its plan; NaN if not published."""
        return _rate(self.case) or math.nan

    @property
    def is_fit(self) -> bool:
        """Whether its family is in the set that bands are fitted to."""
        return self.case.set_of_family == "fit"

    @property
    def tree(self) -> xr.DataTree:
        """The measured parts of its assessment, as a tree."""
        numbers = {name: value for name, value in self.structure.items() if isinstance(value, float)}
        structure = xr.Dataset({name: ((), value) for name, value in numbers.items()})
        parts = {"/structure": structure.assign_attrs({BETWEEN: int(numbers[BETWEEN])})}
        if self.pilot is not None:
            about = {"unseen": self.pilot["reason"]} if self.pilot["reason"] else {}
            parts["/pilot"] = xr.Dataset({name: ((), self.pilot[name], about) for name in (RATE, SLOW_RATE)})
            parts["/trials"] = xr.Dataset({"share_broken": ((), self.pilot["share_broken"])})
        tree = xr.DataTree.from_dict(parts)
        tree.attrs = self.sizes.attributes
        return tree

    @property
    def sizes(self) -> Sizes:
        """Sizes of the design and of its model, which is narrow for published designs."""
        width, depth = int(self.structure["width"]), int(self.structure["depth"])
        return Sizes(width, depth, min(width, PROXY_WIDTH), depth, 0, width > PROXY_WIDTH)


def bands_of(rows: list[Judged], margin: float) -> dict[str, HealthyBand]:
    """Return the bands of the designs that train."""
    found = {}
    for criterion in (criterion for criterion in STRUCTURE if criterion.band is None):
        known = (row for row in rows if row.is_known_to_train)
        of = [row for row in known if math.isfinite(row.structure.get(criterion.name, math.nan))]
        band = band_of([row.structure[criterion.name] for row in of], scale=criterion.scale, margin=margin)
        if of:
            ends = {"width": [row.sizes.width for row in of], "blocks": [row.sizes.blocks for row in of]}
            sizes = {name: (min(sizes), max(sizes)) for name, sizes in ends.items()}
            found[criterion.name] = replace(band, sizes=sizes)
    return found


def states_of(row: Judged, bands: dict[str, HealthyBand]) -> dict[str, str]:
    """Return the state of each column, the verdict, and the criteria that are at risk or failing."""
    if "refused" in row.structure:
        return {"structure": "not measured", "pilot": "not measured", "verdict": "cannot say", "bad": ""}
    criteria, _ = evaluate_criteria(row.tree, bands)
    bad = [str(name) for name, state in zip(criteria["criterion"].values, criteria["state"].values, strict=True)
           if state in BAD_STATES]  # fmt: skip
    found = {column: column_state(criteria, column).value for column in COLUMNS}
    return {**found, "verdict": verdict_of(criteria).value, "bad": ", ".join(bad)}


def recorded(path: Path, make: Callable[[Case], dict[str, Any]], wanted: list[Case]) -> dict[str, dict[str, Any]]:
    """Return results by name of the case; results that are in the file are not computed again."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    done = {line["name"]: line for line in lines}
    missing = [case for case in wanted if case.name not in done]
    with ProcessPoolExecutor(2, initializer=_one_thread) as pool, path.open("a") as file:
        waiting = {pool.submit(_timed, make, case): case for case in missing}
        for future in as_completed(waiting):
            line = {"name": waiting[future].name, **future.result()}
            done[line["name"]] = line
            file.write(json.dumps(line) + "\n")
            file.flush()
    return {case.name: done[case.name] for case in wanted}


def _timed(make: Callable[[Case], dict[str, Any]], case: Case) -> dict[str, Any]:
    start = time.monotonic()
    try:
        found = make(case)
    except wb.WorkbenchError as refusal:
        found = {"refused": str(refusal)}
    return found | {"seconds": round(time.monotonic() - start, 1)}


def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # subnormal numbers, in designs with tiny weights, are a hundred times slower
    warnings.simplefilter("ignore")


def settings_state(row: Judged, rates: tuple[float, float]) -> str:
    """Return the state from settings alone: whether rate times width lies within the range of published designs."""
    rate = row.rate * row.structure.get("width", math.nan)
    is_odd = rate > rates[1] or rate < rates[0]
    return "at risk" if is_odd else "healthy"


def table_of(rows: list[Judged], bands: dict[str, HealthyBand], losses: dict[str, dict[str, Any]]) -> xr.Dataset:
    """Return all recorded data with the conclusions."""
    known = [row.rate * row.structure["width"] for row in rows if row.case.kind == "published" and row.is_fit]
    rates = float(np.nanmin(known)), float(np.nanmax(known))
    sources = {each.name: each.source for each in trained.TRAINED}
    n_windows = planted.N_STEPS // 20
    columns: dict[str, list[Any]] = {}
    for row in rows:
        line = {
            "design": row.case.name, "family": row.case.family, "set": row.case.set_of_family, "kind": row.case.kind,
            "base": row.case.base, "fault": row.case.fault, "source": sources.get(row.case.name, ""),
            "fails": row.fails, "learning_rate": row.rate, "reason": (row.pilot or {}).get("reason", ""),
            "refused": row.structure.get("refused", ""), "settings_state": settings_state(row, rates),
            **{name: row.structure.get(name, math.nan) for name in ("width", "depth", BETWEEN, *ALL)},
            **{f"{name}_error": row.structure.get(f"{name}_error", math.nan) for name in ALL},
            **{name: (row.pilot or {}).get(name, math.nan) for name in PILOTED},
            **states_of(row, bands),
        }  # fmt: skip
        for name, value in line.items():
            columns.setdefault(name, []).append(value)
    names = columns.pop("design")
    table = xr.Dataset({name: ("design", np.array(values)) for name, values in columns.items()}, {"design": names})
    nothing = [math.nan] * n_windows
    table["training_loss"] = (("design", "window"), [losses.get(name, {}).get("losses", nothing) for name in names])
    return table


def flagged(rows: list[Judged], bands: dict[str, HealthyBand]) -> float:
    """Return the fraction of designs known to train whose structure is flagged."""
    return float(np.mean([states_of(row, bands)["structure"] in BAD_STATES for row in rows if row.is_known_to_train]))


def margin_of(rows: list[Judged]) -> float:
    """Return the smallest margin with which bands of the other families flag at most 5 % of designs."""
    families = sorted({row.case.family for row in rows})
    for margin in MARGINS:
        n_flagged = [
            flagged([row for row in rows if row.case.family == family],
                    bands_of([row for row in rows if row.case.family != family], margin))
            * sum(row.is_known_to_train for row in rows if row.case.family == family)
            for family in families
        ]  # fmt: skip
        share = np.nansum(n_flagged) / sum(row.is_known_to_train for row in rows)
        print(f"margin {margin}: {share:.3f} of the designs that train are flagged with their family held out")
        if share <= MOST_FLAGGED:
            break
    return margin


def main() -> None:
    """Measure, train, fit, evaluate and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "data" / "parts" / "assessed_designs")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    every = cases()
    small = [case for case in every if case.kind != "published" and not case.cell]
    structure = recorded(given.folder / "structure.jsonl", structure_of, every)
    losses = recorded(given.folder / "losses.jsonl", trained_here, small)
    pilots = recorded(given.folder / "pilots.jsonl", piloted, [case for case in every if _rate(case)])
    rows = [
        Judged(
            case, structure[case.name], pilots.get(case.name),
            case.kind == "planted" and has_failed(losses[case.name]["losses"], losses[case.base]["losses"]),
        )
        for case in every
    ]  # fmt: skip
    open_rows = [row for row in rows if row.case.set_of_family != "locked" and "refused" not in row.structure]
    margin = margin_of(open_rows)
    bands = bands_of(open_rows, margin)
    shipped = {
        "about": "made by data/make_assessed_designs.py", "margin": margin,
        "n_healthy": sum(row.is_known_to_train for row in open_rows),
        "bands": {name: asdict(band) for name, band in bands.items()},
    }  # fmt: skip
    with replacing(SHIPPED) as path:
        path.write_text(json.dumps(shipped, indent=1) + "\n")
    table = table_of(rows, bands, losses)
    seconds = sum(each.get("seconds", 0.0) for part in (structure, losses, pilots) for each in part.values())
    table.attrs = {
        "call": "python data/make_assessed_designs.py", "seed": SEED, "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"), "core_minutes": round(seconds / 60, 1),
    }  # fmt: skip
    with replacing(ROOT / "data" / "assessed_designs.nc") as path:
        table.to_netcdf(path)


def _rate(case: Case) -> float | None:
    """Return the peak learning rate of a design's plan; None if not published."""
    if case.cell:
        return case.rate
    if case.kind == "published":
        each = next(each for each in trained.TRAINED if each.name == case.name)
        return each.rate or TYPICAL_RATE / trained.design_of(each).width
    base, fault = _parts(case)
    return float(settings_of(base, fault)["learning_rate"])


if __name__ == "__main__":
    main()
