"""Fine-tuning with the first stages frozen, by a backbone that takes the number of frozen stages."""
import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(5)


class Backbone(nn.Module):
    def __init__(self, width=32, frozen_stages=-1):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(3)
        )
        self.frozen_stages = frozen_stages
        self._freeze_stages()

    def _freeze_stages(self):
        parts = [self.stem, *self.stages][: self.frozen_stages + 1]
        for part in parts:
            part.eval()
            part.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self._freeze_stages()
        return self

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = x + stage(x)
        return x.mean((2, 3))


class Classifier(nn.Module):
    def __init__(self, frozen_stages=-1):
        super().__init__()
        self.backbone = Backbone(frozen_stages=frozen_stages)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.backbone(x))


digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)


def fit(model, n, lr):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.05)
    model.train()
    for _ in range(n):
        rows = torch.randint(0, len(images), (64,))
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


model = Classifier(frozen_stages=1)
print(f"tuned {fit(model, 40, 3e-3):.3f}")
