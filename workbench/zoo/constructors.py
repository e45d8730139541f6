"""From a configuration to a model with fresh weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.zoo.architecture_config import ArchitectureConfig, Norm
from workbench.zoo.blocks import ZooModel
from workbench.zoo.decoders import KanTransformer, Transformer
from workbench.zoo.initialization import initialize
from workbench.zoo.mixture import MoeTransformer
from workbench.zoo.module_of import module_of
from workbench.zoo.state_space import Mamba
from workbench.zoo.vision import VisionTransformer

if TYPE_CHECKING:
    from workbench.zoo.module_of import HoldsModel

_CLASSES: dict[str, type[ZooModel]] = {
    "transformer": Transformer,
    "moe": MoeTransformer,
    "mamba": Mamba,
    "kan": KanTransformer,
    "vit": VisionTransformer,
}
_GPT2 = {"norm": "pre_ln", "mlp": "gelu_tanh", "ties_embeddings": True, "scales_residual_init": True}
_LLAMA = {"norm": "rms_norm", "norm_eps": 1e-5, "position": "rotary", "mlp": "swiglu", "has_bias": False}


def build(config: ArchitectureConfig) -> ZooModel:
    """The model of a configuration, with fresh weights.

    Args:
        config: What to build.

    Returns:
        The model in training mode, on the CPU, float32; the global random state is untouched.
    """
    model = _on_meta(config)
    model.to_empty(device="cpu")
    model.tie()  # which the move from meta has undone
    initialize(model)
    return model


def count_parameters(config: ArchitectureConfig) -> int:
    """Weights that a model of this configuration has, tied ones counted once; nothing is allocated."""
    return sum(parameter.numel() for parameter in _on_meta(config).parameters())


def is_zoo_model(model: HoldsModel | nn.Module) -> bool:
    """Whether a model is made from an `ArchitectureConfig` alone, and can be saved as such."""
    return isinstance(module_of(model), ZooModel)


def transformer(norm: Norm = "pre_ln", **options: Any) -> Transformer:
    """A decoder-only transformer.

    Args:
        norm: Where the normalization sits.
        **options: Any option of `ArchitectureConfig` for this family.

    Returns:
        As from `build`.

    Raises:
        ThresholdError: If the configuration is impossible; nothing is allocated then.
    """
    return _build("transformer", {"norm": norm, **options})


def moe(norm: Norm = "pre_ln", **options: Any) -> MoeTransformer:
    """A mixture of experts; see `MoeTransformer` and, for arguments, `transformer`."""
    return _build("moe", {"norm": norm, **options})


def mamba(**options: Any) -> Mamba:
    """A stack of selective state spaces; see `Mamba` and, for arguments, `transformer`."""
    return _build("mamba", options)


def kan(norm: Norm = "pre_ln", **options: Any) -> KanTransformer:
    """A transformer with splines for its MLP; see `KanTransformer` and, for arguments, `transformer`."""
    return _build("kan", {"norm": norm, **options})


def vit(norm: Norm = "pre_ln", **options: Any) -> VisionTransformer:
    """A vision transformer; see `VisionTransformer` and, for arguments, `transformer`."""
    return _build("vit", {"norm": norm, **options})


def gpt2_style(**options: Any) -> Transformer:
    """A transformer like GPT-2: Pre-LN, learned positions, tanh-GELU, tied embeddings, scaled initial residuals.

    Dropout, which GPT-2 has, is left out. See `transformer` for arguments.
    """
    return _build("transformer", {**_GPT2, **options})


def llama_style(**options: Any) -> Transformer:
    """A transformer like Llama: RMSNorm, rotary positions, SwiGLU, no biases; see `transformer` for arguments.

    ``n_kv_heads`` gives the grouped queries of its larger versions.
    """
    return _build("transformer", {**_LLAMA, **options})


def mixtral_style(**options: Any) -> MoeTransformer:
    """A mixture of experts like Mixtral: `llama_style` with two of eight experts; see `transformer` for arguments."""
    return _build("moe", {**_LLAMA, **options})


def _build(family: str, options: dict[str, Any]) -> Any:
    return build(ArchitectureConfig.from_dict({**options, "family": family}))


def _on_meta(config: ArchitectureConfig) -> ZooModel:
    with torch.device("meta"):
        return _CLASSES[config.family](config)
