import torch
from torch import nn

torch.manual_seed(12)
basis = torch.randn(6, 64)
signals = torch.randn(1024, 6) @ basis / 6**0.5


class Encoder(nn.Module):
    def __init__(self, width=64, code=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, code))

    def forward(self, x):
        return self.layers(x)


class Decoder(nn.Module):
    def __init__(self, width=64, code=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(code, width), nn.SiLU(), nn.Linear(width, 64))

    def forward(self, z):
        return self.layers(z)


encoder, decoder = Encoder(), Decoder()
optimizer = torch.optim.Adam(list(encoder.parameters()) + list(decoder.parameters()), lr=5e-3)
mse = nn.MSELoss()

for epoch in range(3):
    order = torch.randperm(len(signals))
    for rows in order.split(64):
        clean = signals[rows]
        noisy = clean + 0.1 * torch.randn_like(clean)
        code = encoder(noisy)
        restored = decoder(code)
        loss = mse(restored, clean)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch} reconstruction {loss.item():.4f}")
