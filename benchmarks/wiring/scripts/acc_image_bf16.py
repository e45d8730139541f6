import torch
import torch.nn as nn
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Circles, squares and crosses at random places."""

    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100003 + i)
        img = 0.2 * torch.randn(1, 20, 20, generator=g)
        cx, cy = torch.randint(6, 14, (2,), generator=g).tolist()
        yy, xx = torch.meshgrid(torch.arange(20) - cy, torch.arange(20) - cx, indexing="ij")
        kind = i % 3
        if kind == 0:
            img[0, (xx**2 + yy**2) <= 16] += 1
        elif kind == 1:
            img[0, (xx.abs() <= 4) & (yy.abs() <= 4)] += 1
        else:
            img[0, ((xx.abs() <= 1) | (yy.abs() <= 1)) & (xx.abs() <= 5) & (yy.abs() <= 5)] += 1
        return img, kind


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), ResidualBlock(16), nn.Conv2d(16, 32, 3, stride=2, padding=1),
        ResidualBlock(32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3),
    )


def main():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    torch.manual_seed(19)
    train = DataLoader(Shapes(640, 1), batch_size=32, shuffle=True)
    test = DataLoader(Shapes(150, 2), batch_size=50)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for epoch in range(2):
        model.train()
        for images, labels in train:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = total = 0
        for images, labels in test:
            with torch.no_grad():
                guess = model(images).argmax(-1)
            guess, labels = accelerator.gather_for_metrics((guess, labels))
            right += (guess == labels).sum().item()
            total += len(labels)
        accelerator.print(f"epoch {epoch}: train loss {loss.item():.3f}, test accuracy {right / total:.2f}")


if __name__ == "__main__":
    main()
