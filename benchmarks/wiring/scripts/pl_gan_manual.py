"""Manual optimization: a GAN that learns a mixture on a line."""
import logging

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class LineGAN(L.LightningModule):
    def __init__(self, latent=4, width=32):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.discriminator = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.latent = latent
        self.history = []

    def training_step(self, real):
        g_opt, d_opt = self.optimizers()
        z = torch.randn(len(real), self.latent)

        self.toggle_optimizer(d_opt)
        fake = self.generator(z).detach()
        d_loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
        d_opt.zero_grad()
        self.manual_backward(d_loss)
        d_opt.step()
        self.untoggle_optimizer(d_opt)

        self.toggle_optimizer(g_opt)
        g_loss = F.softplus(-self.discriminator(self.generator(z))).mean()
        g_opt.zero_grad()
        self.manual_backward(g_loss)
        g_opt.step()
        self.untoggle_optimizer(g_opt)
        self.history.append((d_loss.item(), g_loss.item()))

    def configure_optimizers(self):
        g_opt = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
        d_opt = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))
        return [g_opt, d_opt]


L.seed_everything(3, verbose=False)
samples = torch.cat([torch.randn(1280, 1) * 0.3 - 1, torch.randn(1280, 1) * 0.3 + 2])
gan = LineGAN()
trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
)
trainer.fit(gan, DataLoader(samples, batch_size=64, shuffle=True))
print("discriminator, generator:", gan.history[0], "->", gan.history[-1])
