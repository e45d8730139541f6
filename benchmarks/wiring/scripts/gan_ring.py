import math

import torch
import torch.nn as nn

torch.manual_seed(8)
nz, batch_size = 8, 128


def real_points(n):
    angle = 2 * math.pi * torch.rand(n)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.02 * torch.randn(n, 2)


def mlp(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, n_out))


netG, netD = mlp(nz, 2), mlp(2, 1)
bce = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))

for it in range(60):
    # update D
    netD.zero_grad()
    real = real_points(batch_size)
    noise = torch.randn(batch_size, nz)
    fake = netG(noise)
    errD_real = bce(netD(real).squeeze(1), torch.ones(batch_size))
    errD_fake = bce(netD(fake.detach()).squeeze(1), torch.zeros(batch_size))
    errD = errD_real + errD_fake
    errD.backward()
    optimizerD.step()
    # update G
    netG.zero_grad()
    errG = bce(netD(fake).squeeze(1), torch.ones(batch_size))
    errG.backward()
    optimizerG.step()
    if it % 10 == 0:
        print(f"[{it}/60] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f}")
print(f"Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f}")
