"""The families of transformers that the tests of models go through."""

import pytest

from benchmarks.foreign.families import (
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

#: For what a family shows as well as the next: every third in `make test`, all of them before a release.
FAMILIES_BY_TIER = [
    pytest.param(family, marks=() if place % 3 == 0 else pytest.mark.slow) for place, family in enumerate(FAMILIES)
]
