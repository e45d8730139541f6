import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class DigitsData(L.LightningDataModule):
    def setup(self, stage=None):
        x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
        self.train, self.val = x[:1500], x[1500:]

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=100, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=297)


class VAE(L.LightningModule):
    def __init__(self, latent=6, beta=0.5):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.mu, self.logvar = nn.Linear(64, latent), nn.Linear(64, latent)
        self.dec = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64))
        self.beta = beta

    def elbo(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar) if self.training else mu
        reconstruction = F.binary_cross_entropy_with_logits(self.dec(z), x, reduction="none").sum(1)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
        return (reconstruction + self.beta * kl).mean()

    def training_step(self, x, batch_idx):
        loss = self.elbo(x)
        self.log("train", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, x, batch_idx):
        self.log("val", self.elbo(x))

    def on_validation_epoch_end(self):
        print({k: round(float(v), 3) for k, v in self.trainer.callback_metrics.items()})

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


L.seed_everything(4, verbose=False)
trainer = L.Trainer(
    max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, num_sanity_val_steps=0,
)
trainer.fit(VAE(), datamodule=DigitsData())
