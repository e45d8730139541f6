import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(55)
device = torch.device("cpu")


def parity_batch(length, size):
    bits = torch.randint(0, 2, (size, length), device=device)
    return bits, bits.cumsum(1) % 2


class RunningParity(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.inp = nn.Embedding(2, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 2)

    def forward(self, bits):
        states, _ = self.gru(self.inp(bits))
        return self.out(states)


net = RunningParity().to(device)
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
stages = [(2, 15), (4, 15), (8, 15), (12, 15)]
for length, n_steps in stages:
    for _ in range(n_steps):
        batch_size = int(torch.randint(24, 65, ()))
        x, y = parity_batch(length, batch_size)
        logits = net(x)
        loss = F.cross_entropy(logits.transpose(1, 2), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
    accuracy = (logits.argmax(-1) == y).float().mean()
    print(f"length {length:2d}: loss {loss.item():.4f} accuracy {accuracy:.2f}")
