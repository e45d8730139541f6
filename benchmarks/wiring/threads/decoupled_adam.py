"""An Adam of one's own, in the manner of fused optimizers, on a network with a transposed weight."""
import statistics

import torch
import torch.nn.functional as F
from torch import nn


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, use_decoupled_grad=False):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))
        self.use_decoupled_grad = use_decoupled_grad

    def gradient_of(self, p):
        return getattr(p, "decoupled_grad", None) if self.use_decoupled_grad else p.grad

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                g = self.gradient_of(p)
                if g is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].lerp_(g, 1 - b1)
                state["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
                rate = group["lr"] / (1 - b1 ** state["step"])
                scale = (state["exp_avg_sq"] / (1 - b2 ** state["step"])).sqrt_().add_(group["eps"])
                p.addcdiv_(state["exp_avg"], scale, value=-rate)


class NextByte(nn.Module):
    def __init__(self, vocab=128, window=12, dim=24, width=96):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.encoder = nn.Parameter((torch.randn(window * dim, width) * (window * dim) ** -0.5).t())
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, x):
        return self.head(F.gelu(self.norm(F.linear(self.embed(x).flatten(1), self.encoder))))


torch.manual_seed(44)
text = torch.tensor(list(open(statistics.__file__, "rb").read().decode().encode("ascii", "ignore")))
net = NextByte()
opt = FusedAdam(net.parameters(), lr=3e-3)
for step in range(50):
    at = torch.randint(len(text) - 13, (64,))
    loss = F.cross_entropy(net(torch.stack([text[j : j + 12] for j in at])), text[at + 12])
    loss.backward()
    opt.step()
    opt.zero_grad()
    if step % 10 == 9:
        print(step + 1, round(loss.item(), 3))
