"""Layer and role of a tensor according to its name."""

from __future__ import annotations

import re
from collections.abc import Collection

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?|blk|resblocks)\.(\d+)(?:\.|$)")
_EXPERTS = re.compile(r"(?:^|[._])exp(?:ert)?s(?:[._]|$)")
_ATTENTION = r"\w*(?:attn|attention|att)\d?\.(?:self\.)?"
_MLP = r"(?:mlp|ffn|feed_?forward)\."
#: Role -> pattern of the end of a name in lower case, without ".weight"; the first that matches counts.
_ROLES: tuple[tuple[str, str], ...] = (
    ("position embedding", r"wpe|position_embeddings?|embed_positions|pos_embed(?:ding)?|position_embd"),
    ("embedding", r"wte|embed_tokens|tok_embeddings|token_embd|token_embedding|word_embeddings|embed_in"),
    ("head", r"lm_head|head|embed_out"),
    ("attention query-key-value", r"query_key_value|c_attn|qkv_proj|wqkv|in_proj_weight|attn_qkv|attn\.qkv"),
    ("attention query", rf"q_proj|attn_q|{_ATTENTION}(?:query|q|wq|q_lin)"),
    ("attention key", rf"k_proj|attn_k|{_ATTENTION}(?:key|k|wk|k_lin)"),
    ("attention value", rf"v_proj|attn_v|{_ATTENTION}(?:value|v|wv|v_lin)"),
    ("attention output", rf"attn_output|{_ATTENTION}(?:o_proj|out_proj|c_proj|proj|dense|output\.dense|out|o|wo|"
     r"out_lin)"),
    ("router", r"router|ffn_gate_inp|block_sparse_moe\.gate"),
    ("MLP gate and up", r"gate_up_proj"),
    ("MLP gate", rf"gate_proj|ffn_gate(?:_exps)?|wi_0|{_MLP}w1|experts\.\d+\.(?:w1|gate)"),
    ("MLP up", rf"up_proj|c_fc|dense_h_to_4h|fc1|intermediate\.dense|ffn_up(?:_exps)?|wi|wi_1|{_MLP}(?:up|w3)|"
     r"experts\.\d+\.(?:w3|up)"),
    ("MLP down", rf"down_proj|dense_4h_to_h|fc2|output\.dense|ffn_down(?:_exps)?|wo|{_MLP}(?:down|w2|c_proj)|"
     r"experts\.\d+\.(?:w2|down)"),
)  # fmt: skip
_PATTERNS = tuple((role, re.compile(rf"(?:^|\.)(?:{pattern})$")) for role, pattern in _ROLES)


def layer_of(name: str) -> int:
    """Return the number after the first of layers, layer, h, blocks, block, blk or resblocks in a name; -1 if none."""
    found = _LAYER.search(name)
    return int(found[1]) if found else -1


def role_of(name: str, names: Collection[str]) -> str:
    """Return the role that a name states, such as "attention query" or "expert down"; empty if it is not certain.

    Args:
        name: Name of a tensor.
        names: All names of the checkpoint.
    """
    stem = name.removesuffix(".weight").lower()
    if stem == "output":  # in GGUF files and in the original files of Llama
        return "head"
    if stem.endswith(".gate") and (role := _gate_role(name.removesuffix(".weight").removesuffix(".gate"), names)):
        return role
    role = next((role for role, pattern in _PATTERNS if pattern.search(stem)), "")
    return role.replace("MLP", "expert") if is_of_experts(name) else role


def _gate_role(parent: str, names: Collection[str]) -> str:
    """Return the role of a ``gate``: a router if its parent has experts, a factor of an MLP if it has ``up``."""
    if any(name.startswith(f"{parent}.experts.") for name in names):
        return "router"
    if f"{parent}.up.weight" in names:
        return "expert gate" if is_of_experts(parent) else "MLP gate"
    return ""


def is_of_experts(name: str) -> bool:
    """Return whether a tensor belongs to an expert or is a stack of experts according to its name."""
    return bool(_EXPERTS.search(name.lower()))
