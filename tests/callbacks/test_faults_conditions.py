import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from tests.small_training import same_weights
from workbench.errors import OptionError

SETTINGS = {"n_steps": 8, "learning_rate": 1e-2}


def train(model, task, *faults, **settings):
    return list(wb.train(model, task, **{**SETTINGS, **settings}, faults=faults))


def moe(**options):
    small = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 16, "n_experts": 4, "seed": 1}
    return wb.zoo.moe(**{**small, **options})


def hugging_face_mixture(**options):
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, **options,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.MixtralForCausalLM(config)


def rates(records):
    return [record.learning_rate for record in records]


def test_the_rate_is_multiplied_while_it_is_on(make_model, task):
    records = train(make_model(), task, wb.faults.large_rate(factor=5, start=2, stop=5))
    assert rates(records) == pytest.approx([0.01] * 2 + [0.05] * 3 + [0.01] * 3)
    assert [record.active_faults for record in records] == [()] * 2 + [("large_rate",)] * 3 + [()] * 3


def test_the_rate_grows_linearly_and_on_top_of_the_schedule(make_model, task):
    records = train(make_model(), task, wb.faults.large_rate(factor=9, ramp=4, start=1), warmup=2)
    assert rates(records) == pytest.approx([0.005] + [0.01 * factor for factor in (3, 5, 7, 9, 9, 9, 9)])


def test_a_large_rate_is_that_of_a_run_with_that_rate(make_model, task):
    own, faulted = make_model(), make_model()
    train(own, task, learning_rate=0.08)
    fault = wb.faults.large_rate(factor=8, start=0)
    list(wb.train(faulted, task, n_steps=8, learning_rate=0.01, faults=[fault]))
    assert same_weights(own, faulted)


def test_a_small_batch_is_its_first_rows(make_model, task):
    few, faulted = make_model(), make_model()
    batches = [(inputs[:3], targets[:3]) for inputs, targets in map(task.batch, range(8))]
    expected = train(few, batches)
    found = train(faulted, task, wb.faults.small_batch(n_rows=3, start=0))
    assert same_weights(few, faulted)
    assert [record.accuracy for record in found] == [record.accuracy for record in expected]


def test_rows_of_a_mapping_are_taken_together():
    tokens = torch.randint(32, (6, 12), generator=torch.Generator().manual_seed(0))
    mask, targets = torch.ones_like(tokens), tokens.clone()
    inputs, kept = wb.faults.small_batch(n_rows=2).batch({"input_ids": tokens, "attention_mask": mask}, targets)
    assert {name: len(value) for name, value in inputs.items()} == {"input_ids": 2, "attention_mask": 2}
    assert torch.equal(kept, targets[:2])


def test_a_batch_that_is_smaller_is_said_when_it_is_met(make_model):
    tokens = torch.randint(32, (10, 12), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(tokens, tokens), batch_size=8)  # the second batch has two rows
    run = wb.train(make_model(), loader, n_steps=4, faults=[wb.faults.small_batch(n_rows=4, start=0)])
    assert next(run).active_faults == ("small_batch",)
    with pytest.raises(OptionError, match="keeps n_rows = 4 rows, but a batch has 2; keep fewer"):
        next(run)


@pytest.mark.medium
def test_without_the_auxiliary_loss_the_rest_is_what_is_trained(task):
    without, faulted, whole = moe(balance_coefficient=0.0, z_coefficient=0.0), moe(), moe()
    options = {"balance_coefficient": 0.5}
    faulted, whole = moe(**options), moe(**options)
    train(without, task)
    records = train(faulted, task, wb.faults.no_auxiliary_loss(start=0))
    assert same_weights(without, faulted)
    assert {record.auxiliary_loss for record in records} == {0.0}
    train(whole, task)
    assert not same_weights(whole, faulted)


def test_penalties_stay_where_the_auxiliary_loss_goes(task):
    penalties = [wb.baselines.JacobianPenalty(0.1)]
    alone = train(moe(balance_coefficient=0.0, z_coefficient=0.0), task, penalties=penalties)
    found = train(moe(), task, wb.faults.no_auxiliary_loss(start=0), penalties=penalties)
    assert [r.auxiliary_loss for r in found] == pytest.approx([r.auxiliary_loss for r in alone], rel=1e-5)
    assert min(r.auxiliary_loss for r in found) > 0


def test_hugging_face_routers_lose_theirs_too(task):
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    records = train(hugging_face_mixture(**options), task, wb.faults.no_auxiliary_loss(start=4))
    assert [record.auxiliary_loss > 0 for record in records] == [True] * 4 + [False] * 4
    plain = hugging_face_mixture(output_router_logits=False)
    faulted = hugging_face_mixture(**options)
    train(plain, task)
    train(faulted, task, wb.faults.no_auxiliary_loss(start=0))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain.parameters(), faulted.parameters(), strict=True))


@pytest.mark.parametrize(
    "make", [lambda: wb.zoo.transformer(d_model=16, n_layers=1, vocab_size=32), hugging_face_mixture]
)
def test_a_model_without_auxiliary_loss_is_refused(make, task, tmp_path):
    run = wb.train(make(), task, n_steps=2, store=tmp_path / "a.zarr", faults=[wb.faults.no_auxiliary_loss()])
    with pytest.raises(OptionError, match="needs a model with an auxiliary loss, but .* has none; take a mixture"):
        next(run)
    assert not (tmp_path / "a.zarr").exists()


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_labels_are_replaced_by_labels_of_the_batch(task):
    inputs, targets = task.batch(0)
    is_target = targets != -100
    assert 0 < is_target.sum() < targets.numel()
    before = targets.clone()
    same, wrong = wb.faults.corrupted_data().batch(inputs, targets, generator())
    assert same is inputs
    assert torch.equal(targets, before)  # the batch itself is left alone
    assert torch.equal(wrong == -100, ~is_target)
    assert set(wrong[is_target].tolist()) <= set(targets[is_target].tolist())
    assert not torch.equal(wrong, targets)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_share_of_the_tokens_is_replaced(share):
    tokens = torch.randint(1000, (200, 50), generator=generator(1)).mul(3)
    for inputs, read in (
        (tokens, lambda x: x),
        ({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, lambda x: x["input_ids"]),
        ((tokens, 5), lambda x: x[0]),
    ):
        changed, targets = wb.faults.corrupted_data(what="tokens", share=share).batch(inputs, tokens, generator())
        assert targets is tokens
        assert float((read(changed) != tokens).float().mean()) == pytest.approx(share, rel=0.1)
        assert not (read(changed) % 3).any()  # only tokens that were there


def test_a_burst_repeats_with_the_seed_and_leaves_the_rest(make_model, task):
    def run(seed):
        fault = wb.faults.corrupted_data(what="tokens", share=0.5, start=2, stop=4)
        return [record.loss for record in train(make_model(), task, fault, seed=seed)]

    clean = [record.loss for record in train(make_model(), task)]
    assert run(0) == run(0) != run(1)
    assert run(0)[:2] == clean[:2]
    assert run(0)[2] != clean[2]


def test_what_cannot_be_corrupted_is_said_when_it_is_met():
    pixels, labels = torch.rand(4, 1, 8, 8), torch.rand(4)
    with pytest.raises(OptionError, match="finds no token ids in these inputs; corrupt 'labels' instead"):
        wb.faults.corrupted_data(what="tokens").batch(pixels, labels, generator())
    with pytest.raises(OptionError, match="these targets are not whole numbers"):
        wb.faults.corrupted_data().batch(pixels, labels, generator())


def test_nothing_to_replace_is_no_error(task):
    inputs, targets = task.batch(0)
    ignored = torch.full_like(targets, -100)
    assert torch.equal(wb.faults.corrupted_data().batch(inputs, ignored, generator())[1], ignored)


def test_images_are_corrupted_by_their_labels():
    task = wb.tasks.digits(batch_size=8)
    model = wb.zoo.vit(d_model=16, n_layers=1, n_heads=2, image_size=8, n_channels=1)
    records = train(model, task, wb.faults.corrupted_data(start=0), wb.faults.low_precision_attention(start=0))
    assert np.isfinite([record.loss for record in records]).all()


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        ("large_rate", {"factor": 0}, "factor is 0, expected a positive number"),
        ("large_rate", {"factor": math.inf}, "factor is inf, expected a positive number"),
        ("large_rate", {"ramp": -1}, "ramp is -1, expected at least 0"),
        ("small_batch", {"n_rows": 0}, "n_rows is 0, expected at least 1"),
        ("corrupted_data", {"what": "pixels"}, "what is 'pixels', expected 'labels' or 'tokens'"),
        ("corrupted_data", {"share": 0}, "share is 0, expected a number above 0 and at most 1"),
        ("corrupted_data", {"share": 1.5}, "share is 1.5, expected a number above 0 and at most 1"),
    ],
)
def test_bad_options_are_refused(make, options, sentence):
    with pytest.raises(OptionError, match=sentence):
        getattr(wb.faults, make)(**options)
