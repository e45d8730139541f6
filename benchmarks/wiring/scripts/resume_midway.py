"""Train, stop, load the checkpoint in fresh objects, go on."""
import os
import tempfile

import torch
import torch.nn as nn

HALF, TOTAL = 20, 40


class Stream:
    """Endless batches; its position can be saved."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.w = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))

    def next(self):
        x = torch.randn(64, 16, generator=self.generator)
        return x, (x @ self.w).argmax(1)

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


def build():
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=TOTAL)
    return model, optimizer, scheduler, Stream(seed=1)


def train(model, optimizer, scheduler, stream, first, last):
    model.train()
    for step in range(first, last):
        x, y = stream.next()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.5f}")


def save(path, model, optimizer, scheduler, stream, step):
    torch.save({
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        "stream": stream.state_dict(), "rng": torch.get_rng_state(), "step": step,
    }, path)


def load(path, model, optimizer, scheduler, stream):
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    stream.load_state_dict(checkpoint["stream"])
    torch.set_rng_state(checkpoint["rng"])
    return checkpoint["step"]


torch.manual_seed(0)
path = os.path.join(tempfile.mkdtemp(), "last.pt")
parts = build()
train(*parts, 0, HALF)
save(path, *parts, HALF)
print("saved", os.path.basename(path))

parts = build()
first = load(path, *parts)
train(*parts, first, TOTAL)
