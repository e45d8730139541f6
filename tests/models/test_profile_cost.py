import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import workbench as wb
from tests.about import says
from workbench.errors import SnapshotError
from workbench.models import profile as profiling
from workbench.models.profile import ProfileCost

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


@pytest.mark.parametrize(
    ("item", "n_tokens"),
    [
        (torch.zeros(3, 5, dtype=torch.long), 15),
        ({"input_ids": torch.zeros(3, 5, dtype=torch.long)}, 15),
        ((torch.zeros(3, 5, 8),), 15),
        (torch.zeros(3, 3, 32, 32), 3 * 256),
        (torch.zeros(7, 12), 7),
        ({"text": "none"}, 0),
    ],
)
def test_tokens_are_counted_by_shapes(item, n_tokens):
    assert profiling._n_tokens(item) == n_tokens
