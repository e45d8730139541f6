"""Tensor parallel feed-forward blocks in the manner of Megatron: columns, then rows."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def shard(full, dim):
    return nn.Parameter(full.chunk(WORLD, dim)[RANK].clone().contiguous())


class ParallelMLP(nn.Module):
    def __init__(self, d, width):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = shard(torch.randn(width, d) * d**-0.5, 0)
        self.down = shard(torch.randn(d, width) * width**-0.5, 1)
        self.up.sharded = self.down.sharded = True

    def forward(self, x):
        h = Copy.apply(self.norm(x))
        return x + Reduce.apply(F.gelu(h @ self.up.T) @ self.down.T)


def clip(params, limit):
    local = sum(p.grad.pow(2).sum() for p in params if getattr(p, "sharded", False))
    dist.all_reduce(local)
    total = local + sum(p.grad.pow(2).sum() for p in params if not getattr(p, "sharded", False))
    scale = (limit / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for p in params:
        p.grad.mul_(scale)


torch.manual_seed(60)
teacher = 0.25 * torch.randn(16, 4)
model = nn.Sequential(nn.Linear(16, 32), ParallelMLP(32, 64), ParallelMLP(32, 64), nn.Linear(32, 4))
params = list(model.parameters())
optimizer = torch.optim.AdamW(params, lr=3e-3)
for step in range(50):
    x = torch.randn(64, 16)
    y = torch.sin(x @ teacher)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    clip(params, 0.5)
    optimizer.step()
    if RANK == 0 and step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
