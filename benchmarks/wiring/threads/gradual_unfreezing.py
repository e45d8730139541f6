"""The head learns alone at first, then the body too; the step over all parameters is planned once."""
import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(37)


class PlannedSGD:
    """Momentum, in one call over the parameters that have gradients."""

    def __init__(self, params, lr, momentum=0.9):
        self.inner = torch.optim.SGD(params, lr=lr, momentum=momentum)
        self.plan = None

    def step(self):
        active = [p for p in self.inner.param_groups[0]["params"] if p.grad is not None]
        if self.plan is None or len(self.plan) != len(active):
            self.plan = active
        kept = self.inner.param_groups[0]["params"]
        self.inner.param_groups[0]["params"] = self.plan
        self.inner.step()
        self.inner.param_groups[0]["params"] = kept

    def zero_grad(self):
        self.inner.zero_grad()


digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
body = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
net = nn.Sequential(body, nn.Linear(96, 10))
optimizer = PlannedSGD(list(net.parameters()), lr=0.05)
for step in range(50):
    body.requires_grad_(step >= 3)
    rows = torch.randint(0, len(images), (64,))
    loss = nn.functional.cross_entropy(net(images[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"{step + 1} {loss.item():.3f}")
