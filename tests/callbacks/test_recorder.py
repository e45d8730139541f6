"""The recorder in a standard loop: its values, its cadence, and that it does not affect training."""

import gc
import math
import warnings
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from torch.nn.functional import cross_entropy

import workbench as wb
from tests.about import about, says
from workbench.errors import OptionError, StoreError
from workbench.io.run_output import RecordingWarning
from workbench.models.probing import undisturbed

SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 16, "seed": 1}
ALL = {"attention": 3, "router": 3, "optimizer": 3, "activations": 3}
TERMS = ["D2", "D3", "dWq", "dWk", "W"]


@pytest.fixture
def task():
    return wb.tasks.associative_recall(length=12, vocab_size=32, n_pairs=2, batch_size=8, seed=3)


def dense(norm="pre_ln", **options):
    return wb.zoo.transformer(norm, **{**SMALL, **options})


def moe(**options):
    return wb.zoo.moe(**{**SMALL, "n_experts": 4, **options})


def recorder_with(*args, every=ALL, **options):
    """Return a recorder with `heard`, its observations so far; warnings about short windows are suppressed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        recorder = wb.Recorder(*args, every=every, **options)
    recorder.heard = []
    recorder.observe(recorder.heard.append)
    return recorder


def of_part(recorder, part):
    return [observation for observation in recorder.heard if observation.part == part]


def loss_of(model, batch):
    tokens, targets = batch
    output = model(tokens)
    return cross_entropy(getattr(output, "logits", output).flatten(0, 1).float(), targets.flatten())


def adam(model, rate=1e-2, **options):
    return torch.optim.AdamW(model.parameters(), lr=rate, **options)


def run(model, task, n_steps, recorder=None, optimizer=None, before=lambda i: None, start=0, **attach):
    """Train a model in a standard loop, and return it."""
    optimizer = adam(model) if optimizer is None else optimizer
    with nullcontext() if recorder is None else recorder.attach(model, optimizer, **attach):
        for i in range(start, start + n_steps):
            before(i)
            optimizer.zero_grad()
            loss = loss_of(model, task.batch(i))
            loss.backward()
            if recorder is not None:
                recorder.log(loss=loss)
            optimizer.step()
    return model


def hooks_of(model, optimizer):
    tables = [(len(m._forward_pre_hooks), len(m._forward_hooks), len(m._backward_hooks)) for m in model.modules()]
    return tables, len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)


def events_of(path):
    events = wb.open_run(path)["events"]
    return [{name: events[name].values[i] for name in events.data_vars} for i in range(events.sizes["event"])]


class TestValues:
    def test_query_key_updates_are_those_of_the_dense_products(self, task):
        """Compared with the full d x d matrices, in float64, over windows of three updates."""
        model, recorder, states = dense(), recorder_with(), []

        def keep(i):
            pairs = [(block.attention.query.weight, block.attention.key.weight) for block in model.blocks]
            heads = [[w.detach().double().clone().view(2, 8, 16).transpose(1, 2) for w in pair] for pair in pairs]
            states.append(heads)

        run(model, task, 6, recorder, before=keep)
        keep(6)
        assert [o.step for o in of_part(recorder, "attention")] == [2, 5]
        for o, (start, stop) in zip(of_part(recorder, "attention"), ((0, 3), (3, 6)), strict=True):
            assert o.coords["term"].tolist() == TERMS
            for layer in range(2):
                (q0, k0), (q1, k1) = states[start][layer], states[stop][layer]
                for head in range(2):
                    a, b, c, d = q0[head], k0[head], q1[head] - q0[head], k1[head] - k0[head]
                    matrices = [c @ b.T + a @ d.T, c @ d.T, c, d, q1[head] @ k1[head].T]
                    for i, matrix in enumerate(matrices):
                        s = torch.linalg.svdvals(matrix)
                        p = s**2 / (s**2).sum()
                        found = {name: o.values[name][layer, head, i] for name in o.values if o.values[name].ndim == 3}
                        assert found["frobenius_norm"] == pytest.approx(float(s.norm()), rel=1e-6)
                        assert found["stable_rank"] == pytest.approx(float(s.square().sum() / s[0] ** 2), rel=1e-6)
                        entropy = float(torch.special.entr(p).sum())
                        assert found["spectral_entropy"] == pytest.approx(entropy, rel=1e-6)
                        assert found["effective_rank"] == pytest.approx(math.exp(entropy), rel=1e-6)

    def test_the_optimizer_part_describes_a_single_update(self, task):
        model, recorder = dense(), recorder_with()
        optimizer, seen = adam(model, eps=1e-6), {}

        def before(i):
            seen[i] = {name: p.detach().clone() for name, p in model.named_parameters()}

        with recorder.attach(model, optimizer):
            for i in range(3):
                optimizer.zero_grad()
                loss_of(model, task.batch(i)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                before(i)
                gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
                optimizer.step()
        (o,) = of_part(recorder, "optimizer")
        assert o.step == 2
        assert o.coords["module_name"].tolist() == ["blocks.0", "blocks.1", "outside"]
        assert o.coords["layer"].tolist() == [0, 1, -1]
        for i, prefix in enumerate(("blocks.0.", "blocks.1.", None)):
            names = [n for n in gradients if (n.startswith(prefix) if prefix else not n.startswith("blocks."))]
            parameters = dict(model.named_parameters())
            moments = {n: optimizer.state[p]["exp_avg_sq"] for n, p in parameters.items()}
            every = (gradients, seen[2], parameters, moments)
            g, w, now, v = (torch.cat([d[n].detach().double().flatten() for n in names]) for d in every)
            v = v / (1 - 0.999**3)
            found = {name: float(value[i]) for name, value in o.values.items()}
            rms = float(g.square().mean().sqrt())
            assert found["unchanged_share"] == pytest.approx(float((now == w)[g != 0].double().mean()), abs=1e-6)
            assert found["module_grad_norm"] == pytest.approx(float(g.norm()), rel=1e-6)
            assert found["module_weight_norm"] == pytest.approx(float(w.norm()), rel=1e-6)
            assert found["update_ratio"] == pytest.approx(float((now - w).norm() / w.norm()), rel=1e-5)
            assert found["gradient_rms"] == pytest.approx(rms, rel=1e-6)
            assert found["gradient_rms_over_eps"] == pytest.approx(rms / 1e-6, rel=1e-6)
            staleness = float((g**2 / v.clamp_min(1e-12)).mean().sqrt())
            assert found["adam_staleness"] == pytest.approx(staleness, rel=1e-5)
            first = torch.cat([optimizer.state[parameters[n]]["exp_avg"].double().flatten() for n in names])
            squares = float((first / (1 - 0.9**3)).square().sum() / v.sum())
            noise = 0.1 * (1 + 0.9**3) / (1.9 * (1 - 0.9**3))
            assert found["gradient_signal_share"] == pytest.approx((squares - noise) / (1 - noise), abs=1e-4)

    def test_routers_and_the_probe(self, task):
        """Measures of the weights and of the pass over the probe, after the update."""
        model, recorder = moe(), recorder_with(probe=task.batch(7)[0][:4])
        run(model, task, 3, recorder)
        (router,), (states,), (attention,) = (
            of_part(recorder, part) for part in ("router", "activations", "attention")
        )
        weights = torch.stack([block.mlp.router.weight.detach() for block in model.blocks])
        assert router.values["router_similarity"] == pytest.approx(
            wb.monitors.router_similarity(weights).numpy(), rel=1e-6
        )
        conditioning = wb.monitors.router_conditioning(weights).numpy()
        assert router.values["router_conditioning"] == pytest.approx(conditioning, rel=1e-6)
        with undisturbed(model):
            logits = model(task.batch(7)[0][:4])
            of_routers = torch.stack([block.mlp.logits for block in model.blocks])
        assert states.values["log_z"] == pytest.approx(float(wb.monitors.log_z(logits)), rel=1e-6)
        assert router.values["routing_entropy"] == pytest.approx(
            wb.monitors.routing_entropy(of_routers).numpy(), rel=1e-6
        )
        load = wb.monitors.expert_load(of_routers.topk(2, dim=-1).indices, 4).numpy()
        assert router.values["expert_load"] == pytest.approx(load)
        assert router.coords["layer"].tolist() == [0, 1]
        assert np.isfinite(router.values["routing_change"]).all()  # relative to the choices at the start
        assert np.isfinite(attention.values["attention_logit_max"]).all()
        assert (attention.values["attention_entropy_share"] <= 1).all()

    def test_the_numbers_of_every_update(self, task):
        model, recorder = dense(), recorder_with(every=None)
        run(model, task, 3, recorder)
        rows = of_part(recorder, "monitors")
        assert [row.step for row in rows] == [0, 1, 2]
        twin = dense()
        optimizer = adam(twin)
        for i, row in enumerate(rows):
            optimizer.zero_grad()
            loss = loss_of(twin, task.batch(i))
            loss.backward()
            norm = nn.utils.get_total_norm([p.grad for p in twin.parameters()])
            optimizer.step()
            assert float(row.values["loss"]) == pytest.approx(loss.item())
            assert float(row.values["grad_norm"]) == pytest.approx(float(norm), rel=1e-6)
            assert float(row.values["learning_rate"]) == 1e-2
            assert (float(row.values["batch_size"]), float(row.values["n_tokens"])) == (8, 96)
            assert np.isnan(row.values["accuracy"])

    def test_spectra_are_those_of_the_profile(self, task):
        probe = task.probe(200)
        recorder = recorder_with(every={**dict.fromkeys(ALL), "spectra": 2}, probe=probe)
        run(dense(), task, 3, recorder)
        measurements = of_part(recorder, "spectra")
        assert [o.step for o in measurements] == [0, 2]
        expected = wb.profile(dense(), probe, progress=False)
        assert measurements[0].values["spectral_radius"] == pytest.approx(expected["spectral_radius"].values, rel=1e-6)

    def test_heads_of_grouped_queries_have_an_entry_each(self, task):
        recorder = recorder_with()
        run(dense(n_heads=4, n_kv_heads=2), task, 3, recorder)
        (o,) = of_part(recorder, "attention")
        assert o.values["effective_rank"].shape == (2, 4, 5)
        assert np.isfinite(o.values["effective_rank"]).all()
        ranks = o.values["effective_rank"][:, :, TERMS.index("dWk")]
        assert (ranks[:, 0] == ranks[:, 1]).all()
        assert (ranks[:, 1] != ranks[:, 2]).all()


class TestCadence:
    def test_each_part_has_its_cadence(self, task):
        recorder = recorder_with(every={"attention": 2, "router": None, "optimizer": 3, "activations": 6})
        run(moe(), task, 6, recorder)
        steps = {part: [o.step for o in of_part(recorder, part)] for part in ("attention", "router", "optimizer")}
        assert steps == {"attention": [1, 3, 5], "router": [], "optimizer": [2, 5]}
        assert [o.step for o in of_part(recorder, "activations")] == [5]

    def test_a_run_that_diverges_before_its_first_update_has_a_record(self, task):
        model, recorder = dense(), recorder_with(every=100)
        with torch.no_grad():
            for weight in model.blocks[0].parameters():
                weight.mul_(1e3)
        with recorder.attach(model, adam(model)):
            loss_of(model, task.batch(0))
        (found,) = of_part(recorder, "activations")
        assert found.step == 0
        assert found.values["state_norm"][0] > 1e3
        assert of_part(recorder, "optimizer") == []

    def test_routing_change_is_unknown_before_the_first_update(self, task):
        model, recorder = moe(), recorder_with(every=100)
        with recorder.attach(model, adam(model)):
            loss_of(model, task.batch(0))
        (router,) = of_part(recorder, "router")
        assert np.isfinite(router.values["routing_entropy"]).all()
        assert np.isnan(router.values["routing_change"]).all()

    def test_a_window_that_is_not_full_has_no_spectra_of_updates(self, task):
        model, recorder = dense(), recorder_with()
        run(model, task, 4, recorder, step=1)
        (first,) = of_part(recorder, "attention")
        assert first.step == 2
        assert np.isnan(first.values["effective_rank"]).all()
        assert np.isfinite(first.values["attention_entropy"]).all()

    def test_metrics_logged_after_the_update_belong_to_it(self, task):
        model, recorder = dense(), recorder_with(every=None)
        optimizer = adam(model)
        with recorder.attach(model, optimizer):
            for i in range(3):
                loss_of(model, task.batch(i)).backward()
                recorder.log(before=i)
                optimizer.step()
                recorder.log(after=10 + i)
        rows = of_part(recorder, "monitors")
        assert [(float(r.values["before"]), float(r.values["after"])) for r in rows] == [(0, 10), (1, 11), (2, 12)]

    def test_without_hooks_on_batches_a_row_ends_with_its_update(self, task):
        """The loop runs the model without calling it."""
        model, recorder = dense(), recorder_with(every=None)
        optimizer = adam(model)
        with recorder.attach(model, optimizer):
            for i in range(2):
                model.forward(task.batch(i)[0]).square().mean().backward()
                recorder.log(loss=i)
                optimizer.step()
                assert [float(r.values["loss"]) for r in of_part(recorder, "monitors")] == [*range(i + 1)]
        assert np.isnan(recorder.heard[0].values["batch_size"])

    def test_a_step_may_end_without_an_update(self, task):
        model, recorder = dense(), recorder_with(every=None)
        with recorder.attach(model, adam(model)) as attached:
            loss_of(model, task.batch(0)).backward()
            numbers = attached.finish_step(loss=math.inf, kss_enabled=True)
        assert (numbers["loss"], numbers["batch_size"], numbers["kss_enabled"]) == (math.inf, 8, 1)
        assert [o.step for o in recorder.heard] == [0]

    def test_logged_gradient_norms_are_not_computed(self, task, monkeypatch):
        model, recorder = dense(), recorder_with(every=None)
        optimizer, calls = adam(model), []
        total_norm = nn.utils.get_total_norm
        monkeypatch.setattr(nn.utils, "get_total_norm", lambda *args: calls.append(1) or total_norm(*args))
        with recorder.attach(model, optimizer) as attached:
            for i in range(3):
                loss_of(model, task.batch(i)).backward()
                optimizer.step()
                attached.finish_step(grad_norm=float(i))
        assert len(calls) == 1
        assert [float(o.values["grad_norm"]) for o in recorder.heard] == [0, 1, 2]


class TestNoSideEffects:
    @pytest.mark.medium
    def test_hooks_are_removed_and_the_model_is_released(self, task):
        model, recorder = dense(), recorder_with()
        optimizer = adam(model)
        before = hooks_of(model, optimizer)
        run(model, task, 4, recorder, optimizer)
        recorder.attach(model, optimizer).detach()
        assert hooks_of(model, optimizer) == before
        with pytest.raises(ZeroDivisionError):
            run(model, task, 4, recorder, optimizer, before=lambda i: 1 / (2 - i))
        assert hooks_of(model, optimizer) == before
        alive = weakref.ref(model)
        del model, optimizer
        gc.collect()
        assert alive() is None

    def test_evaluation_between_steps_is_not_counted(self, task):
        model, recorder = dense(), recorder_with(every=None)
        optimizer = adam(model)
        with recorder.attach(model, optimizer):
            loss_of(model, task.batch(0)).backward()
            with torch.no_grad():
                model(task.batch(1)[0])
            model.eval()
            model(task.batch(1)[0])
            model.train()
            optimizer.step()
        (row,) = recorder.heard
        assert float(row.values["batch_size"]) == 8


class TestFailures:
    @pytest.mark.medium
    def test_a_layer_that_becomes_nan_is_reported_once_and_training_continues(self, task, tmp_path):
        model, recorder = dense("none"), recorder_with(tmp_path / "run.zarr")

        def poison(i):
            if i == 4:
                with torch.no_grad():
                    model.blocks[1].attention.key.weight[0, 0] = math.nan

        optimizer = torch.optim.SGD([model.head.weight], lr=0.1)
        run(model, task, 9, recorder, optimizer, before=poison)
        told = [e for e in events_of(tmp_path / "run.zarr") if e["kind"] == "not finite"]
        assert [(e["step"], e["layer"]) for e in told] == [(5, 1)]
        assert told[0]["message"] == "Layer 1 (blocks.1) contains query and key weights that are not finite."
        measurements = of_part(recorder, "attention")
        assert len(measurements) == 3
        assert np.isnan(measurements[1].values["effective_rank"][1, 0]).all()
        assert np.isfinite(measurements[1].values["frobenius_norm"][0]).all()
        assert len(of_part(recorder, "monitors")) == 9

    def test_a_model_without_attention(self, task, tmp_path):
        recorder = recorder_with(tmp_path / "run.zarr")
        run(wb.zoo.mamba(d_model=16, n_layers=2, vocab_size=32, seed=1), task, 3, recorder)
        assert {o.part for o in recorder.heard} == {"monitors", "optimizer", "activations"}
        (told,) = [e for e in events_of(tmp_path / "run.zarr") if e["kind"] == "not recorded"]
        assert told["source"] == "attention"
        assert told["message"].startswith("No layer has attention that can be read.")

    def test_a_model_without_blocks(self, task, tmp_path):
        model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
        recorder = recorder_with(tmp_path / "run.zarr")
        run(model, task, 3, recorder)
        told = [e for e in events_of(tmp_path / "run.zarr") if e["kind"] == "not recorded"]
        assert [e["source"] for e in told] == ["attention", "router", "activations", "precision"]
        assert all("The blocks of Sequential cannot be read" in e["message"] for e in told)
        (o,) = of_part(recorder, "optimizer")
        assert o.coords["module_name"].tolist() == ["outside"]

    @pytest.mark.medium
    def test_one_layer_that_cannot_be_read(self, task, tmp_path):
        model = dense()
        attention = model.blocks[1].attention
        attention.query_norm = Stranger()
        recorder = recorder_with(tmp_path / "run.zarr")
        run(model, task, 3, recorder)
        told = [e for e in events_of(tmp_path / "run.zarr") if e["kind"] == "not recorded"]
        assert [(e["source"], e["layer"]) for e in told] == [("attention", 1)]
        (o,) = of_part(recorder, "attention")
        assert np.isnan(o.values["effective_rank"][1]).all()
        assert np.isfinite(o.values["effective_rank"][0]).all()
        assert np.isfinite(o.values["attention_entropy"]).all()

    @pytest.mark.medium
    def test_a_part_that_fails_is_switched_off_and_reported(self, task, tmp_path, monkeypatch):
        monkeypatch.setattr("workbench.callbacks.recorder.collectors.router_similarity", lambda weight: 1 / 0)
        recorder = recorder_with(tmp_path / "run.zarr")
        with pytest.warns(RecordingWarning, match="'?router'? cannot be recorded from step 2 on .ZeroDivisionError"):
            run(moe(), task, 6, recorder)
        assert of_part(recorder, "router") == []
        assert len(of_part(recorder, "attention")) == 2
        told = [e for e in events_of(tmp_path / "run.zarr") if e["kind"] == "not recorded"]
        assert [(e["source"], e["step"]) for e in told] == [("router", 2)]

    def test_a_batch_that_the_probe_pass_cannot_process(self, task):
        """The other parts are recorded."""

        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = dense()

            def forward(self, tokens):
                if not self.training:
                    raise RuntimeError("training only")
                return self.inner(tokens)

        recorder = recorder_with()
        run(Odd(), task, 3, recorder)
        assert {o.part for o in recorder.heard} == {"monitors", "optimizer"}

    def test_exceptions_of_an_observer_are_passed_on(self, task):
        recorder = recorder_with()
        stop = recorder.observe(lambda observation: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(dense(), task, 3, recorder)
        stop()
        run(dense(), task, 3, recorder)


class Stranger(nn.Module):
    """A block without a linear map of the stream."""

    def forward(self, x):
        return x * x.abs().sqrt()


class TestInvalidUse:
    @pytest.mark.parametrize(
        ("options", "name", "value"),
        [
            ({"every": {"atention": 10}}, "every", "atention"),
            ({"every": {"router": 0}}, "every['router']", 0),
            ({"every": {"curvature": 50}}, "loss_of", None),
        ],
        ids=str,
    )
    def test_options_out_of_range(self, options, name, value):
        with pytest.raises(OptionError, check=about(name, value)):
            wb.Recorder(**options)

    def test_a_short_window_raises_a_warning(self):
        with pytest.warns(RecordingWarning, match="compared over 3 steps, .* Use 10 steps or more"):
            wb.Recorder(every={"attention": 3})

    def test_an_existing_path(self, tmp_path):
        (tmp_path / "run.zarr").mkdir()
        with pytest.raises(StoreError, check=says("exists already; pass resume=True to continue it,")):
            wb.Recorder(tmp_path / "run.zarr")

    def test_the_optimizer_of_another_model(self, tmp_path):
        with pytest.raises(OptionError, check=says("The optimizer updates no parameter of Transformer, nor a")):
            wb.Recorder(tmp_path / "run.zarr").attach(dense(), adam(nn.Linear(3, 3)))
        assert not (tmp_path / "run.zarr").exists()

    def test_attaching_twice(self):
        model, recorder = dense(), wb.Recorder()
        with (
            recorder.attach(model, adam(model)),
            pytest.raises(OptionError, check=says("attach() needs a recorder that is not attached, but this")),
        ):
            recorder.attach(model, adam(model))

    @pytest.mark.parametrize("value", [torch.zeros(3), "low", None])
    def test_logging_values_that_are_not_numbers(self, value):
        model, recorder = dense(), wb.Recorder()
        with (
            recorder.attach(model, adam(model)),
            pytest.raises(OptionError, check=about("loss")),
        ):
            recorder.log(loss=value)


def gpt2_with_dropout():
    from tests.callbacks.test_kss_loops import gpt2

    return gpt2()


def test_values_that_are_read_later_give_the_same_record(task, tmp_path):
    """As on an accelerator: one copy for several rows, measurements completed by another thread."""
    every = {
        "attention": 10,
        "router": 5,
        "optimizer": 3,
        "activations": 4,
        "precision": 6,
        "reduction": 2,
        "update": 7,
    }

    def record(name, *, is_late):
        model = moe()
        optimizer = adam(model)
        recorder = wb.Recorder(tmp_path / name, every=every, alarms=wb.Alarms())
        seen = []
        recorder.observe(lambda observation: seen.append((observation.part, observation.step)))
        with recorder.attach(model, optimizer) as attached:
            attached._is_late = is_late
            for i in range(23):
                loss = loss_of(model, task.batch(i))
                loss.backward()
                recorder.log(loss=loss)
                optimizer.step()
                optimizer.zero_grad()
                late = [i - step for part, step in seen[-1:] if part == "monitors"]
                assert not late or late[0] <= 18
        return wb.open_run(tmp_path / name), seen

    (now, order), (later, later_order) = (record(f"{is_late}.zarr", is_late=is_late) for is_late in (False, True))
    assert sorted(later_order) == sorted(order)
    assert {part for part, _ in order} >= {"monitors", *every.keys() - {"update"}}
    for part in {part for part, _ in order}:
        xr.testing.assert_identical(now[part].to_dataset(), later[part].to_dataset())
