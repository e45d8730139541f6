"""The signatures of the constructors list exactly the options of their family with their defaults."""

import inspect
import pickle
import typing

import pytest

import workbench as wb
from tests.about import about
from workbench.errors import OptionError
from workbench.zoo import ArchitectureConfig
from workbench.zoo.architecture_config import ArchitectureOptions

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


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_without_options_the_configuration_has_the_defaults(name):
    family, preset = CONSTRUCTORS[name]
    assert getattr(wb.zoo, name)().config == ArchitectureConfig(family=family, **preset)


def test_unknown_options_are_rejected():
    with pytest.raises(OptionError, check=about("n_experts", 4)):
        wb.zoo.transformer(n_experts=4)
    with pytest.raises(OptionError, check=about("n_head", 4)):
        wb.zoo.llama_style(n_head=4)


def test_constructors_keep_their_names_and_can_be_pickled():
    for name in CONSTRUCTORS:
        constructor = getattr(wb.zoo, name)
        assert constructor.__name__ == name
        assert pickle.loads(pickle.dumps(constructor)) is constructor
