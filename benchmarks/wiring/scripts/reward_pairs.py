import random

import torch
import torch.nn.functional as F
from torch import nn

# Bradley-Terry reward model: answers with more "good" tokens are preferred.
random.seed(4)
torch.manual_seed(4)
VOCAB, PAD, GOOD = 30, 0, set(range(20, 30))


def answer(quality):
    length = random.randint(5, 14)
    return [random.choice(range(20, 30)) if random.random() < quality else random.choice(range(1, 20)) for _ in range(length)]


def pair():
    while True:
        a, b = answer(random.random()), answer(random.random())
        count_a, count_b = (sum(t in GOOD for t in s) for s in (a, b))
        if count_a != count_b:
            return (a, b) if count_a > count_b else (b, a)


def pad_batch(rows):
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    return ids, mask


class RewardModel(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(16, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        self.score = nn.Linear(dim, 1)

    def forward(self, ids, mask):
        h = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        h = self.body(h, src_key_padding_mask=~mask)
        pooled = (h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return self.score(pooled).squeeze(-1)


rm = RewardModel()
optimizer = torch.optim.AdamW(rm.parameters(), lr=1e-3)
for step in range(50):
    chosen, rejected = zip(*[pair() for _ in range(32)])
    r_chosen = rm(*pad_batch(chosen))
    r_rejected = rm(*pad_batch(rejected))
    loss = -F.logsigmoid(r_chosen - r_rejected).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        acc = (r_chosen > r_rejected).float().mean().item()
        print(f"step {step}: loss {loss.item():.4f} acc {acc:.2f}")
print(f"loss {loss.item():.4f}")
