"""Configuration of all architectures of the zoo; its values are checked before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, Optional, TypedDict, TypeVar, get_args

from workbench.errors import OptionError, require_known, require_listed
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Family = Literal["transformer", "moe", "mamba", "kan", "vit"]
Norm = Literal["pre_ln", "post_ln", "rms_norm", "deep_norm", "deep_norm_post", "sub_ln", "none"]
Position = Literal["learned", "rotary", "none"]
MlpKind = Literal["gelu", "gelu_tanh", "swiglu"]
Initialization = Literal["normal", "xavier", "fixup", "rezero"]
FAMILIES: tuple[str, ...] = get_args(Family)
NORMS: tuple[str, ...] = get_args(Norm)
INITIALIZATIONS: tuple[str, ...] = get_args(Initialization)

_STREAM = {"d_model": 128, "n_layers": 4, "norm": "pre_ln", "norm_eps": None}
_WEIGHTS = {"init_std": 0.02, "scales_residual_init": False, "seed": 0}
_TEXT = {"vocab_size": 256, "max_length": 64, "ties_embeddings": False}
_IMAGES = {"image_size": 32, "patch_size": 4, "n_channels": 3, "n_classes": 10}
_BLOCKS = {
    "n_heads": 4, "n_kv_heads": None, "position": "learned", "qk_norm": False, "is_parallel": False, "has_bias": True,
}  # fmt: skip
_WIDTH = {"mlp_ratio": None, "mlp_width": None}  # the default ratio depends on the kind of MLP

#: Family -> its options and their defaults. An option that is missing does not apply to the family.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "transformer": {
        **_STREAM, **_TEXT, **_BLOCKS, "rotary_base": None, "window": None, "mlp": "gelu", **_WIDTH,
        "initialization": "normal", **_WEIGHTS,
    },
    "moe": {
        **_STREAM, **_TEXT, **_BLOCKS, "rotary_base": None, "window": None, "mlp": "gelu", **_WIDTH,
        "n_experts": 8, "top_k": 2, "normalizes_top_k": None, "balance_coefficient": 0.01, "z_coefficient": 0.001,
        "initialization": "normal", **_WEIGHTS,
    },
    "mamba": {
        **_STREAM, "norm": "rms_norm", **_TEXT, "has_bias": False, "state_size": 16, "conv_width": 4, "expand": 2,
        **_WEIGHTS,
    },
    "kan": {
        **_STREAM, **_TEXT, **_BLOCKS, "rotary_base": None, "window": None, **_WIDTH,
        "n_grid": 4, "spline_order": 3, "spline_range": 3.0, "spline_std": 0.1, "initialization": "normal", **_WEIGHTS,
    },
    "vit": {
        **_STREAM, **_IMAGES, **_BLOCKS, "mlp": "gelu", **_WIDTH, "initialization": "normal", **_WEIGHTS,
    },
}  # fmt: skip


if TYPE_CHECKING:
    Value = TypeVar("Value")

    class Option(Generic[Value]):
        """Type of an option for type checkers: None may be assigned, but the value read is never None."""

        def __get__(self, instance: object, owner: type | None = None) -> Value: ...
        def __set__(self, instance: object, value: Value | None) -> None: ...
else:
    Option = Optional
#: Value that selects the default of the family.
DEFAULT: Any = None


class ArchitectureOptions(TypedDict, total=False):
    """Options of `ArchitectureConfig` but the family, as arguments of the functions of the families."""

    d_model: int
    n_layers: int
    norm: Norm
    norm_eps: float | None
    vocab_size: int
    max_length: int
    ties_embeddings: bool
    n_heads: int
    n_kv_heads: int | None
    position: Position
    rotary_base: float | None
    qk_norm: bool
    window: int | None
    is_parallel: bool
    has_bias: bool
    mlp: MlpKind
    mlp_ratio: float | None
    mlp_width: int | None
    n_experts: int
    top_k: int
    normalizes_top_k: bool
    balance_coefficient: float
    z_coefficient: float
    state_size: int
    conv_width: int
    expand: int
    n_grid: int
    spline_order: int
    spline_range: float
    spline_std: float
    image_size: int
    patch_size: int
    n_channels: int
    n_classes: int
    initialization: Initialization
    init_std: float
    scales_residual_init: bool
    seed: int


@checked
@dataclass(frozen=True, kw_only=True)
class ArchitectureConfig:
    """All options of an architecture and of its initial parameters.

    An option that is None is set to the default of the family (`defaults` lists them). An option that does not apply to
    the family must remain None.

    Attributes:
        family: "transformer" (decoder-only), "moe" and "kan" (the same with a mixture of experts, or with splines, in
            place of the MLP), "mamba" or "vit".
        d_model: Width of the residual stream.
        n_layers: Number of residual blocks.
        norm: Place of the normalization. ``deep_norm`` is the form that the figures of RKSP Table 1 imply,
            alpha x + f(LN x); ``deep_norm_post`` is that of DeepNet, LN(alpha x + f(x)) with branch weights scaled by
            beta (Wang et al. 2022, arXiv:2203.00555); ``sub_ln`` has a second norm inside each branch
            (Wang et al. 2022, arXiv:2210.06423). The family mamba is always pre-normalized with RMSNorm.
        norm_eps: Constant added to the variance; by default 1e-5 in mamba, elsewhere that of torch: 1e-5 for LayerNorm,
            the epsilon of the dtype for RMSNorm.
        vocab_size: Number of tokens in the vocabulary.
        max_length: Longest sequence, in tokens; longer ones raise an exception, with any kind of position.
        ties_embeddings: Whether the output head is the token embedding.
        n_heads: Number of attention heads; divides ``d_model``.
        n_kv_heads: Number of key-value heads, each shared by ``n_heads / n_kv_heads`` query heads (grouped-query
            attention; 1 is multi-query attention); None is ``n_heads``.
        position: "learned" (a vector per position, added once), "rotary" (rotated queries and keys, in halves as in
            Llama) or "none". "rotary" is not available for images.
        rotary_base: Base of the rotary frequencies, by default 10,000; None without rotary positions.
        qk_norm: Whether every query and key is normalized by RMSNorm, per head, before the rotation (as in Qwen3).
        window: Number of tokens that a position attends to, including itself (sliding-window attention); None is all
            tokens up to the position.
        is_parallel: Whether attention and MLP act in parallel on one normalized input, x + a(n(x)) + m(n(x)) (as in
            GPT-J).
        has_bias: Whether linear maps in the blocks have a bias; norms keep theirs.
        mlp: "gelu", "gelu_tanh" (its approximation in GPT-2) or "swiglu" (silu(gate) * up, as in Llama).
        mlp_ratio: Hidden width of the MLP (of each expert, of the KAN) over ``d_model``, by default 4 for GELU, 8/3
            for SwiGLU (about as many parameters) and 1 for a KAN. A width that is not an integer is rounded up to a
            multiple of 8.
        mlp_width: Hidden width, instead of ``mlp_ratio``.
        n_experts: Number of experts in each block.
        top_k: Number of experts for each token.
        normalizes_top_k: Whether the weights of a token's experts are divided by their sum; by default True if there
            are several.
        balance_coefficient: Weight of the load-balancing loss in ``auxiliary_loss()``.
        z_coefficient: Weight of the router z-loss in ``auxiliary_loss()``.
        state_size: Number of states per channel of the selective scan.
        conv_width: Width of the causal convolution, in tokens.
        expand: Inner width over ``d_model``.
        n_grid: Number of grid intervals of each spline, G in the KAN paper; a spline has ``n_grid + spline_order``
            basis functions. B of RKSP is taken to be this number (the paper does not state which of the two it counts).
        spline_order: Degree of the splines; 3 is cubic.
        spline_range: Half the range of the grid, -spline_range .. spline_range.
        spline_std: Standard deviation of the initial spline coefficients; 0.1 in the KAN paper.
        image_size: Height and width of the images, in pixels.
        patch_size: Height and width of a patch, in pixels; divides ``image_size``.
        n_channels: Number of channels of the images.
        n_classes: Number of outputs of the image classifier.
        initialization: "normal" (every matrix N(0, init_std^2)), "xavier" (uniform matrices, Glorot and Bengio 2010),
            or "fixup" and "rezero", which begin as the identity and need ``norm="none"``: see
            `workbench.zoo.constructors`.
        init_std: Standard deviation of weight matrices and embeddings.
        scales_residual_init: Whether the last matrix of each branch is divided by the square root of the number of
            branches, as in GPT-2.
        seed: Seed of the initial parameters.

    Raises:
        OptionError: If the configuration is impossible, or an option does not apply to the family.

    Example:
        >>> import workbench as wb
        >>> config = wb.zoo.ArchitectureConfig(family="moe", d_model=32, n_layers=2, n_experts=4)
        >>> config.title, config.top_k, config.head_dim
        ('pre_ln moe', 2, 8)

    See Also:
        `workbench.zoo.build`: Builds the model.
        `workbench.zoo.defaults`: Returns the options of a family.
    """

    family: Family = "transformer"
    d_model: Option[PositiveInt] = DEFAULT
    n_layers: Option[PositiveInt] = DEFAULT
    norm: Option[Norm] = DEFAULT
    norm_eps: PositiveFloat | None = None
    vocab_size: Option[PositiveInt] = DEFAULT
    max_length: Option[PositiveInt] = DEFAULT
    ties_embeddings: Option[bool] = DEFAULT
    n_heads: Option[PositiveInt] = DEFAULT
    n_kv_heads: PositiveInt | None = None
    position: Option[Position] = DEFAULT
    rotary_base: PositiveFloat | None = None
    qk_norm: Option[bool] = DEFAULT
    window: PositiveInt | None = None
    is_parallel: Option[bool] = DEFAULT
    has_bias: Option[bool] = DEFAULT
    mlp: Option[MlpKind] = DEFAULT
    mlp_ratio: PositiveFloat | None = None
    mlp_width: PositiveInt | None = None
    n_experts: Option[PositiveInt] = DEFAULT
    top_k: Option[PositiveInt] = DEFAULT
    normalizes_top_k: Option[bool] = DEFAULT
    balance_coefficient: Option[NonNegativeFloat] = DEFAULT
    z_coefficient: Option[NonNegativeFloat] = DEFAULT
    state_size: Option[PositiveInt] = DEFAULT
    conv_width: Option[PositiveInt] = DEFAULT
    expand: Option[PositiveInt] = DEFAULT
    n_grid: Option[PositiveInt] = DEFAULT
    spline_order: Option[PositiveInt] = DEFAULT
    spline_range: Option[PositiveFloat] = DEFAULT
    spline_std: Option[NonNegativeFloat] = DEFAULT
    image_size: Option[PositiveInt] = DEFAULT
    patch_size: Option[PositiveInt] = DEFAULT
    n_channels: Option[PositiveInt] = DEFAULT
    n_classes: Option[PositiveInt] = DEFAULT
    initialization: Option[Initialization] = DEFAULT
    init_std: Option[PositiveFloat] = DEFAULT
    scales_residual_init: Option[bool] = DEFAULT
    seed: Option[NonNegativeInt] = DEFAULT

    def __post_init__(self) -> None:
        options = defaults(self.family)
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "family":
                continue
            if name not in options and value is not None:
                raise OptionError(f"{name} is not an option of the family '{self.family}'; leave it out.")
            if value is None:
                value = options.get(name)
            object.__setattr__(self, name, value)
        self._fill_in()
        self._check_combination()

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> ArchitectureConfig:
        """Create a configuration from all or some of the options that `as_dict` returns.

        Raises:
            OptionError: If the configuration is impossible, or an option is unknown.
        """
        known = [field.name for field in fields(cls)]
        require_known("An architecture", options, known)
        return cls(**options)

    def as_dict(self) -> dict[str, Any]:
        """Return the family and all its options as numbers, text and None, which a JSON file can hold."""
        return {"family": self.family, **{name: getattr(self, name) for name in defaults(self.family)}}

    @property
    def title(self) -> str:
        """Default name in figures and tables, such as "pre_ln transformer"."""
        if self.family == "mamba":  # always has the same norm
            return self.family
        return f"{self.family} without norm" if self.norm == "none" else f"{self.norm} {self.family}"

    @property
    def hidden_width(self) -> int:
        """Hidden width of the MLP, of each expert, or of the KAN."""
        if self.mlp_width is not None:
            return self.mlp_width
        if self.mlp_ratio is None:
            raise OptionError(f"The family '{self.family}' has no MLP and therefore no hidden width.")
        width = self.mlp_ratio * self.d_model
        return int(width) if float(width).is_integer() else 8 * math.ceil(width / 8)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def n_key_value_heads(self) -> int:
        """Number of key-value heads, also if ``n_kv_heads`` is None."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    def _fill_in(self) -> None:
        """Set the defaults that depend on other options."""
        if self.mlp_ratio is not None and self.mlp_width is not None:
            raise OptionError("Both mlp_ratio and mlp_width are given; pass one of them.")
        if "mlp_ratio" in defaults(self.family) and self.mlp_ratio is None and self.mlp_width is None:
            ratio = 1 if self.family == "kan" else 8 / 3 if self.mlp == "swiglu" else 4
            object.__setattr__(self, "mlp_ratio", ratio)
        if self.position == "rotary" and self.rotary_base is None:
            object.__setattr__(self, "rotary_base", 10_000.0)
        if self.family == "mamba" and self.norm_eps is None:
            object.__setattr__(self, "norm_eps", 1e-5)
        if self.family == "moe" and self.normalizes_top_k is None:
            object.__setattr__(self, "normalizes_top_k", self.top_k > 1)

    def _check_combination(self) -> None:
        if self.family == "mamba" and self.norm != "rms_norm":
            raise OptionError(f"norm is '{self.norm}', but the family '{self.family}' supports only 'rms_norm'.")
        if self.n_heads is not None:
            self._check_attention()
        if self.top_k is not None and self.top_k > self.n_experts:
            raise OptionError.of("top_k", self.top_k, f"at most n_experts ({self.n_experts})")
        if self.patch_size is not None and self.image_size % self.patch_size:
            raise OptionError.of("patch_size", self.patch_size, f"a divisor of image_size ({self.image_size})")
        if self.initialization in ("fixup", "rezero"):
            self._check_identity_initialization()

    def _check_attention(self) -> None:
        if self.d_model % self.n_heads:
            raise OptionError.of("n_heads", self.n_heads, f"a divisor of d_model ({self.d_model})")
        if self.n_heads % self.n_key_value_heads:
            raise OptionError.of("n_kv_heads", self.n_kv_heads, f"a divisor of n_heads ({self.n_heads})")
        if self.position != "rotary" and self.rotary_base is not None:
            raise OptionError(f"rotary_base is for position='rotary', but position is '{self.position}'; leave it out.")
        if self.position == "rotary" and self.family == "vit":
            raise OptionError("position is 'rotary', but the family 'vit' supports only 'learned' and 'none'.")
        if self.position == "rotary" and self.head_dim % 2:
            raise OptionError(f"Rotary positions need heads of even width, not d_model / n_heads = {self.head_dim}.")

    def _check_identity_initialization(self) -> None:
        if self.norm != "none":
            raise OptionError(f"initialization='{self.initialization}' needs norm='none', but norm is '{self.norm}'.")
        if self.initialization == "rezero":
            return
        if self.family in ("moe", "kan") or self.mlp == "swiglu":
            kind = f"the family '{self.family}'" if self.family in ("moe", "kan") else "mlp 'swiglu'"
            raise OptionError(f"Fixup is not defined for {kind}; choose initialization='rezero'.")
        if self.ties_embeddings:
            raise OptionError("Fixup begins with a head of zeros, which is not tied; pass ties_embeddings=False.")
        if self.scales_residual_init:
            raise OptionError("Fixup begins with branches of zeros without a scale; pass scales_residual_init=False.")


def defaults(family: Family) -> dict[str, Any]:
    """Return the options of a family and their defaults.

    A default is None if it depends on other options, or if the option is off.

    Raises:
        OptionError: If there is no such family.

    Example:
        >>> import workbench as wb
        >>> wb.zoo.defaults("moe")["n_experts"], wb.zoo.defaults("kan")["mlp_ratio"]
        (8, None)

    See Also:
        `workbench.zoo.ArchitectureConfig`: Explains the options.
    """
    require_listed("family", [family], FAMILIES)
    return dict(_DEFAULTS[family])
