import math
import urllib.parse

import torch
import torch.nn as nn
import torch.nn.functional as F

hp = {"z": 1e-4, "smoothing": 0.1, "noise": 1e-3, "lr": 2e-3, "steps": 45, "length": 32, "batch": 12, "drop_tokens": 0.05}
torch.manual_seed(64)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)
        slopes = 2.0 ** -torch.arange(1, heads + 1)
        self.register_buffer("slopes", slopes.view(heads, 1, 1))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).chunk(3, -1)
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
        bias = self.slopes * distance
        bias = bias.masked_fill(distance > 0, float("-inf"))
        attn = (q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5 + bias).softmax(-1)
        return self.to_out((attn @ v).transpose(1, 2).reshape(b, n, d))


class AlibiLM(nn.Module):
    def __init__(self, vocab=128, dim=64, heads=4, depth=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.attn = nn.ModuleList(Attention(dim, heads) for _ in range(depth))
        self.ff = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 128), nn.GELU(), nn.Linear(128, dim)) for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.final = nn.LayerNorm(dim)
        self.logits = nn.Linear(dim, vocab)

    def forward(self, x):
        h = self.emb(x)
        for attn, ff, norm in zip(self.attn, self.ff, self.norms):
            h = h + attn(norm(h))
            h = h + ff(h)
        return self.logits(self.final(h))


text = torch.tensor(list(open(urllib.parse.__file__, "rb").read())).clamp(max=127)
lm = AlibiLM()
opt = torch.optim.AdamW(lm.parameters(), lr=hp["lr"])
for it in range(hp["steps"]):
    starts = torch.randint(len(text) - hp["length"] - 1, (hp["batch"],))
    seq = torch.stack([text[s : s + hp["length"] + 1] for s in starts])
    inp, tgt = seq[:, :-1].clone(), seq[:, 1:]
    inp[torch.rand(inp.shape) < hp["drop_tokens"]] = 0
    logits = lm(inp)
    ce = F.cross_entropy(logits.flatten(0, 1), tgt.flatten(), label_smoothing=hp["smoothing"])
    loss = ce + hp["z"] * logits.logsumexp(-1).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    for p in lm.parameters():
        p.grad.add_(torch.randn_like(p), alpha=hp["noise"] / math.sqrt(1 + it))
    opt.step()
    if it % 11 == 0:
        print(f"{it + 1}: loss {loss.item():.3f} ce {ce.item():.3f}")
