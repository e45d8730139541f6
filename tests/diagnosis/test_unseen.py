"""What a record does not show is listed unless the record decides it, with the contract that tests it."""

import json
from dataclasses import replace

import numpy as np
import pytest

import workbench as wb
from tests.diagnosis.records import descent, monitors
from tests.diagnosis.test_facts import NAMED, N, curves, facts_of, made
from workbench.contracts.check import CONTRACTS
from workbench.diagnosis import Rules, find_failure, read_record
from workbench.diagnosis.unseen import UNSEEN, unseen_in
from workbench.reports.diagnosis_document import diagnosis_document

END, PAD = 2, 0
LLAMA = {
    "model": {"name": "LlamaForCausalLM", "config": {"vocab_size": 128, "model_type": "llama", "eos_token_id": END}}
}
TWICE, PADDING, ENDS = "labels shifted twice", "padding in the loss", "ends of texts without a label"


def texts(pad=PAD):
    """Return tokens, their attention mask, and the labels of 6 texts with an end and padding."""
    ids = np.random.default_rng(0).integers(5, 128, (6, 20))
    n = np.arange(8, 14)[:, None]
    at = np.arange(20)
    ids = np.where(at == n - 1, END, np.where(at >= n, pad, ids))
    mask = (at < n).astype(int)
    return ids, mask, np.where(mask == 1, ids, -100)


def with_probe(configuration=LLAMA, **inputs):
    run = made({"monitors": curves()}, configuration)
    named = {name: {"dtype": "int64", "values": np.asarray(each).tolist()} for name, each in inputs.items()}
    run.attrs["probe"] = json.dumps({"mapping": named})
    return run


def shifted(configuration=LLAMA):
    ids = np.random.default_rng(0).integers(5, 128, (4, 20))
    return with_probe(configuration, input_ids=ids[:, :-1], labels=ids[:, 1:])


def padded(count_padding=False, ignored=()):
    ids, mask, labels = texts()
    labels = ids if count_padding else np.where(np.isin(ids, ignored), -100, labels)
    return with_probe(input_ids=ids, attention_mask=mask, labels=labels)


@pytest.mark.parametrize(
    ("run", "fault", "words"),
    [
        (shifted(), TWICE, "it learns the token after the next"),
        (padded(count_padding=True), PADDING, "hides 48 % of the tokens that count as labels"),
        (padded(ignored=[END]), ENDS, "None of 6 ends of texts (token 2) counts as a label"),
    ],
)
def test_labels_of_the_stored_inputs_decide(run, fault, words):
    (fact,) = (fact for fact in facts_of(run) if fact.is_finding)
    assert words in fact.sentence
    found = wb.diagnose(run)
    assert (found.attrs["state"], json.loads(found.attrs["established"])) == ("found", ["labels"])
    assert words in found.attrs["summary"]
    assert fault not in found["unseen"]["unseen"].values


def test_sound_labels_are_no_finding_and_are_not_listed():
    found = wb.diagnose(padded())
    assert found.attrs["state"] == "nothing found"
    assert not {TWICE, PADDING, ENDS} & set(found["unseen"]["unseen"].values.tolist())


def prompts_hidden():
    ids, mask, labels = texts()
    return with_probe(input_ids=ids, attention_mask=mask, labels=np.where(np.arange(20) < 5, -100, labels))


def ends_of_prompts_hidden():
    ids = np.random.default_rng(0).integers(5, 128, (6, 20))
    ids[:, [4, 12]] = END
    labels = np.where(np.arange(20) < 6, -100, ids)
    return with_probe(input_ids=ids, attention_mask=np.ones_like(ids), labels=labels)


def padded_with_ends():
    """Texts without an end, padded with the end-of-text token."""
    ids, mask, _ = texts(END)
    ids = np.where(ids == END, 7, ids) * mask + END * (1 - mask)
    return with_probe(input_ids=ids, attention_mask=mask, labels=np.where(mask == 1, ids, -100))


@pytest.mark.parametrize(
    "run",
    [
        prompts_hidden(),
        ends_of_prompts_hidden(),
        padded_with_ends(),
        shifted(NAMED),  # a class of that name that is not one of transformers
        shifted({"model": {"name": "GPT", "config": {}}}),
        with_probe({"model": {"name": "T5ForConditionalGeneration", "config": {"model_type": "t5"}}}, **dict(
            zip(("input_ids", "labels"), np.random.default_rng(0).integers(5, 9, (2, 3, 20)), strict=True)
        )),
        with_probe(input_ids=[[7] * 20] * 4, labels=[[7] * 20] * 4),
        with_probe(labels=[[7] * 20] * 4),
        with_probe(input_ids=[[7] * 20] * 4, labels=[[-100] * 20] * 4),
    ],
)  # fmt: skip
def test_what_healthy_loops_do_with_labels_is_no_finding(run):
    assert not [fact for fact in facts_of(run) if fact.is_finding]


@pytest.mark.parametrize(
    "text", ["", "null", "[1]", '{"tuple": []}', '{"mapping": {"labels": [1], "x": {"values": 3}}}']
)
def test_a_probe_without_names_decides_nothing(text):
    run = made({"monitors": curves()}, LLAMA)
    run.attrs["probe"] = text
    assert read_record(run).probe == {}


@pytest.mark.parametrize(
    ("fault", "covered"),
    [
        ("data repeated after 1,024 examples", {"batch_size": np.full(N, 2.0)}),
        ("gradients of a scaled or summed loss", {"loss_weight": np.ones(N)}),
        ("a missing causal mask", {"lookahead": np.zeros(N)}),
        (PADDING, {"token_entropy": np.full(N, np.nan)}),  # images
        (TWICE, {"label_agreement": np.full(N, np.nan)}),  # a label for each example
    ],
)
def test_a_fault_is_listed_unless_the_monitors_exclude_it(fault, covered):
    other = {"loss_weight": np.full(N, 4.0), "label_agreement": np.ones(N)}
    assert [fault in names(curves(**(other | each))) for each in ({}, covered)] == [True, False]


def names(part, configuration=None):
    return unseen_in(read_record(made({"monitors": part}, configuration)))["unseen"].values.tolist()


@pytest.mark.parametrize(
    ("fault", "configuration"),
    [
        ("experts without a balance loss", NAMED),
        ("dropout that differs in recomputed activations", {"model": {"name": "GPT", "config": {"dropout": 0.0}}}),
        ("a schedule of wrong length or unit", {"training": {"warmup": 20}}),
    ],
)
def test_a_fault_is_listed_unless_the_configuration_excludes_it(fault, configuration):
    assert [fault in names(curves(), each) for each in ({}, configuration)] == [True, False]


def test_a_restart_is_listed_for_a_run_that_continues():
    run = made({"monitors": curves()})
    assert "a restart without the optimizer's state" not in unseen_in(read_record(run))["unseen"].values
    run = wb.open_run(wb.samples.failed_run("healthy")).copy()
    events = run["events"].to_dataset()
    run["events"] = run["events"].__class__(events.assign(kind=("event", np.full(events.sizes["event"], "resumed"))))
    assert "a restart without the optimizer's state" in unseen_in(read_record(run))["unseen"].values


def test_the_summary_and_the_table_list_the_same_and_a_contract_tests_each():
    found = wb.diagnose(made({"monitors": curves(label_agreement=np.ones(N))}))
    listed = found["unseen"]["unseen"].values.tolist()
    assert len(listed) > 9
    assert all(name in found.attrs["summary"] for name in listed)
    by_hand = [how for _, how, _ in UNSEEN if how.endswith(".")]
    assert len(by_hand) == 2
    assert {how for _, how, _ in UNSEEN} <= {*CONTRACTS, *by_hand}


def without_evidence():
    """Return rules that find another cause whatever the symptoms are."""
    rules = Rules.shipped()
    return replace(rules, unknown=dict.fromkeys(rules.unknown, 60.0))


def diverging():
    loss = descent(N, first=4.8, last=2.0)
    loss[300:] = np.nan
    return curves(loss, grad_norm=np.where(np.arange(N) < 300, 1.0, np.nan))


def raised(by=1.5, until=N):
    loss = descent(N, first=4.8, last=2.0)
    loss[250:until] += by
    return curves(loss)


@pytest.mark.parametrize("part", [diverging(), raised()])
def test_a_failure_without_a_cause_is_not_nothing(part):
    found = wb.diagnose(made({"monitors": part[["loss", "grad_norm"]]}), rules=without_evidence(), uses=["mechanism"])
    assert found.attrs["state"] == "no cause found"
    assert "No cause found in what was recorded (loss" in found.attrs["summary"]
    assert "othing found" not in found.attrs["summary"]
    document = diagnosis_document(found)
    assert (document.verdict, document.state) == ("No cause found in what was recorded", "failing")
    assert document.actions
    assert "No cause was found" in document.sections[3].blocks[0].text
    found["experiments"] = found["experiments"].__class__(found["experiments"].to_dataset().isel(experiment=[]))
    assert "None of" in diagnosis_document(found).actions[0].text


def test_a_rise_that_recovered_is_no_failure_without_a_cause():
    run = made({"monitors": raised(until=300)[["loss", "grad_norm"]]})
    found = wb.diagnose(run, rules=without_evidence(), uses=["mechanism"])
    assert (found.attrs["shows_failure"], found.attrs["has_recovered"]) == (1, 1)
    assert found.attrs["state"] == "nothing found"


@pytest.mark.parametrize("factor", [1, 600])
def test_a_large_loss_has_not_diverged(factor):
    """A sum over tokens, or a regression; its gradients are as large."""
    loss = factor * descent(N, first=4.8, last=2.0)
    run = made({"monitors": monitors(loss, grad_norm=factor * (1 + 0.3 * np.cos(np.arange(N))))})
    assert find_failure(read_record(run)).kind == "stalled"
    loss[-3:] *= 30
    assert find_failure(read_record(made({"monitors": monitors(loss)}))).kind == "diverged"


def with_rate(n_off, **columns):
    rate = np.clip(np.linspace(1e-3, 0, N - n_off + 1), 0, None)[: N - n_off]
    return curves(learning_rate=np.append(rate, np.zeros(n_off)), **columns)


def test_a_schedule_that_ended_before_the_run_is_found():
    moves = {"update_ratio": np.append(np.full(N - 100, 0.01), np.zeros(100))}
    (fact,) = (fact for fact in facts_of(made({"monitors": with_rate(100, **moves)})) if fact.is_finding)
    assert (fact.cause, fact.step) == ("schedule", N - 100)
    assert "0 in the last 100 of 400 updates" in fact.sentence


@pytest.mark.parametrize(
    "part", [with_rate(1, update_ratio=np.full(N, 0.01)), with_rate(100, update_ratio=np.full(N, 0.01)), with_rate(100)]
)
def test_a_rate_that_ends_at_0_or_is_that_of_another_group_is_no_finding(part):
    assert not [fact for fact in facts_of(made({"monitors": part})) if fact.is_finding]


def test_a_loss_that_shows_no_failure_has_likely_causes_only_if_it_learned_too_little():
    """Warm restarts: a rate that returns to its peak is what the planned schedule does, and a fault in another run."""
    rate = 5e-4 * (1 + np.cos(np.pi * (np.arange(N) % 100) / 100))
    loss = 2 + 2.5 * np.exp(-np.arange(N) / 80) + 0.03 * np.random.default_rng(0).standard_normal(N)
    found = wb.diagnose(made({"monitors": monitors(loss, rate=rate)}))
    assert (found.attrs["state"], found.attrs["shows_failure"]) == ("likely", 0)
    assert "If it learned too little: the evidence points to schedule" in found.attrs["summary"]
    assert diagnosis_document(found).verdict == "If it learned too little: schedule"


@pytest.mark.parametrize("seed", range(5))
def test_batches_of_another_kind_are_no_rise(seed):
    """A third of the batches have a larger loss; by chance they fill a window."""
    draws = np.random.default_rng(seed)
    loss = 2 + 2 * np.exp(-np.arange(600) / 80) + 0.9 * (draws.random(600) < 0.3) + 0.05 * draws.standard_normal(600)
    failure = find_failure(read_record(made({"monitors": monitors(loss)})))
    assert failure.kind == "stalled"
    loss[450:] += 1.5
    failure = find_failure(read_record(made({"monitors": monitors(loss)})))
    assert failure.kind == "spike"
    assert 400 < failure.step < 465


def test_losses_that_are_suddenly_not_finite_have_not_risen():
    failure = find_failure(read_record(made({"monitors": diverging()})))
    finite = made({"monitors": diverging().isel(step=slice(300))})
    assert failure.noise == pytest.approx(find_failure(read_record(finite)).noise)
    assert "without an earlier rise of the loss" in failure.words
    part = diverging()
    part["loss"].values[297:300] = [4, 8, 16]
    failure = find_failure(read_record(made({"monitors": part})))
    assert failure.words == "the loss began to rise at step 296 and the run diverged"
