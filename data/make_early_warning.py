"""Record the study behind the alarms: healthy runs, faulted runs, what was seen first and what could be saved.

    python data/make_early_warning.py                  # everything, in order; resumable
    python data/make_early_warning.py --only record    # one stage

Stages: `record` trains every run with a recorder and no alarms, into `--work`; `fit` measures from the runs with
tuning seeds what healthy runs do and what faults look like (workbench/callbacks/alarms/shipped/); `act` trains those
of the other runs that a fault has harmed again, with automatic actions; `collect` replays the others through the alarms
and writes data/early_warning.nc.

Every run: a small transformer on associative recall, AdamW (betas .9, .95), clipping at 1, warm-up 50, a recorder that
looks every 10 steps (at updates every 5), one thread. A fault begins between steps 250 and 300, drawn from the seed.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import nn

import workbench as wb
from workbench.callbacks import alarms as alarms_room
from workbench.callbacks.alarms import Alarms, Attributor, Calibration, calibrate, calibrate_paired, observations
from workbench.callbacks.alarms.lead_times import lead_time
from workbench.io.atomic import replacing
from workbench.io.provenance import versions

N_STEPS, WARMUP = 800, 50
TUNING_SEEDS, REPORTED_SEEDS = (101, 102, 103, 104, 105), (1, 2, 3, 4)
#: Of the faulted runs, in turn; half as many to tune with.
FAULT_SEEDS = {"tuning": (101, 102), "reported": (1, 2)}
#: A fault begins somewhere here.
EARLIEST, LATEST = 250, 300
#: Share of healthy runs that may raise a false alarm.
BUDGET = 0.05
#: Faults are learned from looks so many steps after they have begun, ...
ATTRIBUTED_AFTER = (20, 50, 100, 200)
#: ... and named so many steps after the first alarm.
CONFIRM = 50
#: Accuracy that a run may lose without being called harmed.
MARGIN = 0.05
OUT = Path(__file__).parent
SHIPPED = Path(alarms_room.__file__).parent / "shipped"
#: Where alarms are listened to before there is anything to attribute with.
NOBODY = Attributor(("unknown",), (), np.zeros((1, 0)), np.zeros(1))

_SHORT = {"length": 8, "vocab_size": 16, "n_pairs": 2, "batch_size": 32}
_LONG = {"length": 12, "vocab_size": 32, "n_pairs": 3, "batch_size": 32}


@dataclass(frozen=True)
class Setup:
    """An architecture, a task and two learning rates at which it is healthy."""

    make: str
    model: dict[str, Any]
    task: dict[str, Any]
    rates: tuple[float, float]


SETUPS = {
    "pre_ln": Setup("transformer", {"norm": "pre_ln", "d_model": 48, "n_layers": 3}, _SHORT, (0.004, 0.008)),
    "grouped": Setup("llama_style", {"d_model": 32, "n_layers": 2, "n_kv_heads": 2}, _LONG, (0.004, 0.008)),
    "post_ln": Setup("transformer", {"norm": "post_ln", "d_model": 48, "n_layers": 2}, _SHORT, (0.001, 0.002)),
    "moe": Setup(
        "moe", {"norm": "pre_ln", "d_model": 32, "n_layers": 2, "n_experts": 4, "top_k": 2}, _SHORT, (0.004, 0.008)
    ),
}

#: Name -> the faults of a run, as names and options of `workbench.faults`; a duration instead of a stop.
DOSES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "attention, 8 bits": [("low_precision_attention", {"n_bits": 8})],
    "attention, 7 bits": [("low_precision_attention", {"n_bits": 7})],
    "attention, 6 bits": [("low_precision_attention", {"n_bits": 6})],
    "attention, 6 bits to nearest": [("low_precision_attention", {"n_bits": 6, "rounding": "nearest"})],
    "rate x 10": [("large_rate", {"factor": 10.0})],
    "rate x 40": [("large_rate", {"factor": 40.0})],
    "rate x 40 in 200 steps": [("large_rate", {"factor": 40.0, "ramp": 200})],
    "batch of 1": [("small_batch", {"n_rows": 1})],
    "batch of 2": [("small_batch", {"n_rows": 2})],
    "no auxiliary loss": [("no_auxiliary_loss", {})],
    "labels, 100 steps": [("corrupted_data", {"what": "labels", "duration": 100})],
    "labels, half of them": [("corrupted_data", {"what": "labels", "share": 0.5})],
    "tokens, 100 steps": [("corrupted_data", {"what": "tokens", "duration": 100})],
    "bucket dropped": [("dropped_bucket", {})],
    "stale by 5": [("stale_reduction", {"delay": 5})],
    "stale by 20": [("stale_reduction", {"delay": 20})],
    "reduction in 1 bit": [("low_precision_reduction", {"n_bits": 6})],
    "attention, 8 bits + rate x 10": [("low_precision_attention", {"n_bits": 8}), ("large_rate", {"factor": 10.0})],
    "batch of 2 + no auxiliary loss": [("small_batch", {"n_rows": 2}), ("no_auxiliary_loss", {})],
    "rate x 10 + no auxiliary loss": [("large_rate", {"factor": 10.0}), ("no_auxiliary_loss", {})],
}
#: Dose -> which of the two rates of which setups; named twice: with both seeds.
FAULTED: dict[str, list[tuple[str, int]]] = {
    "attention, 8 bits": 2 * [(s, i) for s in ("pre_ln", "grouped", "moe") for i in (0, 1)] + 2 * [("post_ln", 1)],
    "attention, 7 bits": [("pre_ln", 1), ("grouped", 1), ("moe", 1)],
    "attention, 6 bits": [("pre_ln", 1), ("grouped", 1)],
    "attention, 6 bits to nearest": [("pre_ln", 1), ("grouped", 1)],
    "rate x 10": [*((s, 1) for s in SETUPS), ("pre_ln", 0), ("moe", 0)],
    "rate x 40": [*((s, 1) for s in SETUPS), ("pre_ln", 0), ("grouped", 0)],
    "rate x 40 in 200 steps": [(s, 1) for s in SETUPS],
    "batch of 1": [("pre_ln", 1), ("grouped", 1), ("moe", 1)],
    "batch of 2": [("post_ln", 1)],
    "no auxiliary loss": [("moe", 0), ("moe", 0), ("moe", 1), ("moe", 1)],
    "labels, 100 steps": [("pre_ln", 1), ("grouped", 1), ("moe", 1)],
    "labels, half of them": [("pre_ln", 0), ("post_ln", 1)],
    "tokens, 100 steps": [("pre_ln", 1), ("grouped", 1)],
    "bucket dropped": [("pre_ln", 1), ("post_ln", 1), ("moe", 1)],
    "stale by 5": [("grouped", 1), ("moe", 1)],
    "stale by 20": [("pre_ln", 1), ("grouped", 1), ("post_ln", 1)],
    "reduction in 1 bit": [("pre_ln", 1), ("moe", 1)],
    "attention, 8 bits + rate x 10": [("pre_ln", 0), ("grouped", 0)],
    "batch of 2 + no auxiliary loss": [("moe", 1)],
    "rate x 10 + no auxiliary loss": [("moe", 0)],
}


@dataclass(frozen=True)
class Case:
    """One run of the study."""

    setup: str
    rate: float
    dose: str  # empty: healthy
    seed: int

    @property
    def split(self) -> str:
        """Tuning or reported."""
        return "tuning" if self.seed in TUNING_SEEDS else "reported"

    @property
    def name(self) -> str:
        """For a file."""
        text = f"{self.setup} {self.rate} {self.dose or 'healthy'} {self.seed}"
        return "_".join("".join(c if c.isalnum() or c in "._" else " " for c in text).split())

    @property
    def start(self) -> int | None:
        """Step at which the fault begins; None: healthy."""
        draw = torch.Generator().manual_seed(self.seed * 1009 + sorted(DOSES).index(self.dose)) if self.dose else None
        return int(torch.randint(EARLIEST, LATEST + 1, (), generator=draw)) if self.dose else None

    def healthy(self) -> Case:
        """The same run without its fault."""
        return replace(self, dose="")


def cases() -> list[Case]:
    """Every run, the tuning ones first."""
    found = []
    for split, seeds in (("tuning", TUNING_SEEDS), ("reported", REPORTED_SEEDS)):
        healthy = [Case(s, rate, "", seed) for seed in seeds for s, setup in SETUPS.items() for rate in setup.rates]
        faulted: dict[Case, None] = {}
        for i, (dose, (s, which)) in enumerate((dose, place) for dose, places in FAULTED.items() for place in places):
            if split == "reported" or i % 2 == 0:
                first, second = (
                    Case(s, SETUPS[s].rates[which], dose, seed)
                    for seed in FAULT_SEEDS[split][:: -1 if i % 4 > 1 else 1]
                )
                faulted[second if first in faulted else first] = None
        found += [*healthy, *faulted]
    return found


def faults_of(case: Case) -> list[Any]:
    """Fresh faults that begin at the case's step."""
    found = []
    for kind, options in DOSES.get(case.dose, []):
        options = dict(options)
        duration = options.pop("duration", None)
        stop = None if duration is None else case.start + duration
        found.append(getattr(wb.faults, kind)(start=case.start, stop=stop, **options))
    return found


def model_and_task(case: Case) -> tuple[nn.Module, Any]:
    """Of a case, fresh."""
    setup = SETUPS[case.setup]
    sizes = {"vocab_size": setup.task["vocab_size"], "max_length": setup.task["length"]}
    model = getattr(wb.zoo, setup.make)(n_heads=4, **setup.model, **sizes, seed=case.seed)
    return model, wb.tasks.associative_recall(**setup.task, seed=case.seed)


def run_settings(case: Case) -> dict[str, Any]:
    """Further arguments of `workbench.train`."""
    return {
        "n_steps": N_STEPS,
        "learning_rate": case.rate,
        "warmup": WARMUP,
        "clip_norm": 1.0,
        "optimizer_options": {"betas": (0.9, 0.95), "fused": True},
        "seed": case.seed,
    }


def recorder_of() -> wb.Recorder:
    """As every run of the study has it."""
    return wb.Recorder(every={"attention": 10, "router": 10, "optimizer": 5, "activations": 10}, n_probe_tokens=128)


def held_out_accuracy(model: nn.Module, task: Any) -> float:
    """Share of 1,024 held-out questions answered rightly."""
    inputs, targets = replace(task, batch_size=1024).batch(-1)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        predicted = model(inputs)[:, -1].argmax(-1)
    model.train(was_training)
    return float((predicted == targets[:, -1]).double().mean())


def record(case: Case, work: Path) -> str:
    """One run into a store of its own; nothing if it is there."""
    place = work / "recorded" / case.name
    if place.with_name(place.name + ".json").exists():
        return f"{case.name}: there already"
    begun = time.monotonic()
    model, task = model_and_task(case)
    store = work / "recorded" / f"{case.name}.zarr"
    if store.exists():
        shutil.rmtree(store)  # of a killed attempt
    *_, last = wb.train(model, task, store=store, recorder=recorder_of(), faults=faults_of(case), **run_settings(case))
    result = asdict(case) | {
        "split": case.split,
        "start": case.start,
        "has_diverged": last.diverged,
        "cause": last.cause,
        "step": last.step,
        "accuracy": math.nan if last.diverged else held_out_accuracy(model, task),
        "seconds": time.monotonic() - begun,
    }
    # One file a run: faster to read, and smaller.
    run = wb.open_run(store).load()
    wb.export_netcdf(run, place.with_name(place.name + ".nc"), overwrite=True)
    shutil.rmtree(store)
    with replacing(place.with_name(place.name + ".json")) as partial:
        partial.write_text(json.dumps(result))
    how = f"{last.cause} at {last.step}" if last.diverged else f"accuracy {result['accuracy']:.3f}"
    return f"{case.name}: {how} ({result['seconds']:.0f} s)"


def recorded(case: Case, work: Path) -> tuple[xr.DataTree, dict[str, Any]]:
    """A run of the first stage, and how it ended."""
    place = work / "recorded" / case.name
    return wb.open_run(f"{place}.nc"), json.loads(Path(f"{place}.json").read_text())


def fit(work: Path) -> None:
    """What healthy runs do and what faults look like, from the runs with tuning seeds."""
    tuning = [case for case in cases() if case.split == "tuning"]
    healthy = [case for case in tuning if not case.dose]
    runs = {case: recorded(case, work)[0] for case in healthy}
    about = f"{len(runs)} healthy runs of {len(SETUPS)} small transformers, data/make_early_warning.py"
    SHIPPED.mkdir(exist_ok=True)
    calibration = calibrate(runs.values(), about=about)
    calibration.save(SHIPPED / "calibration.json", overwrite=True)
    partner = {seed: TUNING_SEEDS[i - 1] for i, seed in enumerate(TUNING_SEEDS)}
    pairs = [(run, runs[replace(case, seed=partner[case.seed])]) for case, run in runs.items()]
    paired = calibrate_paired(pairs, about=f"{len(pairs)} pairs of {about}, alike but for their seeds")
    paired.save(SHIPPED / "calibration_paired.json", overwrite=True)
    examples = [
        (features, cause)
        for case in tuning
        if len(causes_of(case)) == 1
        for (cause,) in [causes_of(case)]
        for features in looks_after_onset(case, work, calibration)
    ]
    for name, uses_settings in (("attribution", True), ("attribution_without_settings", False)):
        attributor = Attributor.fit(examples, uses_settings=uses_settings)
        attributor.save(SHIPPED / f"{name}.json", overwrite=True)
    print(f"fitted to {len(runs)} healthy runs and {len(examples)} looks at faulted ones", flush=True)


def causes_of(case: Case) -> list[str]:
    """Kinds of its faults."""
    return [kind for kind, _ in DOSES.get(case.dose, [])]


def looks_after_onset(case: Case, work: Path, calibration: Calibration) -> list[dict[str, float]]:
    """What an attributor would go by at a few moments after a fault has begun."""
    alarms = Alarms(calibration=calibration, attributor=NOBODY)
    found, moments = [], [case.start + steps for steps in ATTRIBUTED_AFTER]
    for look in observations(recorded(case, work)[0]):
        alarms.observe(look)
        if look.part == "monitors" and look.step in moments:
            found.append(alarms.features())
    return found


def judge(case: Case, work: Path) -> dict[str, Any]:
    """What the alarms say about a run, when, and what they put it down to."""
    run, result = recorded(case, work)
    begin = case.start or 0
    blind = Attributor.open(SHIPPED / "attribution_without_settings.json")
    alarms = Alarms(budget=BUDGET)
    cause = {"at_once": "", "later": "", "later_without_settings": ""}
    first: int | None = None
    for look in observations(run):
        if look.part in ("precision", "reduction", "settings"):  # the study judges what alarms make of monitors
            continue
        fresh = [alarm for alarm in alarms.observe(look) if alarm.step >= begin]
        if fresh and first is None:
            first = look.step
            cause["at_once"] = alarms.attribute().cause
        if first is not None and look.step <= first + CONFIRM:
            cause["later"] = alarms.attribute().cause
            cause["later_without_settings"] = blind.attribute(alarms.features()).cause
    timing = lead_time(alarms.raised, divergence=result["step"] if result["has_diverged"] else None, since=begin)
    mechanism = timing.mechanism
    return result | {
        "start": math.nan if case.start is None else case.start,
        "n_alarms": sum(alarm.step >= begin for alarm in alarms.raised),
        "n_alarms_before": sum(alarm.step < begin for alarm in alarms.raised),
        "mechanism_step": math.nan if mechanism is None else mechanism.step,
        "mechanism_signal": "" if mechanism is None else mechanism.signal,
        "mechanism_score": math.nan if mechanism is None else mechanism.score,
        "layer": -1 if mechanism is None else mechanism.layer,
        "head": -1 if mechanism is None else mechanism.head,
        **{f"{name}_step": timing.by_outcome.get(name, math.nan) for name in ("loss", "grad_norm", "spike_score")},
        **{f"cause_{when}": found for when, found in cause.items()},
    }


def was_harmed(case: Case, work: Path) -> bool:
    """Whether a faulted run diverged, or ended less accurate than its healthy twin; as `early_warning.harmful`."""
    result, twin = recorded(case, work)[1], recorded(case.healthy(), work)[1]
    lost = twin["accuracy"] - result["accuracy"]
    return bool(case.dose) and (result["has_diverged"] or lost > MARGIN)


def act(case: Case, work: Path) -> str:
    """Train a faulted run again, with alarms that act; nothing if it was done."""
    file = work / "acted" / f"{case.name}.json"
    if file.exists():
        return f"{case.name}: there already"
    begun = time.monotonic()
    model, task = model_and_task(case)
    actions = actions_of()
    with tempfile.TemporaryDirectory() as folder:
        *_, last = wb.train(
            model,
            task,
            recorder=recorder_of(),
            alarms=Alarms(budget=BUDGET),
            actions=actions,
            faults=faults_of(case),
            checkpoints=folder,
            checkpoint_every=25,
            **run_settings(case),
        )
    result = {
        "name": case.name,
        "acted_has_diverged": last.diverged,
        "acted_step": last.step,
        "acted_accuracy": math.nan if last.diverged else held_out_accuracy(model, task),
        "actions": "; ".join(f"{action.step} {action.kind}" for action in actions.done),
        "acted_seconds": time.monotonic() - begun,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as partial:
        partial.write_text(json.dumps(result))
    return f"{case.name}: {result['actions'] or 'no action'}, accuracy {result['acted_accuracy']:.3f}"


def actions_of() -> wb.Actions:
    """As every run of the last stage has them."""
    # By default broken arithmetic is answered by a stop; the recorded runs went on with a smaller rate.
    data = {"no_auxiliary_loss": ("auxiliary_loss",), "corrupted_data": ("roll_back",)}
    return wb.Actions(policy={"small_batch": ("cut_rate",), **data})


def collect(work: Path) -> None:
    """Put everything reported into one file, and write down how it was made."""
    reported = [case for case in cases() if case.split == "reported"]
    rows = []
    for case in reported:
        acted = work / "acted" / f"{case.name}.json"
        none = {"acted_has_diverged": False, "acted_step": -1, "acted_accuracy": math.nan, "actions": ""}
        again = json.loads(acted.read_text()) if acted.exists() else none
        healthy = recorded(case.healthy(), work)[1]["accuracy"]
        rows.append(judge(case, work) | {"healthy_accuracy": healthy} | {name: again[name] for name in none})
    table = xr.Dataset({name: ("run", [row[name] for row in rows]) for name in rows[0] if name != "split"})
    table["fault"] = ("run", [" + ".join(causes_of(case)) for case in reported])
    table = table.set_coords(["setup", "rate", "dose", "seed", "fault"])
    seconds = [json.loads(file.read_text()) for file in sorted(work.glob("*/*.json"))]
    table.attrs = {
        "call": "python data/make_early_warning.py",
        "n_steps": N_STEPS,
        "warmup": WARMUP,
        "budget": BUDGET,
        "confirm": CONFIRM,
        "tuning_seeds": json.dumps(TUNING_SEEDS),
        "setups": json.dumps({name: asdict(setup) for name, setup in SETUPS.items()}),
        "doses": json.dumps(DOSES),
        "core_minutes": round(sum(one.get("seconds", one.get("acted_seconds", 0)) for one in seconds) / 60, 1),
        "versions": versions(),
    }
    with replacing(OUT / "early_warning.nc") as partial:
        table.to_netcdf(partial, engine="netcdf4")
    print(f"{len(rows)} runs in {OUT / 'early_warning.nc'}", flush=True)


def side_by_side(function: Any, todo: list[tuple], processes: int) -> Iterator[str]:
    """Calls in processes of one thread each, results as they come."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done in as_completed([pool.submit(function, *arguments) for arguments in todo]):
            yield done.result()


def main() -> None:
    """Read the command line and make the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("artifacts/early_warning"))
    parser.add_argument("--only", choices=("record", "fit", "act", "collect"))
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    (args.work / "recorded").mkdir(parents=True, exist_ok=True)
    if args.only in (None, "record"):
        for line in side_by_side(record, [(case, args.work) for case in cases()], args.processes):
            print(line, flush=True)
    if args.only in (None, "fit"):
        fit(args.work)
    if args.only in (None, "act"):
        todo = [(case, args.work) for case in cases() if case.split == "reported" and was_harmed(case, args.work)]
        for line in side_by_side(act, todo, args.processes):
            print(line, flush=True)
    if args.only in (None, "collect"):
        collect(args.work)


if __name__ == "__main__":
    main()
