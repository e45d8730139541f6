import os
import tempfile

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __init__(self, n=960):
        g = torch.Generator().manual_seed(10)
        self.freq = torch.randint(0, 5, (n,), generator=g)
        phase = 6.28 * torch.rand(n, 1, generator=g)
        t = torch.arange(48) / 48
        self.x = torch.sin(6.28 * (self.freq[:, None] + 1) * t + phase) + 0.2 * torch.randn(n, 48, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i].unsqueeze(0), self.freq[i]


class WaveClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, 16, 7, padding=3), nn.GELU(), nn.MaxPool1d(2), nn.Conv1d(16, 32, 7, padding=3), nn.GELU()
        )
        self.fc = nn.Linear(32, 5)
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.fc(self.conv(x).amax(-1)), y)
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        sched = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.8)
        return [opt], [sched]


def trainer(epochs):
    return L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )


L.seed_everything(20, verbose=False)
loader = DataLoader(Waves(), batch_size=64, shuffle=True)
first = trainer(2)
first.fit(WaveClassifier(), loader)
path = os.path.join(tempfile.mkdtemp(), "two_epochs.ckpt")
first.save_checkpoint(path)

model = WaveClassifier()
trainer(4).fit(model, loader, ckpt_path=path)
print(f"resumed: {model.seen[0]:.4f} -> {model.seen[-1]:.4f}")
