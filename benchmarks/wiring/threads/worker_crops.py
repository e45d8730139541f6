"""Images are cut and turned at random by NumPy in two worker processes."""
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Augmented(Dataset):
    def __init__(self):
        digits = load_digits()
        self.images, self.labels = digits.images.astype(np.float32) / 16, digits.target

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = np.pad(self.images[i], 2)
        y, x = np.random.randint(0, 5, 2)
        image = image[y : y + 8, x : x + 8] + 0.1 * np.random.randn(8, 8)
        return torch.tensor(image, dtype=torch.float32).unsqueeze(0), int(self.labels[i])


def seed_worker(worker):
    np.random.seed(get_worker_info().seed % 2**32)


def main():
    torch.manual_seed(61)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(512, 10),
    )
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    loader = DataLoader(Augmented(), batch_size=64, shuffle=True, drop_last=True, num_workers=2, worker_init_fn=seed_worker)
    for epoch in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch + 1}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
