from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset


@dataclass
class Args:
    users: int = 200
    items: int = 150
    dim: int = 24
    batch: int = 128
    epochs: int = 2
    lr: float = 0.02
    temperature: float = 0.3


class Clicks(Dataset):
    def __init__(self, args, n=2560):
        g = torch.Generator().manual_seed(6)
        taste = torch.randn(args.users, 4, generator=g)
        trait = torch.randn(args.items, 4, generator=g)
        self.user = torch.randint(0, args.users, (n,), generator=g)
        self.item = torch.multinomial((2 * taste[self.user] @ trait.T).softmax(-1), 1, generator=g).squeeze(1)

    def __len__(self):
        return len(self.user)

    def __getitem__(self, i):
        return self.user[i], self.item[i]


class Tower(nn.Module):
    def __init__(self, n, dim):
        super().__init__()
        self.table = nn.Embedding(n, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, ids):
        return F.normalize(self.mlp(self.table(ids)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.user_tower = Tower(args.users, args.dim)
        self.item_tower = Tower(args.items, args.dim)
        self.log_scale = nn.Parameter(torch.tensor(1 / args.temperature).log())

    def forward(self, users, items):
        similarity = self.user_tower(users) @ self.item_tower(items).T
        logits = similarity * self.log_scale.exp()
        same = items[:, None] == items[None, :]
        logits = logits.masked_fill(same & ~torch.eye(len(items), dtype=torch.bool), -1e4)
        return F.cross_entropy(logits, torch.arange(len(users)))


def run(args=Args()):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(16)
    model = TwoTower(args)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader = DataLoader(Clicks(args), batch_size=args.batch, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(args.epochs):
        for users, items in loader:
            loss = model(users, items)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_value_(model.parameters(), 0.002)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: in-batch loss {loss.item():.4f}")


run()
