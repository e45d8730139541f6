"""Functions that build models with initial parameters from configurations and options."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor, nn

from workbench.errors import OptionError
from workbench.option_checks import unpacking
from workbench.zoo.architecture_config import ArchitectureConfig, ArchitectureOptions, Family, Norm, defaults
from workbench.zoo.blocks import (
    Block,
    KanLayer,
    ResidualBlock,
    ScalarBias,
    ScalarScale,
    ZooModel,
    deep_norm_constants,
    dense_mlp,
    final_norm,
)
from workbench.zoo.decoders import KanTransformer, Mamba, MambaMixer, MoeTransformer, Transformer
from workbench.zoo.module_of import HoldsModel, module_of


class VisionTransformer(ZooModel):
    """Vision transformer (ViT, Dosovitskiy et al. 2021, arXiv:2010.11929) that averages its tokens.

    There is no class token: the input of the classifier is the mean of all normalized tokens, so that every state of
    the stream belongs to a patch.
    """

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__(config)
        n_patches = (config.image_size // config.patch_size) ** 2
        self.patch_embedding = nn.Linear(config.n_channels * config.patch_size**2, config.d_model)
        has_table = config.position == "learned"
        self.position_embedding = nn.Embedding(n_patches, config.d_model) if has_table else None
        self.blocks = nn.ModuleList(Block(config, dense_mlp(config)) for _ in range(config.n_layers))
        self.final_norm = final_norm(config)
        self.head = nn.Linear(config.d_model, config.n_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the classes, shape (batch, class)."""
        x = self.patch_embedding(self._patches(images))
        if self.position_embedding is not None:
            x = x + self.position_embedding(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x).mean(1))

    def _patches(self, images: Tensor) -> Tensor:
        """Return the pixels of each patch, row by row, shape (batch, patch, channel * height * width)."""
        config = self.config
        expected = (config.n_channels, config.image_size, config.image_size)
        if tuple(images.shape[1:]) != expected:
            raise OptionError(f"Images are {tuple(images.shape)}, expected (batch, {', '.join(map(str, expected))}).")
        size = config.patch_size
        grid = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # batch, channel, row, height, column, width
        return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


Constructor = TypeVar("Constructor", bound=Callable[..., ZooModel])
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
    """Return whether an `ArchitectureConfig` fully determines a model, so that `save_checkpoint` can save it."""
    return isinstance(module_of(model), ZooModel)


#: Defaults of presets that differ from those of their family.
_GPT2: ArchitectureOptions = {"mlp": "gelu_tanh", "ties_embeddings": True, "scales_residual_init": True}
_LLAMA: ArchitectureOptions = {
    "norm": "rms_norm", "norm_eps": 1e-05, "position": "rotary", "mlp": "swiglu", "has_bias": False,
}  # fmt: skip


def _family(family: Family, preset: ArchitectureOptions | None = None) -> Callable[[Constructor], Constructor]:
    """Return a decorator that shows the options of a family and their defaults in the signature of its function."""
    types = {name: each.__forward_arg__ for name, each in ArchitectureOptions.__annotations__.items()}
    shown = {name: (types[name], value) for name, value in {**defaults(family), **(preset or {})}.items()}
    return unpacking(shown, first="norm")


@_family("transformer")
def transformer(*first: Norm, **options: Unpack[ArchitectureOptions]) -> Transformer:
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
    return _build("transformer", *first, **options)


@_family("moe")
def moe(*first: Norm, **options: Unpack[ArchitectureOptions]) -> MoeTransformer:
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
    return _build("moe", *first, **options)


@_family("mamba")
def mamba(**options: Unpack[ArchitectureOptions]) -> Mamba:
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
    return _build("mamba", **options)


@_family("kan")
def kan(*first: Norm, **options: Unpack[ArchitectureOptions]) -> KanTransformer:
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
    return _build("kan", *first, **options)


@_family("vit")
def vit(*first: Norm, **options: Unpack[ArchitectureOptions]) -> VisionTransformer:
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
    return _build("vit", *first, **options)


@_family("transformer", _GPT2)
def gpt2_style(**options: Unpack[ArchitectureOptions]) -> Transformer:
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
    return _build("transformer", **(_GPT2 | options))


@_family("transformer", _LLAMA)
def llama_style(**options: Unpack[ArchitectureOptions]) -> Transformer:
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
    return _build("transformer", **(_LLAMA | options))


@_family("moe", _LLAMA)
def mixtral_style(**options: Unpack[ArchitectureOptions]) -> MoeTransformer:
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
    return _build("moe", **(_LLAMA | options))


def _build(family: str, *norm: Norm, **options: Any) -> Any:
    options |= dict(zip(("norm",), norm, strict=False))
    return build(ArchitectureConfig.from_dict({**options, "family": family}))


def _on_meta(config: ArchitectureConfig) -> ZooModel:
    with torch.device("meta"):
        return _CLASSES[config.family](config)


@torch.no_grad()
def initialize(model: ZooModel) -> None:
    """Initialize the parameters of a model as the docstring of this module describes."""
    config = model.config
    generator = torch.Generator().manual_seed(config.seed)
    is_filled: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if id(weight) in is_filled:  # a head that is tied to the embedding
            continue
        if isinstance(module, nn.LayerNorm | nn.RMSNorm | ScalarBias | ScalarScale):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=config.init_std, generator=generator)
            is_filled.add(id(weight))
        elif isinstance(module, nn.Linear):
            _fill_matrix(module.weight, config, generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, KanLayer):
            _fill_matrix(module.base_weight, config, generator)
            nn.init.ones_(module.spline_weight)
            nn.init.normal_(module.coefficient, std=config.spline_std, generator=generator)
    branches = [branch for block in model.blocks if isinstance(block, ResidualBlock) for branch in block.branches()]
    for branch in branches:
        if isinstance(branch, MambaMixer):
            _fill_mixer(branch, generator)
        _rescale(branch.path(), len(branches), config)
    if config.initialization == "fixup":
        nn.init.zeros_(model.head.weight)


def _fill_matrix(weight: Tensor, config: ArchitectureConfig, generator: torch.Generator) -> None:
    if config.initialization == "xavier":
        nn.init.xavier_uniform_(weight, generator=generator)
    else:
        nn.init.normal_(weight, std=config.init_std, generator=generator)


def _fill_mixer(mixer: MambaMixer, generator: torch.Generator) -> None:
    """Initialize the parameters of a mixer that are not drawn from a normal distribution."""
    mixer.log_decay.copy_(torch.arange(1, mixer.state_size + 1).log().expand_as(mixer.log_decay))
    nn.init.ones_(mixer.skip)
    for layer in (mixer.convolution, mixer.time_step, mixer.out):
        bound = layer.weight[0].numel() ** -0.5
        nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
    if mixer.convolution.bias is not None:
        nn.init.zeros_(mixer.convolution.bias)
    step = torch.empty_like(mixer.time_step.bias).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
    mixer.time_step.bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


def _rescale(path: list[list[Tensor]], n_branches: int, config: ArchitectureConfig) -> None:
    """Apply the factors of DeepNorm, GPT-2 and Fixup to the matrices of a branch."""
    _, beta = deep_norm_constants(config)
    if not math.isclose(beta, 1.0):
        for weights in path:
            for weight in weights:
                weight.mul_(beta)
    if config.scales_residual_init:
        for weight in path[-1]:
            weight.div_(math.sqrt(n_branches))
    if config.initialization == "fixup":
        for weights in path[:-1]:
            for weight in weights:
                weight.mul_(n_branches ** (-1 / (2 * len(path) - 2)))
        for weight in path[-1]:
            weight.zero_()
