from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    batch_size: int = 64
    temperature: float = 0.2
    lr: float = 2e-3
    epochs: int = 3
    seed: int = 21


class TwoViews(Dataset):
    def __init__(self, n):
        self.patterns = torch.randn(n, 3, 12, 12)

    def __len__(self):
        return len(self.patterns)

    def augment(self, img):
        if torch.rand(()) < 0.5:
            img = img.flip(-1)
        img = torch.roll(img, shifts=int(torch.randint(-2, 3, ())), dims=-2)
        return img * (0.7 + 0.6 * torch.rand(())) + 0.1 * torch.randn_like(img)

    def __getitem__(self, i):
        img = self.patterns[i]
        return self.augment(img), self.augment(img)


class Net(nn.Module):
    def __init__(self, width=32, out=32):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 2, 1), nn.GroupNorm(4, width), nn.ReLU(), nn.Flatten(),
        )
        self.projector = nn.Sequential(nn.Linear(width * 9, 64), nn.ReLU(), nn.Linear(64, out))

    def forward(self, x):
        return F.normalize(self.projector(self.backbone(x)), dim=1)


def info_nce(a, b, temperature):
    logits = a @ b.t() / temperature
    target = torch.arange(len(a))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def main(cfg=Config()):
    torch.manual_seed(cfg.seed)
    loader = DataLoader(TwoViews(1024), batch_size=cfg.batch_size, shuffle=True, drop_last=True)
    net = Net()
    opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr)
    for epoch in range(cfg.epochs):
        for left, right in loader:
            loss = info_nce(net(left), net(right), cfg.temperature)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} contrastive loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
