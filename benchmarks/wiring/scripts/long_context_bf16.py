import dataclasses

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass
class ModelArgs:
    vocab: int = 24
    dim: int = 48
    n_heads: int = 3
    n_layers: int = 2
    max_len: int = 320
    dropout: float = 0.05


def rotary(dim, length, base=10000.0):
    freqs = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    t = torch.arange(length, dtype=torch.float32)
    return torch.polar(torch.ones(length, dim // 2), torch.outer(t, freqs))


def rotate(x, freqs_cis):
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs_cis).flatten(-2).type_as(x)


class TransformerBlock(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim)
        self.wqkv = nn.Linear(args.dim, 3 * args.dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)
        self.ffn_norm = nn.RMSNorm(args.dim)
        self.ffn = nn.Sequential(nn.Linear(args.dim, 3 * args.dim), nn.SiLU(), nn.Linear(3 * args.dim, args.dim))
        self.dropout = nn.Dropout(args.dropout)
        self.n_heads = args.n_heads

    def forward(self, x, freqs_cis):
        b, t, d = x.shape
        qkv = self.wqkv(self.attention_norm(x)).view(b, t, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = rotate(qkv[0], freqs_cis), rotate(qkv[1], freqs_cis), qkv[2]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.dropout(self.wo(y))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class LongModel(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layers))
        self.norm = nn.RMSNorm(args.dim)
        self.unembed = nn.Linear(args.dim, args.vocab, bias=False)
        self.register_buffer("freqs_cis", rotary(args.dim // args.n_heads, args.max_len), persistent=False)

    def forward(self, ids):
        h = self.embed(ids)
        for layer in self.layers:
            h = checkpoint(layer, h, self.freqs_cis[: ids.shape[1]], use_reentrant=False)
        return self.unembed(self.norm(h))


def walks(n, length):
    """Random walks on a ring of 24 tokens, one or two steps at a time."""
    return torch.randint(1, 3, (n, length)).cumsum(1) % 24


if __name__ == "__main__":
    torch.manual_seed(88)
    model = LongModel(ModelArgs())
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(30):
        ids = walks(4, 301)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 6 == 5:
            print("step", step + 1, "loss", round(loss.item(), 3))
