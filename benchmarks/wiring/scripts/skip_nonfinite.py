import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(5)


class MaskedPool(nn.Module):
    """Attention pooling over a set of vectors of which some are missing."""

    def __init__(self, d_in, d):
        super().__init__()
        self.key = nn.Linear(d_in, d)
        self.value = nn.Linear(d_in, d)
        self.query = nn.Parameter(torch.randn(d) / d**0.5)

    def forward(self, x, present):
        score = self.key(x) @ self.query
        score = score.masked_fill(~present, -1e9)
        weight = score.softmax(dim=1)
        return (weight.unsqueeze(-1) * self.value(x)).sum(1)


class SetRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = MaskedPool(5, 32)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x, present):
        return self.head(self.pool(x, present)).squeeze(-1)


def sample(n=64, size=7):
    x = torch.rand(n, size, 5)
    present = torch.rand(n, size) < 0.6
    count = present.sum(1).clamp(min=1)
    y = (x[..., 0] * present).sum(1) / count + (x[..., 1] * present).amax(1)
    return x * present.unsqueeze(-1), present, y


model = SetRegressor()
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
skipped = 0
for step in range(60):
    x, present, y = sample()
    loss = F.smooth_l1_loss(model(x, present), y)
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    else:
        skipped += 1
    if step % 15 == 0:
        print(f"step {step} loss {loss.item():.5f} norm {norm.item():.3f}")
print(f"loss {loss.item():.5f}, {skipped} steps skipped")
