"""A small decoder with rotary positions, normalised queries and keys, and dropout in attention."""
import heapq
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(31)
T = 96


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, n):
        positions = torch.arange(n, dtype=self.inv_freq.dtype)
        angle = torch.outer(positions, self.inv_freq)
        angle = torch.cat([angle, angle], -1)
        return angle.cos().float(), angle.sin().float()


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(dim // heads), nn.RMSNorm(dim // heads)
        self.rotary = RotaryEmbedding(dim // heads)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = self.rotary(t)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = Attention(dim, heads, dropout)
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, vocab=128, dim=64, heads=4, depth=2, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


data = torch.tensor(list(open(heapq.__file__, "rb").read())).clamp(max=127)
train, held_out = data[:-2000], data[-2000:]


def draw(source, n=8):
    at = torch.randint(len(source) - T - 1, (n,)).tolist()
    rows = torch.stack([source[i : i + T + 1] for i in at])
    return rows[:, :-1], rows[:, 1:]


model = Decoder()
matrices = [p for p in model.parameters() if p.ndim > 1]
vectors = [p for p in model.parameters() if p.ndim == 1]
optimizer = torch.optim.AdamW(
    [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=3e-3, betas=(0.9, 0.95)
)
for step in range(40):
    for group in optimizer.param_groups:
        group["lr"] = 3e-3 * min(1.0, (step + 1) / 5) * (0.6 + 0.4 * math.cos(math.pi * step / 40))
    x, y = draw(train)
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 9:
        model.eval()
        with torch.no_grad():
            x, y = draw(held_out)
            held = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        model.train()
        print(f"{step + 1}: loss {loss.item():.3f}, held out {held.item():.3f}")
