"""Reference architectures, small enough to read and to train on a laptop.

Every model takes token ids (or images) and returns logits; ``model.config`` is its configuration. A training loop adds
``model.auxiliary_loss()`` where there is such a method: ``getattr(model, "auxiliary_loss", None)``.

Example:
    >>> import workbench as wb
    >>> model = wb.zoo.transformer("rms_norm", d_model=32, n_layers=2)
    >>> config = wb.zoo.ArchitectureConfig(family="moe", d_model=32, n_layers=2, top_k=1)
    >>> [type(each).__name__ for each in (model, wb.zoo.build(config))]
    ['Transformer', 'MoeTransformer']

See Also:
    `workbench.train`: Trains a model.
    `workbench.save_checkpoint`: Saves a model of the zoo.
    `workbench.design`: Describes an architecture that can be built at several sizes.
"""

from workbench.option_checks import publish
from workbench.zoo.architecture_config import FAMILIES, INITIALIZATIONS, NORMS, ArchitectureConfig, defaults
from workbench.zoo.blocks import ZooModel
from workbench.zoo.constructors import (
    build,
    count_parameters,
    gpt2_style,
    kan,
    llama_style,
    mamba,
    mixtral_style,
    moe,
    transformer,
    vit,
)

__all__ = [
    "FAMILIES", "INITIALIZATIONS", "NORMS", "ArchitectureConfig", "ZooModel", "build", "count_parameters", "defaults",
    "gpt2_style", "kan", "llama_style", "mamba", "mixtral_style", "moe", "transformer", "vit",
]  # fmt: skip

__dir__ = publish(__name__)
