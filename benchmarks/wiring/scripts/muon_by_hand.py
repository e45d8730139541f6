import statistics

import torch
import torch.nn.functional as F
from torch import nn


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, steps=5):
        super().__init__(params, dict(lr=lr, momentum=momentum, steps=steps))

    @staticmethod
    def orthogonalize(G, steps):
        a, b, c = 3.4445, -4.7750, 2.0315
        X = G / (G.norm() + 1e-7)
        if G.size(0) > G.size(1):
            X = X.T
        for _ in range(steps):
            A = X @ X.T
            X = a * X + (b * A + c * A @ A) @ X
        return X.T if G.size(0) > G.size(1) else X

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buf.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buf, group["momentum"])
                update = self.orthogonalize(update, group["steps"])
                p.add_(update, alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


class MLPMixerLM(nn.Module):
    def __init__(self, vocab, window=16, dim=32, width=128):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.fc1 = nn.Linear(window * dim, width, bias=False)
        self.fc2 = nn.Linear(width, width, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab)
        nn.init.zeros_(self.lm_head.weight)

    def forward(self, x):
        h = F.relu(self.norm1(self.fc1(self.embed(x).flatten(1)))).square()
        h = h + F.relu(self.norm2(self.fc2(h))).square()
        return self.lm_head(h)


torch.manual_seed(40)
text = torch.tensor(list(open(statistics.__file__, "rb").read().decode().encode("ascii", "ignore")))
model = MLPMixerLM(128)
hidden = [model.fc1.weight, model.fc2.weight]
others = [p for p in model.parameters() if all(p is not q for q in hidden)]
optimizers = [Muon(hidden, lr=0.02), torch.optim.Adam(others, lr=3e-3, betas=(0.8, 0.95))]
for step in range(50):
    i = torch.randint(len(text) - 17, (64,))
    x = torch.stack([text[j : j + 16] for j in i])
    loss = F.cross_entropy(model(x), text[i + 16])
    loss.backward()
    for opt in optimizers:
        opt.step()
    model.zero_grad(set_to_none=True)
    if step % 10 == 0:
        print(step, loss.item())
print("last", loss.item())
