import itertools
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import workbench as wb
from tests.about import about, says
from tests.oracle import oracle
from workbench.errors import OptionError, SnapshotError
from workbench.models import profile as profiling
from workbench.models.profile import ProfileCost


@pytest.fixture
def model():
    return wb.zoo.transformer("pre_ln", d_model=16, n_layers=3, n_heads=2, max_length=32)


@pytest.fixture
def tokens():
    return wb.tasks.text_bytes(length=32, batch_size=20).batch(0)[0]


def block_states(model, tokens):
    """Return the states between blocks by running them explicitly."""
    states = [model.token_embedding(tokens) + model.position_embedding(torch.arange(tokens.shape[1]))]
    for block in model.blocks:
        states.append(block(states[-1]))
    return [state.detach().flatten(0, 1).double().numpy() for state in states]


def test_profile_is_the_oracle_on_the_blocks_states(model, tokens):
    spectra = wb.profile(model, tokens, progress=False)
    states = block_states(model, tokens)
    assert list(spectra.layer_name.values) == ["blocks.0", "blocks.1", "blocks.2"]
    assert spectra.attrs["n_snapshots"] == 640
    for i in range(3):
        X, Y = states[i], states[i + 1]
        truth = oracle(X.T, Y.T, 1e-5 * np.cov(X.T).trace() / 16)
        layer = spectra.isel(layer=i)
        np.testing.assert_allclose(np.abs(layer.eigenvalue), np.abs(truth["eigenvalue"]), rtol=1e-6)
        np.testing.assert_allclose(layer.residual, truth["residual"], rtol=1e-5)
        assert float(layer.nonlinearity_ratio) == pytest.approx(truth["nonlinearity_ratio"], rel=1e-6)
        assert float(layer.eigenvector_condition) == pytest.approx(truth["eigenvector_condition"], rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_layer_that_is_not_finite_is_named_and_hooks_are_removed(model, tokens, bad):
    with torch.no_grad():
        model.blocks[1].mlp.down.bias[0] = bad
    with pytest.raises(SnapshotError, check=says("The residual stream holds NaN or infinite values in layer")):
        wb.profile(model, tokens, progress=False)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.training


def test_the_first_layer_that_is_not_finite_in_a_later_batch_is_named(model, tokens):
    """Check the first of the layers, which are tested together after each batch; later ones are not finite either."""
    with torch.no_grad():
        model.token_embedding.weight[250] = 1e6
    model.blocks[1].register_forward_hook(lambda block, args, y: y / (args[0].abs().max() < 1e4))
    last = tokens.clone()
    last[0, 0] = 250
    with pytest.raises(SnapshotError, check=says("The residual stream holds NaN or infinite values in layer")):
        wb.profile(model, [tokens, tokens, last], n_snapshots=None, progress=False)
    assert wb.profile(model, [tokens, tokens], n_snapshots=None, progress=False).sizes["layer"] == 3


def test_a_constant_stream_is_rejected(model):
    with torch.no_grad():
        model.position_embedding.weight.zero_()
    with pytest.raises(SnapshotError, check=says("are all the same; pass inputs that")):
        wb.profile(model, torch.full((8, 32), 7), progress=False)


def test_inputs_that_are_missing_are_asked_for(model):
    with pytest.raises(OptionError, match="a task of wb.tasks", check=about("inputs", None)):
        wb.profile(model)


def test_too_few_states_are_rejected(model):
    with pytest.raises(SnapshotError, check=says("A spectrum needs 3 snapshots")):
        wb.profile(model, torch.tensor([[1, 2]]), progress=False)


def test_a_block_that_writes_to_its_input_is_measured_correctly(tokens):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return x.add_(self.linear(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.blocks = nn.Embedding(256, 8), nn.ModuleList(InPlace() for _ in range(3))

        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    model = Model()
    found = wb.profile(model, tokens, progress=False)
    expected = np.sort(np.abs(np.linalg.eigvals(np.eye(8) + model.blocks[0].linear.weight.detach().double().numpy())))
    np.testing.assert_allclose(np.sort(np.abs(found.eigenvalue.values[0])), expected, rtol=1e-5)


def test_rank_seed_and_thresholds_are_recorded(model, tokens):
    thresholds = wb.Thresholds(near_unit_upper=1.2)
    spectra = wb.profile(model, tokens, rank=4, seed=7, thresholds=thresholds, n_snapshots=100, progress=False)
    assert spectra.sizes["mode"] == 4
    assert spectra.attrs["operator"] == "randomized DMD, rank 4"
    assert spectra.attrs["seed"] == 7
    assert spectra.attrs["near_unit_upper"] == 1.2
    assert spectra.attrs["token_selection"] == "100 of 640 tokens"
    assert spectra.attrs["stack"] == "blocks"


def test_progress_is_reported_for_each_layer(model, tokens, capsys):
    texts = []
    wb.profile(model, tokens, progress=texts.append)
    assert texts[:2] == ["finding the blocks", "forward pass"]
    assert texts[-4:] == ["spectra", *(f"{n} of 3 layers" for n in (1, 2, 3))]
    wb.profile(model, tokens)
    assert capsys.readouterr().err == ""  # it took less than a second


def test_an_interrupt_leaves_no_hook_and_ends_at_once(model, tokens, notebook):
    def batches():
        yield tokens
        time.sleep(0.2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wb.profile(model, batches(), n_snapshots=None)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert notebook.lines[-1] == "stopped after 0 of 3 layers"


def test_an_interrupt_does_not_wait_for_layers_that_have_begun(model, tokens, notebook, monkeypatch):
    begun = itertools.count()
    is_released = threading.Event()

    def spectrum(moments, options):
        if next(begun) == 0:
            time.sleep(0.2)
            raise KeyboardInterrupt
        is_released.wait(20)

    monkeypatch.setattr("workbench.koopman.spectra.layer_spectrum", spectrum)
    before, start = torch.get_num_threads(), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wb.profile(model, tokens, n_workers=2)
    assert time.monotonic() - start < 2
    assert torch.get_num_threads() == before
    assert notebook.lines[-1] == "stopped after 0 of 3 layers"
    is_released.set()


def test_low_precision_weights_are_profiled_in_float64(model, tokens):
    spectra = wb.profile(model.to(torch.bfloat16), tokens, progress=False)
    assert spectra.attrs["dtype"] == "bfloat16"
    assert spectra.eigenvalue.dtype == np.complex128


@pytest.mark.medium
def test_a_compiled_model_is_profiled_like_the_model_itself(model, tokens):
    expected = wb.profile(model, tokens, progress=False)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(tokens)  # compiled code would ignore hooks that are added after the first call
    found = wb.profile(compiled, tokens, progress=False)
    np.testing.assert_array_equal(found.eigenvalue, expected.eigenvalue)


def test_the_seed_of_the_options_is_used_unless_another_is_given(model, tokens):
    options = wb.DmdOptions(rank=4, seed=5)
    assert wb.profile(model, tokens, options=options, progress=False).attrs["seed"] == 5
    assert wb.profile(model, tokens, options=options, seed=6, progress=False).attrs["seed"] == 6


@pytest.mark.parametrize("was_run", [False, True])
def test_transformers_captures_the_same_number_of_outputs_afterwards(was_run):
    """Check that the hooks that transformers adds in the first call that captures outputs do not accumulate."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=64, num_hidden_layers=3, num_local_experts=2, **sizes)).eval()
    inputs = {"input_ids": torch.randint(64, (2, 12)), "output_hidden_states": True, "output_router_logits": True}
    if was_run:
        model(**inputs)
    for _ in range(3):
        wb.profile(model, inputs, progress=False)
        wb.query_key_weights(model, inputs)
        found = model(**inputs)
        assert (len(found.hidden_states), len(found.router_logits)) == (4, 3)


def test_blocks_of_which_some_are_quantized(tokens):
    """Check that blocks whose matrix is a buffer are not taken for norms."""

    class Block(nn.Module):
        def __init__(self, *, is_quantized):
            super().__init__()
            self.norm, self.scale = nn.LayerNorm(16), 0.01
            matrix = torch.randint(-9, 9, (16, 16), dtype=torch.int8)
            if is_quantized:
                self.register_buffer("matrix", matrix)
            else:
                self.matrix = nn.Parameter(matrix.float())

        def forward(self, x):
            return x + self.scale * self.norm(x) @ self.matrix.float()

    model = nn.Sequential(nn.Embedding(256, 16), nn.Sequential(*(Block(is_quantized=i < 3) for i in range(4))))
    assert wb.profile(model, tokens, progress=False).sizes["layer"] == 4
    assert wb.profile(model, tokens, stack="1", progress=False).sizes["layer"] == 4


GIGABYTE = 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=90,
        dtype=torch.float32,
    )
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


IDS = torch.randint(0, 90, (4, 64), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("streaming", [True, False])
def test_a_dry_run_estimates_memory_and_time_and_measures_no_layer(folder, streaming, monkeypatch):
    monkeypatch.setattr("workbench.models.profile.LayerResults", None)
    cost = wb.profile(wb.open_checkpoint(folder, streaming=streaming), IDS, dry_run=True)
    assert isinstance(cost, ProfileCost)
    assert cost.memory == cost.weights + cost.states + cost.moments + cost.spectra
    assert 0 < cost.seconds < 600
    assert f"of {cost.free / 1e9:.1f} GB free, about" in str(cost)


def test_a_rank_few_layers_and_one_worker_need_less():
    model = wb.zoo.transformer(d_model=1040, n_layers=2, n_heads=2, vocab_size=90)
    ids = IDS.repeat(8, 1)
    assert ids.numel() > 1040

    def cost(**options):
        return wb.profile(model, list(ids.split(16)), dry_run=True, **options)

    full = cost(n_workers=2)
    assert full.moments == 2 * 3 * 8 * 1040**2
    assert cost(n_workers=2, layers=[0]).moments == full.moments / 2
    assert cost(n_workers=1).spectra == full.spectra / 2
    assert cost(n_workers=2, rank=8).memory < full.memory / 2


def test_time_is_unknown_for_inputs_that_cannot_be_counted():
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=90)
    cost = wb.profile(model, (ids for ids in IDS.split(2)), dry_run=True)
    assert np.isnan(cost.seconds)
    assert str(cost).endswith("GB free")


@pytest.mark.parametrize(
    ("part", "remedy"),
    [
        ("weights", "use a machine with more memory"),
        ("states", "pass fewer or shorter inputs"),
        (
            "moments",
            "pass wb.profile(..., rank=64), or wb.profile(..., layers=) for some of the layers, or open the checkpoint "
            "with wb.open_checkpoint(..., streaming=True)",
        ),
        ("spectra", "pass wb.profile(..., rank=64), or wb.profile(..., n_workers=1)"),
    ],
)
def test_the_remedy_for_too_large_a_profile_depends_on_its_largest_part(part, remedy):
    sizes = dict.fromkeys(("weights", "states", "moments", "spectra"), GIGABYTE) | {part: 3 * GIGABYTE}
    subject = wb.open_checkpoint(wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2))
    profiling.require_memory(ProfileCost(**sizes, free=6 * GIGABYTE), subject)
    with pytest.raises(SnapshotError, check=says("of 6.0 GB free")) as caught:
        profiling.require_memory(ProfileCost(**sizes, free=6 * GIGABYTE - 1), subject)
    assert str(caught.value).endswith(f"; {remedy}.")


def test_too_wide_a_model_is_rejected_before_anything_runs(monkeypatch):
    model = wb.zoo.transformer(d_model=520, n_layers=2, n_heads=2, vocab_size=90)
    monkeypatch.setattr(profiling, "free_memory", lambda device: 10**6)
    monkeypatch.setattr("workbench.models.profile.capture_layers", None)
    with pytest.raises(SnapshotError, check=says("GB free; pass wb.profile(...")):
        wb.profile(model, IDS, progress=False)
