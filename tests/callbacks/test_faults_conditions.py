import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from tests.about import about
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


def test_the_learning_rate_is_multiplied_while_the_fault_is_on(make_model, task):
    records = train(make_model(), task, wb.faults.large_rate(factor=5, start=2, stop=5))
    assert rates(records) == pytest.approx([0.01] * 2 + [0.05] * 3 + [0.01] * 3)
    assert [record.active_faults for record in records] == [()] * 2 + [("large_rate",)] * 3 + [()] * 3


def test_a_large_rate_is_equivalent_to_training_at_that_rate(make_model, task):
    control, faulty = make_model(), make_model()
    train(control, task, learning_rate=0.08)
    fault = wb.faults.large_rate(factor=8, start=0)
    list(wb.train(faulty, task, n_steps=8, learning_rate=0.01, faults=[fault]))
    assert same_weights(control, faulty)


def test_a_small_batch_consists_of_the_first_examples(make_model, task):
    control, faulty = make_model(), make_model()
    batches = [(inputs[:3], targets[:3]) for inputs, targets in map(task.batch, range(8))]
    expected = train(control, batches)
    found = train(faulty, task, wb.faults.small_batch(n_rows=3, start=0))
    assert same_weights(control, faulty)
    assert [record.accuracy for record in found] == [record.accuracy for record in expected]


def test_all_entries_of_a_mapping_keep_the_same_examples():
    tokens = torch.randint(32, (6, 12), generator=torch.Generator().manual_seed(0))
    mask, targets = torch.ones_like(tokens), tokens.clone()
    inputs, kept = wb.faults.small_batch(n_rows=2).batch({"input_ids": tokens, "attention_mask": mask}, targets)
    assert {name: len(value) for name, value in inputs.items()} == {"input_ids": 2, "attention_mask": 2}
    assert torch.equal(kept, targets[:2])


def test_a_batch_that_is_already_smaller_raises(make_model):
    tokens = torch.randint(32, (10, 12), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(tokens, tokens), batch_size=8)  # the second batch has two examples
    run = wb.train(make_model(), loader, n_steps=4, faults=[wb.faults.small_batch(n_rows=4, start=0)])
    assert next(run).active_faults == ("small_batch",)
    with pytest.raises(OptionError, check=about("n_rows", 4)):
        next(run)


@pytest.mark.medium
def test_only_the_auxiliary_loss_is_left_out(task):
    without = moe(balance_coefficient=0.0, z_coefficient=0.0)
    faulty, complete = moe(balance_coefficient=0.5), moe(balance_coefficient=0.5)
    train(without, task)
    records = train(faulty, task, wb.faults.no_auxiliary_loss(start=0))
    assert same_weights(without, faulty)
    assert {record.auxiliary_loss for record in records} == {0.0}
    train(complete, task)
    assert not same_weights(complete, faulty)


def test_the_auxiliary_loss_of_hugging_face_routers_is_left_out(task):
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    records = train(hugging_face_mixture(**options), task, wb.faults.no_auxiliary_loss(start=4))
    assert [record.auxiliary_loss > 0 for record in records] == [True] * 4 + [False] * 4
    without = hugging_face_mixture(output_router_logits=False)
    faulty = hugging_face_mixture(**options)
    train(without, task)
    train(faulty, task, wb.faults.no_auxiliary_loss(start=0))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(without.parameters(), faulty.parameters(), strict=True))


@pytest.mark.parametrize(
    "make", [lambda: wb.zoo.transformer(d_model=16, n_layers=1, vocab_size=32), hugging_face_mixture]
)
def test_a_model_without_auxiliary_loss_is_rejected(make, task, tmp_path):
    model = make()
    run = wb.train(model, task, n_steps=2, store=tmp_path / "a.zarr", faults=[wb.faults.no_auxiliary_loss()])
    with pytest.raises(OptionError, check=about("model", type(model).__name__)):
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
    assert torch.equal(targets, before)  # the batch itself is unchanged
    assert torch.equal(wrong == -100, ~is_target)
    assert set(wrong[is_target].tolist()) <= set(targets[is_target].tolist())
    assert not torch.equal(wrong, targets)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_fraction_of_the_tokens_is_replaced(share):
    tokens = torch.randint(1000, (200, 50), generator=generator(1)).mul(3)
    for inputs, read in (
        (tokens, lambda x: x),
        ({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, lambda x: x["input_ids"]),
        ((tokens, 5), lambda x: x[0]),
    ):
        changed, targets = wb.faults.corrupted_data(what="tokens", share=share).batch(inputs, tokens, generator())
        assert targets is tokens
        assert float((read(changed) != tokens).float().mean()) == pytest.approx(share, rel=0.1)
        assert not (read(changed) % 3).any()  # only tokens of the batch


def test_corruption_depends_on_the_seed_and_ends_at_the_stop(make_model, task):
    def run(seed):
        fault = wb.faults.corrupted_data(what="tokens", share=0.5, start=2, stop=4)
        return [record.loss for record in train(make_model(), task, fault, seed=seed)]

    clean = [record.loss for record in train(make_model(), task)]
    assert run(0) == run(0) != run(1)
    assert run(0)[:2] == clean[:2]
    assert run(0)[2] != clean[2]


def test_data_that_cannot_be_corrupted_raise():
    pixels, labels = torch.rand(4, 1, 8, 8), torch.rand(4)
    with pytest.raises(OptionError, check=about("inputs", "Tensor of shape (4, 1, 8, 8)")):
        wb.faults.corrupted_data(what="tokens").batch(pixels, labels, generator())
    with pytest.raises(OptionError, check=about("targets", "torch.float32")):
        wb.faults.corrupted_data().batch(pixels, labels, generator())


def test_images_are_corrupted_by_their_labels():
    task = wb.tasks.digits(batch_size=8)
    model = wb.zoo.vit(d_model=16, n_layers=1, n_heads=2, image_size=8, n_channels=1)
    records = train(model, task, wb.faults.corrupted_data(start=0), wb.faults.low_precision_attention(start=0))
    assert np.isfinite([record.loss for record in records]).all()
