"""Reference architectures, small enough to read and to train on a laptop.

    model = wb.zoo.transformer("rms_norm", d_model=256, n_layers=6)
    config = wb.zoo.ArchitectureConfig(family="moe", d_model=256, top_k=1)
    model = wb.zoo.build(config)

Every model takes token ids (or images) and returns logits; ``model.config`` is what it was made from. A training loop
adds ``model.auxiliary_loss()`` where there is such a method: ``getattr(model, "auxiliary_loss", None)``.
"""

from workbench.zoo.architecture_config import FAMILIES, INITIALIZATIONS, NORMS, ArchitectureConfig, defaults
from workbench.zoo.blocks import ZooModel
from workbench.zoo.constructors import (
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
from workbench.zoo.conversion import from_gpt2, from_llama
from workbench.zoo.decoders import KanTransformer, Transformer
from workbench.zoo.mixture import MoeTransformer
from workbench.zoo.state_space import Mamba
from workbench.zoo.vision import VisionTransformer

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


def __dir__() -> list[str]:
    return sorted(__all__)
