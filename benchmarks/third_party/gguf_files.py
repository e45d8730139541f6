"""Trials of GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.third_party.checkpoint_trial import DAMAGES, Saved, llama, trial

GGUF = "GGUF"


def gguf(folder: Path, kind: str = "Q8_0", *, change: Callable[[dict], dict] = lambda t: t, n_blocks: int = 2,
         architecture: str = "llama") -> Saved:  # fmt: skip
    """Write a GGUF file as the converter of llama.cpp does; the expected model has the dequantized parameters.

    Args:
        folder: Destination.
        kind: Number format of the matrices, a name of ``GGMLQuantizationType``.
        change: Function applied to the tensors before they are written.
        n_blocks: Number of blocks in the header.
        architecture: Architecture in the header.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize, quantize

    wide = 256 if kind.endswith("_K") or kind.startswith(("IQ", "TQ")) else 64
    sizes = {"hidden_size": wide, "intermediate_size": wide, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = llama(**sizes, max_position_embeddings=64)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "model.layers": "blk",
    }  # fmt: skip
    quantization = GGMLQuantizationType[kind]
    file = folder / "model.gguf"
    writer = GGUFWriter(file, architecture)
    for key, value in {
        "block_count": n_blocks, "context_length": 64, "embedding_length": wide, "feed_forward_length": wide,
        "head_count": 4, "head_count_kv": 4, "vocab_size": 32, "layer_norm_rms_eps": 1e-6, "rope_freq_base": 1e4,
        "rope_dimension_count": wide // 4,
    }.items():  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*(chr(65 + i) for i in range(31)), "AB"])
    writer.add_token_types([1] * 32)
    writer.add_token_merges(["A B"])
    tensors = {}
    for name, parameter in model.named_parameters():
        short = name.removesuffix(".weight")
        for long, gguf_name in names.items():
            short = short.replace(long, gguf_name)
        rows = torch.arange(len(parameter))
        if short.endswith(("attn_q", "attn_k")):  # llama.cpp pairs the rotated features in a different order
            rows = rows.reshape(4, 2, -1).transpose(1, 2).flatten()
        values = parameter.detach()[rows].numpy()
        if parameter.ndim == 1:
            data, raw, known = values, None, values
        elif kind in ("F32", "F16"):
            data, raw = values.astype(np.float32 if kind == "F32" else np.float16), None
            known = data.astype(np.float32)
        else:
            data, raw = _quantized(values, quantization, quantize), quantization
            known = dequantize(data, quantization)
        parameter.data = torch.from_numpy(np.array(known))[torch.argsort(rows)]
        tensors[f"{short}.weight"] = (data, raw)
    for name, (data, raw) in change(tensors).items():
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Saved(file, model)


def _quantized(values: np.ndarray, kind: Any, quantize: Callable) -> np.ndarray:
    """Quantize a matrix; formats that only llama.cpp can write receive arbitrary valid blocks."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        return quantize(values, kind)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        generator = np.random.default_rng(0)
        rows = np.zeros((len(values), values.shape[1] // block * size), np.uint8)
        for i in range(len(rows)):  # the blocks contain float16 scales, so draw until the values are finite and small
            while True:
                rows[i] = generator.integers(0, 256, rows.shape[1], np.uint8)
                found = dequantize(rows[i : i + 1], kind)
                if np.isfinite(found).all() and np.abs(found).max() < 1e3:
                    break
        return rows


for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
             "IQ4_NL", "IQ4_XS", "TQ1_0"):  # fmt: skip
    trial(GGUF, kind)(partial(gguf, kind=kind))
trial(GGUF, "a tensor missing", "does not fit")(
    partial(gguf, change=lambda t: {n: v for n, v in t.items() if n != "blk.1.ffn_up.weight"})
)
trial(GGUF, "more blocks in the header", "does not fit")(partial(gguf, n_blocks=3))
trial(GGUF, "fewer blocks in the header", "does not fit")(partial(gguf, n_blocks=1))
trial(GGUF, "an architecture unknown to transformers", "configuration")(partial(gguf, architecture="made_up"))
trial(GGUF, "first of two files of one model", "does not fit")(
    partial(gguf, change=lambda t: dict(list(t.items())[: len(t) // 2]))
)
for damage, change in DAMAGES.items():

    def _write(folder, change=change):
        file = gguf(folder).source
        file.write_bytes(change(file.read_bytes()))
        return Saved(file)

    trial(GGUF, damage, "damaged")(_write)
