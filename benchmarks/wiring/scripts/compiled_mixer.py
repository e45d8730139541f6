import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(23)


class GatedMixer(nn.Module):
    """Token mixing by a causal convolution with a gate."""

    def __init__(self, dim, kernel=5):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.proj = nn.Linear(dim, 2 * dim)
        self.conv = nn.Conv1d(dim, dim, kernel, groups=dim)
        self.out = nn.Linear(dim, dim)
        self.kernel = kernel

    def forward(self, x):
        value, gate = self.proj(self.norm(x)).chunk(2, dim=-1)
        value = F.pad(value.transpose(1, 2), (self.kernel - 1, 0))
        value = self.conv(value).transpose(1, 2)
        return x + self.out(value * torch.sigmoid(gate))


class Model(nn.Module):
    def __init__(self, vocab=64, dim=64, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mixers = nn.Sequential(*[GatedMixer(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, idx):
        return self.head(self.norm(self.mixers(self.embed(idx))))


table = torch.randint(0, 64, (64, 3))


def chain(n, length):
    out = [torch.randint(0, 64, (n,))]
    for _ in range(length - 1):
        out.append(table[out[-1], torch.randint(0, 3, (n,))])
    return torch.stack(out, 1)


raw_model = Model()
model = torch.compile(raw_model, backend="aot_eager")
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=4e-3)
for step in range(40):
    tokens = chain(16, 41)
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, 64), tokens[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: {loss.item():.3f}")
print(f"end: {loss.item():.3f}")
