import tempfile

import torch
import torch.nn as nn
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

N_FEATURES, STOP = 24, 25


def make_parts(accelerator):
    g = torch.Generator().manual_seed(2)
    x = torch.randn(1600, N_FEATURES, generator=g)
    w = torch.randn(N_FEATURES, 1, generator=g)
    y = torch.tanh(x @ w) + 0.05 * torch.randn(1600, 1, generator=g)
    model = nn.Sequential(nn.Linear(N_FEATURES, 48), nn.SiLU(), nn.Linear(48, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.05, total_iters=50)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=False)
    return accelerator.prepare(model, optimizer, scheduler, loader)


def train(accelerator, model, optimizer, scheduler, batches, start):
    model.train()
    for step, (x, y) in enumerate(batches, start=start):
        if step == STOP and start == 0:
            break
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 8 == 0:
            accelerator.print(f"{step:2d} {loss.item():.4f} {scheduler.get_last_lr()[0]:.4f}")
    return loss.item()


accelerator = Accelerator(cpu=True)
set_seed(14)
model, optimizer, scheduler, loader = make_parts(accelerator)
train(accelerator, model, optimizer, scheduler, loader, 0)
folder = tempfile.mkdtemp()
accelerator.save_state(folder)
accelerator.free_memory()

model, optimizer, scheduler, loader = make_parts(accelerator)
accelerator.load_state(folder)
remaining = skip_first_batches(loader, STOP)
print("final", round(train(accelerator, model, optimizer, scheduler, remaining, STOP), 4))
