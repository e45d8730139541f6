"""Record the practice cases of `wb.course.patient`: failed and healthy runs of the held-out families, and the board.

    python data/make_patients.py --only record        # complete records of all runs; resumable
    python data/make_patients.py --only costs         # compute time of the measurements
    python data/make_patients.py --only pack          # data/patients.nc
    python data/make_patients.py --only agreement     # diagnoses of the complete and of the packed records
    python data/make_patients.py --only board         # scores of wb.diagnose and of the simple baselines; resumable

All runs are of the test set ("locked") of the study of the diagnosis, whose families the rules of `wb.diagnose` have
never seen. They are the usable runs of that study and new ones, with other settings and faults drawn from the kinds
that often do harm, labeled by the same rules against their own controls.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import packing
import xarray as xr
from failure_cases import (
    N_BASES,
    NO_PAIRS,
    PLANTS,
    STRONG_PLANTS,
    answer,
    cases,
    is_healthy,
    is_refused,
    singles,
    verdict,
)
from make_failures import CADENCE, in_processes, record
from packing import BITS, DEFAULT_BITS
from recorded_players import RECORDED

import workbench as wb
from workbench.course import cures, n_patients, patient
from workbench.course.case_files import RESULT, Truth, configuration, opened, opened_case, truth_of, whole_run
from workbench.course.cures import recovered_fraction
from workbench.course.failure_runs import N_STEPS, SEED, SETUPS, Case, Plant, build
from workbench.course.patients import MEASUREMENTS
from workbench.course.scoring import points_for
from workbench.diagnosis import CAUSES
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.models.losses import prediction_of, token_loss

OUT = Path(__file__).parent
FILE = OUT / "patients.nc"
#: Kind of a fault -> number of draws for each setup. Only kinds that do harm in about half of the runs of the study, so
#: that recording each run at once is faster than finding the harmful ones first.
DRAWS = {
    "rate": 3, "jump": 1, "restarts": 1, "ends early": 1, "few rows": 1, "batch size": 1, "eps": 1, "coarse weights": 1,
    "wrong sign": 2, "labels": 1, "tokens": 1,
}  # fmt: skip
#: The same for kinds whose stronger doses of the study are drawn.
STRONG_DRAWS = {"large init": 2, "router rate": 1, "router init": 2}
#: Number of new settings, and of pairs of harmful faults, for each setup.
N_NEW, N_PAIRS = 4, 3
#: Smallest lost fraction of a clear failure, and the lost fraction below which a failure is mild.
CLEAR, MILD = 0.5, 0.25
#: Kind of a run -> levels to which such runs belong; a level that is named twice gets twice as many.
LEVELS = {"clear": (1, 1, 3), "moderate": (2, 2, 3), "mild": (4, 5), "two causes": (5,), "healthy": (3, 4, 5)}
#: Parts that `wb.diagnose` does not read, which are not measured.
UNREAD = dict.fromkeys(("precision", "reduction", "update"))


def drawn(table: tuple, draws: dict[str, int]) -> tuple:
    """Return rows of a table of faults with other numbers of draws; each kind once."""
    rows = {row[1]: (*row[:-1], draws[row[1]]) for row in reversed(table) if row[1] in draws}
    return tuple(rows[kind] for kind in draws if kind in rows)


def held_out_setups() -> dict[str, int]:
    """Return setup -> its number, for all setups of the test set."""
    return {name: number for number, (name, setup) in enumerate(SETUPS.items()) if setup.set == "locked"}


def new_controls() -> list[Case]:
    """Return the new runs without a fault."""
    return [Case(name, N_BASES + base) for name in held_out_setups() for base in range(N_NEW)]


def new_singles(results: dict[Case, dict[str, Any]]) -> list[Case]:
    """Return the new runs with one fault whose control is healthy.

    Args:
        results: Case -> result, for the new controls.
    """
    table = (*drawn(PLANTS, DRAWS), *drawn(STRONG_PLANTS, STRONG_DRAWS))
    found: list[list[Case]] = []
    for name, number in held_out_setups().items():
        draw = np.random.default_rng([SEED, 3000 + number])
        of_setup = dict.fromkeys(singles(name, table, draw, first_base=N_BASES, n_bases=N_NEW))
        found.append([case for case in of_setup if not is_refused(case) and is_healthy(results[case.control], results)])
    # In turn from each setup, so that they are balanced also if recording is stopped early.
    return [case for cases_in_turn in zip_longest(*found) for case in cases_in_turn if case is not None]


def new_pairs(results: dict[Case, dict[str, Any]]) -> list[Case]:
    """Return runs with two faults that do harm alone, and those with the second fault and the settings of the first.

    Args:
        results: Case -> result, for the new controls and runs with one fault.
    """
    found: list[Case] = []
    harmful = set(usable(results)) & set(new_singles(results))
    for name, number in held_out_setups().items():
        draw = np.random.default_rng([SEED, 4000 + number])
        able = [case for case in results if case in harmful and case.setup == name]
        able = [case for case in able if case.plants[0].kind not in NO_PAIRS]
        for _ in range(N_PAIRS):
            one = able[int(draw.integers(len(able)))]
            others = [case for case in able if case.causes != one.causes]
            other = others[int(draw.integers(len(others)))]
            found += [Case(name, one.base, other.plants), Case(name, one.base, (*one.plants, *other.plants))]
    return [*dict.fromkeys(found)]


def case_of(result: dict[str, Any]) -> Case:
    """Return the case of a recorded result."""
    return Case(result["setup"], result["base"], tuple(Plant(**plant) for plant in result["plants"]))


def results_in(folder: Path) -> dict[Case, dict[str, Any]]:
    """Return the recorded results of a folder by case."""
    found = [json.loads(place.read_text()) for place in sorted(folder.glob("*.json"))]
    return {case_of(result): result for result in found}


def usable(results: dict[Case, dict[str, Any]]) -> list[Case]:
    """Return all failed runs with known causes whose control is healthy, and all healthy controls."""
    return [
        case
        for case in results
        if case.control in results and is_healthy(results[case.control], results) and answer(case, results)[0]
    ]


def known() -> list[Case]:
    """Return the usable runs of the test set of the study of the diagnosis."""
    names = set(wb.samples.open("failures")["name"].values.tolist())
    return [case for case in cases("locked") if case.name in names]


def record_all(work: Path, processes: int) -> None:
    """Record the usable runs of the study and the new ones, controls first."""
    do, new = partial(record, cadence=CADENCE | UNREAD), work / "new"
    in_processes(do, known(), work / "known", processes)
    in_processes(do, new_controls(), new, processes)
    in_processes(do, new_singles(results_in(new)), new, processes)
    in_processes(do, new_pairs(results_in(new)), new, processes)


# The file


#: Number of steps of a training whose time is measured.
TIMED_STEPS = 60
#: Measurements that take time: "batches" needs a recorder, the others are parts. All others are by-products of training
#: and cost 1.
TIMED = ("batches", "optimizer", "activations", "attention", "router", "curvature", "spectra")


def seconds_of(name: str, measured: str) -> float:
    """Return the processor time of a training of a setup in which one part is measured, in seconds.

    Args:
        name: Name of the setup.
        measured: A part, "batches" for a recorder without parts, or "" for no recorder.
    """
    made = build(Case(name, N_BASES))
    inputs, targets = replace(made.task, batch_size=8).batch(0)
    options: dict[str, Any] = {"n_steps": TIMED_STEPS}
    if measured == "spectra":  # three spectra in 200 steps
        options |= {"spectra_every": 100, "profile_options": {"n_snapshots": 256, "n_workers": 1}, "n_steps": N_STEPS}
    elif measured:
        own = {measured: CADENCE[measured]} if measured in CADENCE else {}
        options["recorder"] = wb.Recorder(
            every=dict.fromkeys(wb.Recorder().every) | own, budget=None, n_probe_tokens=64,
            loss_of=lambda model, _: token_loss(prediction_of(model(inputs)), targets),
        )  # fmt: skip
    begun = time.process_time()
    for _ in wb.train(made.model, made.task, **made.plan | options):
        pass
    return (time.process_time() - begun) * N_STEPS / options["n_steps"]


def time_parts(work: Path) -> None:
    """Measure the time of each part for every held-out setup, and write it to a JSON file, unless it exists."""
    place = work / "costs.json"
    if place.exists():
        return
    found: dict[str, dict[str, float]] = {}
    for name in held_out_setups():
        seconds_of(name, "")  # loads everything that is loaded once
        found[name] = {part: seconds_of(name, part) for part in ("", *TIMED)}
        print(name, found[name], flush=True)
    place.write_text(json.dumps(found))


def costs_from(seconds: dict[str, dict[str, float]]) -> dict[str, int]:
    """Return the cost of each measurement in percent of the time of the training, at least 1: the median over setups.

    Args:
        seconds: StudySetup -> part -> time, from `time_parts`.
    """
    costs = dict.fromkeys(MEASUREMENTS, 1) | {"cure": 100}
    for part in TIMED:
        base = "" if part in ("batches", "spectra") else "batches"  # the others need a recorder
        setups = [SETUPS[name] for name in seconds]
        has_part = {"router": [s.has_routers for s in setups], "attention": [s.make != "mamba" for s in setups]}
        able = [of for of, has in zip(seconds.values(), has_part.get(part, [True] * len(setups)), strict=True) if has]
        shares = [100 * (of[part] - of[base]) / of[""] for of in able]
        costs[part] = max(1, round(float(np.median(shares))))
    return costs


@dataclass(frozen=True)
class Labeled:
    """A recorded run with its label.

    Attributes:
        case: The run.
        place: Its record.
        causes, how: Label.
        result, control: Results of the run and of its control.
        is_new: Whether it was not part of the study of the diagnosis.
    """

    case: Case
    place: Path
    causes: tuple[str, ...]
    how: str
    result: dict[str, Any]
    control: dict[str, Any]
    is_new: bool

    @property
    def lost(self) -> float:
        """Fraction of what the control learned that the run lacks at the end; infinite if it diverged."""
        learned = self.control["start_loss"] - self.control["final_loss"]
        behind = (self.result["final_loss"] - self.control["final_loss"]) / learned
        return math.inf if self.result["diverged"] else behind

    @property
    def kind(self) -> str:
        """Kind of the run, which determines its level."""
        if self.causes == ("nothing",):
            return "healthy"
        if len(self.causes) > 1:
            return "two causes"
        if self.lost >= CLEAR:
            return "clear"
        return "mild" if self.how == "learned less" and self.lost < MILD else "moderate"


def labeled(work: Path) -> list[Labeled]:
    """Return all usable recorded runs: those of the study with its labels, and the new ones."""
    study = wb.samples.open("failures").set_index(run="name")
    of_study, new = results_in(work / "known"), results_in(work / "new")
    found = []
    for case, result in of_study.items():
        row = study.sel(run=case.name)
        causes = tuple(map(str, row["ranked_cause"].values[row["is_cause"].values]))
        how, control = str(row["how"].values), of_study[case.control]
        if case.plants and verdict(result, control) != how:
            print(f"{case.name}: now {verdict(result, control)!r}, in the study {how!r}", flush=True)
            continue
        found.append(Labeled(case, work / "known" / f"{case.name}.nc", causes, how, result, control, False))
    for case in usable(new):
        causes, how = answer(case, new)
        place = work / "new" / f"{case.name}.nc"
        found.append(Labeled(case, place, causes, how, new[case], new[case.control], True))
    return found


def with_levels(runs: list[Labeled]) -> list[tuple[int, int, Labeled]]:
    """Return level, place within the level, and run, in a random order that depends on nothing but the names.

    Runs of a kind that belongs to several levels are divided among them in turn.
    """
    draw = np.random.default_rng(SEED)
    runs = sorted(runs, key=lambda run: run.case.name)
    runs = [runs[i] for i in draw.permutation(len(runs))]
    n_seen: dict[str, int] = dict.fromkeys(LEVELS, 0)
    n_in = dict.fromkeys(range(1, 6), 0)
    found = []
    for run in runs:
        levels = LEVELS[run.kind]
        level = levels[n_seen[run.kind] % len(levels)]
        found.append((level, n_in[level], run))
        n_seen[run.kind] += 1
        n_in[level] += 1
    return found


def settings_of(run: Labeled, configuration: str) -> str:
    """Return the recorded configuration without the fault: as the plan says, not as faulty code carries it out.

    Functions that a fault put in the place of the schedule or the optimizer are not named, and seeds are omitted.
    """
    found = json.loads(configuration)
    # The recorded number of steps is missing where the schedule does not depend on it.
    training = {"n_steps": N_STEPS, **found["training"]}
    found = {"model": found["model"], "task": found["task"], "training": training}
    plan = build(run.case.control).plan
    if training["schedule"] not in ("constant", "cosine", "linear"):
        training["schedule"] = "custom"
    if training["optimizer"] != "AdamW":  # a subclass or wrapper of AdamW with the options of the control
        training |= {"optimizer": "AdamW", "learning_rate": plan["learning_rate"]}
        training["optimizer_options"] = plan["optimizer_options"]
    training["optimizer_options"] = {k: v for k, v in training["optimizer_options"].items() if k != "fused"}
    for place in (found["model"].get("config", {}), found["task"], training):
        place.pop("seed", None)
    found["model"].pop("n_weights", None)  # smaller if normalizations were removed
    return json.dumps(found)


def pack(work: Path) -> None:
    """Write all usable runs to data/patients.nc."""
    chosen = with_levels(labeled(work))
    runs = [wb.open_run(run.place) for *_, run in chosen]
    table = packing.pack(runs)
    configurations = [
        settings_of(run, tree.attrs["configuration"]) for (*_, run), tree in zip(chosen, runs, strict=True)
    ]
    cases_as_json = [json.dumps({**asdict(run.case)}) for *_, run in chosen]
    causes = list(CAUSES)
    columns: dict[str, Any] = {
        "level": [level for level, *_ in chosen],
        "place": [place for _, place, _ in chosen],
        "how": [run.how for *_, run in chosen],
        "lost": [run.lost for *_, run in chosen],
        "is_new": [run.is_new for *_, run in chosen],
        "family": [SETUPS[run.case.setup].family for *_, run in chosen],
        "setup": [run.case.setup for *_, run in chosen],
        "configuration": np.array([text.encode() for text in configurations]),
        "case": np.array([text.encode() for text in cases_as_json]),
    }
    for name in RESULT:
        columns[name] = [run.result[name] for *_, run in chosen]
        columns[f"control_{name}"] = [run.control[name] for *_, run in chosen]
    table = table.assign({name: ("patient", np.array(values)) for name, values in columns.items()})
    table = table.assign(
        is_cause=(("patient", "ranked_cause"), np.array([[c in r.causes for c in causes] for *_, r in chosen]))
    )
    seconds = json.loads((work / "costs.json").read_text())
    costs = costs_from(seconds)
    table = table.assign_coords(ranked_cause=causes, measurement=list(costs)).assign(
        cost=("measurement", list(costs.values()))
    )
    recorded = [
        json.loads(place.read_text())["seconds"] for part in ("known", "new") for place in (work / part).glob("*.json")
    ]
    table.attrs |= {
        "call": "python data/make_patients.py",
        "seed": SEED,
        "n_recorded": len(recorded),
        "minutes": round(math.fsum(recorded) / 60, 1),
        "bits": json.dumps({**BITS, "others": DEFAULT_BITS}),
        "seconds_of_parts": json.dumps(seconds),
        "versions": versions(),
    }
    write(table)


def agreement(work: Path) -> None:
    """Diagnose every complete and every packed record with the same settings, and add the agreement to the file."""
    with opened() as data:
        table = data.load()
    n_same, differences = 0, []
    for i in range(table.sizes["patient"]):
        case = table.isel(patient=i)
        name = truth_of(case).case.name
        complete = wb.open_run(next(work.glob(f"*/{name}.nc"))).load()
        complete.attrs["configuration"] = configuration(case)
        one, other = (wb.diagnose(run)["causes"].to_dataset() for run in (complete, whole_run(case)))
        n_same += str(one["cause"].values[0]) == str(other["cause"].values[0])
        differences.append(float(np.abs(one["probability"] - other["probability"].sel(cause=one["cause"])).max()))
    table.attrs |= {"n_same_first_cause": n_same, "largest_difference": max(differences)}
    print(f"{n_same} of {len(differences)} first causes agree; probabilities differ by at most {max(differences):.3f}")
    write(table)


# The board


def answers_of(name: str, work: Path) -> dict[str, dict[str, Any]]:
    """Return the answers of a player to all cases, by "level place"; they are kept in a JSON file."""
    place = work / f"answers {name}.json"
    if place.exists():
        return json.loads(place.read_text())
    player, found = RECORDED[name](), {}
    for level in range(1, 6):
        for seed in range(n_patients(level)):
            one = patient(seed, level)
            cause, cure = player(one)
            found[f"{level} {seed}"] = {"cause": cause, "cure": cure, "spent": one.spent / one.budget}
    place.write_text(json.dumps(found))
    return found


def replay(chosen: tuple[int, int, str], work: Path) -> str:
    """Replay a case with the change for a cause, and write the result to a JSON file, unless it exists."""
    level, place, cause = chosen
    with opened_case(level, place) as case:
        truth = truth_of(case)
        target = work / f"{truth.case.name} with {cause}.json"
        if target.exists():
            return f"{target.stem}: there already"
        run = whole_run(case)
    begun = time.monotonic()
    outcome = cures.replay(truth, run, cause)
    result = asdict(outcome) | {"losses": [], "seconds": time.monotonic() - begun}
    with replacing(target) as partial_file:
        partial_file.write_text(json.dumps(result))
    return f"{target.stem}: {recovered_fraction(truth, outcome):.2f} recovered ({result['seconds']:.0f} s)"


def outcome_of(truth: Truth, cause: str, work: Path) -> cures.Outcome:
    """Return the result of a replay."""
    result = json.loads((work / f"{truth.case.name} with {cause}.json").read_text())
    del result["seconds"]
    return cures.Outcome(**result | {"losses": np.zeros(0)})


def score_players(work: Path, processes: int) -> None:
    """Replay the cures that the players choose for failed runs, and add their scores to data/patients.nc."""
    with opened() as data:
        table = data.load()
    keys = [f"{level} {place}" for level, place in zip(table["level"].values, table["place"].values, strict=True)]
    truths = [truth_of(table.isel(patient=i)) for i in range(len(keys))]
    answers = {name: answers_of(name, work) for name in RECORDED}
    names = ("points", "are_causes_right", "does_cure_work", "spent")
    scores = {name: np.zeros((len(RECORDED), len(keys))) for name in names}
    for i, (name, of_player) in enumerate(answers.items()):
        wanted = [
            (*map(int, key.split()), of_player[key]["cure"])
            for key, truth in zip(keys, truths, strict=True)
            if of_player[key]["cure"] and truth.how
        ]
        print(f"{name}: {len(wanted)} replays", flush=True)
        in_processes(replay, wanted, work / "cures", processes)
        for j, (key, truth) in enumerate(zip(keys, truths, strict=True)):
            given = of_player[key]
            cure = given["cure"]
            outcome = outcome_of(truth, cure, work / "cures") if cure and truth.how else None
            found = points_for(truth, [given["cause"]], cure, outcome, 1 - given["spent"])
            is_right = {given["cause"]} == set(truth.causes)
            numbers = (round(found.total, 1), is_right, found.does_cure_work, given["spent"])
            for column, number in zip(names, numbers, strict=True):
                scores[column][i, j] = number
    columns = {f"board_{name}": (("player", "patient"), values.astype(np.float32)) for name, values in scores.items()}
    table = table.assign(columns).assign_coords(player=list(RECORDED))
    replays = [json.loads(place.read_text())["seconds"] for place in (work / "cures").glob("*.json")]
    table.attrs |= {"n_replays": len(replays), "replay_minutes": round(math.fsum(replays) / 60, 1)}
    write(table)


def write(table: xr.Dataset) -> None:
    """Write data/patients.nc."""
    with replacing(FILE) as partial_file:
        table.to_netcdf(partial_file, engine="netcdf4", encoding=packing.encoding(table))
    print(f"{table.sizes['patient']} patients, {FILE.stat().st_size / 2**20:.2f} MiB", flush=True)


def main() -> None:
    """Read the command line and record the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("artifacts/patients"))
    parser.add_argument("--only", choices=("record", "costs", "pack", "agreement", "board"))
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    if args.only in (None, "record"):
        record_all(args.work, args.processes)
    if args.only in (None, "costs"):
        time_parts(args.work)
    if args.only in (None, "pack"):
        pack(args.work)
    if args.only in (None, "agreement"):
        agreement(args.work)
    if args.only in (None, "board"):
        score_players(args.work, args.processes)


if __name__ == "__main__":
    main()
