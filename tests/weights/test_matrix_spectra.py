import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import workbench as wb
from tests.about import about, says
from workbench.errors import CheckpointError, OptionError, SchemaError
from workbench.schema.runs import WEIGHTS, validate_weights
from workbench.weights import matrix_spectra, weight_spectra


def spectra_of(tmp_path, state, reference=None, **options):
    """Return the spectra of tensors that are saved in a file, as a checkpoint is."""
    paths = []
    for number, tensors in enumerate([state] + [reference] * (reference is not None)):
        paths.append(tmp_path / f"{number}.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, paths[-1])
    if reference is not None:
        options["reference"] = paths[1]
    return weight_spectra(paths[0], progress=False, **options)


class Weights(nn.Module):
    """A module of named parameters in any number format."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


class Quantized(torch.Tensor):
    """A tensor subclass whose entries may not be the weights."""


def of_one(matrix):
    return weight_spectra(Weights(w=matrix), progress=False).isel(matrix=0)


def random_matrix(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(70, 70), (120, 60), (60, 120)])
def test_every_variable_follows_its_formula(shape, dtype):
    matrix = random_matrix(*shape, dtype=dtype)
    found = of_one(matrix)
    s = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
    np.testing.assert_allclose(found["singular_value"], s, atol=1e-7 * s[0])
    fraction = s / s.sum()
    assert float(found["frobenius_norm"]) == pytest.approx(np.linalg.norm(matrix.double().numpy()), rel=1e-12)
    assert float(found["spectral_norm"]) == pytest.approx(s[0], rel=1e-12)
    assert float(found["stable_rank"]) == pytest.approx((s**2).sum() / s[0] ** 2, rel=1e-12)
    assert float(found["effective_rank"]) == pytest.approx(np.exp(-(fraction * np.log(fraction)).sum()), rel=1e-7)
    values = s**2 / max(shape)
    tail = wb.weights.power_law_tail(values)
    bulk = wb.weights.random_bulk(values, *shape)
    for name, value in {
        "alpha": tail.alpha, "alpha_error": tail.error, "ks_distance": tail.distance, "tail_start": tail.start,
        "n_tail": tail.n_tail, "bulk_variance": bulk.variance, "bulk_edge": bulk.edge, "n_spikes": bulk.n_spikes,
    }.items():  # fmt: skip
        assert float(found[name]) == pytest.approx(value, rel=1e-8), name
    assert (int(found["n_rows"]), int(found["n_columns"])) == shape


def test_a_long_matrix_is_read_in_pieces(monkeypatch):
    matrix = random_matrix(60, 1000)
    at_once = of_one(matrix)
    monkeypatch.setattr(matrix_spectra, "_ROWS", 64)
    np.testing.assert_allclose(of_one(matrix)["singular_value"], at_once["singular_value"], rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_matrix_of_rank_one(dtype):
    found = of_one(torch.outer(torch.arange(1, 81), torch.arange(1, 61)).to(dtype))
    assert float(found["stable_rank"]) == pytest.approx(1, abs=1e-9)
    assert float(found["effective_rank"]) == pytest.approx(1, abs=1e-9)
    assert np.count_nonzero(found["singular_value"]) == 1
    assert float(found["n_spikes"]) == 1
    assert np.isnan(found["alpha"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_orthogonal_matrix_has_neither_tail_nor_spike(dtype):
    found = of_one(3 * torch.linalg.qr(random_matrix(80, 80, dtype=torch.float64)).Q.to(dtype))
    assert float(found["stable_rank"]) == pytest.approx(80, rel=1e-5)
    assert float(found["effective_rank"]) == pytest.approx(80, rel=1e-5)
    assert float(found["n_spikes"]) == 0
    assert np.isnan(found["alpha"])


def test_a_zero_matrix():
    found = of_one(torch.zeros(60, 60))
    assert float(found["frobenius_norm"]) == float(found["spectral_norm"]) == 0
    assert np.isnan([found[name] for name in WEIGHTS if "norm" not in name and name != "singular_value"]).all()


def test_a_random_matrix_has_no_heavy_tail_and_one_with_known_tail_has():
    rng = np.random.default_rng(0)
    gaussian = of_one(torch.tensor(rng.normal(size=(300, 300))))
    q, r = (np.linalg.qr(rng.normal(size=(300, 300)))[0] for _ in range(2))
    values = (1 - (np.arange(300) + 0.5) / 300) ** (-1 / 1.5)  # p(x) ~ x^-2.5
    heavy = of_one(torch.tensor(q * np.sqrt(values) @ r))
    assert float(gaussian["alpha"]) > 4
    assert float(gaussian["ks_distance"]) > 0.1 > 2 * float(heavy["ks_distance"])
    assert float(gaussian["n_spikes"]) == 0
    assert float(heavy["alpha"]) == pytest.approx(2.5, abs=2 * float(heavy["alpha_error"]))
    assert float(heavy["n_spikes"]) >= 10


_UNCHANGED = ("stable_rank", "effective_rank", "alpha", "alpha_error", "ks_distance", "n_tail", "n_spikes")


@settings(max_examples=20, deadline=None)
@given(scale=st.floats(1e-150, 1e150), seed=st.integers(0, 99), transpose=st.booleans())
def test_scaling_permuting_and_transposing(scale, seed, transpose):
    matrix = random_matrix(80, 60, seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randperm(n, generator=generator) for n in matrix.shape)
    moved = scale * matrix[rows][:, columns]
    before, after = of_one(matrix), of_one(moved.T.contiguous() if transpose else moved)
    for name in _UNCHANGED:
        assert float(after[name]) == pytest.approx(float(before[name]), rel=1e-8), name
    for name, power in {"spectral_norm": 1, "frobenius_norm": 1, "tail_start": 2, "bulk_edge": 2}.items():
        assert float(after[name]) == pytest.approx(scale**power * float(before[name]), rel=1e-8), name


def test_the_difference_of_two_checkpoints(tmp_path):
    base = random_matrix(100, 60)
    left, right = random_matrix(100, 1, seed=1), random_matrix(1, 60, seed=2)
    found = spectra_of(tmp_path, {"w": base + left @ right}, {"w": base}).isel(matrix=0)
    assert float(found["stable_rank"]) == pytest.approx(1, abs=1e-6)
    assert float(found["n_spikes"]) == 1
    norms = torch.linalg.matrix_norm(left @ right) / torch.linalg.matrix_norm(base)
    assert float(found["relative_change"]) == pytest.approx(float(norms), rel=1e-6)
    assert found.attrs["reference"].endswith("1.safetensors")


def test_an_equal_reference_and_a_reference_of_zeros(tmp_path):
    matrix = random_matrix(60, 60)
    same = spectra_of(tmp_path, {"w": matrix}, {"w": matrix}).isel(matrix=0)
    assert float(same["relative_change"]) == float(same["frobenius_norm"]) == 0
    from_zero = spectra_of(tmp_path, {"w": matrix}, {"w": torch.zeros(60, 60)}).isel(matrix=0)
    assert np.isnan(from_zero["relative_change"])
    wide = weight_spectra(Weights(w=matrix.double()), reference=Weights(w=2 * matrix), progress=False)
    assert float(wide["relative_change"].item()) == pytest.approx(0.5)


def test_a_file_has_the_spectra_of_its_model():
    subject = wb.samples.load("pre_ln")
    of_model = weight_spectra(subject, progress=False)
    of_file = weight_spectra(wb.samples.embedded("pre_ln") / "model.safetensors", progress=False)
    assert set(of_model["matrix"].values) == set(of_file["matrix"].values)
    for name in WEIGHTS:
        np.testing.assert_array_equal(of_file[name].sel(matrix=of_model["matrix"]), of_model[name])
    assert of_model.attrs["subject"] == "pre_ln"
    assert of_file.attrs["source"].endswith("model.safetensors")


def test_stacks_kernels_and_tensors_that_are_left_out(tmp_path):
    state = {
        "layers.0.mlp.experts.up_proj": random_matrix(3, 20, 10),
        "layers.0.mlp.experts.up_proj_bias": random_matrix(3, 20),
        "layers.0.mixer.conv1d.weight": random_matrix(32, 1, 4),
        "layers.1.patch.weight": random_matrix(12, 3, 4, 4),
        "layers.1.coefficient": random_matrix(16, 16, 7),
        "layers.1.mask": torch.ones(16, 16, dtype=torch.bool),
        "layers.1.packed": random_matrix(16, 16).to(torch.float8_e4m3fn),
        "layers.1.norm.weight": torch.ones(16),
    }
    found = spectra_of(tmp_path, state)
    stack = [f"layers.0.mlp.experts.up_proj[{i}]" for i in range(3)]
    assert set(found["matrix"].values) == {*stack, "layers.1.patch.weight"}
    assert set(found.sel(matrix=stack)["role"].values) == {"expert up"}
    second = np.linalg.svd(state["layers.0.mlp.experts.up_proj"][1].double(), compute_uv=False)
    np.testing.assert_allclose(found["singular_value"].sel(matrix=stack[1]).dropna("value"), second, rtol=1e-6)
    patch = found.sel(matrix="layers.1.patch.weight")
    assert (int(patch["n_rows"]), int(patch["n_columns"]), int(patch["layer"])) == (12, 48, 1)
    assert np.isnan(found["singular_value"].sel(matrix=stack[0])[10:]).all()
    assert sorted(found.attrs["left_out"].splitlines()) == [
        "layers.0.mixer.conv1d.weight: shorter side of 4, below min_size",
        "layers.0.mlp.experts.up_proj_bias: a bias",
        "layers.1.coefficient: three dimensions, neither a stack of experts nor a convolution by its name",
        "layers.1.mask: values of type bool, which do not represent weights without scales",
        "layers.1.packed: values of type float8_e4m3fn without their scales",
    ]


def test_a_reference_with_fewer_layers_is_rejected_with_the_missing_matrix():
    deep, shallow = (wb.zoo.transformer(d_model=16, n_layers=n, n_heads=2) for n in (2, 1))
    with pytest.raises(CheckpointError, check=says("The reference module Transformer has no matrix")):
        weight_spectra(deep, reference=shallow, layers=[1], progress=False)


def test_tied_weights_appear_once_and_the_model_is_not_changed():
    model = nn.Sequential(nn.Embedding(60, 50), nn.Linear(50, 60, bias=False))
    model[1].weight = model[0].weight
    model.train()
    found = weight_spectra(torch.nn.DataParallel(model).module, progress=False)
    assert found["matrix"].values.tolist() == ["0.weight"]
    assert model.training
    assert model[0].weight.grad is None


def test_matrices_are_read_one_at_a_time(monkeypatch):
    """Check that each tensor is released before the next one is read."""
    import weakref

    references, alive = [], []

    class Lazy:
        shape, dtype = (50, 50), torch.float32

        def read(self):
            alive.append(sum(reference() is not None for reference in references))
            tensor = random_matrix(50, 50)
            references.append(weakref.ref(tensor))
            return tensor

    monkeypatch.setattr(matrix_spectra, "lazy_state", lambda path: {f"w{i}": Lazy() for i in range(4)})
    weight_spectra("made_up.safetensors", progress=False)
    assert alive == [0, 0, 0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_matrix_with_a_value_that_is_not_finite_is_named(bad, dtype):
    matrix = random_matrix(20, 30, dtype=dtype)
    matrix[3, 4] = bad
    with pytest.raises(CheckpointError, check=says("w contains a value that is not finite, or too large to be")):
        of_one(matrix)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ({"v": (20, 30)}, "has no matrix w;"),
        ({"w": (20, 30), "v": (20, 20)}, "has a matrix v,"),
        ({"w": (30, 20)}, "(30, 20)"),
    ],
)
def test_a_reference_that_does_not_match_is_rejected(reference, words):
    other = Weights(**{name: random_matrix(*shape) for name, shape in reference.items()})
    with pytest.raises(CheckpointError, check=says(words)):
        weight_spectra(Weights(w=random_matrix(20, 30)), reference=other, progress=False)


@pytest.mark.parametrize(
    ("call", "error", "name", "value"),
    [
        (lambda: weight_spectra(nn.LayerNorm(9)), CheckpointError, "source", "module LayerNorm"),
        (lambda: weight_spectra(nn.Linear(9, 9), min_size=10), CheckpointError, "source", "module Linear"),
        (lambda: weight_spectra(nn.Linear(9, 9), min_size=0), OptionError, "min_size", 0),
        (lambda: weight_spectra(nn.Linear(9, 9), layers=[0]), OptionError, "layers", 0),
        (lambda: weight_spectra(wb.zoo.transformer(n_layers=2), layers=[2]), OptionError, "layers", 2),
        (lambda: weight_spectra(nn.Linear(9, 9, device="meta")), CheckpointError, "weight", "a meta tensor"),
        (
            lambda: weight_spectra(nn.utils.parametrizations.weight_norm(nn.Linear(9, 9))),
            OptionError,
            "source",
            "ParametrizedLinear",
        ),
        (lambda: weight_spectra(Weights(w=Quantized(random_matrix(9, 9)))), CheckpointError, "w", "Quantized"),
    ],
)
def test_errors_name_what_is_wrong(call, error, name, value):
    with pytest.raises(error, check=about(name, value)):
        call()


def test_a_source_must_be_a_model_or_an_existing_path():
    with pytest.raises(CheckpointError):
        weight_spectra("nowhere.safetensors")
    with pytest.raises(OptionError, check=about("source", 5)):
        weight_spectra(5)


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda ds: ds.drop_vars("alpha"), "alpha"),
        (lambda ds: ds.drop_vars("role"), "role"),
        (lambda ds: ds.assign(n_spikes=ds["n_spikes"].astype(int)), "n_spikes"),
        (lambda ds: ds.assign(singular_value=ds["singular_value"].T), "singular_value"),
        (lambda ds: ds.assign_attrs(schema_version=99), "schema_version"),
    ],
)
def test_datasets_that_do_not_follow_the_schema_are_rejected(spoil, name):
    spectra = weight_spectra(Weights(w=random_matrix(60, 60)), progress=False)
    assert validate_weights(spectra) is spectra
    with pytest.raises(SchemaError, check=about(name)):
        validate_weights(spoil(spectra))


def test_saved_spectra_are_opened_unchanged(tmp_path):
    spectra = weight_spectra(wb.samples.load("no_norm"), layers=[0], progress=False)
    for path in (wb.save(spectra, tmp_path / "w.zarr"), wb.export_netcdf(spectra, tmp_path / "w.nc")):
        assert wb.open_run(path)["weights"].to_dataset().identical(spectra)
    with pytest.raises(SchemaError, check=says("The weight spectra lack alpha;")):
        wb.save(spectra.drop_vars("alpha"), tmp_path / "bad.zarr")


def test_progress_counts_matrices():
    texts = []
    weight_spectra(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), progress=texts.append)
    assert texts == ["1 of 2 weights", "2 of 2 weights"]
