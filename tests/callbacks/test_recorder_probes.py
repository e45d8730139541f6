"""The probes of a recorder: they measure the run's own arithmetic in any loop, and do not affect training."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

import workbench as wb
from tests.callbacks.test_recorder import adam, dense, gpt2_with_dropout, loss_of, moe, of_part, recorder_with, task  # noqa: F401
from tests.launches import launched
from workbench.callbacks.recorder.joint_optimizer import JointOptimizer
from workbench.callbacks.recorder.options import CADENCE
from workbench.callbacks.recorder.probes import QueryKeyWindow, ReductionCollector
from workbench.io.run_output import RecordingWarning
from workbench.models.readable_weights import complete
from workbench.probes.gradient_agreement import GradientVerdict

PROBES = {"precision": 2, "reduction": 2, "update": 2}


def trained(model, task, recorder=None, *, n_steps=6, fault_from=None, autocast=None):  # noqa: F811
    """Train in a standard loop, in which attention may lose bits from a step on."""
    optimizer, mode = adam(model), wb.faults.FlashAttentionMode()
    with ExitStack() as stack:
        if recorder is not None:
            stack.enter_context(recorder.attach(model, optimizer))
        for i in range(n_steps):
            optimizer.zero_grad()
            if fault_from is not None:
                mode.cut = wb.faults.Cut(n_bits=4 * (i >= fault_from), output=True, gradient=True)
            with ExitStack() as around:
                if autocast is not None:
                    around.enter_context(torch.autocast("cpu", autocast))
                if fault_from is not None:
                    around.enter_context(mode)
                loss = loss_of(model, task.batch(i))
                loss.backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_the_probe_runs_in_the_modes_of_the_loop(autocast, task):  # noqa: F811
    recorder = recorder_with(every=PROBES)
    trained(dense(), task, recorder, n_steps=10, fault_from=6, autocast=autocast)
    found = of_part(recorder, "precision")
    assert [o.step for o in found] == [1, 3, 5, 7, 9]
    excess = np.array([o.values["error_excess"].max() for o in found])
    assert excess[:3].max() < 8 < excess[3:].min()
    limits = {float(o.values["excess_limit"]) for o in found}
    assert limits == {25.0 if autocast is None else 2.0}


def test_the_first_probe_raises_the_alarm_and_names_the_fault(task):  # noqa: F811
    alarms = wb.Alarms()
    fault = wb.faults.low_precision_attention(n_bits=2, start=7)
    records = list(
        wb.train(dense(), task, n_steps=20, recorder=wb.Recorder(every={"precision": 3}), alarms=alarms, faults=[fault])
    )
    assert [(r.step, alarm.signal) for r in records for alarm in r.alarms] == [(8, "arithmetic")]
    (alarm,) = alarms.raised
    assert (alarm.step, alarm.is_outcome, alarm.score > 10) == (8, False, True)
    assert 0 <= alarm.layer < 2
    assert 0 <= alarm.head < 2
    assert "torch's own kernel" in alarm.message
    assert alarms.attribute().cause == "low_precision_attention"
    assert alarms.attribute().probability == {"low_precision_attention": 1.0}


FAULTS = {
    "bucket": (wb.faults.DroppedBucket(share=1.0, start=6), "zeros instead of the computed", "dropped_bucket"),
    "stale": (wb.faults.StaleReduction(delay=1, start=6), "not those computed in this step", "stale_reduction"),
    "bits": (
        wb.faults.LowPrecisionReduction(n_bits=2, start=6, n_ranks=2), "significant bits", "low_precision_reduction",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_gradients_that_differ_from_the_computed_ones(name, task):  # noqa: F811
    fault, words, cause = FAULTS[name]
    alarms = wb.Alarms()
    options = {"n_steps": 12, "clip_norm": 0.1, "faults": [fault], "alarms": alarms}
    assert len(list(wb.train(moe(), task, recorder=wb.Recorder(every={"reduction": 2}), **options))) == 12
    alarm = alarms.raised[0]
    assert (alarm.signal, words in alarm.message) == ("gradients", True)
    assert alarm.step == 7
    found = alarms.attribute()
    assert found.cause == cause
    assert len(found.probability) == (3 if name == "stale" else 1)  # without earlier steps it may be another fault
    assert sum(found.probability.values()) == pytest.approx(1)


@pytest.mark.parametrize("number", [0, 31, 32, 69])
def test_a_fault_in_one_of_many_parameters_is_found_in_its_turn_and_then_each_time(number):
    weights = torch.nn.ParameterList([torch.full((3, 4), 1.0 + i) for i in range(70)])
    collector = ReductionCollector(JointOptimizer([torch.optim.SGD(weights.parameters())]), weights)
    verdicts = []
    for _ in range(7):
        weights.zero_grad()
        collector.arm()
        sum(weight.pow(3).sum() for weight in weights).backward()
        weights[number].grad.zero_()
        collector.take()
        values = complete(collector.values())
        verdicts.append(int(values["gradient_verdict"]))
        assert values["wrong_parameters"] == pytest.approx(verdicts[-1] and 1 / 24, rel=0.05)
    missing = GradientVerdict.PARAMETERS_MISSING.severity
    assert verdicts == [0] * (number % 3) + [missing] * (7 - number % 3)  # 70 parameters take three turns


@pytest.mark.parametrize("name", ["clip_norm", "accumulated", "clipped by value", "autocast"])
def test_gradients_of_correct_loops_raise_no_alarm(name, task):  # noqa: F811
    alarms = wb.Alarms()
    recorder = recorder_with(every={"reduction": 1}, alarms=alarms)
    model = dense()
    optimizer = adam(model)
    with recorder.attach(model, optimizer):
        for i in range(8):
            optimizer.zero_grad()
            for part in range(2 if name == "accumulated" else 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
                    loss = loss_of(model, task.batch(2 * i + part))
                loss.backward()
            if name == "clip_norm":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            elif name == "clipped by value":
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
    found = [int(o.values["gradient_verdict"]) for o in of_part(recorder, "reduction")]
    # The model is read within the first step, after its gradients were computed.
    assert found[0] == -1
    assert set(found[1:]) <= ({2, 7} if name == "clipped by value" else {0})
    assert alarms.raised == []
    assert all(not weight._backward_hooks for weight in model.parameters())


def test_the_effect_of_an_update_is_the_change_of_the_loss_on_held_out_examples(task):  # noqa: F811
    model, losses = dense(), []
    inputs, targets = task.held_out(64)
    recorder = recorder_with(every={"update": 1})
    for _ in wb.train(model, task, n_steps=4, learning_rate=1e-4, recorder=recorder):
        with torch.no_grad():
            losses.append(float(loss_of(model, (inputs, targets))))
    found = of_part(recorder, "update")
    changes = [float(o.values["loss_change"]) for o in found]
    np.testing.assert_allclose(changes[1:], np.diff(losses), rtol=1e-3, atol=1e-6)
    predicted = np.array([float(o.values["predicted_loss_change"]) for o in found])
    np.testing.assert_allclose(changes, predicted, rtol=0.1, atol=1e-4)


def test_a_model_that_returns_its_loss_has_one(task):  # noqa: F811
    model, recorder = gpt2_with_dropout(), recorder_with(every={"update": 1})
    optimizer = adam(model)
    with recorder.attach(model, optimizer):
        for i in range(3):
            optimizer.zero_grad()
            tokens, _ = task.batch(i)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
    assert all(np.isfinite(float(o.values["loss_change"])) for o in of_part(recorder, "update"))
    assert len(of_part(recorder, "update")) == 3


def test_the_contents_of_batches(task):  # noqa: F811
    recorder = recorder_with(every=None)
    trained(dense(), task, recorder, n_steps=3)
    numbers = [o.values for o in of_part(recorder, "monitors")]
    for i, found in enumerate(numbers):
        tokens = task.batch(i)[0]
        _, counts = tokens.unique(return_counts=True)
        share = counts / counts.sum()
        assert float(found["token_entropy"]) == pytest.approx(float(-(share * share.log()).sum()), rel=1e-5)
        assert float(found["label_entropy"]) > 0  # from the gradient of the loss
        assert float(found["repeated_examples"]) == 0
        assert float(found["update_ratio"]) > 0
    records = recorder_with(every=None)
    for _ in wb.train(dense(), task, n_steps=2, recorder=records):
        pass
    labels = task.batch(1)[1]
    _, counts = labels[labels != -100].unique(return_counts=True)
    share = counts / counts.sum()
    entropy = float(of_part(records, "monitors")[1].values["label_entropy"])
    assert entropy == pytest.approx(float(-(share * share.log()).sum()), rel=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_lost_causal_mask_is_seen_in_the_outputs_unless_there_is_dropout(dropout):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.LlamaConfig(**sizes, vocab_size=9, attention_dropout=dropout)
    model, recorder = transformers.LlamaForCausalLM(config), recorder_with(every=None)
    optimizer = adam(model)
    with recorder.attach(model, optimizer):
        for i in range(6):
            model.train(mode=i != 1)
            ids = torch.randint(9, (8, 12))
            mask = torch.ones(12, 12, dtype=torch.bool).tril(0 if i < 3 else 20).expand(8, 1, 12, 12)
            model(input_ids=ids, labels=ids, attention_mask=mask).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = np.array([float(o.values["lookahead"]) for o in of_part(recorder, "monitors")])
    if dropout:
        assert found[1] == 0  # in eval mode
        assert np.isnan(np.delete(found, 1)).all()
    else:
        assert (found[:3] < 1e-6).all()
        assert (found[3:] > 1e-3).all()


def test_the_largest_losses(task):  # noqa: F811
    records = recorder_with(every=None)
    model = dense()
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
            for inputs, targets in [task.batch(0)]
        ]
    kept = losses[0][task.batch(0)[1].flatten() != -100].sort(descending=True).values
    for _ in wb.train(model, task, n_steps=1, recorder=records):
        pass
    found = float(of_part(records, "monitors")[0].values["largest_losses"])
    assert found == pytest.approx(float(kept[: -(-len(kept) // 8)].mean()), rel=1e-5)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_the_largest_losses_of_hugging_face_models(kind):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "causal":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=32))
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=32))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ids = torch.randint(0, 40, (4, 12))
    labels = ids.clone()
    labels[0, :5] = -100
    losses = torch.nn.functional.cross_entropy(
        *(
            (model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            if kind == "causal"
            else (model(ids).logits.flatten(0, 1), labels.flatten())
        ),
        reduction="none",
    )
    kept = losses.detach()[losses.detach() != 0].sort(descending=True).values
    recorder = recorder_with(every=None)
    optimizer = torch.optim.AdamW(model.parameters())
    with recorder.attach(model, optimizer):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    found = float(of_part(recorder, "monitors")[0].values["largest_losses"])
    assert found == pytest.approx(float(kept[: -(-len(kept) // 8)].mean()), rel=1e-4)


def test_a_resumed_run_remembers_its_examples(task, tmp_path):  # noqa: F811
    stores = {}
    for name, parts in {"whole": [8], "parts": [4, 8]}.items():
        for n_steps in parts:
            options = {"n_steps": 8, "store": tmp_path / f"{name}.zarr", "checkpoint_every": 4}
            small = wb.tasks.associative_recall(length=4, vocab_size=4, n_pairs=1, batch_size=8, seed=3)
            model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=4, max_length=4, seed=1)
            run = wb.train(model, small, recorder=wb.Recorder(), resume=n_steps != parts[0], **options)
            for record in run:
                if record.step == n_steps - 1:
                    run.close()
                    break
        stores[name] = wb.open_run(tmp_path / f"{name}.zarr")["monitors"].to_dataset()["repeated_examples"].values
    assert stores["whole"].max() > 0
    np.testing.assert_array_equal(stores["whole"], stores["parts"])


def test_failing_measurements_do_not_stop_training(task, monkeypatch):  # noqa: F811
    def fails(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("workbench.probes.batch.BatchProbe._entropies", fails)
    monkeypatch.setattr("workbench.callbacks.recorder.updates.SampledUpdate.end", fails)
    recorder = recorder_with(every=None)
    with pytest.warns(RecordingWarning, match="The update ratio cannot be recorded from step 0 on"):
        trained(dense(), task, recorder, n_steps=3)
    numbers = [o.values for o in of_part(recorder, "monitors")]
    assert len(numbers) == 3
    assert all(np.isnan(found["token_entropy"]) and np.isnan(found["update_ratio"]) for found in numbers)
    assert all(np.isfinite(found["grad_norm"]) for found in numbers)


def test_broken_arithmetic_stops_the_run_with_a_remedy(task):  # noqa: F811
    """A smaller learning rate would hide the bug."""
    kinds = {k for c, ks in wb.Actions().policy.items() if c in FAULTS_OF_ARITHMETIC for k in ks}
    assert kinds == {"stop"}
    actions = wb.Actions(policy={"low_precision_attention": ("stop",)})
    recorder = wb.Recorder(every={"precision": 3})
    fault = wb.faults.low_precision_attention(n_bits=4, start=7)
    options = {"recorder": recorder, "alarms": wb.Alarms(), "actions": actions, "faults": [fault]}
    records = list(wb.train(dense(), task, n_steps=20, **options))
    assert records[-1].step == 8
    (done,) = actions.done
    assert done.kind == "stop"
    assert "Run attention in float32 with torch's own kernel." in done.message


FAULTS_OF_ARITHMETIC = ("low_precision_attention", "arithmetic", "low_precision_reduction", "stale_reduction")


def test_a_changed_setting_that_is_not_a_fault_requests_no_action(task):  # noqa: F811
    assert wb.Actions().policy["changed_setting"] == ()

    class Changing(wb.Callback):
        name = "changing"

        def begin_step(self, step):
            if step == 10:
                for group in self.run.optimizer.param_groups:
                    group["weight_decay"] = 0.5

    alarms, actions = wb.Alarms(), wb.Actions(policy={"changed_setting": (), "otherwise": ("stop",)})
    options = {"recorder": wb.Recorder(every=None), "alarms": alarms, "callbacks": [Changing()]}
    records = list(wb.train(dense(), task, n_steps=20, actions=actions, **options))
    assert len(records) == 20
    assert [alarm.signal for alarm in alarms.raised] == ["weight_decay"]


class WithoutFloat64(torch.nn.Module):
    """A module whose kernel supports no float64."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, *args, **kwargs):
        if x.dtype == torch.float64:
            raise NotImplementedError("There is no kernel for float64.")
        return self.module(x, *args, **kwargs)


def test_a_block_whose_arithmetic_cannot_be_measured_leaves_the_others(task):  # noqa: F811
    def recorded(layers):
        model, recorder = dense(), recorder_with(every={"precision": 2})
        for layer in layers:
            model.blocks[layer].attention = WithoutFloat64(model.blocks[layer].attention)
        trained(model, task, recorder)
        return [np.isfinite(o.values["error_excess"]).tolist() for o in of_part(recorder, "precision")]

    assert recorded([1]) == [[True, False]] * 3
    with pytest.warns(RecordingWarning, match="No block can be run separately"):
        assert recorded([0, 1]) == []


def window_of(model, tokens):
    return QueryKeyWindow(wb.query_key_weights(model, tokens), SimpleNamespace(as_model=model), 2.0)


def test_query_keys_are_measured_without_waiting(task):  # noqa: F811
    model = dense()
    window = window_of(model, task.batch(0)[0])
    window.begin()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=1e-3)
    launches, (values, broken) = launched(window.measure(2, is_full=True))
    assert (launches.waits, broken) == ({}, {})
    assert (values["effective_rank"] > 1).all()
    unchanged, _ = complete(window.measure(2, is_full=True))  # the base point has moved
    assert (unchanged["frobenius_norm"][..., :4] == 0).all()
    assert np.isnan(unchanged["effective_rank"][..., :4]).all()


def test_query_keys_that_are_not_finite_are_named(task):  # noqa: F811
    model = dense()
    window = window_of(model, task.batch(0)[0])
    window.begin()
    with torch.no_grad():
        model.blocks[1].attention.query.weight[0, 0] = torch.inf
    values, broken = complete(window.measure(2, is_full=True))
    assert broken == {1: "query and key weights"}
    assert np.isnan(values["frobenius_norm"][1, 0]).all()
    assert np.isfinite(values["frobenius_norm"][0]).all()


def test_layers_of_a_large_model_take_turns_and_their_spectra_follow_together(task, monkeypatch):  # noqa: F811
    """Each row with spectra has those of every layer, over the window in which the layer had its turn."""
    found = {}
    for n_entries in (1 << 21, 1):
        monkeypatch.setattr("workbench.callbacks.recorder.probes._ENTRIES_OF_GRAMS", n_entries)
        recorder, rows = wb.Recorder(every=dict.fromkeys(CADENCE) | {"attention": 10}), {}
        recorder.observe(lambda seen, rows=rows: rows.setdefault(seen.part, {}).update({seen.step: seen.values}))
        model = dense()
        optimizer = adam(model)
        with recorder.attach(model, optimizer):
            for i in range(40):
                optimizer.zero_grad()
                loss_of(model, task.batch(i)).backward()
                optimizer.step()
        found[n_entries] = rows["attention"]
    whole, in_turn = found.values()
    n_layers = len(whole[9]["effective_rank"])
    assert [*in_turn] == [9, 19, 29, 39]
    assert n_layers == 2
    for step, values in in_turn.items():
        np.testing.assert_array_equal(values["attention_entropy"], whole[step]["attention_entropy"])
        if step in (9, 29):
            assert np.isnan(values["effective_rank"]).all()
            continue
        for layer, measured_at in enumerate((step - 10, step)):
            for name in ("effective_rank", "frobenius_norm"):
                np.testing.assert_array_equal(values[name][layer], whole[measured_at][name][layer])
