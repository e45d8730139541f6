"""The signatures of the constructors list exactly the options of their family with their defaults."""

import inspect
import json
import typing
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.about import about
from workbench.errors import OptionError
from workbench.zoo import ArchitectureConfig
from workbench.zoo.architecture_config import ArchitectureOptions

Config = wb.zoo.ArchitectureConfig
#: For every option, a value that differs from the default and is compatible with all other defaults.
OTHER = {
    "d_model": 64, "n_layers": 2, "norm": "post_ln", "norm_eps": 1e-6, "vocab_size": 100, "max_length": 32,
    "ties_embeddings": True, "n_heads": 2, "n_kv_heads": 2, "position": "none", "qk_norm": True, "window": 8,
    "is_parallel": True, "has_bias": None, "mlp": "swiglu", "mlp_ratio": 2.5, "n_experts": 4, "top_k": 3,
    "normalizes_top_k": False, "balance_coefficient": 0.0, "z_coefficient": 0.5, "state_size": 8, "conv_width": 3,
    "expand": 3, "n_grid": 5, "spline_order": 2, "spline_range": 1.0, "spline_std": 0.0, "image_size": 16,
    "patch_size": 8, "n_channels": 1, "n_classes": 3, "initialization": "xavier", "init_std": 0.05,
    "scales_residual_init": True, "seed": 3,
}  # fmt: skip


def others(family):
    known = {**OTHER, "has_bias": family == "mamba"}
    if family == "mamba":
        del known["norm"]  # the family has only one norm
    return {name: value for name, value in known.items() if name in wb.zoo.defaults(family)}


@pytest.mark.parametrize("family", wb.zoo.FAMILIES)
@given(data=st.data())
def test_any_configuration_survives_json(family, data):
    options = others(family)
    chosen = data.draw(st.sets(st.sampled_from(sorted(options))))
    config = Config(family=family, **{name: options[name] for name in chosen})
    assert Config.from_dict(json.loads(json.dumps(config.as_dict()))) == config
    for name in chosen:
        assert getattr(config, name) == options[name] != wb.zoo.defaults(family)[name]
    assert set(config.as_dict()) == {"family", *wb.zoo.defaults(family)}


@pytest.mark.parametrize("family", wb.zoo.FAMILIES)
def test_options_of_other_families_are_rejected(family):
    given_options = {**OTHER, "has_bias": True, "rotary_base": 1e4, "mlp_width": 8}
    names = [field.name for field in fields(Config) if field.name != "family"]
    not_applicable = [name for name in names if name not in wb.zoo.defaults(family)]
    assert not_applicable
    for name in not_applicable:
        with pytest.raises(OptionError, check=about(name, given_options[name], "None")):
            Config(family=family, **{name: given_options[name]})


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        ({"family": "perceiver"}, "family", ("transformer", "moe", "mamba", "kan", "vit")),
        ({"n_heads": 4, "n_kv_heads": 3}, "n_kv_heads", "a divisor of n_heads (4)"),
        ({"d_model": 30, "n_heads": 4}, "n_heads", "a divisor of d_model (30)"),
        ({"family": "moe", "n_experts": 2, "top_k": 3}, "top_k", "at most n_experts (2)"),
        ({"family": "vit", "image_size": 30, "patch_size": 4}, "patch_size", "a divisor of image_size (30)"),
        (
            {"position": "rotary", "d_model": 20, "n_heads": 4},
            "n_heads",
            "such that d_model / n_heads is even",
        ),
        ({"rotary_base": 500.0}, "rotary_base", "None"),
        ({"family": "vit", "position": "rotary"}, "position", ("learned", "none")),
        ({"family": "mamba", "norm": "pre_ln"}, "norm", ("rms_norm",)),
        ({"mlp_ratio": 4, "mlp_width": 64}, "mlp_width", "None if mlp_ratio is given"),
        ({"initialization": "rezero", "norm": "pre_ln"}, "norm", ("none",)),
        ({"initialization": "fixup", "norm": "none", "mlp": "swiglu"}, "initialization", ("rezero",)),
        ({"family": "moe", "initialization": "fixup", "norm": "none"}, "initialization", ("rezero",)),
        ({"family": "kan", "initialization": "fixup", "norm": "none"}, "initialization", ("rezero",)),
        ({"initialization": "fixup", "norm": "none", "ties_embeddings": True}, "ties_embeddings", (False,)),
        ({"initialization": "fixup", "norm": "none", "scales_residual_init": True}, "scales_residual_init", (False,)),
    ],
)
def test_impossible_configurations_are_rejected(options, name, expected):
    found = tuple(value) if isinstance(value := options[name], list) else value  # errors keep lists as tuples
    with pytest.raises(OptionError, check=about(name, found, expected)):
        Config(**options)


def test_unknown_options_are_rejected_by_all_constructors():
    for make in (wb.zoo.transformer, wb.zoo.moe, wb.zoo.mamba, wb.zoo.kan, wb.zoo.vit, wb.zoo.llama_style):
        with pytest.raises(OptionError, check=about("n_head", 4)):
            make(n_head=4)


def test_hidden_widths():
    assert Config(d_model=30, n_heads=2).hidden_width == 120
    assert Config(d_model=128, mlp="swiglu").hidden_width == 344  # 341.3, rounded up to a multiple of 8
    assert Config(d_model=96, mlp="swiglu").hidden_width == 256
    assert Config(mlp_width=17).hidden_width == 17
    assert Config(family="kan").hidden_width == 128


def hand_count(family, d, n_layers, vocab_size, n_positions):
    """Return the number of parameters, derived by hand."""
    attention = 4 * d * d + 4 * d
    mlp = {
        "transformer": 8 * d * d + 5 * d,
        "vit": 8 * d * d + 5 * d,
        "moe": 8 * (8 * d * d + 5 * d) + 8 * d,
        "kan": 2 * d * d * (4 + 3 + 2),
    }
    if family == "mamba":
        inner, rank = 2 * d, -(-d // 16)
        mixer = 2 * inner * d + 5 * inner + inner * (rank + 32) + (rank + 1) * inner + 17 * inner + inner * d
        return n_layers * (mixer + d) + d + 2 * vocab_size * d
    ends = (48 + 1) * d + 10 * d if family == "vit" else 2 * vocab_size * d
    return n_layers * (attention + mlp[family] + 4 * d) + 2 * d + n_positions * d + ends


@pytest.mark.parametrize("family", wb.zoo.FAMILIES)
def test_parameters_are_counted_without_allocation(family):
    config = Config(family=family, d_model=1024, n_layers=24)
    n_positions = {"mamba": 0, "vit": 64}.get(family, 64)
    assert wb.zoo.count_parameters(config) == hand_count(family, 1024, 24, 256, n_positions)
    enormous = Config(family=family, d_model=2**18, n_layers=4)  # would take terabytes
    assert wb.zoo.count_parameters(enormous) == hand_count(family, 2**18, 4, 256, n_positions)


@pytest.mark.parametrize("family", ["transformer", "moe", "mamba", "kan"])
def test_tied_weights_are_counted_once(family):
    config = Config(family=family, d_model=16, n_layers=2, vocab_size=50, ties_embeddings=True)
    model = wb.zoo.build(config)
    assert wb.zoo.count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    assert wb.zoo.count_parameters(config) == hand_count(family, 16, 2, 50, 0 if family == "mamba" else 64) - 50 * 16


LLAMA = {"norm": "rms_norm", "norm_eps": 1e-5, "position": "rotary", "mlp": "swiglu", "has_bias": False}
CONSTRUCTORS = {
    "transformer": ("transformer", {}),
    "moe": ("moe", {}),
    "mamba": ("mamba", {}),
    "kan": ("kan", {}),
    "vit": ("vit", {}),
    "gpt2_style": (
        "transformer",
        {"norm": "pre_ln", "mlp": "gelu_tanh", "ties_embeddings": True, "scales_residual_init": True},
    ),
    "llama_style": ("transformer", LLAMA),
    "mixtral_style": ("moe", LLAMA),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_signatures_are_the_options_of_the_family(name):
    family, preset = CONSTRUCTORS[name]
    constructor = getattr(wb.zoo, name)
    parameters = inspect.signature(constructor).parameters
    assert {key: p.default for key, p in parameters.items()} == {**wb.zoo.defaults(family), **preset}
    assert all(p.kind is p.KEYWORD_ONLY for key, p in parameters.items() if key != "norm")


def test_the_options_have_the_types_of_the_configuration():
    of_config, own = typing.get_type_hints(ArchitectureConfig), typing.get_type_hints(ArchitectureOptions)
    assert [*own] == [name for name in of_config if name != "family"]
    for name, kind in own.items():
        assert typing.Optional[kind] == typing.Optional[of_config[name]]  # noqa: UP045
