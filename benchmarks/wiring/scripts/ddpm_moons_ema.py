import copy
import math

import torch
import torch.nn as nn
from sklearn.datasets import make_moons

torch.manual_seed(1)
T = 50
betas = torch.linspace(1e-4, 0.2, T)
alpha_bar = torch.cumprod(1 - betas, 0)
points = torch.tensor(make_moons(2000, noise=0.05, random_state=0)[0], dtype=torch.float32)
points = (points - points.mean(0)) / points.std(0)


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU())
        self.inp = nn.Linear(2, width)
        self.mid = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        freqs = torch.exp(-math.log(1000) * torch.arange(8) / 8)
        angles = t[:, None].float() * freqs
        emb = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        return self.out(self.mid(self.inp(x) + emb))


@torch.no_grad()
def update_ema(ema, model, decay):
    for e, p in zip(ema.parameters(), model.parameters()):
        e.lerp_(p, 1 - decay)


@torch.no_grad()
def validation(model):
    g = torch.Generator().manual_seed(0)
    t = torch.randint(0, T, (512,), generator=g)
    eps = torch.randn(512, 2, generator=g)
    a = alpha_bar[t][:, None]
    return nn.functional.mse_loss(model(a.sqrt() * points[:512] + (1 - a).sqrt() * eps, t), eps).item()


model = Denoiser()
ema = copy.deepcopy(model).requires_grad_(False)
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(60):
    x0 = points[torch.randint(0, len(points), (256,))]
    t = torch.randint(0, T, (256,))
    eps = torch.randn_like(x0)
    a = alpha_bar[t][:, None]
    xt = a.sqrt() * x0 + (1 - a).sqrt() * eps
    loss = (model(xt, t) - eps).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    update_ema(ema, model, 0.9)
    if step % 15 == 14:
        print(f"{step + 1}: loss {loss.item():.4f} ema {validation(ema):.4f}")
