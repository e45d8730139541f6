"""Rank the causes of a failed run by the evidence for and against each, and propose deciding experiments."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from workbench.diagnosis.causes import ALL_CAUSES, UNKNOWN
from workbench.diagnosis.checkpoint_evidence import checkpoints_of, measure_weights
from workbench.diagnosis.experiments import Experiment, propose
from workbench.diagnosis.facts import WEIGHT, RunFact, read_facts, settle
from workbench.diagnosis.failed_run import Failure, Record, find_failure, read_record
from workbench.diagnosis.ranking import COVERAGE, Rules, view_of
from workbench.diagnosis.symptoms import Symptom, read_symptoms
from workbench.diagnosis.unseen import contracts_tested, unseen_in
from workbench.errors import OptionError
from workbench.formatting import capitalized, counted, listed, lowered
from workbench.io.provenance import versions
from workbench.schema.runs import SCHEMA_VERSION
from workbench.schema.statuses import CauseKind, DiagnosisState, SymptomKind
from workbench.zoo import ArchitectureConfig

if TYPE_CHECKING:
    from torch import nn

    from workbench.models.subject import Subject

#: Symptoms that indicate the block at fault, the most direct first.
_OF_A_BLOCK = (
    "block_blows_up", "odd_weights", "stream_jumps_at_a_block", "block_forgets", "odd_gradients", "odd_updates",
)  # fmt: skip
#: Evidence of less than this many nats is omitted.
_LEAST_EVIDENCE = 0.02
#: Probability from which on a cause is named although the loss shows no failure, and number of sentences in a summary.
_SURE, _N_FOUND = 0.8, 3
#: Monitors and parts that `workbench.watch` records for every model, in words.
_CURVES = ("loss", "grad_norm", "learning_rate", "repeated_examples")
_PARTS = {
    "optimizer": "updates", "attention": "attention", "activations": "activations", "precision": "arithmetic",
    "reduction": "gradients that reach the optimizer", "update": "effect of an update",
}  # fmt: skip


def diagnose(
    run: Any,
    *,
    model: Subject | nn.Module | None = None,
    task: Any = None,
    checkpoints: str | os.PathLike[str] | None = None,
    rules: Rules | None = None,
    uses: Collection[str] = tuple(SymptomKind),
) -> xr.DataTree:
    """Find the facts of a run, rank its possible causes by the evidence for and against each, and propose experiments.

    All evidence is read from the record of the run itself. No healthy run is needed for comparison, and faults that a
    study has injected are not read. *Facts* are numbers that absolute limits decide, such as a probe beyond its limit
    or a gradient norm that is exactly a loss scale. If there is one, it is the answer, and the ranking cannot
    contradict it. The ranking rules were fitted to recorded runs of small models with injected faults and without.

    Contracts that the watch of the run has found to be broken come first; each is a fact with its experiment, place and
    remedy. Otherwise the answer is an order of causes, and which of them the evidence does not exclude. Their scores
    are no probabilities: on faults that the recorded runs do not have, they are often wrong. A record never shows that
    a run is healthy: if nothing is found, the summary lists what was recorded, what was not tested, and the command
    that tests it.

    Args:
        run: Path of a store, or of a log that `workbench.read_log` reads; a tree from `workbench.open_run`, or a
            dataset from `workbench.read_log`.
        model: The model of the run, to check that the checkpoints fit it.
        task: The task of the run; it is only recorded, because `workbench.run_experiment` needs it.
        checkpoints: Folder of the checkpoints; None for the folder next to the store, ``run.zarr`` ->
            ``run.checkpoints``, if it exists.
        rules: Rules of the ranking; None for the shipped ones.
        uses: Kinds of evidence to read: ``"mechanism"``, ``"log"`` (learning rate and batch size as recorded at every
            step), ``"configuration"``, ``"fact"``.

    Returns:
        A tree with attributes ``kind`` ("diagnosis"), ``state`` ("found", "likely", "no cause found" if the loss
        diverged or rose for good, or "nothing found"), ``fault`` (kind of the most likely cause), ``failure_kind``,
        ``failure_step``, ``shows_failure`` (0 if the loss neither diverged nor rose), ``has_recovered`` (whether a rise
        did), ``view`` (what the record holds: "store", "recorder", "mechanism", "log", "curves" or "other"),
        ``coverage`` (if it is known for that view), ``summary``, ``recorded``, ``not_recorded`` and ``unseen`` (in
        words), ``notes`` (of `workbench.read_log`), and the children

        - ``causes`` (dim ``cause``, in their order; "nothing" means that nothing was found, "unknown" none
          of the others): ``title``, ``kind``, ``probability`` (the score of the order, which adds up to 1),
          ``is_possible`` (whether it is not excluded), ``mechanism_probability`` (the score from measured quantities
          alone, some of them relative to learning rate or eps), ``layer`` (the block at fault; -1 for no specific
          block);
        - ``evidence`` (dim ``evidence``, by cause and decreasing weight): ``cause``, ``symptom``, ``kind`` ("fact" for
          facts), ``weight`` (contribution to the log-odds of the cause; below 0 it is evidence against the cause; 10
          and -10 for facts), ``value``, ``units``, ``reference``, ``step``, ``layer``, ``sentence``, and the place of
          the number in the run (``path``, ``variable``, ``selection`` as JSON; empty if it comes from configuration,
          checkpoint or several symptoms);
        - ``experiments`` (dim ``experiment``, in order of information per cost): ``cause``, ``title``, ``change``,
          ``n_steps``, ``from_step``, the expected outcomes, ``cost`` and ``information``;
        - ``unseen`` (dim ``unseen``, faults that this record does not show): ``check`` (the contract that tests each).

    Raises:
        StoreError: If there is no run at the path.
        SchemaError: If it has no monitors with a loss, or too few steps.
        CheckpointError: If a checkpoint does not fit the model or its own configuration.
        OptionError: If ``uses`` names an unknown kind.

    Example:
        >>> import workbench as wb
        >>> tree = wb.diagnose(wb.samples.failed_run("hyperparameter"))
        >>> tree["causes"]["cause"].values[0].item(), tree["causes"]["kind"].values[0].item()
        ('schedule', 'hyperparameter')
        >>> int(tree["causes"]["is_possible"].sum())  # number of causes in the set
        1

    See Also:
        `workbench.run_experiment`: Runs one of the proposed experiments.
        `workbench.report`: Writes a diagnosis as a report.
        `workbench.samples.failed_run`: Shipped failed runs to diagnose.
    """
    for kind in uses:
        if kind not in list(SymptomKind):
            raise OptionError.of("uses", kind, tuple(each.value for each in SymptomKind))
    places = checkpoints_of(run, checkpoints)
    weights = None
    if places:
        first = min(places)
        weights = measure_weights(places[first], step=first, model=model)
    record = read_record(run, weights=weights)
    failure = find_failure(record)
    symptoms = read_symptoms(record, failure, kinds=uses)
    facts = read_facts(record, failure) if SymptomKind.FACT in uses else []
    rules = Rules.shipped() if rules is None else rules
    strengths = {name: symptom.strength for name, symptom in symptoms.items()}
    probability = settle(rules.probabilities(strengths, view_of(symptoms)), facts)
    layers = {cause: block_at_fault(symptoms) if cause in ("architecture",) else -1 for cause in probability}
    layers |= {fact.cause: fact.layer for fact in reversed(facts) if fact.is_for and fact.cause != "architecture"}
    experiments = propose(record, failure, probability, layers, rules=rules, checkpoints=places)
    return _tree(record, failure, symptoms, facts, rules, probability, layers, experiments, task)


def block_at_fault(symptoms: Mapping[str, Symptom]) -> int:
    """Return the block that the symptoms point to; -1 for no specific block."""
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
    facts: list[RunFact],
    rules: Rules,
    probability: Mapping[str, float],
    layers: Mapping[str, int],
    experiments: list[Experiment],
    task: Any,
) -> xr.DataTree:
    view, what_happened = view_of(symptoms), capitalized(failure.words)
    established = tuple(dict.fromkeys(fact.cause for fact in facts if fact.is_for))
    possible = established or rules.set_of(probability, view)
    alone = {name: s.strength for name, s in read_symptoms(record, failure, kinds=[SymptomKind.MECHANISM]).items()}
    mechanism = settle(rules.probabilities(alone, view), facts)
    tree = xr.DataTree.from_dict(
        {
            "/causes": causes_table(probability, layers, possible, mechanism),
            "/evidence": _evidence(symptoms, facts, rules, probability),
            "/experiments": experiments_table(experiments),
        }
    )
    described = task.describe() if hasattr(task, "describe") else {}
    found = [fact.sentence for fact in facts if fact.is_finding]
    recorded, missing = in_the_record(record)
    unseen = unseen_in(record)
    tree["unseen"] = xr.DataTree(unseen)
    about = {
        "what_happened": what_happened, "found": json.dumps(found), "established": json.dumps(established),
        "recorded": recorded, "not_recorded": missing, "shows_failure": int(failure.is_seen),
        "has_recovered": int(failure.has_recovered), "unseen": listed(unseen["unseen"].values.tolist()),
        "notes": str(record.parts["monitors"].attrs.get("notes", "")),
    }  # fmt: skip
    answer = answer_of(about, probability, layers, possible)
    tree.attrs = {
        "summary": answer["summary"],  # shown first when a notebook cell displays the tree
        "schema_version": SCHEMA_VERSION,
        "kind": "diagnosis",
        "subject": _subject(record),
        "run": record.source,
        "failure_kind": failure.kind.value,
        "failure_step": failure.step,
        "view": view,
        **({"coverage": COVERAGE} if view in rules.least else {}),
        **about,
        **answer,
        "rules": rules.about,
        "n_symptoms": len(symptoms),
        "task": json.dumps(described, default=str),
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return tree


def _subject(record: Record) -> str:
    """Return the name of the model in the run, or a description for a model of the zoo that has only its class name."""
    config = record.setting("model", "config", default={})
    if record.subject != record.setting("model", "name") or "family" not in config:
        return record.subject
    try:
        known = ArchitectureConfig.from_dict(config)
    except OptionError:  # recorded by a version with other options
        return record.subject
    return f"{known.title}, {known.n_layers} blocks of width {known.d_model}"


def answer_of(
    about: Mapping[Any, Any], probability: Mapping[str, float], layers: Mapping[str, int], possible: Collection[str]
) -> dict[str, str]:
    """Return the attributes of a diagnosis that state what was found and which causes are not excluded.

    ``about`` are attributes as in `diagnose`, of which trees of older versions have only ``what_happened``;
    probabilities decrease, and a block at fault is -1 for none.
    """
    found, first = json.loads(about.get("found", "[]")), next(iter(probability))
    is_named = first not in ("nothing", UNKNOWN)
    has_failed = bool(about.get("shows_failure", 1))
    is_sure = has_failed or probability[first] >= _SURE
    named = [cause for cause in possible if cause != "nothing"]
    titles = []
    for cause in named:
        where = f" in block {layers[cause]}" if layers[cause] >= 0 else ""
        titles.append(f"{ALL_CAUSES[cause].title}{where}")
    others = f", and does not exclude {listed(titles[1:], 'or')}" if len(titles) > 1 else ""
    likely = f"The evidence points to {titles[0]}{others}." if titles else ""
    if found:
        state = DiagnosisState.FOUND
        more = f" The evidence has {counted(len(found) - _N_FOUND, 'more finding')}." if len(found) > _N_FOUND else ""
        if sure := [ALL_CAUSES[cause].title for cause in json.loads(about["established"])]:
            likely = f"{'Cause' if len(sure) == 1 else 'Causes'}: {listed(sure)}."
        elif not has_failed:
            likely = ""  # where the loss shows no failure, symptoms explain no finding
        answer = f"Found: {' '.join(found[:_N_FOUND])}{more} {likely}"
    elif is_named and is_sure:
        state = DiagnosisState.LIKELY
        answer = likely if has_failed else f"If it learned too little: {lowered(likely)}"
        answer += " The symptoms also occur in runs without a fault." if "nothing" in possible else ""
    else:
        is_down = has_failed and not about.get("has_recovered", 0)
        state = DiagnosisState.NO_CAUSE if is_down else DiagnosisState.NOTHING_FOUND
        answer = f"{capitalized(state.value)} in what was recorded ({about.get('recorded', 'see the evidence')})."
        if has_failed or is_named:
            when = "The" if has_failed else "If it learned too little, the"
            known = [title for title, cause in zip(titles, named, strict=True) if cause != UNKNOWN]
            answer += f" {when} closest are {listed(known[:_N_FOUND])}." if known else ""
        answer += (
            f"{about.get('not_recorded', '')} Not visible in this record: {about.get('unseen', 'other faults')}. "
            "workbench check -- python train.py tests most of them; wb.assess(model, task) measures the design itself."
        )
    by_kind = {
        kind: math.fsum(p for cause, p in probability.items() if ALL_CAUSES[cause].kind == kind) for kind in CauseKind
    }
    return {
        "state": state,
        "fault": ALL_CAUSES[first].kind,
        "fault_probabilities": json.dumps({kind: round(p, 4) for kind, p in by_kind.items()}),
        "summary": f"{about['what_happened']}. {answer.strip()} {about.get('notes', '')}".strip(),
    }


def in_the_record(record: Record) -> tuple[str, str]:
    """Return what was recorded, as a list in words, and a sentence about what was not."""
    found = [name.replace("_", " ") for name in _CURVES if record.every(name) is not None]
    parts = [title for part, title in _PARTS.items() if part in record.parts]
    missing = [name.replace("_", " ") for name in _CURVES if record.every(name) is None]
    why = {"update": " (the model has to return its loss)"}
    why |= {event.source: " (not possible here; its event states why)" for event in record.events_of("not recorded")}
    missing += [f"{title}{why.get(part, '')}" for part, title in _PARTS.items() if part not in record.parts]
    tested = contracts_tested(record)
    if record.contracts is not None:
        parts.append(f"{len(tested)} of {counted(len(record.contracts.checks), 'contract')}")
    how = "; wb.watch(model, optimizer) records it" if any("(" not in name for name in missing) else ""
    how += "; pass the loss to watched.log(loss=loss)" * ("loss" in missing)
    not_recorded = f" Not recorded: {listed(missing)}{how}." if missing else ""
    if record.contracts is None:
        return listed([*found, *parts]), f"{not_recorded} No contract was tested."
    left = [each.id for each in record.contracts.checks if each.id not in tested]
    return listed([*found, *parts]), not_recorded + (f" Contracts not tested: {listed(left)}." if left else "")


def causes_table(
    probability: Mapping[str, float],
    layers: Mapping[str, int],
    possible: Collection[str],
    mechanism: Mapping[str, float],
) -> xr.Dataset:
    """Return the causes in their order, dim ``cause``."""
    names = list(probability)
    columns: dict[str, tuple[list[Any], str, str, str]] = {
        "title": ([ALL_CAUSES[name].title for name in names], "cause", "", "possible cause of the failure"),
        "kind": ([ALL_CAUSES[name].kind for name in names], "kind", "", "kind of the cause"),
        "probability": ([probability[name] for name in names], "score", "1", "score of the order; adds up to 1"),
        "is_possible": ([name in possible for name in names], "not excluded", "", "not excluded by the evidence"),
        "mechanism_probability": ([mechanism[name] for name in names], "score by mechanism", "1",
            "from measured quantities alone, some of them relative to learning rate or eps"),
        "layer": ([layers[name] for name in names], "block", "1", "block at fault; -1 for no specific block"),
    }  # fmt: skip
    return xr.Dataset(
        {name: ("cause", np.array(values), _about(*about)) for name, (values, *about) in columns.items()},
        coords={"cause": names},
    )


def _evidence(
    symptoms: Mapping[str, Symptom], facts: list[RunFact], rules: Rules, probability: Mapping[str, float]
) -> xr.Dataset:
    """Return the contribution of each symptom to the log-odds of each cause, largest first within a cause."""
    given = rules.evidence({name: symptom.strength for name, symptom in symptoms.items()})
    rows: list[tuple[str, Symptom, float]] = []
    for cause in probability:
        found: list[tuple[str, Symptom, float]] = [
            (cause, fact, WEIGHT if fact.is_for else -WEIGHT) for fact in facts if fact.cause == cause
        ]
        if cause in rules.causes:
            weights = dict(zip(rules.symptoms, given[rules.causes.index(cause)].tolist(), strict=True))
            found += [(cause, symptoms[name], w) for name, w in weights.items() if name in symptoms]
        rows += sorted((row for row in found if abs(row[2]) >= _LEAST_EVIDENCE), key=lambda row: -row[2])
    seen = [symptom for _, symptom, _ in rows]
    columns: dict[str, tuple[list[Any], str, str, str]] = {
        "cause": ([cause for cause, _, _ in rows], "cause", "", "cause that the evidence is for or against"),
        "symptom": ([s.name for s in seen], "symptom", "", "name of the symptom or fact"),
        "weight": ([weight for *_, weight in rows], "weight", "1",
            "contribution to the log-odds of the cause; above 0 for it, below 0 against it"),
        "quantity": ([s.variable or s.name for s in seen], "quantity", "", "the measured quantity"),
        "value": ([float(s.value) for s in seen], "value", "see units", "the measured value"),
        "units": ([s.units for s in seen], "units", "", "units of value and reference"),
        "reference": (
            [float(s.reference) for s in seen], "reference", "see units", "usual value or limit; NaN if there is none"
        ),
        "strength": ([float(s.strength) for s in seen], "strength", "1", "0: not unusual, 1: striking"),
        "kind": ([str(s.kind) for s in seen], "kind", "", "mechanism, log, configuration or fact"),
        "step": ([int(s.step) for s in seen], "step", "1", "step of the run; -1 for no specific step"),
        "layer": ([int(s.layer) for s in seen], "block", "1", "-1 for no specific block"),
        "sentence": ([s.sentence for s in seen], "sentence", "", "the symptom in words"),
        "path": ([s.path for s in seen], "path", "", "part of the run that holds the number; empty if there is none"),
        "variable": ([s.variable for s in seen], "variable", "", "variable in that part"),
        "selection": ([json.dumps(s.position) for s in seen], "selection", "", "JSON of dimension -> value"),
    }  # fmt: skip
    return xr.Dataset(
        {name: ("evidence", np.array(values), _about(*about)) for name, (values, *about) in columns.items()}
    )


def experiments_table(experiments: list[Experiment]) -> xr.Dataset:
    """Return the proposed experiments as a dataset in their order, dim ``experiment``."""
    columns: dict[str, tuple[list[Any], str, str]] = {
        "cause": ([e.cause for e in experiments], "", "cause that the experiment decides about"),
        "title": ([e.title for e in experiments], "", "the change in words"),
        "change": ([json.dumps(dict(e.change)) for e in experiments], "", "the change as JSON"),
        "n_steps": ([e.n_steps for e in experiments], "step", "steps to replay in each of the two replays"),
        "from_step": (
            [e.from_step for e in experiments],
            "1",
            "updates before the replay; 0: from the initial parameters",
        ),
        "expected_if_right": ([e.if_right for e in experiments], "", "expected outcome if it is this cause"),
        "expected_if_wrong": ([e.if_wrong for e in experiments], "", "expected outcome if it is another cause"),
        "cost": ([e.cost for e in experiments], "1", "steps of both replays over the steps of the run"),
        "information": ([e.information for e in experiments], "bit", "mutual information of the outcome and the cause"),
    }
    variables = {
        name: ("experiment", np.array(values), _about(name.replace("_", " "), units, meaning))
        for name, (values, units, meaning) in columns.items()
    }
    return xr.Dataset(variables, coords={"order": ("experiment", np.arange(1, len(experiments) + 1))})


def _about(long_name: str, units: str, meaning: str) -> dict[str, str]:
    return {"long_name": long_name, "units": units, "meaning": meaning}
