"""What stands for a subject: itself, a whole model of its design, or a thin one."""

import torch

import workbench as wb
from workbench.assessment.measured_model import LENGTH, LENGTH_OF_SCANS, THIN_WIDTH, measured_model, planned_task

SIZE = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_length": 16}


def test_small_designs_are_measured_whole_and_large_ones_thin():
    small = measured_model({"family": "transformer", **SIZE})
    assert small.is_target_size
    assert not small.is_own
    large = measured_model("gpt2")
    assert (large.width, large.depth) == (THIN_WIDTH, 4)
    assert (large.target_width, large.target_depth) == (768, 12)
    assert 1.2e8 < large.n_weights < 1.3e8
    assert len(list(small.siblings(3))) == 3
    assert list(measured_model(small.model).siblings(3)) == [small.model]


def test_fresh_models_of_a_thin_design_have_the_variances_of_its_width():
    found = measured_model("gpt2")
    plain, fresh = (model.transformer.h[0].mlp.c_fc.weight for model in (found.model, found.fresh()))
    torch.testing.assert_close(fresh, plain * (768 / THIN_WIDTH) ** 0.5)
    deep = found.fresh(seed=1, depth=12)
    assert len(deep.transformer.h) == 12
    assert not torch.equal(deep.transformer.h[0].mlp.c_fc.weight, fresh)


def test_a_subject_with_its_own_weights_stands_for_itself():
    model = wb.zoo.transformer(**SIZE)
    found = measured_model(model)
    assert found.fresh() is model
    whole = measured_model({"family": "transformer", **SIZE})
    assert whole.fresh() is whole.model
    assert not torch.equal(next(whole.fresh(1).parameters()), next(whole.model.parameters()))


def test_what_scans_its_tokens_reads_shorter_sequences():
    import transformers

    plan = wb.hardware.read_plan({})
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=2, vocab_size=32)
    )
    other = wb.zoo.transformer(**SIZE | {"max_length": 128})
    lengths = [next(iter(planned_task(model, plan, seed=0).stream(0)))[0].shape[1] for model in (mamba, other)]
    assert lengths == [LENGTH_OF_SCANS, LENGTH]
