import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_backbone():
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )


class Network(nn.Module):
    def __init__(self, backbone, n_classes):
        super().__init__()
        self.backbone = backbone
        self.classifier = nn.Linear(192, n_classes)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.classifier(features)


def main():
    torch.manual_seed(3)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    even = torch.tensor(data.target % 2)
    backbone = make_backbone()
    backbone.requires_grad_(False)

    network = Network(backbone, 10)
    network.classifier = nn.Linear(192, 2)
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    network.train()
    loader = DataLoader(TensorDataset(images, even), batch_size=64, shuffle=True, drop_last=True)
    for epoch in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(network(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.4f}")


main()
