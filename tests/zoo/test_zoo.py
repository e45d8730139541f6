import json

import numpy as np
import pytest
import torch

import workbench as wb

#: M as measured here at d = 128, L = 4 and init_std = 0.02; for deep_norm the value of the paper, from which its form
#: was derived.
MEASURED_M = {
    "pre_ln": 0.125,
    "post_ln": 0.73,
    "rms_norm": 0.137,
    "deep_norm": 0.00,
    "deep_norm_post": 0.74,
    "sub_ln": 0.11,
    "none": 0.98,
}


@pytest.fixture(
    scope="module",
    params=[(42,), pytest.param((42, 123, 456), marks=pytest.mark.slow)],
    ids=["one seed", "three seeds"],
)
def found_m(request):
    """Return M of each norm at initialization, averaged over layers and seeds."""
    found = {}
    for norm in wb.zoo.NORMS:
        values = []
        for seed in request.param:
            model = wb.zoo.transformer(norm, d_model=128, n_layers=4, seed=seed)
            tokens, _ = wb.tasks.associative_recall(seed=seed).batch(0)
            spectra = wb.profile(model, tokens, progress=False)
            values.append(float(wb.summarize(spectra).near_unit_mass.sel(statistic="mean")))
        found[norm] = np.mean(values)
    return found


def test_near_unit_mass_of_each_normalization(found_m):
    assert found_m == pytest.approx(MEASURED_M, abs=0.06)


def test_weights_are_drawn_in_a_fixed_order():
    """Recorded runs depend on this: a seed must keep determining the same parameters bit for bit."""
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, seed=7)
    names = ["token_embedding", "position_embedding"]
    for i in range(2):
        names += [f"blocks.{i}.attention.{name}" for name in ("query", "key", "value", "out")]
        names += [f"blocks.{i}.mlp.up", f"blocks.{i}.mlp.down"]
    generator = torch.Generator().manual_seed(7)
    for name in [*names, "head"]:
        weight = model.get_parameter(f"{name}.weight")
        assert torch.equal(weight, torch.empty_like(weight).normal_(0, 0.02, generator=generator)), name


def test_configurations_saved_by_the_first_version_still_open():
    old = json.loads((wb.samples.embedded("pre_ln") / "config.json").read_text())
    assert old.pop("workbench_architecture") == "transformer"
    assert old.pop("tokenizer") == "bytes"  # added later
    assert sorted(old) == sorted(
        ["norm", "d_model", "n_layers", "n_heads", "vocab_size", "max_length", "mlp_ratio", "init_std", "seed"]
    )
    config = wb.zoo.ArchitectureConfig.from_dict(old)
    assert config == wb.zoo.ArchitectureConfig(d_model=64, n_layers=6, mlp_ratio=4, seed=42)


def random_tokens(n_examples):
    return torch.randint(256, (n_examples, 64), generator=torch.Generator().manual_seed(42))


@pytest.mark.medium
@pytest.mark.parametrize(("norm", "published_m", "published_radius"), [("pre_ln", 0.16, 2.29), ("none", 0.79, 1.11)])
def test_the_published_values_of_dense_architectures_are_reproduced(norm, published_m, published_radius):
    """The comparison of architectures in RKSP: d = 256, L = 6, random tokens."""
    model = wb.zoo.transformer(norm, d_model=256, n_layers=6, seed=42)
    spectra = wb.profile(model, random_tokens(32), progress=False)
    assert float(spectra.near_unit_mass.mean()) == pytest.approx(published_m, abs=0.03)
    assert float(spectra.spectral_radius.mean()) == pytest.approx(published_radius, rel=0.1)


@pytest.mark.medium
def test_fewer_experts_make_blocks_less_linear():
    """The order of eta is that of the paper (0.68, 0.55, 0.48 for one, two and four of eight experts)."""
    ratios = []
    for top_k in (1, 2, 4):
        model = wb.zoo.moe(top_k=top_k, normalizes_top_k=True, d_model=64, n_layers=2, seed=42)
        ratios.append(float(wb.profile(model, random_tokens(16), progress=False).nonlinearity_ratio.mean()))
    assert ratios[0] > ratios[1] + 0.03 > ratios[2] + 0.06
