"""What the generic readers cannot find out by running a model, family by family, as data."""

from __future__ import annotations

from typing import Any

#: transformers ``model_type`` -> options of its config that are set while a model is run to be read.
RUN_OVERRIDES: dict[str, dict[str, Any]] = {
    # In eval mode RWKV divides weights in place and halves the stream between blocks every `rescale_every` blocks.
    "rwkv": {"rescale_every": 0},
}
