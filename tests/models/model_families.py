"""Families of models in transformers on which the tests run."""

import pytest

from benchmarks.third_party.families import (
    BERT,
    BY_NAME,
    FAMILIES,
    GPT2,
    LLAMA,
    MHA,
    MOE,
    N_TOKENS,
    VIT,
    VOCABULARY,
    Family,
    build,
    make_inputs,
)

__all__ = [
    "BERT", "BY_NAME", "FAMILIES", "FAMILIES_BY_TIER", "GPT2", "LLAMA", "MHA", "MOE", "N_TOKENS", "VIT", "VOCABULARY",
    "Family", "build", "make_inputs",
]  # fmt: skip

#: For tests whose result hardly depends on the family: every third family in `make test`, all of them before a release.
FAMILIES_BY_TIER = [
    pytest.param(family, marks=() if place % 3 == 0 else pytest.mark.slow) for place, family in enumerate(FAMILIES)
]
