"""Functions that build models with initial parameters from configurations and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.zoo.architecture_config import ArchitectureConfig, Initialization, MlpKind, Norm, Position
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


def build(config: ArchitectureConfig) -> ZooModel:
    """Build the model of a configuration, with initial parameters.

    Args:
        config: Configuration of the model.

    Returns:
        The model in training mode, on the CPU, in float32. The global random state is unchanged.

    Example:
        >>> import workbench as wb
        >>> config = wb.zoo.ArchitectureConfig(d_model=16, n_layers=2, norm="sub_ln")
        >>> model = wb.zoo.build(config)
        >>> model.config == config
        True

    See Also:
        `workbench.zoo.ArchitectureConfig`: Explains the options.
        `workbench.zoo.count_parameters`: Counts the parameters without building the model.
    """
    model = _on_meta(config)
    model.to_empty(device="cpu")
    model.tie()  # `to_empty` has separated tied weights
    initialize(model)
    return model


def count_parameters(config: ArchitectureConfig) -> int:
    """Return the number of parameters of a configuration, tied ones counted once; nothing is allocated.

    Example:
        >>> import workbench as wb
        >>> wb.zoo.count_parameters(wb.zoo.ArchitectureConfig(d_model=16, n_layers=2))
        15808

    See Also:
        `workbench.zoo.build`: Builds the model.
    """
    return sum(parameter.numel() for parameter in _on_meta(config).parameters())


def is_zoo_model(model: HoldsModel | nn.Module) -> bool:
    """Return whether an `ArchitectureConfig` fully determines a model, so that `save_checkpoint` can save it.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.zoo.is_zoo_model(wb.zoo.mamba(d_model=16, n_layers=1)), wb.zoo.is_zoo_model(torch.nn.Linear(4, 4))
        (True, False)

    See Also:
        `workbench.save_checkpoint`: Saves models of the zoo.
    """
    return isinstance(module_of(model), ZooModel)


def transformer(
    norm: Norm = "pre_ln",
    *,
    d_model: int = 128,
    n_layers: int = 4,
    norm_eps: float | None = None,
    vocab_size: int = 256,
    max_length: int = 64,
    ties_embeddings: bool = False,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    position: Position = "learned",
    qk_norm: bool = False,
    is_parallel: bool = False,
    has_bias: bool = True,
    rotary_base: float | None = None,
    window: int | None = None,
    mlp: MlpKind = "gelu",
    mlp_ratio: float | None = None,
    mlp_width: int | None = None,
    initialization: Initialization = "normal",
    init_std: float = 0.02,
    scales_residual_init: bool = False,
    seed: int = 0,
) -> Transformer:
    """Build a decoder-only transformer.

    `ArchitectureConfig` explains the options. None turns an option off, or derives it from the others.

    Returns:
        The model, as from `build`.

    Raises:
        OptionError: If the configuration is impossible; in this case nothing is allocated.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.transformer("post_ln", d_model=16, n_layers=2, vocab_size=32)
        >>> tuple(model(torch.zeros(1, 8, dtype=torch.long)).shape)
        (1, 8, 32)

    See Also:
        `workbench.zoo.ArchitectureConfig`: Explains the options.
        `workbench.train`: Trains the model.
    """
    return _build("transformer", locals())


def moe(
    norm: Norm = "pre_ln",
    *,
    d_model: int = 128,
    n_layers: int = 4,
    norm_eps: float | None = None,
    vocab_size: int = 256,
    max_length: int = 64,
    ties_embeddings: bool = False,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    position: Position = "learned",
    qk_norm: bool = False,
    is_parallel: bool = False,
    has_bias: bool = True,
    rotary_base: float | None = None,
    window: int | None = None,
    mlp: MlpKind = "gelu",
    mlp_ratio: float | None = None,
    mlp_width: int | None = None,
    n_experts: int = 8,
    top_k: int = 2,
    normalizes_top_k: bool | None = None,
    balance_coefficient: float = 0.01,
    z_coefficient: float = 0.001,
    initialization: Initialization = "normal",
    init_std: float = 0.02,
    scales_residual_init: bool = False,
    seed: int = 0,
) -> MoeTransformer:
    """Build a mixture of experts; `ArchitectureConfig` explains the options.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.moe(d_model=16, n_layers=2, n_experts=4, top_k=1)
        >>> logits = model(torch.zeros(1, 8, dtype=torch.long))
        >>> model.auxiliary_loss().ndim
        0

    See Also:
        `workbench.zoo.mixtral_style`: Builds a model like Mixtral.
    """
    return _build("moe", locals())


def mamba(
    *,
    d_model: int = 128,
    n_layers: int = 4,
    norm: Norm = "rms_norm",
    norm_eps: float | None = None,
    vocab_size: int = 256,
    max_length: int = 64,
    ties_embeddings: bool = False,
    has_bias: bool = False,
    state_size: int = 16,
    conv_width: int = 4,
    expand: int = 2,
    init_std: float = 0.02,
    scales_residual_init: bool = False,
    seed: int = 0,
) -> Mamba:
    """Build a stack of selective state-space blocks; `ArchitectureConfig` explains the options.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.mamba(d_model=16, n_layers=2, state_size=4)
        >>> tuple(model(torch.zeros(1, 8, dtype=torch.long)).shape)
        (1, 8, 256)

    See Also:
        `workbench.zoo.ArchitectureConfig`: Explains the options.
    """
    return _build("mamba", locals())


def kan(
    norm: Norm = "pre_ln",
    *,
    d_model: int = 128,
    n_layers: int = 4,
    norm_eps: float | None = None,
    vocab_size: int = 256,
    max_length: int = 64,
    ties_embeddings: bool = False,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    position: Position = "learned",
    qk_norm: bool = False,
    is_parallel: bool = False,
    has_bias: bool = True,
    rotary_base: float | None = None,
    window: int | None = None,
    mlp_ratio: float | None = None,
    mlp_width: int | None = None,
    n_grid: int = 4,
    spline_order: int = 3,
    spline_range: float = 3.0,
    spline_std: float = 0.1,
    initialization: Initialization = "normal",
    init_std: float = 0.02,
    scales_residual_init: bool = False,
    seed: int = 0,
) -> KanTransformer:
    """Build a transformer whose MLPs are splines; `ArchitectureConfig` explains the options.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.kan(d_model=16, n_layers=1, n_grid=8)
        >>> tuple(model(torch.zeros(1, 8, dtype=torch.long)).shape)
        (1, 8, 256)

    See Also:
        `workbench.zoo.ArchitectureConfig`: Explains the options.
    """
    return _build("kan", locals())


def vit(
    norm: Norm = "pre_ln",
    *,
    d_model: int = 128,
    n_layers: int = 4,
    norm_eps: float | None = None,
    image_size: int = 32,
    patch_size: int = 4,
    n_channels: int = 3,
    n_classes: int = 10,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    position: Position = "learned",
    qk_norm: bool = False,
    is_parallel: bool = False,
    has_bias: bool = True,
    mlp: MlpKind = "gelu",
    mlp_ratio: float | None = None,
    mlp_width: int | None = None,
    initialization: Initialization = "normal",
    init_std: float = 0.02,
    scales_residual_init: bool = False,
    seed: int = 0,
) -> VisionTransformer:
    """Build a vision transformer; `ArchitectureConfig` explains the options.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.vit(d_model=16, n_layers=2, image_size=8)
        >>> tuple(model(torch.zeros(2, 3, 8, 8)).shape)
        (2, 10)

    See Also:
        `workbench.zoo.ArchitectureConfig`: Explains the options.
    """
    return _build("vit", locals())


def gpt2_style(
    *,
    d_model: int = 128,
    n_layers: int = 4,
    norm: Norm = "pre_ln",
    norm_eps: float | None = None,
    vocab_size: int = 256,
    max_length: int = 64,
    ties_embeddings: bool = True,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    position: Position = "learned",
    qk_norm: bool = False,
    is_parallel: bool = False,
    has_bias: bool = True,
    rotary_base: float | None = None,
    window: int | None = None,
    mlp: MlpKind = "gelu_tanh",
    mlp_ratio: float | None = None,
    mlp_width: int | None = None,
    initialization: Initialization = "normal",
    init_std: float = 0.02,
    scales_residual_init: bool = True,
    seed: int = 0,
) -> Transformer:
    """Build a transformer like GPT-2: Pre-LN, learned positions, tanh-GELU, tied embeddings, scaled initial residuals.

    The dropout of GPT-2 is omitted. `ArchitectureConfig` explains the options.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.gpt2_style(d_model=16, n_layers=2)
        >>> model.config.mlp, model.config.scales_residual_init
        ('gelu_tanh', True)

    See Also:
        `workbench.zoo.ArchitectureConfig`: Explains the options.
    """
    return _build("transformer", locals())


def llama_style(
    *,
    d_model: int = 128,
    n_layers: int = 4,
    norm: Norm = "rms_norm",
    norm_eps: float = 1e-05,
    vocab_size: int = 256,
    max_length: int = 64,
    ties_embeddings: bool = False,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    position: Position = "rotary",
    qk_norm: bool = False,
    is_parallel: bool = False,
    has_bias: bool = False,
    rotary_base: float | None = None,
    window: int | None = None,
    mlp: MlpKind = "swiglu",
    mlp_ratio: float | None = None,
    mlp_width: int | None = None,
    initialization: Initialization = "normal",
    init_std: float = 0.02,
    scales_residual_init: bool = False,
    seed: int = 0,
) -> Transformer:
    """Build a transformer like Llama: RMSNorm, rotary positions, SwiGLU, no biases.

    ``n_kv_heads`` selects grouped-query attention, which larger versions of Llama have. `ArchitectureConfig` explains
    the options.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.llama_style(d_model=16, n_layers=2, n_kv_heads=2)
        >>> model.config.norm, model.config.n_key_value_heads
        ('rms_norm', 2)

    See Also:
        `workbench.zoo.ArchitectureConfig`: Explains the options.
    """
    return _build("transformer", locals())


def mixtral_style(
    *,
    d_model: int = 128,
    n_layers: int = 4,
    norm: Norm = "rms_norm",
    norm_eps: float = 1e-05,
    vocab_size: int = 256,
    max_length: int = 64,
    ties_embeddings: bool = False,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    position: Position = "rotary",
    qk_norm: bool = False,
    is_parallel: bool = False,
    has_bias: bool = False,
    rotary_base: float | None = None,
    window: int | None = None,
    mlp: MlpKind = "swiglu",
    mlp_ratio: float | None = None,
    mlp_width: int | None = None,
    n_experts: int = 8,
    top_k: int = 2,
    normalizes_top_k: bool | None = None,
    balance_coefficient: float = 0.01,
    z_coefficient: float = 0.001,
    initialization: Initialization = "normal",
    init_std: float = 0.02,
    scales_residual_init: bool = False,
    seed: int = 0,
) -> MoeTransformer:
    """Build a mixture of experts like Mixtral: `llama_style` with two of eight experts per token.

    `ArchitectureConfig` explains the options.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.mixtral_style(d_model=16, n_layers=2, n_experts=4)
        >>> model.config.n_experts, model.config.top_k
        (4, 2)

    See Also:
        `workbench.zoo.ArchitectureConfig`: Explains the options.
    """
    return _build("moe", locals())


def _build(family: str, options: Mapping[str, Any]) -> Any:
    return build(ArchitectureConfig.from_dict({**options, "family": family}))


def _on_meta(config: ArchitectureConfig) -> ZooModel:
    with torch.device("meta"):
        return _CLASSES[config.family](config)
