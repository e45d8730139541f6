"""Reference architectures, small enough to read and to train on a laptop.

    model = wb.zoo.transformer("rms_norm", d_model=256, n_layers=6)
    config = wb.zoo.ArchitectureConfig(family="moe", d_model=256, top_k=1)
    model = wb.zoo.build(config)

Every model takes token ids (or images) and returns logits; ``model.config`` is what it was made from. A training loop
adds ``model.auxiliary_loss()`` where there is such a method: ``getattr(model, "auxiliary_loss", None)``.
"""

from workbench.subjects.zoo.blocks import ZooModel
from workbench.subjects.zoo.config import FAMILIES, INITIALIZATIONS, NORMS, ArchitectureConfig, defaults
from workbench.subjects.zoo.constructors import (
    build,
    count_parameters,
    gpt2_style,
    is_zoo_model,
    kan,
    llama_style,
    mamba,
    mixtral_style,
    moe,
    transformer,
    vit,
)
from workbench.subjects.zoo.decoders import KanTransformer, Transformer
from workbench.subjects.zoo.layouts import from_gpt2, from_llama
from workbench.subjects.zoo.mixture import MoeTransformer
from workbench.subjects.zoo.state_space import Mamba
from workbench.subjects.zoo.vision import VisionTransformer

__all__ = [
    "FAMILIES",
    "INITIALIZATIONS",
    "NORMS",
    "ArchitectureConfig",
    "KanTransformer",
    "Mamba",
    "MoeTransformer",
    "Transformer",
    "VisionTransformer",
    "ZooModel",
    "build",
    "count_parameters",
    "defaults",
    "from_gpt2",
    "from_llama",
    "gpt2_style",
    "is_zoo_model",
    "kan",
    "llama_style",
    "mamba",
    "mixtral_style",
    "moe",
    "transformer",
    "vit",
]
