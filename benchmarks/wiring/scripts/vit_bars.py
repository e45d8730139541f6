import torch
from torch import nn

torch.manual_seed(0)


def images(n):
    """Noisy pictures with one bright bar; the class is where the bar lies (4 rows or 4 columns)."""
    x = 0.3 * torch.randn(n, 1, 16, 16)
    y = torch.randint(0, 8, (n,))
    for i, k in enumerate(y.tolist()):
        if k < 4:
            x[i, 0, 4 * k : 4 * k + 2, :] += 1.5
        else:
            x[i, 0, :, 4 * (k - 4) : 4 * (k - 4) + 2] += 1.5
    return x, y


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        keep = torch.rand(x.shape[0], 1, 1) >= self.p
        return x * keep / (1 - self.p)


class EncoderBlock(nn.Module):
    def __init__(self, dim, heads, drop):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.drop = DropPath(drop)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.drop(self.attn(h, h, h, need_weights=False)[0])
        return x + self.drop(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, dim=48, depth=3, classes=8, patch=4):
        super().__init__()
        self.embed = nn.Conv2d(1, dim, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 17, dim))
        self.blocks = nn.Sequential(*[EncoderBlock(dim, 4, 0.1 * i / depth) for i in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, img):
        x = self.embed(img).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])


model = ViT()
criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
x_val, y_val = images(128)
for epoch in range(3):
    model.train()
    for _ in range(15):
        x, y = images(32)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x_val).argmax(1) == y_val).float().mean().item()
    print(f"epoch {epoch}: loss {loss.item():.3f}, val accuracy {accuracy:.2f}")
