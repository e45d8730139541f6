import contextlib
import io

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(70)


class MoE(nn.Module):
    """Top-2 mixture with a load-balancing loss (Shazeer et al., Switch Transformer)."""

    def __init__(self, dim, n_experts=4, k=2):
        super().__init__()
        self.gate = nn.Linear(dim, n_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(n_experts)
        )
        self.n_experts, self.k = n_experts, k
        self.aux_loss = None

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        probs = self.gate(flat).softmax(-1)
        weight, chosen = probs.topk(self.k, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            if len(token):
                out = out.index_add(0, token, weight[token, slot].unsqueeze(1) * expert(flat[token]))
        load = F.one_hot(chosen, self.n_experts).float().sum(1).mean(0) / self.k
        self.aux_loss = self.n_experts * (load * probs.mean(0)).sum()
        return out.view_as(x)


class MoELanguageModel(nn.Module):
    def __init__(self, vocab, dim=48, heads=4, depth=2, length=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.attn = nn.ModuleList(nn.MultiheadAttention(dim, heads, batch_first=True) for _ in range(depth))
        self.moe = nn.ModuleList(MoE(dim) for _ in range(depth))
        self.norm_a = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.norm_m = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, vocab))

    def forward(self, idx):
        T = idx.size(1)
        x = self.tok(idx) + self.pos.weight[:T]
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)
        for attn, moe, na, nm in zip(self.attn, self.moe, self.norm_a, self.norm_m):
            h = na(x)
            x = x + attn(h, h, h, attn_mask=mask, need_weights=False)[0]
            x = x + moe(nm(x))
        return self.head(x)

    def balance_loss(self):
        return sum(m.aux_loss for m in self.moe)


with contextlib.redirect_stdout(io.StringIO()) as zen:
    import this  # noqa
text = zen.getvalue() * 4
chars = sorted(set(text))
ids = torch.tensor([chars.index(c) for c in text])
lm = MoELanguageModel(len(chars))
optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
for step in range(40):
    s = torch.randint(len(ids) - 33, (8,))
    seq = torch.stack([ids[i : i + 33] for i in s])
    ce = F.cross_entropy(lm(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
    loss = ce + 0.01 * lm.balance_loss()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    optimizer.step()
    if step % 8 == 7:
        print(f"step {step + 1} ce {ce.item():.3f} balance {lm.balance_loss().item():.3f}")
