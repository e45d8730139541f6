import asyncio.base_events
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2024)


def rope_table(dim, length, theta=10000.0):
    inv = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
    angle = torch.outer(torch.arange(length).float(), inv)
    return torch.cos(angle), torch.sin(angle)


def apply_rope(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return h.type_as(x) * self.weight


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = RMSNorm(self.hd), RMSNorm(self.hd)
        self.w1, self.w3 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.w2 = nn.Linear(2 * dim, dim, bias=False)
        self.attn_norm, self.mlp_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x, cos, sin):
        B, T, D = x.shape
        h = self.attn_norm(x)
        q, k, v = (w(h).view(B, T, self.heads, self.hd).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.hd)
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
        x = x + self.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))
        h = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Transformer(nn.Module):
    def __init__(self, vocab=128, dim=64, heads=4, depth=2, length=96):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.output = RMSNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.cos, self.sin = rope_table(dim // heads, length)

    def forward(self, ids):
        h = self.tok(ids)
        for block in self.blocks:
            h = block(h, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        return self.output(self.norm(h))


text = torch.tensor(list(open(asyncio.base_events.__file__, "rb").read()))
model = Transformer()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
for step in range(30):
    starts = torch.randint(len(text) - 97, (8,))
    chunk = torch.stack([text[s : s + 97] for s in starts])
    loss = F.cross_entropy(model(chunk[:, :-1]).flatten(0, 1), chunk[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.3f}")
print(f"loss {loss.item():.3f}")
