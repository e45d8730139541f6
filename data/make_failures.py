"""Record the study of the diagnosis: runs with injected faults, each with a control without faults.

    python data/make_failures.py --only fit           # runs that the rules are fitted to; resumable
    python data/make_failures.py --only choose        # runs that rules and symptoms are chosen on
    python data/make_failures.py --only locked        # runs that evaluate them

    python data/make_failures.py --only replays       # replays of runs with the changes for their most likely causes
    python data/make_failures.py --only rules         # the rules in workbench/diagnosis/shipped/
    python data/make_failures.py --only collect       # data/failures.nc and diagnosis_accuracy.csv
    python data/make_failures.py --only unknown       # "another cause" in the rules, and unknown_causes.csv

Setups and the division into sets are in `workbench.course.failure_runs`, faults and labels in `failure_cases.py`. Runs
whose control is not healthy are not used.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from failure_cases import LOST, SPIKE, answer, cases, is_healthy
from fitting import fit_rules, save_rules, smallest_in_sets

import workbench as wb
from workbench import diagnosis
from workbench.course.failure_runs import N_STEPS, SETUPS, Case, build, held_out_loss, largest_rise
from workbench.diagnosis import CAUSES, Rules, block_at_fault, find_failure, read_record, read_symptoms
from workbench.diagnosis.causes import UNKNOWN
from workbench.diagnosis.experiment_runs import Replay
from workbench.diagnosis.experiments import propose
from workbench.diagnosis.ranking import REPLAYED, VIEWS
from workbench.errors import WorkbenchError
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.koopman.spectra import RankWarning
from workbench.models.losses import prediction_of, token_loss

if TYPE_CHECKING:
    import pandas as pd

SETS = ("fit", "choose", "locked")
#: Number of changes with which a failed run is replayed, for its most likely causes.
N_REPLAYS = 2
OUT = Path(__file__).parent
SHIPPED = Path(diagnosis.__file__).parent / "shipped"
CADENCE = {"attention": 20, "router": 10, "optimizer": 5, "activations": 5, "curvature": 60}


def record(case: Case, work: Path, cadence: dict[str, int | None] = CADENCE) -> str:
    """Train one case and write a netCDF and a JSON file, unless they exist."""
    place = work / f"{case.name}.nc"
    if place.with_suffix(".json").exists():
        return f"{case.name}: there already"
    begun = time.monotonic()
    made = build(case)
    model, task = made.model, made.task
    start_loss = held_out_loss(model, task)
    inputs, targets = replace(task, batch_size=8).batch(0)
    recorder = wb.Recorder(
        every=cadence,
        budget=None,
        n_probe_tokens=64,
        loss_of=lambda model, _: token_loss(prediction_of(model(inputs)), targets),
    )
    spectra = {"spectra_every": 100, "profile_options": {"n_snapshots": 256, "n_workers": 1}}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)  # the rank is recorded
        store = Path(folder) / "run.zarr"
        *_, last = wb.train(model, task, store=store, recorder=recorder, faults=made.faults, **spectra, **made.plan)
        run = wb.open_run(store).load()
    wb.export_netcdf(run, place, overwrite=True)
    router = run["router"]["dead_experts"].values if "router" in run.children else np.zeros((1, 1))
    n_experts = run["router"].sizes["expert"] if "router" in run.children else 1
    result = asdict(case) | {
        "diverged": last.cause if last.diverged else "",
        "step": last.step,
        "start_loss": start_loss,
        "final_loss": math.nan if last.diverged else held_out_loss(model, task),
        "rise": largest_rise(run["monitors"]["loss"].values),
        "dead_share": float(np.nanmax(router[-1]) / n_experts),
        "seconds": time.monotonic() - begun,
    }
    with replacing(place.with_suffix(".json")) as partial_file:
        partial_file.write_text(json.dumps(result))
    how = f"{last.cause} at {last.step}" if last.diverged else f"loss {result['final_loss']:.2f}"
    return f"{case.name}: {how}, rise {result['rise']:.2f} ({result['seconds']:.0f} s)"


# Evaluation


@dataclass(frozen=True)
class Run:
    """A recorded run with its causes.

    Attributes:
        case: The case.
        set: "fit", "choose" or "locked".
        causes: Causes of the failure; ("nothing",) for a healthy run.
        how: How the run failed; empty if it did not.
        lost: Fraction of what its control learned that it lacks at the end; infinite if it diverged.
        strengths: View -> strengths of the symptoms of that view.
        layer: Block that the symptoms point to; -1 for no specific block.
    """

    case: Case
    set: str
    causes: tuple[str, ...]
    how: str
    lost: float
    strengths: dict[str, dict[str, float]]
    layer: int

    @property
    def family(self) -> str:
        """Family with which the run is held out."""
        return SETUPS[self.case.setup].family


#: Columns of a minimal log, by view.
COLUMNS = {"log": ["loss", "grad_norm", "learning_rate", "batch_size"], "curves": ["loss", "grad_norm"]}


def read(which: str, work: Path) -> list[Run]:
    """Return all failed runs of a set whose control is healthy, and all healthy controls."""
    results = {}
    for case in cases(which):
        place = work / which / f"{case.name}.json"
        if place.exists():
            results[case] = json.loads(place.read_text())
    found = []
    for case in results:
        control = results.get(case.control)
        if control is None or not is_healthy(control, results):
            continue
        causes, how = answer(case, results)
        if causes:
            learned = control["start_loss"] - control["final_loss"]
            behind = (results[case]["final_loss"] - control["final_loss"]) / learned
            found.append((case, causes, how, math.inf if results[case]["diverged"] else behind))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        places = [work / which / f"{case.name}.nc" for case, *_ in found]
        seen = list(pool.map(views, places, chunksize=8))
    return [
        Run(case, which, causes, how, lost, strengths, layer)
        for (case, causes, how, lost), (strengths, layer) in zip(found, seen, strict=True)
    ]


def views(place: Path) -> tuple[dict[str, dict[str, float]], int]:
    """Return strengths of the symptoms of a run by view, and the block that they point to."""
    run = wb.open_run(place)
    record = read_record(run)
    monitors = run["monitors"].to_dataset()
    found, layer = {}, -1
    for view, (kinds, has_model) in VIEWS.items():
        columns = [name for name in COLUMNS.get(view, ()) if name in monitors]
        one = record if has_model else read_record(monitors[columns])
        symptoms = read_symptoms(one, find_failure(one), kinds=kinds)
        found[view] = {name: symptom.strength for name, symptom in symptoms.items()}
        layer = block_at_fault(symptoms) if view == "store" else layer
    return found, layer


def in_processes(do: Callable[[Any, Path], str], todo: Sequence[Any], work: Path, processes: int) -> None:
    """Apply a function to every case, in processes of one thread each."""
    work.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done in as_completed([pool.submit(do, case, work) for case in todo]):
            print(done.result(), flush=True)


def replay(chosen: tuple[Case, tuple[str, ...]], work: Path) -> str:
    """Replay a run from its beginning with the change for each given cause, and write a JSON file, unless it exists."""
    case, changes = chosen
    place = work / f"{case.name}.replays.json"
    if place.exists():
        return f"{case.name}: replayed already"
    run, made = work / f"{case.name}.nc", build(case)
    record = read_record(run)
    failure = find_failure(record)
    layers = dict.fromkeys(CAUSES, -1) | {"architecture": block_at_fault(read_symptoms(record, failure))}
    uniform = dict.fromkeys(CAUSES, 1 / len(CAUSES))
    proposed = propose(record, failure, uniform, layers, rules=Rules.uniform(), checkpoints={})
    proposed = [one for one in proposed if one.cause in changes]
    plan = {name: value for name, value in made.plan.items() if name in ("optimizer", "optimizer_options", "clip_norm")}
    found: dict[str, dict[str, Any]] = {}
    controls: dict[int, np.ndarray] = {}
    for one in proposed:
        has_coarse_weights = any(plant.kind == "coarse weights" for plant in case.plants)
        exact = sound_optimizer(case) if one.cause == "precision" and has_coarse_weights else {}
        replay = Replay(record, run, made.model, made.task, 0, one.n_steps, made.faults, None, plan | exact)
        if one.n_steps not in controls:
            controls[one.n_steps] = replay.losses({})
        try:
            answer = replay.answer(failure.kind, failure.step, controls[one.n_steps], one.change, one.title)
        except WorkbenchError as error:  # the change is impossible for this model
            found[one.cause] = {"decided": False, "supports": False, "why": str(error)}
            continue
        found[one.cause] = {"decided": answer.is_decided, "supports": answer.supports}
    with replacing(place) as partial_file:
        partial_file.write_text(json.dumps(found))
    return f"{case.name}: " + ", ".join(f"{cause} {one['supports']}" for cause, one in found.items())


def sound_optimizer(case: Case) -> dict[str, Any]:
    """Return the optimizer of the control, which replaces that of a run with rounded weights."""
    plan = build(case.control).plan
    options = {"optimizer_options": plan["optimizer_options"], "learning_rate": plan["learning_rate"]}
    return {"optimizer": "AdamW", **options}


def replay_all(work: Path, processes: int) -> None:
    """Replay every run, including healthy ones, with the changes for the most likely causes by mechanism."""
    known = [*read("fit", work), *read("choose", work)]
    ranked = [(run, rules.probabilities(run.strengths["mechanism"])) for run, rules in without_family(known, PENALTY)]
    rules = fit_rules(examples(known), penalty=PENALTY)
    ranked += [(run, rules.probabilities(run.strengths["mechanism"])) for run in read("locked", work)]
    for name in SETS:
        todo = []
        for run, probability in ranked:
            if run.set == name:
                todo.append((run.case, tuple([cause for cause in probability if cause != "nothing"][:N_REPLAYS])))
        in_processes(replay, todo, work / name, processes)


def answered(run: Run, work: Path) -> dict[str, bool]:
    """Return change -> whether its replay supported the cause, for replays in which the failure recurred."""
    place = work / run.set / f"{run.case.name}.replays.json"
    found = json.loads(place.read_text()) if place.exists() else {}
    return {cause: one["supports"] for cause, one in found.items() if one["decided"]}


def shares(runs: list[Run], work: Path) -> np.ndarray:
    """Return the fraction of replays with each change that supported it, by actual cause, shape (change, cause).

    Rare pairs are shrunk toward the fraction over all other causes, as if two more replays had such outcomes; pairs
    whose change is for the actual cause are shrunk toward the fraction over all such pairs.
    """
    names = list(CAUSES)
    counts = np.zeros((len(CAUSES), len(CAUSES), 2))
    for run in runs:
        for change, supports in answered(run, work).items():
            for cause in run.causes:
                counts[names.index(change), names.index(cause), int(supports)] += 1 / len(run.causes)
    is_own = np.eye(len(CAUSES), dtype=bool)
    others = np.where(is_own[..., None], 0, counts).sum(1)
    prior = np.repeat(((others[:, 1] + 1) / (others.sum(1) + 2))[:, None], len(CAUSES), axis=1)
    prior[is_own] = counts[is_own][:, 1].sum() / counts[is_own].sum()
    return (counts[..., 1] + 2 * prior) / (counts.sum(-1) + 2)


#: Number of bootstrap samples of families for the intervals.
N_BOOTSTRAP = 1000
#: Penalties of the rules to try, and the one with the smallest cross entropy on "choose".
PENALTY = 3.0
PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0)


def examples(runs: list[Run]) -> list[tuple[dict[str, float], tuple[str, ...]]]:
    """Return every run in every view, with its causes."""
    return [(strengths, run.causes) for run in runs for strengths in run.strengths.values()]


def without_family(runs: list[Run], penalty: float) -> Iterator[tuple[Run, Rules]]:
    """Yield every run with rules fitted without its family."""
    for family in sorted({run.family for run in runs}):
        rules = fit_rules(examples([run for run in runs if run.family != family]), penalty=penalty)
        yield from ((run, rules) for run in runs if run.family == family)


def fit(work: Path) -> None:
    """Fit the rules to "fit" and "choose", calibrate them across families, and print the cross entropy by penalty."""
    parts = {name: read(name, work) for name in ("fit", "choose")}
    found = {}
    for penalty in PENALTIES:
        rules = fit_rules(examples(parts["fit"]), penalty=penalty)
        log = [
            -math.log(max(rules.probabilities(strengths)[cause], 1e-9))
            for strengths, causes in examples(parts["choose"])
            for cause in causes[:1]
        ]
        found[penalty] = float(np.mean(log))
        print(f"penalty {penalty:g}: cross entropy {found[penalty]:.3f} on held-out families", flush=True)
    runs = [*parts["fit"], *parts["choose"]]
    n_healthy = sum(run.causes == ("nothing",) for run in runs)
    about = f"{len(runs) - n_healthy} failed and {n_healthy} healthy runs of small models, data/make_failures.py"
    rules = replace(fit_rules(examples(runs), penalty=PENALTY, about=about), answers=shares(runs, work))
    scores: dict[str, dict[str, list[float]]] = {view: {cause: [] for cause in CAUSES} for view in (*VIEWS, REPLAYED)}
    for run, others in without_family(runs, PENALTY):
        for view, strengths in run.strengths.items():
            probability = others.probabilities(strengths)
            for cause in run.causes:
                scores[view][cause].append(probability[cause])
        after = one_replay(replace(others, answers=rules.answers), run, "mechanism", answered(run, work))
        for cause in run.causes:
            scores[REPLAYED][cause].append(after[cause])
    least = {view: np.array([smallest_in_sets(of[cause]) for cause in rules.causes]) for view, of in scores.items()}
    SHIPPED.mkdir(exist_ok=True)
    save_rules(replace(rules, least=least), SHIPPED / "rules.json")
    print(about, flush=True)


def one_replay(rules: Rules, run: Run, view: str, answers: dict[str, bool]) -> dict[str, float]:
    """Return the probabilities after the most informative recorded replay; unchanged if there is none."""
    probability = rules.probabilities(run.strengths[view])
    if not answers:
        return probability
    change = max(answers, key=lambda one: rules.information(probability, one))
    return rules.after(probability, change, supports=answers[change])


def judged(work: Path) -> Iterator[tuple[Run, Rules]]:
    """Yield every run with rules fitted without its family, which are the shipped ones for "locked"."""
    shipped = Rules.shipped()
    known = [*read("fit", work), *read("choose", work)]
    for run, rules in without_family(known, PENALTY):
        yield run, replace(rules, least=shipped.least, answers=shipped.answers)
    yield from ((run, shipped) for run in read("locked", work))


def collect(work: Path) -> None:
    """Write symptoms, replays and answers of the rules for every run to one file, and their accuracy to a table."""
    rows = list(judged(work))
    runs = [run for run, _ in rows]
    symptoms = sorted({name for run in runs for view in ("store", "log") for name in run.strengths[view]})
    causes, every_view = list(CAUSES), list(VIEWS)
    shape = (len(rows), len(every_view), len(causes))
    probability, is_in_set = np.zeros(shape), np.zeros(shape, bool)
    after, is_left = np.zeros((len(rows), len(causes))), np.zeros((len(rows), len(causes)), bool)
    settings = np.zeros((len(rows), len(causes)))
    strength = np.full((2, len(rows), len(symptoms)), np.nan)
    seconds: dict[str, float] = {}
    for name in SETS:
        for case in cases(name):
            seconds[case.name] = json.loads((work / name / f"{case.name}.json").read_text())["seconds"]
    by_settings = dict(settings_alone(runs))
    for i, (run, rules) in enumerate(rows):
        for j, view in enumerate(every_view):
            found = rules.probabilities(run.strengths[view])
            probability[i, j] = [found[cause] for cause in causes]
            is_in_set[i, j] = [cause in rules.set_of(found, view) for cause in causes]
        found = one_replay(rules, run, "mechanism", answered(run, work))
        after[i] = [found[cause] for cause in causes]
        is_left[i] = [cause in rules.set_of(found, REPLAYED) for cause in causes]
        settings[i] = [by_settings[run.case][cause] for cause in causes]
        for j, view in enumerate(("store", "log")):
            for name, value in run.strengths[view].items():
                strength[j, i, symptoms.index(name)] = value
    table = xr.Dataset(
        {
            "strength": (("run", "symptom"), strength[0].astype(np.float32)),
            "log_strength": (("run", "symptom"), strength[1].astype(np.float32)),
            "probability": (("run", "view", "ranked_cause"), probability.astype(np.float32)),
            "is_in_set": (("run", "view", "ranked_cause"), is_in_set),
            "probability_after_replay": (("run", "ranked_cause"), after.astype(np.float32)),
            "is_in_set_after_replay": (("run", "ranked_cause"), is_left),
            "probability_by_settings": (("run", "ranked_cause"), settings.astype(np.float32)),
            "is_cause": (("run", "ranked_cause"), np.array([[c in run.causes for c in causes] for run in runs])),
            "how": ("run", [run.how for run in runs]),
            "lost": ("run", np.array([run.lost for run in runs], dtype=np.float32)),
            "layer": ("run", [run.layer for run in runs]),
        },
        coords={
            "symptom": symptoms,
            "view": every_view,
            "ranked_cause": causes,
            "set": ("run", [run.set for run in runs]),
            "family": ("run", [run.family for run in runs]),
            "setup": ("run", [run.case.setup for run in runs]),
            "name": ("run", [run.case.name for run in runs]),
            "plants": ("run", [" + ".join(plant.kind for plant in run.case.plants) for run in runs]),
            "n_replays": ("run", [len(answered(run, work)) for run in runs]),
        },
    )
    table.attrs = {
        "call": "python data/make_failures.py",
        "n_steps": N_STEPS,
        "recorded": json.dumps({name: len(cases(name)) for name in SETS}),
        "rules": Rules.shipped().about,
        "lost": LOST,
        "spike": SPIKE,
        "minutes": round(math.fsum(seconds.values()) / 60, 1),
        "versions": versions(),
    }
    accuracy(table).round(3).to_csv(OUT / "diagnosis_accuracy.csv", index=False)
    packed = {name: {"zlib": True, "complevel": 6} for name, v in table.data_vars.items() if v.dtype.kind in "fb"}
    with replacing(OUT / "failures.nc") as partial_file:
        table.to_netcdf(partial_file, engine="netcdf4", encoding=packed)


#: Rows of the table of accuracy: name -> variables of probability and set, and view.
ANSWERS = {
    **{view: ("probability", "is_in_set", view) for view in VIEWS},
    "mechanism and one replay": ("probability_after_replay", "is_in_set_after_replay", ""),
    "settings alone": ("probability_by_settings", "", ""),
}


def accuracy(table: xr.Dataset) -> pd.DataFrame:
    """Return how often the answers are right, by set of families, for each kind of answer and for the majority class.

    Fractions of the failed runs, with 95 % intervals from resampled families: ``first`` (the first answer is a cause),
    ``covered`` (all causes are in the set, whose mean size is ``size``) and ``missed`` (the first answer is that
    nothing is wrong). ``healthy`` is the fraction of the healthy runs with that first answer.
    """
    import pandas as pd

    rows = []
    for which in SETS:
        runs = table.isel(run=(table["set"] == which).values)
        is_cause = runs["is_cause"].values
        is_healthy = is_cause[:, list(CAUSES).index("nothing")]
        for name, (probability, is_in_set, view) in ANSWERS.items():
            chosen = runs.sel(view=view) if view else runs
            first = chosen[probability].values.argmax(1)
            inside = chosen[is_in_set].values if is_in_set else np.eye(len(CAUSES), dtype=bool)[first]
            rows.append(_accuracy(which, name, runs["family"].values, is_cause, is_healthy, first, inside))
        most = is_cause[~is_healthy].sum(0).argmax()
        first = np.full(len(is_cause), most)
        inside = np.eye(len(CAUSES), dtype=bool)[first]
        rows.append(_accuracy(which, "majority class", runs["family"].values, is_cause, is_healthy, first, inside))
    return pd.DataFrame(rows)


def _accuracy(
    which: str, name: str, family: np.ndarray, is_cause: np.ndarray, is_healthy: np.ndarray, first: np.ndarray,
    inside: np.ndarray,
) -> dict[str, Any]:  # fmt: skip
    nothing = list(CAUSES).index("nothing")
    right = is_cause[np.arange(len(first)), first]
    covered = (inside | ~is_cause).all(1)

    def measured(at: np.ndarray) -> tuple[float, float, float]:
        failed, sound = at[~is_healthy[at]], at[is_healthy[at]]
        return right[failed].mean(), covered[failed].mean(), (first[sound] == nothing).mean()

    draw, names = np.random.default_rng(0), np.unique(family)
    places = {one: np.flatnonzero(family == one) for one in names}
    again = [
        measured(np.concatenate([places[one] for one in draw.choice(names, len(names))])) for _ in range(N_BOOTSTRAP)
    ]
    found = measured(np.arange(len(first)))
    row: dict[str, Any] = {"set": which, "answer": name, "failed": int((~is_healthy).sum())}
    for column, (label, value) in enumerate(zip(("first", "covered", "healthy"), found, strict=True)):
        if label == "healthy":
            row |= {"size": inside[~is_healthy].sum(1).mean(), "missed": (first[~is_healthy] == nothing).mean()}
            row |= {"sound": int(is_healthy.sum())}
        low, high = np.quantile([one[column] for one in again], [0.025, 0.975])
        row |= {label: value, f"{label}_low": low, f"{label}_high": high}
    return row


def settings_alone(runs: list[Run]) -> Iterator[tuple[Case, dict[str, float]]]:
    """Yield the answers of a baseline, rules that read learning rate, batch size and configuration alone."""

    def only(run: Run) -> dict[str, float]:
        return {name: value for name, value in run.strengths["store"].items() if name not in run.strengths["mechanism"]}

    for which, known in (("locked", ("fit", "choose")), ("choose", ("fit",)), ("fit", ("choose",))):
        rules = fit_rules([(only(run), run.causes) for run in runs if run.set in known], penalty=PENALTY)
        yield from ((run.case, rules.probabilities(only(run))) for run in runs if run.set == which)


# Causes that the rules do not know


#: Fraction of the right first causes, of failed and healthy runs, that "another cause" may cost, and log-odds to try.
COST, LOG_ODDS = 0.02, np.round(np.arange(-2, 4, 0.1), 1)
#: Symptoms of learning rate and batch size, and those that explain a rise of the loss, see `joint_symptoms`.
OF_LOG = ("rate_jumps", "rate_is_spent", "starts_at_full_rate", "fails_in_warm_up", "few_rows", "batches_shrink")
EXPLANATIONS = ("rate_jumps", "updates_leap", "gradients_build_up", "few_rows", "batches_shrink", "loss_noise")


def recorded_strengths(table: xr.Dataset) -> list[dict[str, dict[str, float]]]:
    """Return the strengths of every recorded run by view, from data/failures.nc."""
    names, found = [str(name) for name in table["symptom"].values], []
    for rows in zip(table["strength"].values, table["log_strength"].values, strict=True):
        store, log = ({n: float(v) for n, v in zip(names, row, strict=True) if np.isfinite(v)} for row in rows)
        recorder = {name: value for name, value in store.items() if not name.endswith("_setting")}
        of_run = {"store": store, "recorder": recorder, "log": log}
        for view, whole in (("mechanism", recorder), ("curves", log)):
            one = {name: value for name, value in whole.items() if name not in OF_LOG}
            if "rise_out_of_nothing" in one:  # the joint symptom of the remaining ones
                left = math.prod(1 - min(max(one[name], 0), 1) for name in EXPLANATIONS if name in one)
                one["rise_out_of_nothing"] = min(one["abrupt"], 1) * min(one["spike_recovers"], 1) * left
            of_run[view] = one
        found.append(of_run)
    return found


def judge_unknown() -> None:
    """Set the log-odds of "another cause", and write how often runs of a kind that was left out get that answer.

    The kinds are left out one at a time, together with the family of the run. The log-odds of each view are the largest
    that cost at most `COST` of the right first causes of "fit" and "choose".
    """
    import pandas as pd

    with xr.open_dataset(OUT / "failures.nc") as data:
        table = data.load()
    strengths, sets, families = recorded_strengths(table), table["set"].values, table["family"].values
    causes = [tuple(np.array([*CAUSES])[row].tolist()) for row in table["is_cause"].values]
    known = np.flatnonzero(sets != "locked")
    answers: dict[tuple[str, str, int], dict[str, float]] = {}  # left out, view, run -> log of each probability
    for left_out in ("", *(cause for cause in CAUSES if cause != "nothing")):
        for family in ("", *np.unique(families[known])):
            chosen = [i for i in known if left_out not in causes[i] and families[i] != family]
            rules = fit_rules([(one, causes[i]) for i in chosen for one in strengths[i].values()], penalty=PENALTY)
            for i in np.flatnonzero(families == family if family else sets == "locked"):
                if not left_out or causes[i] == (left_out,):
                    for view, one in strengths[i].items():
                        answers[left_out, view, int(i)] = logits(rules, one)
    unknown, rows = {}, []
    for view in VIEWS:
        of_known = {i: answers["", view, i] for i in range(len(causes))}

        def n_right(value: float, which: Sequence[int], answers: dict[int, dict[str, float]] = of_known) -> int:
            return sum(first_of(answers[i], value) in causes[i] for i in which)

        allowed = (1 - COST) * n_right(-math.inf, known)
        unknown[view] = float(max(value for value in LOG_ODDS if n_right(value, known) >= allowed))
        for name in SETS:
            failed = [i for i in np.flatnonzero(sets == name) if causes[i] != ("nothing",)]
            others = [one for (out, of, i), one in answers.items() if out and of == view and sets[i] == name]
            for given, value in (("named causes alone", -math.inf), ("with another cause", unknown[view])):
                first = [(first_of(one, value), probability_of(one, value)) for one in others]
                row = {"set": name, "view": view, "answer": given, "failed": len(failed), "left_out": len(others)}
                row["right"] = n_right(value, failed) / len(failed)
                for cause in (UNKNOWN, "nothing"):
                    row[cause] = np.mean([one == cause for one, _ in first])
                row["sure_and_wrong"] = np.mean([one not in (UNKNOWN, "nothing") and p >= 0.5 for one, p in first])
                rows.append(row)
    place = SHIPPED / "rules.json"
    content = json.loads(place.read_text()) | {"unknown": unknown}
    with replacing(place) as partial_file:
        partial_file.write_text(json.dumps(content, indent=1) + "\n")
    pd.DataFrame(rows).round(3).to_csv(OUT / "unknown_causes.csv", index=False)
    print(unknown, flush=True)


def logits(rules: Rules, strengths: dict[str, float]) -> dict[str, float]:
    """Return the log-odds of every cause, which are minus infinity if it is excluded."""
    given = dict(zip(rules.causes, (rules.evidence(strengths).sum(axis=1) + rules.bias).tolist(), strict=True))
    return {cause: given[cause] if p else -math.inf for cause, p in rules.probabilities(strengths).items()}


def first_of(of_causes: dict[str, float], unknown: float) -> str:
    """Return the most probable cause with the given log-odds of another cause."""
    both = of_causes | {UNKNOWN: unknown}
    return max(both, key=lambda cause: both[cause])


def probability_of(of_causes: dict[str, float], unknown: float) -> float:
    """Return the probability of the most probable cause."""
    values = np.array([*of_causes.values(), unknown])
    return float(1 / np.exp(values - values.max()).sum())


def main() -> None:
    """Read the command line and record the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("artifacts/failures"))
    parser.add_argument("--only", choices=(*SETS, "replays", "rules", "collect", "unknown"))
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    for name in SETS:
        if args.only in (None, name):
            in_processes(record, cases(name), args.work / name, args.processes)
    if args.only in (None, "replays"):
        replay_all(args.work, args.processes)
    if args.only in (None, "rules"):
        fit(args.work)
    if args.only in (None, "collect"):
        collect(args.work)
    if args.only in (None, "unknown"):
        judge_unknown()


if __name__ == "__main__":
    main()
