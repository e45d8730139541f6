"""The recorder in loops of every kind: its values do not depend on how gradients are computed."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import workbench as wb
from tests.callbacks.test_kss_loops import gpt2, llama
from tests.callbacks.test_recorder import ALL, adam, dense, loss_of, of_part, recorder_with, run, task  # noqa: F401
from tests.small_training import same_weights
from workbench.io.run_output import RecordingWarning

WITHOUT_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def heard_by(loop, model, optimizer=None, **options):
    """Return the observations of three updates; ``loop(model, optimizer, recorder, i)`` performs one."""
    recorder = recorder_with(**options)
    optimizer = adam(getattr(model, "_orig_mod", model)) if optimizer is None else optimizer
    torch.manual_seed(1)
    with recorder.attach(model, optimizer):
        for i in range(3):
            optimizer.zero_grad()
            loop(model, optimizer, recorder, i)
    return recorder


#: Metrics of one batch, or of a part of it on one rank, whose mean over parts is not that of the full batch.
OF_PARTS = (
    "token_entropy",
    "label_entropy",
    "label_agreement",
    "largest_losses",
    "ignored_labels",
    "repeated_examples",
    "lookahead",
)


def assert_same(some, others, tolerance=1e-5):
    assert [(o.step, o.part) for o in some.heard] == [(o.step, o.part) for o in others.heard]
    for one, other in zip(some.heard, others.heard, strict=True):
        for name, value in one.values.items():
            if name in OF_PARTS:
                continue
            scale = np.nan_to_num(np.abs(other.values[name])).max(initial=1e-9)
            assert value == pytest.approx(other.values[name], rel=tolerance, abs=tolerance * scale, nan_ok=True), name


def column(recorder, name):
    return np.array([float(o.values[name]) for o in of_part(recorder, "monitors")])


@pytest.fixture
def plain(task):  # noqa: F811
    def loop(model, optimizer, recorder, i):
        loss = loss_of(model, task.batch(i))
        loss.backward()
        recorder.log(loss=loss)
        optimizer.step()

    return loop


class TestGradients:
    def test_accumulation(self, task, plain):  # noqa: F811
        """Two halves of a batch are equivalent to the batch: examples and tokens are summed, the probe is the same."""

        def halves(model, optimizer, recorder, i):
            tokens, targets = task.batch(i)
            losses = [loss_of(model, (tokens[rows], targets[rows])) / 2 for rows in (slice(0, 4), slice(4, 8))]
            sum(losses).backward()
            recorder.log(loss=sum(losses))
            optimizer.step()

        probe = task.batch(0)[0]
        make = lambda: gpt2(**WITHOUT_DROPOUT)  # noqa: E731
        assert_same(heard_by(halves, make(), probe=probe), heard_by(plain, make(), probe=probe), 1e-3)

    @pytest.mark.parametrize("is_reentrant", [False, True])
    def test_gradient_checkpointing_of_hugging_face(self, plain, is_reentrant):
        def checkpointed():
            model = llama()
            model.activation_checkpointing_enable({"use_reentrant": is_reentrant})
            model.enable_input_require_grads()
            return model

        assert_same(heard_by(plain, checkpointed()), heard_by(plain, llama()))

    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
    def test_a_model_that_is_recomputed_entirely_is_counted_once(self, task, plain):  # noqa: F811
        def whole(model, optimizer, recorder, i):
            tokens, targets = task.batch(i)
            logits = checkpoint(model, tokens, use_reentrant=False)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            recorder.log(loss=loss)
            optimizer.step()

        assert_same(heard_by(whole, dense()), heard_by(plain, dense()))

    def test_losses_in_outputs_need_no_log(self, task):  # noqa: F811
        def loop(model, optimizer, recorder, i):
            tokens = task.batch(i)[0]
            for rows in (tokens[:4], tokens[4:]):
                loss = model(input_ids=rows, labels=rows).loss
                losses.append(loss.item())
                (loss / 2).backward()
            optimizer.step()

        losses = []
        recorder = heard_by(loop, gpt2(), every=None)
        found = [float(o.values["loss"]) for o in of_part(recorder, "monitors")]
        assert found == pytest.approx(np.array(losses).reshape(3, 2).mean(1), rel=1e-6)

    def test_padding_is_not_counted_as_tokens(self, task):  # noqa: F811
        def loop(model, optimizer, recorder, i):
            tokens = task.batch(i)[0]
            mask = torch.ones_like(tokens)
            mask[:, 8:] = 0
            model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
            optimizer.step()

        recorder = heard_by(loop, gpt2(), every=None)
        assert [float(o.values["n_tokens"]) for o in recorder.heard] == [64.0] * 3

    @pytest.mark.medium
    def test_closures(self, task, plain):  # noqa: F811
        """The batch is processed within the optimizer's step."""

        def loop(model, optimizer, recorder, i):
            def closure():
                optimizer.zero_grad()
                loss = loss_of(model, task.batch(i))
                loss.backward()
                return loss

            optimizer.step(closure)

        assert_same(heard_by(loop, dense()), heard_by(plain, dense()))
        model = dense()
        recorder = heard_by(loop, model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
        (o,) = of_part(recorder, "optimizer")
        assert (o.values["update_ratio"] > 0).all()


class TestPrecision:
    def test_autocast(self, task):  # noqa: F811
        """Training is bitwise identical, and the weights are read in full precision."""

        def loop(model, optimizer, recorder, i):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, task.batch(i))
            loss.backward()
            if recorder is not None:
                recorder.log(loss=loss)
            optimizer.step()

        torch.manual_seed(1)
        twin = gpt2()
        optimizer = adam(twin)
        torch.manual_seed(1)
        for i in range(3):
            optimizer.zero_grad()
            loop(twin, optimizer, None, i)
        model = gpt2()
        recorder = heard_by(loop, model)
        assert same_weights(model, twin)
        assert len(of_part(recorder, "attention")) == 1

    @pytest.mark.parametrize("is_fused", [False, True])
    def test_a_gradient_scaler(self, task, is_fused):  # noqa: F811
        """Gradients are recorded unscaled, and an update that overflowed is skipped."""

        def loop(model, optimizer, recorder, i):
            for factor in (float("inf"), 1.0) if i == 1 else (1.0,):
                optimizer.zero_grad()
                loss = loss_of(model, task.batch(i))
                scaler.scale(loss * factor).backward()
                recorder.log(loss=loss)
                scaler.step(optimizer)
                scaler.update()

        def unscaled(model, optimizer, recorder, i):
            loss = loss_of(model, task.batch(i))
            loss.backward()
            recorder.log(loss=loss)
            optimizer.step()

        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        model, twin = dense(), dense()
        options = {"probe": task.batch(0)[0], "every": {"optimizer": 1}}
        found = heard_by(loop, model, adam(model, fused=is_fused), **options)
        expected = heard_by(unscaled, twin, adam(twin, fused=is_fused), **options)
        assert column(found, "is_skipped").tolist() == [0, 1, 0, 0]
        assert column(found, "loss_scale").tolist() == [1024, 1024, 512, 512]
        assert column(found, "batch_size").tolist() == [8] * 4
        assert np.isnan(column(expected, "loss_scale")).all()
        kept = [o for o in found.heard if o.part != "monitors" or not o.values["is_skipped"]]
        assert [o.part for o in kept] == [o.part for o in expected.heard]
        for one, other in zip(kept, expected.heard, strict=True):
            for name in one.values.keys() - {"loss_scale", "repeated_examples", "repeated_batch", "spike_score"}:
                assert one.values[name] == pytest.approx(other.values[name], rel=1e-3, abs=1e-6, nan_ok=True), name

    @pytest.mark.parametrize("to_none", [False, True])
    @pytest.mark.parametrize("clears", ["first", "last"])
    def test_skipped_updates_have_rows(self, task, to_none, clears):  # noqa: F811
        """All updates are skipped from some step on; the scaler is found although it is not passed."""
        model, scaler = dense(), torch.amp.GradScaler("cpu", init_scale=2.0**8)
        optimizer, recorder = adam(model), recorder_with(every=None)
        with recorder.attach(model, optimizer):
            for i in range(6):
                loss = loss_of(model, task.batch(i))
                if clears == "first":
                    optimizer.zero_grad(set_to_none=to_none)
                scaler.scale(loss * (float("inf") if i > 2 else 1)).backward()
                scaler.step(optimizer)
                scaler.update()
                if clears == "last":
                    optimizer.zero_grad(set_to_none=to_none)
        assert column(recorder, "is_skipped").tolist() == [0, 0, 0, 1, 1, 1]
        assert column(recorder, "loss_scale").tolist() == [256, 256, 256, 256, 128, 64]
        assert np.isfinite(column(recorder, "loss")[:3]).all()

    def test_updates_that_a_loop_skips_itself_have_rows(self, task):  # noqa: F811
        """Discarded gradients are told from those of SAM's first pass, and from passes of another model."""
        model = dense()
        optimizer, recorder = adam(model), recorder_with(every=None)
        with recorder.attach(model, optimizer):
            for i in range(5):
                loss_of(model, task.batch(i)).backward()
                if i == 2:
                    optimizer.zero_grad()
                    continue
                if i == 3:
                    with torch.no_grad():
                        for p in model.parameters():
                            p.add_(p.grad)
                    optimizer.zero_grad()
                    loss_of(model, task.batch(i)).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert column(recorder, "is_skipped").tolist() == [0, 0, 1, 0, 0]
        assert column(recorder, "batch_size").tolist() == [8] * 5
        assert column(recorder, "repeated_examples").tolist() == [0] * 5

    def test_passes_of_another_model_through_this_one_do_not_count(self):
        """As those of a generator through the discriminator that is recorded."""
        discriminator, generator = nn.Linear(4, 1), nn.Linear(2, 4)
        optimizer, recorder = adam(discriminator), recorder_with(every=None)
        losses = []
        with recorder.attach(discriminator, optimizer):
            for _ in range(4):
                optimizer.zero_grad()
                loss = discriminator(torch.randn(8, 4)).square().mean()
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
                discriminator(generator(torch.randn(8, 2))).mean().backward()
        assert column(recorder, "loss").tolist() == losses
        assert column(recorder, "batch_size").tolist() == [8] * 4

    def test_float32_masters_of_a_bfloat16_model(self, task):  # noqa: F811
        """Changes of the float32 copies are recorded, although bfloat16 would hide most of them."""
        full, model = dense(), dense().to(torch.bfloat16)
        with torch.no_grad():
            for p, q in zip(full.parameters(), model.parameters(), strict=True):
                p.copy_(q.float())
        masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
        # As usual in optimizers, parameters with and without decay are in groups, in another order than in the model.
        groups = [[m for m in masters if m.ndim > 1], [m for m in masters if m.ndim == 1]]
        optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=1e-5)
        reference = torch.optim.SGD(full.parameters(), lr=1e-5)
        generator = torch.Generator().manual_seed(0)
        recorder, expected = recorder_with(), recorder_with()
        with warnings.catch_warnings():
            warnings.simplefilter("error", RecordingWarning)
            attached = recorder.attach(model, optimizer)
        with attached, expected.attach(full, reference):
            for i in range(3):
                loss_of(model, task.batch(i))
                loss_of(full, task.batch(i))
                for p, q in zip(full.parameters(), masters, strict=True):
                    p.grad = torch.randn(p.shape, generator=generator)
                    q.grad = p.grad.clone()
                optimizer.step()
                reference.step()
                with torch.no_grad():
                    for p, q in zip(model.parameters(), masters, strict=True):
                        p.copy_(q)
        for part in ("attention", "optimizer"):
            (one,), (other,) = of_part(recorder, part), of_part(expected, part)
            for name in set(one.values) - {"attention_logit_max", "attention_entropy", "attention_entropy_share"}:
                assert one.values[name] == pytest.approx(other.values[name], rel=1e-5, nan_ok=True), name

    def test_bfloat16_without_copies_raises_a_warning(self, task):  # noqa: F811
        model, recorder = dense().to(torch.bfloat16), recorder_with()
        with pytest.warns(
            RecordingWarning, match=r"without a float32 copy of its parameters; in bfloat16, updates below 2\^-9"
        ):
            run(model, task, 3, recorder)
        (o,) = of_part(recorder, "attention")
        assert np.isfinite(o.values["frobenius_norm"]).all()


class TestModels:
    @pytest.mark.medium
    @pytest.mark.parametrize("control", ["SpectralNorm", "WeightNorm"])
    def test_parametrized_weights_are_read_after_parametrization(self, task, control):  # noqa: F811
        model = dense()
        getattr(wb.baselines, control)().apply(model)
        twin = dense()
        getattr(wb.baselines, control)().apply(twin)
        recorder = recorder_with()
        start = [b.attention.query.weight.detach().double().clone() for b in wb.baselines.plain_copy(model).blocks]
        run(model, task, 3, recorder)
        assert same_weights(model, run(twin, task, 3))
        assert type(model.blocks[0].attention.query).__name__ == "ParametrizedLinear"
        (o,) = of_part(recorder, "attention")
        stop = [b.attention.query.weight.detach().double() for b in wb.baselines.plain_copy(model).blocks]
        for layer, (before, after) in enumerate(zip(start, stop, strict=True)):
            change = (after - before).view(2, 8, 16)
            found = o.values["frobenius_norm"][layer, :, 2]
            assert found == pytest.approx(torch.linalg.matrix_norm(change).numpy(), rel=1e-4)

    def test_accelerate(self, task, plain):  # noqa: F811
        import accelerate

        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = dense()
        model, optimizer = accelerator.prepare(model, adam(model))

        def accumulating(model, optimizer, recorder, i):
            tokens, targets = task.batch(i)
            for rows in (slice(0, 4), slice(4, 8)):
                with accelerator.accumulate(model):
                    loss = loss_of(model, (tokens[rows], targets[rows]))
                    accelerator.backward(loss)
                    losses.append(loss.detach())
                    if accelerator.sync_gradients:
                        recorder.log(loss=sum(losses[-2:]) / 2)
                    optimizer.step()
                    optimizer.zero_grad()

        losses = []
        probe = task.batch(0)[0]
        found = heard_by(accumulating, model, optimizer, probe=probe)
        assert_same(found, heard_by(plain, dense(), probe=probe), 1e-3)

    @pytest.mark.medium
    def test_the_probe_is_the_start_of_the_first_batch(self, task, plain):  # noqa: F811
        """It is truncated to a number of tokens, and the same in every measurement."""
        expected = heard_by(plain, dense(), probe=(task.batch(0)[0][:2],))
        assert_same(heard_by(plain, dense(), n_probe_tokens=25), expected, 1e-9)
        expected = heard_by(plain, dense(), probe=(task.batch(0)[0][:1, :5],))
        assert_same(heard_by(plain, dense(), n_probe_tokens=5), expected, 1e-9)

    def test_images(self):
        model = wb.zoo.vit(d_model=16, n_layers=2, n_heads=2, image_size=8, patch_size=4, n_classes=4, seed=1)
        images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))

        def loop(model, optimizer, recorder, i):
            nn.functional.cross_entropy(model(images), torch.arange(6) % 4).backward()
            optimizer.step()

        recorder = heard_by(loop, model)
        assert {o.part for o in recorder.heard} == {"monitors", "attention", "optimizer", "activations"}
        assert np.isfinite(of_part(recorder, "attention")[0].values["effective_rank"]).all()
        row = of_part(recorder, "monitors")[0]
        assert float(row.values["batch_size"]) == 6
        assert np.isnan(row.values["n_tokens"])

    def test_every_part_follows_the_schema(self, plain):
        recorder = heard_by(
            plain, wb.zoo.moe(n_experts=4, d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_length=16)
        )
        for o in recorder.heard:
            if o.part != "monitors":
                assert set(o.values) == set(wb.schema.PARTS[o.part])
                for name, value in o.values.items():
                    dims = wb.schema.PARTS[o.part][name].dims[1:]
                    assert value.shape == tuple(len(o.coords[dim]) for dim in dims)
        assert {o.part for o in recorder.heard} == {*ALL, "monitors"}
