"""Rank the causes of a failed run, with the evidence for and against each, and propose the experiment that decides."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.diagnosis.causes import CAUSES
from workbench.diagnosis.checkpoint_evidence import checkpoints_of, measure_weights
from workbench.diagnosis.experiments import Experiment, propose
from workbench.diagnosis.failed_run import Record, read_record
from workbench.diagnosis.failure import Failure, find_failure
from workbench.diagnosis.ranking import COVERAGE, Rules, view_of
from workbench.diagnosis.symptoms import Symptom, read_symptoms
from workbench.errors import OptionError
from workbench.formatting import capitalized, listed, percent
from workbench.io.provenance import versions
from workbench.schema.runs import SCHEMA_VERSION
from workbench.schema.statuses import CauseKind, SymptomKind
from workbench.zoo import ArchitectureConfig

if TYPE_CHECKING:
    import xarray as xr
    from torch import nn

    from workbench.models.subject import Subject

#: Symptoms that say which block it is, the most direct first.
_OF_A_BLOCK = (
    "block_blows_up",
    "odd_weights",
    "stream_jumps_at_a_block",
    "block_forgets",
    "odd_gradients",
    "odd_updates",
)
#: Evidence of less than this many nats is not shown.
_LEAST_EVIDENCE = 0.02


def diagnose(
    run: Any,
    *,
    model: Subject | nn.Module | None = None,
    task: Any = None,
    checkpoints: str | os.PathLike[str] | None = None,
    rules: Rules | None = None,
    uses: Collection[str] = tuple(SymptomKind),
) -> xr.DataTree:
    """Rank the causes of a failed run, with the evidence for and against each, and propose deciding experiments.

    Everything is read from the run's own record: no healthy run is compared, and faults that a study has injected are
    not read. The rules were fitted to recorded runs of small models, healthy ones and ones with one or two planted
    faults. The answer is a set, of one cause or several: of the recorded runs of each cause that its limits were set
    on, 90 % had it in their set, judged by rules without their family. The probabilities say nothing about causes that
    were not planted.

    Args:
        run: Path of a store, or of a CSV or TensorBoard log; a tree from `workbench.open_run`, or a thinner record from
            `workbench.read_log`.
        model: The run's model, to check that the checkpoints fit it.
        task: The task it was trained on; only recorded, as `run_experiment` needs it.
        checkpoints: Folder of the checkpoints; None: next to the store, ``run.zarr`` -> ``run.checkpoints``, if there
            are any.
        rules: Rules of the ranking; None: the shipped ones.
        uses: Kinds of symptoms to read: ``"mechanism"``, ``"log"`` (rate and batch size as every step records them),
            ``"configuration"``.

    Returns:
        A tree with attributes ``kind`` ("diagnosis"), ``fault`` (kind of the likeliest cause), ``failure_kind``,
        ``failure_step``, ``shows_failure`` (0: the loss neither diverged nor rose), ``view`` (what the record holds:
        "store", "recorder", "mechanism", "log", "curves" or "other"), ``coverage`` (where it is known for that view),
        ``summary``, and the children

        - ``causes`` (``cause``, by falling probability; "nothing": no fault): ``title``, ``kind``, ``probability``
          (adds up to 1), ``is_possible`` (whether it is in the set), ``mechanism_probability`` (from what the run did
          alone: measured quantities, some of them relative to rate or eps), ``layer`` (the block at fault; -1: none in
          particular);
        - ``evidence`` (``evidence``, by cause and falling weight): ``cause``, ``symptom``, ``weight`` (what it adds to
          the log-odds of the cause; below 0 it speaks against), ``value``, ``units``, ``reference``, ``step``,
          ``layer``, ``sentence``, and where the number stands in the run (``path``, ``variable``, ``selection``, JSON;
          empty: configuration, checkpoint or several other symptoms);
        - ``experiments`` (``experiment``, the most information for its cost first): see
          `workbench.diagnosis.experiments`.

    Raises:
        StoreError: If there is no run at the path.
        SchemaError: If it has no monitors with a loss, or too few steps.
        CheckpointError: If a checkpoint does not fit the model or its own configuration.
        OptionError: If ``uses`` names something else.

    Example:
        >>> import workbench as wb
        >>> tree = wb.diagnose(wb.samples.failed_run("hyperparameter"))
        >>> tree["causes"]["cause"].values[0].item(), tree["causes"]["kind"].values[0].item()
        ('schedule', 'hyperparameter')
        >>> tree["causes"]["is_possible"].values.sum()  # causes in the set
        np.int64(1)
    """
    for kind in uses:
        if kind not in list(SymptomKind):
            raise OptionError(f"'{kind}' is no kind of symptom, expected some of {', '.join(SymptomKind)}.")
    places = checkpoints_of(run, checkpoints)
    weights = None
    if places:
        first = min(places)
        weights = measure_weights(places[first], step=first, model=model)
    record = read_record(run, weights=weights)
    failure = find_failure(record)
    symptoms = read_symptoms(record, failure, kinds=uses)
    rules = Rules.shipped() if rules is None else rules
    strengths = {name: symptom.strength for name, symptom in symptoms.items()}
    probability = rules.probabilities(strengths)
    layers = {cause: block_at_fault(symptoms) if cause in ("architecture",) else -1 for cause in probability}
    experiments = propose(record, failure, probability, layers, rules=rules, checkpoints=places)
    return _tree(record, failure, symptoms, rules, probability, layers, experiments, task)


def block_at_fault(symptoms: Mapping[str, Symptom]) -> int:
    """The block that the symptoms point to; -1: none in particular."""
    votes: dict[int, float] = {}
    for place, name in enumerate(_OF_A_BLOCK):
        symptom = symptoms.get(name)
        if symptom is not None and symptom.layer >= 0 and symptom.strength > 0:
            votes[symptom.layer] = votes.get(symptom.layer, 0.0) + symptom.strength / (1 + 0.5 * place)
    best = max(votes, key=lambda layer: votes[layer], default=-1)
    return best if best >= 0 and votes[best] >= 0.3 else -1


def _tree(
    record: Record,
    failure: Failure,
    symptoms: Mapping[str, Symptom],
    rules: Rules,
    probability: Mapping[str, float],
    layers: Mapping[str, int],
    experiments: list[Experiment],
    task: Any,
) -> xr.DataTree:
    import xarray as xr

    view, what_happened = view_of(symptoms), capitalized(failure.words)
    possible = rules.set_of(probability, view)
    alone = {name: s.strength for name, s in read_symptoms(record, failure, kinds=[SymptomKind.MECHANISM]).items()}
    tree = xr.DataTree.from_dict(
        {
            "/causes": causes_table(probability, layers, possible, rules.probabilities(alone)),
            "/evidence": _evidence(symptoms, rules, probability),
            "/experiments": experiments_table(experiments),
        }
    )
    described = task.describe() if hasattr(task, "describe") else {}
    answer = answer_of(what_happened, probability, layers, possible)
    tree.attrs = {
        "summary": answer["summary"],  # first, where a cell shows the tree
        "schema_version": SCHEMA_VERSION,
        "kind": "diagnosis",
        "subject": _subject(record),
        "run": record.source,
        "failure_kind": failure.kind.value,
        "failure_step": failure.step,
        "shows_failure": int(failure.is_seen),
        "view": view,
        **({"coverage": COVERAGE} if view in rules.least else {}),
        "what_happened": what_happened,
        **answer,
        "rules": rules.about,
        "n_symptoms": len(symptoms),
        "task": json.dumps(described, default=str),
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return tree


def _subject(record: Record) -> str:
    """The run's own name of its model, or a description for a model of the zoo, whose class name would say little."""
    config = record.setting("model", "config", default={})
    if record.subject != record.setting("model", "name") or "family" not in config:
        return record.subject
    try:
        known = ArchitectureConfig.from_dict(config)
    except OptionError:  # recorded by a version with other options
        return record.subject
    return f"{known.title}, {known.n_layers} blocks of width {known.d_model}"


def answer_of(
    what_happened: str, probability: Mapping[str, float], layers: Mapping[str, int], possible: Collection[str]
) -> dict[str, str]:
    """The attributes of a diagnosis that tell which causes are not excluded.

    Args:
        what_happened: Clause about the run.
        probability: Probability of each cause, in falling order.
        layers: Block at fault by cause; -1: none in particular.
        possible: Causes in the set.
    """
    told = []
    for cause in possible:
        where = f" in block {layers[cause]}" if layers[cause] >= 0 else ""
        told.append(f"{CAUSES[cause].title}{where} ({percent(probability[cause])})")
    first = next(iter(probability))
    if first == "nothing":
        answer = f"Most likely nothing is wrong ({percent(probability[first])})"
        answer += f"; not excluded: {listed(told[1:], 'or')}." if len(told) > 1 else "."
    else:
        faults = [words for cause, words in zip(possible, told, strict=True) if cause != "nothing"]
        one, several = "The cause", "The cause is one of these, or several of them"
        answer = f"{one if len(faults) == 1 else several}: {listed(faults, 'or')}."
        if "nothing" in possible:
            answer += f" That nothing is wrong is not excluded ({percent(probability['nothing'])})."
    by_kind = {
        kind: math.fsum(p for cause, p in probability.items() if CAUSES[cause].kind == kind) for kind in CauseKind
    }
    return {
        "fault": CAUSES[first].kind,
        "fault_probabilities": json.dumps({kind: round(p, 4) for kind, p in by_kind.items()}),
        "summary": f"{what_happened}. {answer}",
    }


def causes_table(
    probability: Mapping[str, float],
    layers: Mapping[str, int],
    possible: Collection[str],
    mechanism: Mapping[str, float],
) -> xr.Dataset:
    """The causes by falling probability, dim ``cause``."""
    import xarray as xr

    names = list(probability)
    columns: dict[str, tuple[list[Any], str, str, str]] = {
        "title": ([CAUSES[name].title for name in names], "cause", "", "what may have made it fail"),
        "kind": ([CAUSES[name].kind for name in names], "kind", "", "kind of the cause"),
        "probability": ([probability[name] for name in names], "probability", "1", "among these causes; adds up to 1"),
        "is_possible": ([name in possible for name in names], "in the set", "", "not excluded, at the stated coverage"),
        "mechanism_probability": (
            [mechanism[name] for name in names], "probability by mechanism", "1", "from what the run did alone: "
            "measured quantities, some of them relative to rate or eps",
        ),
        "layer": ([layers[name] for name in names], "block", "1", "block at fault; -1: none in particular"),
    }  # fmt: skip
    return xr.Dataset(
        {name: ("cause", np.array(values), _about(*about)) for name, (values, *about) in columns.items()},
        coords={"cause": names},
    )


def _evidence(symptoms: Mapping[str, Symptom], rules: Rules, probability: Mapping[str, float]) -> xr.Dataset:
    """What each symptom adds to the log-odds of each cause, largest first within a cause."""
    import xarray as xr

    given = rules.evidence({name: symptom.strength for name, symptom in symptoms.items()})
    rows: list[tuple[str, Symptom, float]] = []
    for cause in probability:
        of_cause = given[rules.causes.index(cause)]
        found = [
            (cause, symptoms[name], float(of_cause[i])) for i, name in enumerate(rules.symptoms) if name in symptoms
        ]
        rows += sorted((row for row in found if abs(row[2]) >= _LEAST_EVIDENCE), key=lambda row: -row[2])

    def column(values: list[Any], long_name: str, units: str, meaning: str) -> tuple[str, Any, dict[str, str]]:
        kept = np.array(values, dtype=str) if values and isinstance(values[0], str) else np.array(values)
        return ("evidence", kept, _about(long_name, units, meaning))

    seen = [symptom for _, symptom, _ in rows]
    return xr.Dataset(
        {
            "cause": column([cause for cause, _, _ in rows], "cause", "", "that it speaks for or against"),
            "symptom": column([symptom.name for symptom in seen], "symptom", "", "name of the symptom"),
            "weight": column(
                [weight for *_, weight in rows],
                "weight",
                "1",
                "added to the log-odds of the cause; above 0 for it, below against it",
            ),
            "quantity": column([symptom.variable or symptom.name for symptom in seen], "quantity", "", "what was read"),
            "value": column([float(symptom.value) for symptom in seen], "value", "see units", "what was measured"),
            "units": column([symptom.units for symptom in seen], "units", "", "of value and reference"),
            "reference": column(
                [float(symptom.reference) for symptom in seen],
                "reference",
                "see units",
                "what runs usually have; NaN: nothing in particular",
            ),
            "strength": column(
                [symptom.strength for symptom in seen], "strength", "1", "0 nothing unusual, 1 striking"
            ),
            "kind": column([symptom.kind for symptom in seen], "kind", "", "mechanism, log or configuration"),
            "step": column([int(symptom.step) for symptom in seen], "step", "1", "of the run; -1: none in particular"),
            "layer": column([int(symptom.layer) for symptom in seen], "block", "1", "-1: none in particular"),
            "sentence": column([symptom.sentence for symptom in seen], "sentence", "", "for people"),
            "path": column(
                [symptom.path for symptom in seen],
                "path",
                "",
                "part of the run that holds the number; empty: none does",
            ),
            "variable": column([symptom.variable for symptom in seen], "variable", "", "in that part"),
            "selection": column(
                [json.dumps(symptom.position) for symptom in seen], "selection", "", "JSON: dimension -> value"
            ),
        }
    )


def experiments_table(experiments: list[Experiment]) -> xr.Dataset:
    """The proposed experiments as a dataset, dim ``experiment``, in their order."""
    import xarray as xr

    columns: dict[str, tuple[list[Any], str, str]] = {
        "cause": ([e.cause for e in experiments], "", "that it would decide about"),
        "title": ([e.title for e in experiments], "", "what is changed, in words"),
        "change": ([json.dumps(dict(e.change)) for e in experiments], "", "JSON: the one change"),
        "n_steps": ([e.n_steps for e in experiments], "step", "to replay, of each of the two runs"),
        "from_step": ([e.from_step for e in experiments], "1", "updates made before it; 0: from fresh weights"),
        "expected_if_right": ([e.if_right for e in experiments], "", "what is seen if it is this cause"),
        "expected_if_wrong": ([e.if_wrong for e in experiments], "", "what is seen if it is another one"),
        "cost": ([e.cost for e in experiments], "1", "relative to the steps of the run"),
        "information": (
            [e.information for e in experiments],
            "bit",
            "what its answer tells, from the cause's probability",
        ),
    }
    variables = {
        name: ("experiment", np.array(values), _about(name.replace("_", " "), units, meaning))
        for name, (values, units, meaning) in columns.items()
    }
    return xr.Dataset(variables, coords={"order": ("experiment", np.arange(1, len(experiments) + 1))})


def _about(long_name: str, units: str, meaning: str) -> dict[str, str]:
    return {"long_name": long_name, "units": units, "meaning": meaning}
