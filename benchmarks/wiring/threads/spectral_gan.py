"""A small adversarial training whose judge has spectral norms; it is looked at before the first update."""
import torch
from torch import nn

torch.manual_seed(27)


class SpectralLinear(nn.Linear):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out)
        self.register_buffer("u", torch.zeros(n_out))
        self.register_buffer("v", torch.zeros(n_in))
        self.u.normal_(0, 1)
        self.iterate(15)

    @torch.no_grad()
    def iterate(self, n):
        for _ in range(n):
            self.v.copy_(nn.functional.normalize(self.weight.t() @ self.u, dim=0, eps=1e-12))
            self.u.copy_(nn.functional.normalize(self.weight @ self.v, dim=0, eps=1e-12))

    def forward(self, x):
        if self.training:
            self.iterate(1)
        u, v = self.u.clone(), self.v.clone()
        sigma = torch.dot(u, self.weight @ v) + 1e-12
        return nn.functional.linear(x, self.weight / sigma, self.bias)


def real(n):
    corner = torch.randint(0, 2, (n, 2)).float() * 2 - 1
    return corner + 0.1 * torch.randn(n, 2)


maker = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
judge = nn.Sequential(SpectralLinear(2, 48), nn.LeakyReLU(0.1), SpectralLinear(48, 48), nn.LeakyReLU(0.1), SpectralLinear(48, 1))
judge.eval()
with torch.no_grad():
    print(f"scores before training {judge(real(200)).std().item():.3g}")
judge.train()
opt_j = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.0, 0.9))
opt_m = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.0, 0.9))
for step in range(50):
    fake = maker(torch.randn(96, 6))
    loss_j = (1 - judge(real(96))).relu().mean() + (1 + judge(fake.detach())).relu().mean()
    opt_j.zero_grad()
    loss_j.backward()
    opt_j.step()
    loss_m = -judge(fake).mean()
    opt_m.zero_grad()
    loss_m.backward()
    opt_m.step()
    if step % 10 == 9:
        print(f"{step + 1} judge {loss_j.item():.3f} maker {loss_m.item():.3f}")
