# data parallel without a wrapper: broadcast at the start, average gradients by hand
import torch
import torch.distributed as dist
import torch.nn as nn

dist.init_process_group("gloo")
rank = dist.get_rank()
size = dist.get_world_size()
torch.manual_seed(rank)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 40, batch_first=True)
        self.norm = nn.LayerNorm(40)
        self.out = nn.Linear(40, 3)

    def forward(self, x):
        h, _ = self.gru(x)
        return self.out(self.norm(h))


def broadcast_parameters(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= size


def trajectories(n, length=24):
    """Damped pendulums in three dimensions."""
    omega = 0.2 + 0.3 * torch.rand(n, 1, 3)
    phase = 6.28 * torch.rand(n, 1, 3)
    t = torch.arange(length + 1).view(1, -1, 1)
    return torch.exp(-0.01 * t) * torch.sin(omega * t + phase)


model = Net()
broadcast_parameters(model)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(50):
    batch = trajectories(32)
    loss = nn.functional.mse_loss(model(batch[:, :-1]), batch[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    average_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if rank == 0 and step % 10 == 9:
        print(step + 1, round(loss.item(), 5), flush=True)
dist.destroy_process_group()
