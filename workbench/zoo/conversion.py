"""Conversion of GPT-2 and Llama models of the transformers library to transformers of the zoo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import CheckpointError
from workbench.zoo.architecture_config import MlpKind
from workbench.zoo.constructors import transformer
from workbench.zoo.module_of import module_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from workbench.zoo.decoders import Transformer
    from workbench.zoo.module_of import HoldsModel


def from_gpt2(model: HoldsModel | nn.Module) -> Transformer:
    """Convert a GPT-2 model to the transformer of the zoo that computes the same function.

    Dropout is omitted, so the two agree in eval mode.

    Args:
        model: A ``GPT2LMHeadModel``; it is not changed.

    Returns:
        A copy in eval mode, on the same device and in the same dtype.

    Raises:
        CheckpointError: If it is another model, or has an option that the transformer of the zoo does not have.

    Example:
        >>> import workbench as wb
        >>> import transformers
        >>> size = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8}
        >>> model = wb.zoo.from_gpt2(transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)))
        >>> model.config.norm, model.config.mlp, model.config.ties_embeddings
        ('pre_ln', 'gelu_tanh', True)

    See Also:
        `workbench.zoo.from_llama`: Converts a Llama model.
        `workbench.zoo.gpt2_style`: Builds a model like GPT-2 with initial parameters.
    """
    from transformers import GPT2LMHeadModel

    model = module_of(model)
    _check_class(model, GPT2LMHeadModel)
    theirs: Any = model.config
    _check_options(theirs, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    ours = transformer(
        d_model=theirs.n_embd, n_layers=theirs.n_layer, n_heads=theirs.n_head, vocab_size=theirs.vocab_size,
        max_length=theirs.n_positions, norm="pre_ln", norm_eps=theirs.layer_norm_epsilon,
        mlp=_mlp_kind(theirs.activation_function), mlp_width=theirs.n_inner or 4 * theirs.n_embd,
        ties_embeddings=theirs.tie_word_embeddings, init_std=theirs.initializer_range, scales_residual_init=True,
    )  # fmt: skip
    state = model.state_dict()
    filled = {
        "token_embedding.weight": state["transformer.wte.weight"],
        "position_embedding.weight": state["transformer.wpe.weight"],
        "final_norm.weight": state["transformer.ln_f.weight"],
        "final_norm.bias": state["transformer.ln_f.bias"],
        "head.weight": state["lm_head.weight"],
    }
    for i in range(ours.config.n_layers):
        there, here = f"transformer.h.{i}", f"blocks.{i}"
        # Conv1D stores its weights as (in, out), and those of query, key and value side by side.
        weights = state[f"{there}.attn.c_attn.weight"].T.chunk(3)
        biases = state[f"{there}.attn.c_attn.bias"].chunk(3)
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            filled[f"{here}.attention.{name}.weight"], filled[f"{here}.attention.{name}.bias"] = weight, bias
        pairs = {"attn.c_proj": "attention.out", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
        for name, our_name in pairs.items():
            filled[f"{here}.{our_name}.weight"] = state[f"{there}.{name}.weight"].T
            filled[f"{here}.{our_name}.bias"] = state[f"{there}.{name}.bias"]
        for name, our_name in {"ln_1": "attention_norm", "ln_2": "mlp_norm"}.items():
            filled |= {f"{here}.{our_name}.{kind}": state[f"{there}.{name}.{kind}"] for kind in ("weight", "bias")}
    return _filled(ours, filled, model)


def from_llama(model: HoldsModel | nn.Module) -> Transformer:
    """Convert a Llama model to the transformer of the zoo that computes the same function.

    Args:
        model: A ``LlamaForCausalLM`` with unscaled rotary positions; it is not changed.

    Returns:
        A copy in eval mode, on the same device and in the same dtype.

    Raises:
        CheckpointError: If it is another model, or has an option that the transformer of the zoo does not have.

    Example:
        >>> import workbench as wb
        >>> import transformers
        >>> size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> config = transformers.LlamaConfig(**size, vocab_size=32)
        >>> model = wb.zoo.from_llama(transformers.LlamaForCausalLM(config))
        >>> model.config.norm, model.config.mlp, model.config.position
        ('rms_norm', 'swiglu', 'rotary')

    See Also:
        `workbench.zoo.from_gpt2`: Converts a GPT-2 model.
        `workbench.zoo.llama_style`: Builds a model like Llama with initial parameters.
    """
    from transformers import LlamaForCausalLM

    model = module_of(model)
    _check_class(model, LlamaForCausalLM)
    theirs: Any = model.config
    head_dim = theirs.hidden_size // theirs.num_attention_heads
    _check_options(theirs, hidden_act="silu", head_dim=head_dim, mlp_bias=theirs.attention_bias)
    rotary = theirs.rope_parameters
    if rotary["rope_type"] != "default":
        raise CheckpointError(
            f"The rotary positions are of type '{rotary['rope_type']}', but the transformer of the zoo supports only "
            "'default'; profile the original model.",
            name="rope_type",
            value=rotary["rope_type"],
            expected=("default",),
        )
    ours = transformer(
        d_model=theirs.hidden_size, n_layers=theirs.num_hidden_layers, n_heads=theirs.num_attention_heads,
        n_kv_heads=theirs.num_key_value_heads, vocab_size=theirs.vocab_size,
        max_length=theirs.max_position_embeddings, norm="rms_norm", norm_eps=theirs.rms_norm_eps, position="rotary",
        rotary_base=rotary["rope_theta"], mlp="swiglu", mlp_width=theirs.intermediate_size,
        has_bias=theirs.attention_bias, ties_embeddings=theirs.tie_word_embeddings, init_std=theirs.initializer_range,
    )  # fmt: skip
    state = model.state_dict()
    filled = {
        "token_embedding.weight": state["model.embed_tokens.weight"],
        "final_norm.weight": state["model.norm.weight"],
        "head.weight": state["lm_head.weight"],
    }
    pairs = {
        "self_attn.q_proj": "attention.query", "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value", "self_attn.o_proj": "attention.out",
        "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm",
    }  # fmt: skip
    for i in range(ours.config.n_layers):
        for name, our_name in pairs.items():
            for kind in ("weight", "bias"):
                if (tensor := state.get(f"model.layers.{i}.{name}.{kind}")) is not None:
                    filled[f"blocks.{i}.{our_name}.{kind}"] = tensor
    return _filled(ours, filled, model)


def _check_class(model: nn.Module, expected: type) -> None:
    if not isinstance(model, expected):
        raise CheckpointError.of("model", model, f"a {expected.__name__}")


def _check_options(config: Any, **required: Any) -> None:
    """Raise an exception for options that change the function and that the transformer of the zoo does not have."""
    for name, value in required.items():
        if (found := getattr(config, name)) != value:
            raise CheckpointError(
                f"{name} is {found!r}, but the transformer of the zoo supports only {value!r}; profile the original "
                "model.",
                name=name,
                value=found,
                expected=(value,),
            )


def _mlp_kind(activation: str) -> MlpKind:
    kinds: dict[str, MlpKind] = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    if activation not in kinds:
        raise CheckpointError(
            f"activation_function is '{activation}', but the transformer of the zoo supports only {', '.join(kinds)}; "
            "profile the original model.",
            name="activation_function",
            value=activation,
            expected=tuple(kinds),
        )
    return kinds[activation]


@torch.no_grad()
def _filled(model: Transformer, state: dict[str, Tensor], source: nn.Module) -> Transformer:
    """Return the transformer with copies of these weights, on the device and in the dtype of the source."""
    like = next(source.parameters())
    model.to(device=like.device, dtype=like.dtype)
    model.load_state_dict(state)
    return model.eval()
