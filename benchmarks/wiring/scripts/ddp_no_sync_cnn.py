import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUM = 2
UPDATES = 40


def random_shift(x):
    dy, dx = torch.randint(-1, 2, (2,)).tolist()
    return torch.roll(x, (dy, dx), dims=(-2, -1))


def build():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(512, 10),
    )


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), int(os.environ["WORLD_SIZE"])
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[rank::world] / 16
    labels = torch.tensor(digits.target)[rank::world]

    torch.manual_seed(0)
    net = DDP(build())
    torch.manual_seed(1 + rank)
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, UPDATES)
    for update in range(UPDATES):
        opt.zero_grad()
        for micro in range(ACCUM):
            rows = torch.randint(0, len(images), (16,))
            context = net.no_sync() if micro < ACCUM - 1 else contextlib.nullcontext()
            with context:
                loss = nn.functional.cross_entropy(net(random_shift(images[rows])), labels[rows]) / ACCUM
                loss.backward()
        opt.step()
        sched.step()
        if rank == 0 and update % 8 == 7:
            print(f"update {update + 1} loss {loss.item() * ACCUM:.4f}", flush=True)
    dist.destroy_process_group()


main()
