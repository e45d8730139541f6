import re

import torch
from torch import nn, optim

torch.manual_seed(14)
DTYPE = torch.bfloat16

source = open(re.__file__.replace("__init__", "_parser")).read()
vocab = sorted(set(source))
ids = torch.tensor([vocab.index(c) for c in source])
CONTEXT = 12


class NGram(nn.Module):
    """Predict the next character from the twelve before it (Bengio et al. 2003)."""

    def __init__(self, n_vocab, dim=24, hidden=128):
        super().__init__()
        self.emb = nn.Embedding(n_vocab, dim)
        self.hidden = nn.Linear(CONTEXT * dim, hidden)
        self.out = nn.Linear(hidden, n_vocab)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(self.emb(x).flatten(1))))


model = NGram(len(vocab)).to(DTYPE)
optimizer = optim.SGD(model.parameters(), lr=0.5)
for i in range(1, 61):
    at = torch.randint(len(ids) - CONTEXT, (128,))
    x = torch.stack([ids[a : a + CONTEXT] for a in at])
    y = ids[at + CONTEXT]
    loss = nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if i % 20 == 0:
        print(f"{i:4d} {loss.item():.3f}")
