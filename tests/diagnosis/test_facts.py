"""Facts decide a diagnosis: each is planted in a record made by hand, and healthy records hold none."""

import json
import math

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.diagnosis.records import descent, monitors, optimizer, tree
from workbench.contracts.results import CheckReport, Result, Status
from workbench.diagnosis import CAUSES, Rules, find_failure, read_facts, read_record
from workbench.diagnosis.causes import ALL_CAUSES, UNKNOWN
from workbench.diagnosis.diagnose import diagnose, in_the_record
from workbench.diagnosis.facts import settle

N, V, ENTROPY = 400, 128, 3.0
NAMED = {"model": {"name": "LlamaForCausalLM", "config": {"vocab_size": V}}}


def curves(loss=None, **columns):
    """Return monitors of a healthy run of a language model, with some columns replaced."""
    loss = descent(N, first=math.log(V), last=2.0) if loss is None else loss
    n = len(loss)
    usual = {
        "batch_size": np.full(n, 8.0), "n_tokens": np.full(n, 512.0), "token_entropy": np.full(n, ENTROPY),
        "label_entropy": np.full(n, ENTROPY), "repeated_examples": np.zeros(n),
        "grad_norm": 1 + 0.1 * np.cos(np.arange(n)),
    }  # fmt: skip
    found = monitors(loss)
    return found.assign({name: ("step", np.asarray(values, float)) for name, values in (usual | columns).items()})


def precision(excess=1.0, n=10, every=20):
    shape = (n, 2)
    block = np.full(shape, 1.0)
    block[n // 2 :, 1] = excess
    heads = np.full((*shape, 2), 1.0)
    data = dict.fromkeys(("error_excess", "gradient_error", "output_error"), (("step", "layer"), block))
    data |= dict.fromkeys(("query_error_excess", "query_gradient_error"), (("step", "layer", "head"), heads))
    data["excess_limit"] = ("step", np.full(n, 25.0))
    return xr.Dataset(data, {"step": np.arange(n) * every + every - 1, "layer": [0, 1], "head": [0, 1]})


def attention(logit, entropy, n=10):
    shape = (n, 2, 2)
    data = {"attention_logit_max": np.full(shape, logit), "attention_entropy_share": np.full(shape, entropy)}
    coords = {"step": np.arange(n) * 10 + 9, "layer": [0, 1], "head": [0, 1]}
    return xr.Dataset({name: (("step", "layer", "head"), values) for name, values in data.items()}, coords)


def router(n_dead, n_experts=4, n=10):
    dead = np.tile([0.0, n_dead], (n, 1))
    dead[: n // 2] = 0
    data = {"dead_experts": (("step", "layer"), dead)}
    data["expert_load"] = (("step", "layer", "expert"), np.full((n, 2, n_experts), 1 / n_experts))
    return xr.Dataset(data, {"step": np.arange(n) * 10 + 9, "layer": [0, 1], "expert": np.arange(n_experts)})


def activations(log_z, n=8):
    return xr.Dataset({"log_z": ("step", np.full(n, log_z))}, {"step": np.arange(n) * 50 + 49})


def at(step, value, other=0.0):
    values = np.full(N, float(other))
    values[step] = value
    return values


def events(*rows):
    names = ("step", "kind", "source", "score", "message")
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    return xr.Dataset({name: ("event", np.array(values)) for name, values in columns.items()})


def fp16(step=250):
    is_skipped = (np.arange(N) >= step).astype(float)
    return {"is_skipped": is_skipped, "loss_scale": 2.0 ** (16 - np.cumsum(is_skipped))}


def certain_and_wrong():
    """Return losses of a model that is certain, whose probabilities are taken as logits of 4 classes."""
    return math.log(3 + math.e) - 1 + np.random.default_rng(0).integers(1, 7, N) / 8


def rounded(share):
    part = optimizer(unchanged=share)
    moves = xr.DataArray(1 + 0.1 * np.sin(np.arange(part.sizes["step"])), dims="step")
    return part.assign(unchanged_share=(part["unchanged_share"] * moves).transpose("step", "module"))


PER_CLASS = {"model": {"name": "BertForSequenceClassification", "config": {"id2label": dict.fromkeys("0123")}}}
LABELS_LOST = curves(at(300, np.nan, 2.5), grad_norm=at(300, 0, 1.3), label_entropy=np.full(N, np.nan))
#: Name of a fact -> parts of a run, its configuration, the cause, and the first step.
PLANTED = {
    "alarm_of_arithmetic": ({"monitors": curves(), "precision": precision(1e4)}, {}, "precision", 119),
    "alarm_of_settings": (
        {"monitors": curves(), "events": events((250, "setting", "is_training", 0.0, "The training mode changed."))},
        {}, "wiring", 250,
    ),
    "alarm_of_the_watch": (
        {"monitors": curves(), "events": events((260, "alarm", "grad_norm", 3.0, "grad_norm has risen."))}, {}, "", 260,
    ),
    "blame": (
        {"monitors": curves(), "events": events((270, "blame", "finite", np.inf, "Rank 1: no gradient is finite."))},
        {}, "", 270,
    ),
    "label_entropy_is_off": ({"monitors": curves(label_entropy=at(77, 0.0, 3.0))}, {}, "labels", 77),
    "alarm_of_limits, tokens": ({"monitors": curves(token_entropy=np.full(N, 0.1))}, {}, "loader", 4),
    "alarm_of_limits, labels": (
        {"monitors": curves(ignored_labels=(np.arange(N) >= 300).astype(float))}, {}, "labels", 302,
    ),
    "alarm_of_limits, causal mask": (
        {"monitors": curves(lookahead=np.full(N, 0.2), label_agreement=np.ones(N))}, {}, "", 9,
    ),
    "alarm_of_data": (
        {"monitors": curves(lookahead=0.2 * (np.arange(N) >= 300), label_agreement=np.ones(N))}, {}, "", 302,
    ),
    "alarm_of_limits, no gradient": ({"monitors": curves(grad_norm=np.zeros(N))}, {}, "wiring", 2),
    "repeated_examples_is_off": (
        {"monitors": curves(repeated_examples=(np.arange(N) % 4 > 0).astype(float))}, {}, "loader", 1,
    ),
    "no_label_counts": ({"monitors": LABELS_LOST}, {}, "labels", 300),
    "first_loss_too_high": ({"monitors": curves(descent(N, first=139, last=2))}, NAMED, "", 0),
    "too_good": ({"monitors": curves(descent(N, first=4.85, last=0.01, noise=0.001))}, NAMED, "", None),
    "only_frequencies": (
        {"monitors": curves(descent(N, first=4.85, last=3.3), ignored_labels=np.zeros(N), n_tokens=np.full(N, 2048))},
        NAMED, "", N - 1,
    ),
    "softmax_twice": (
        {"monitors": curves(certain_and_wrong(), label_entropy=np.full(N, np.nan))}, PER_CLASS, "labels", 0,
    ),
    "alarm_of_limits, clipping": (
        {"monitors": curves(grad_norm=np.repeat([2.0**-16, 2.0**-17], N // 2))}, {}, "loss_scale", 4,
    ),
    "alarm_of_limits, skipped": ({"monitors": curves(**fp16())}, {}, "loss_scale", None),
    "never_reached": (
        {"monitors": curves(), "optimizer": optimizer(gradient=[np.nan, 1, 1, 1], ratio=[0, 0.01, 0.01, 0.01])}, {},
        "wiring", 9,
    ),
    "no_update": ({"monitors": curves(), "optimizer": optimizer(ratio=0.0)}, {}, "wiring", 9),
    "rounded_away": ({"monitors": curves(), "optimizer": rounded(0.4)}, {}, "precision", 9),
    "rounded_away, all": ({"monitors": curves(), "optimizer": optimizer(unchanged=1.0)}, {}, "precision", 9),
    "rounded_away, whole tensors": ({"monitors": curves(), "optimizer": optimizer(unchanged=0.4)}, {}, "", 9),
    "experts_receive_nothing": ({"monitors": curves(), "router": router(2)}, {}, "", 59),
    "attention_saturates": ({"monitors": curves(), "attention": attention(4000.0, 0.01)}, {}, "", 99),
}  # fmt: skip


def made(parts, configuration=None):
    run = tree({name: part for name, part in parts.items() if name != "events"}, configuration=configuration)
    if "events" in parts:
        run["events"] = xr.DataTree(parts["events"])
    return run


def facts_of(run):
    record = read_record(run)
    return read_facts(record, find_failure(record))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fact_is_found_alone_and_decides(name):
    parts, configuration, cause, step = PLANTED[name]
    run = made(parts, configuration)
    name = name.split(",")[0]
    findings = [fact for fact in facts_of(run) if fact.is_finding]
    assert [fact.name for fact in findings] == [name]
    assert step in (None, findings[0].step)
    found = diagnose(run)
    assert found.attrs["state"] == "found"
    assert f"Found: {findings[0].sentence}" in found.attrs["summary"]
    assert json.loads(found.attrs["established"]) == ([cause] if cause else [])
    causes = found["causes"].to_dataset()
    if cause:
        assert causes["cause"].values[0] == cause
        assert ALL_CAUSES[cause].title in found.attrs["summary"]
        assert causes["cause"].values[causes["is_possible"].values].tolist() == [cause]
    if "nothing" in causes["cause"].values:
        assert float(causes.set_index(cause="cause")["probability"].sel(cause="nothing")) == 0
    evidence = found["evidence"].to_dataset()
    row = evidence.isel(evidence=int(np.flatnonzero(evidence["symptom"].values == name)[0]))
    assert (str(row["kind"].values), abs(float(row["weight"]))) == ("fact", 10)
    if path := str(row["path"].values):
        assert str(row["variable"].values) in run[path].data_vars


@pytest.mark.parametrize("name", PLANTED)
def test_a_fact_is_the_same_in_a_stored_run(name, tmp_path):
    parts, configuration, *_ = PLANTED[name]
    run = made(parts, configuration)
    wb.save(run, tmp_path / "run.zarr")
    assert diagnose(tmp_path / "run.zarr").attrs["summary"] == diagnose(run).attrs["summary"]


def test_a_complete_healthy_record_holds_no_finding_and_what_it_lacks_is_named():
    parts = {
        "monitors": curves(label_agreement=np.ones(N)),
        "precision": precision(),
        "optimizer": optimizer(),
        "attention": attention(30.0, 0.4),
    }
    found = diagnose(made(parts, NAMED))
    assert (found.attrs["state"], json.loads(found.attrs["found"])) == ("nothing found", [])
    summary = found.attrs["summary"]
    assert "Nothing found in what was recorded (loss," in summary
    assert "Not recorded: activations, gradients that reach the optimizer and effect of an update (the" in summary
    assert "return its loss); wb.watch(model, optimizer) records it." in summary
    assert "Not visible in this record: labels shifted twice, a missing causal mask" in summary
    assert "%" not in summary


def test_what_the_watch_cannot_record_here_is_not_advised():
    rest = {"activations": activations(2.0), "reduction": activations(2.0).rename(log_z="gradient_verdict")}
    parts = {
        "monitors": curves(),
        "precision": precision(),
        "optimizer": optimizer(),
        "attention": attention(30.0, 0.4),
    }
    _, missing = in_the_record(read_record(made(parts | rest)))
    assert missing == " Not recorded: effect of an update (the model has to return its loss). No contract was tested."


@pytest.mark.parametrize(
    "columns",
    [
        {"repeated_examples": (np.arange(N) >= 120).astype(float)},  # a second epoch
        {"grad_norm": np.ones(N)},  # clipped in every step
        {"grad_norm": np.full(N, 0.25)},
        {"is_skipped": at(0, 1.0), "loss_scale": np.full(N, 2.0**15)},  # the scaler begins too high
        {"label_entropy": np.full(N, np.nan), "token_entropy": np.full(N, np.nan)},
    ],
)
def test_what_healthy_loops_do_is_no_finding(columns):
    assert not [fact for fact in facts_of(made({"monitors": curves(**columns)}, NAMED)) if fact.is_finding]


@pytest.mark.parametrize("part", [router(1), router(20, n_experts=32), router(2).isel(step=slice(0, 7))])
def test_experts_without_a_token_for_a_while_are_no_finding(part):
    assert not [fact for fact in facts_of(made({"monitors": curves(), "router": part})) if fact.is_finding]


def test_frozen_blocks_are_no_finding():
    """The recorder has no update ratio for parameters that require no gradient."""
    part = optimizer(gradient=[np.nan, 0.3, 0.3, 0.3], ratio=[np.nan, 0.01, 0.01, 0.01])
    assert not [fact for fact in facts_of(made({"monitors": curves(), "optimizer": part})) if fact.is_finding]


def test_the_loss_of_a_classifier_is_compared_with_its_classes_and_not_its_vocabulary():
    config = {"vocab_size": 30_000, "id2label": {str(i): str(i) for i in range(4)}}
    of_labels = {"BertForSequenceClassification": 4, "LlamaForCausalLM": 30_000, "GPT": 30_000}
    for name, expected in (of_labels | {"BertForMultipleChoice": None}).items():
        run = made({"monitors": curves()}, {"model": {"name": name, "config": config}})
        assert read_record(run).n_classes == expected


def test_a_summed_loss_is_no_finding():
    loss = 512 * descent(N, first=math.log(V), last=2.0)
    assert not [f for f in facts_of(made({"monitors": curves(loss)}, NAMED)) if f.name == "first_loss_too_high"]


def test_clean_probes_exclude_a_fault_of_precision():
    """Evidence of symptoms for it, such as large attention logits, does not count then."""
    parts = {"monitors": curves(), "optimizer": optimizer(), "attention": attention(900.0, 0.2)}
    before = diagnose(made(parts))["causes"].to_dataset().set_index(cause="cause")["probability"]
    after = diagnose(made(parts | {"precision": precision()}))["causes"].to_dataset().set_index(cause="cause")
    assert float(before.sel(cause="precision")) > 0 == float(after["probability"].sel(cause="precision"))
    assert after["probability"].sum().item() == pytest.approx(1)


def test_probes_that_ended_before_the_failure_exclude_nothing():
    loss = descent(N)
    loss[350:] += 2.0
    parts = {"monitors": curves(loss), "optimizer": optimizer()}
    early = facts_of(made(parts | {"precision": precision(n=4)}))
    late = facts_of(made(parts | {"precision": precision(n=20)}))
    assert ["arithmetic_is_sound" in [fact.name for fact in facts] for facts in (early, late)] == [False, True]


def test_alarms_that_name_no_cause_do_not_decide_for_one():
    rows = ((250, "alarm", "loss", 2.0, "loss has risen."), (251, "alarm", "grad_norm", 2.0, "grad_norm has risen."))
    said = (250, "attribution", "low_precision_attention", 0.24, "This looks like it (24%): no signal stands out.")
    found = diagnose(made({"monitors": curves(), "events": events(rows[0], said, rows[1])}))
    assert "alarm at step 250: loss has risen. 1 more alarm followed." in found.attrs["summary"]
    assert json.loads(found.attrs["established"]) == []
    assert "precision" not in found.attrs["summary"]


def test_several_facts_are_listed_by_their_first_step():
    parts = {"monitors": curves(label_entropy=at(77, 0.0, 3.0)), "precision": precision(1e4)}
    found = diagnose(made(parts))
    assert json.loads(found.attrs["established"]) == ["labels", "precision"]
    assert found["causes"]["cause"].values[:2].tolist() == ["labels", "precision"]
    assert "Causes: labels or loss and precision fault." in found.attrs["summary"]


PROBABILITIES = st.lists(st.floats(1e-9, 1), min_size=len(CAUSES), max_size=len(CAUSES)).map(
    lambda values: dict(sorted(zip(CAUSES, np.array(values) / sum(values), strict=True), key=lambda pair: -pair[1]))
)


@given(PROBABILITIES, st.lists(st.sampled_from(list(PLANTED)), max_size=4, unique=True), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_ranking_contradicts_a_fact(probability, names, with_exclusion):
    facts = [FACTS[name] for name in names] + [SOUND] * with_exclusion
    after = settle(probability, facts)
    assert sum(after.values()) == pytest.approx(1)
    established = list(dict.fromkeys(fact.cause for fact in facts if fact.is_for))
    assert list(after)[: len(established)] == established
    if any(fact.is_finding for fact in facts):
        assert after.get("nothing", 0) == 0
    if with_exclusion and "precision" not in established:
        assert after["precision"] == 0
    rest = [cause for cause in probability if cause not in established and after.get(cause, 0) > 0]
    assert [cause for cause in after if cause in rest] == rest  # otherwise the order remains
    if not facts:
        assert after == pytest.approx(probability)


FACTS = {
    name: next(fact for fact in facts_of(made(parts, configuration)) if fact.name == name.split(",")[0])
    for name, (parts, configuration, *_) in PLANTED.items()
}
SOUND = next(
    fact
    for fact in facts_of(made({"monitors": curves(), "optimizer": optimizer(), "precision": precision()}))
    if fact.name == "arithmetic_is_sound"
)


def test_every_cause_excluded_leaves_none_of_these():
    assert settle({"precision": 1.0}, [SOUND]) == {UNKNOWN: 1.0, "precision": 0.0}


@given(st.integers(0, 10**6), st.integers(60, 900), st.floats(0.5, 8), st.floats(0.001, 0.1), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_flat_loss_is_no_fault(seed, n, level, noise, is_log):
    """A run that continues, or is fine-tuned at a constant rate."""
    loss = level * (1 + noise * np.random.default_rng(seed).standard_normal(n))
    data = monitors(loss)
    found = diagnose(data[["loss"]] if is_log else data)
    assert found.attrs["state"] == "nothing found"
    assert found.attrs["shows_failure"] == 0


@given(st.integers(0, 10**6), st.integers(2, 12))
@settings(max_examples=20, deadline=None)
def test_losses_that_are_logged_at_some_steps_only_are_no_failure(seed, every):
    """The missing ones change nothing: the diagnosis is that of the logged rows."""
    loss = descent(60, seed=seed)
    sparse = np.full(60 * every, np.nan)
    sparse[::every] = loss
    whole, logged = (diagnose(made({"monitors": part})) for part in (
        monitors(sparse), monitors(loss, step=np.arange(60) * every)
    ))  # fmt: skip
    assert whole.attrs["failure_kind"] == logged.attrs["failure_kind"] == "stalled"
    assert whole.attrs["summary"] == logged.attrs["summary"]
    xr.testing.assert_identical(whole["causes"].to_dataset(), logged["causes"].to_dataset())


def test_a_run_without_any_loss_has_not_diverged():
    found = diagnose(made({"monitors": monitors(np.full(N, np.nan)), "optimizer": optimizer()}))
    assert found.attrs["summary"].startswith("No loss was recorded. Nothing found in what was recorded")
    assert "pass the loss to watched.log(loss=loss)" in found.attrs["summary"]


def test_the_sample_with_a_failed_probe_is_diagnosed_as_its_timeline_shows_it():
    path = wb.samples.failed_run("precision")
    alarms = wb.Alarms()
    raised = [alarm for alarm in wb.alarms.replay(wb.open_run(path), alarms) if alarm.signal == "arithmetic"]
    found = diagnose(path)
    assert found.attrs["fault"] == "precision"
    assert raised[0].message.rstrip(".") in found.attrs["summary"]
    evidence = found["evidence"].to_dataset()
    probe = evidence.isel(evidence=evidence["symptom"].values == "alarm_of_arithmetic")
    assert int(probe["step"][0]) == raised[0].step
    assert int(probe["layer"][0]) == raised[0].layer


def test_facts_can_be_left_out():
    assert diagnose(made(*PLANTED["no_label_counts"][:2]), uses=("mechanism", "log")).attrs["state"] != "found"
    assert Rules.shipped().causes == tuple(CAUSES)


@pytest.mark.parametrize(
    "columns",
    [{"ignored_labels": np.full(N, 0.7), "n_tokens": np.full(N, 384.0)}, {"n_tokens": np.full(N, 8 * 24.0)}],
    ids=["most are ignored", "short examples"],
)
def test_entropy_of_few_labels_is_no_bound_of_the_loss(columns):
    columns = {"ignored_labels": np.zeros(N), "label_entropy": np.full(N, 1.9)} | columns
    run = made({"monitors": curves(descent(N, first=4.85, last=2.1), **columns)}, NAMED)
    assert not [fact for fact in facts_of(run) if fact.is_finding]


def test_a_loss_above_the_entropy_of_its_labels_that_still_falls_is_no_finding():
    loss = np.linspace(4.85, 4.2, N) + 0.02 * np.random.default_rng(0).standard_normal(N)
    run = made({"monitors": curves(loss, ignored_labels=np.zeros(N), n_tokens=np.full(N, 2048.0))}, NAMED)
    assert not [fact for fact in facts_of(run) if fact.is_finding]


def with_contracts(*checks):
    """Return a healthy run whose watch has tested contracts."""
    tree = made({"monitors": curves()}, NAMED)
    tree.attrs["contracts"] = json.dumps(CheckReport(checks, 4, 0.1).as_json())
    return tree


def test_a_broken_contract_is_the_first_cause_and_a_fact():
    where = {"where": "the optimizer (train.py:7)", "remedy": "build it from model.parameters()."}
    check = Result("optimizer_covers", Status.FAILED, "2 parameters do not move.", **where)
    found = diagnose(with_contracts(check))
    sentence = (
        "The contract optimizer_covers is broken: 2 parameters do not move. Where: the optimizer (train.py:7). "
        "To mend it: build it from model.parameters()."
    )
    assert json.loads(found.attrs["found"])[0] == sentence
    assert found.attrs["state"] == "found"
    assert f"Found: {sentence}" in found.attrs["summary"]
    assert "Cause: wiring of the training step." in found.attrs["summary"]
    assert "%" not in found.attrs["summary"]
    assert found["causes"]["cause"].values[0] == "wiring"


def test_what_contracts_have_tested_is_not_unseen():
    unseen = diagnose(made({"monitors": curves()}, NAMED))["unseen"]["check"].values.tolist()
    assert {"accumulation", "optimizer_covers"} <= {*unseen}
    passed = Result("accumulation", Status.PASSED, "nothing moves")
    found = diagnose(with_contracts(passed, Result("optimizer_covers", Status.NOT_TESTED, "unknown")))
    left = found["unseen"]["check"].values.tolist()
    assert "accumulation" not in left
    assert "optimizer_covers" in left
    assert found.attrs["state"] == "nothing found"
    assert "and 1 of 2 contracts)" in found.attrs["summary"]
    assert "Contracts not tested: optimizer_covers." in found.attrs["summary"]
