"""A learning rate range test, after which everything is put back, and then the training."""
import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(18)
digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)


def loader(n):
    for _ in range(n):
        rows = torch.randint(0, len(images), (64,))
        yield images[rows], labels[rows]


class RateFinder:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.weights = copy.deepcopy(model.state_dict())
        self.state = copy.deepcopy(optimizer.state_dict())

    def run(self, low=1e-5, high=3.0, n=10):
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, (high / low) ** (1 / n))
        for group in self.optimizer.param_groups:
            group["lr"] = low
        rates, losses = [], []
        for x, y in loader(n):
            rates.append(self.optimizer.param_groups[0]["lr"])
            losses.append(update(self.model, self.optimizer, schedule, x, y))
        best = min(range(n - 1), key=lambda i: losses[i + 1] - losses[i])
        return rates[best] / 3, schedule

    def reset(self):
        self.model.load_state_dict(self.weights)
        self.optimizer.load_state_dict(self.state)


def update(model, optimizer, schedule, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    return loss.item()


model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
finder = RateFinder(model, optimizer)
rate, schedule = finder.run()
finder.reset()
for group in optimizer.param_groups:
    group["lr"] = group["initial_lr"] = min(rate, 5e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
for step, (x, y) in enumerate(loader(40)):
    loss = update(model, optimizer, schedule, x, y)
    if step % 10 == 9:
        print(f"{step + 1}: {loss:.4f}")
