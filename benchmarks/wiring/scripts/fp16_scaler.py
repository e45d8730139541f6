import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(6)
device_type = "cpu"


class TinyTransformer(nn.Module):
    def __init__(self, vocab=32, dim=64, heads=4, layers=2, max_len=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(max_len, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, x):
        T = x.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(T)
        h = self.embed(x) + self.position(torch.arange(T))
        return self.head(self.norm(self.layers(h, mask=mask, is_causal=True)))


def sequences(n, length):
    """Each next token is the sum of the two before, modulo 32, or noise."""
    s = torch.randint(0, 32, (n, length))
    for t in range(2, length):
        s[:, t] = torch.where(torch.rand(n) < 0.95, (s[:, t - 1] // 4 + s[:, t - 2] // 8) % 32, s[:, t])
    return s


model = TinyTransformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device_type, init_scale=2.0**14)
losses = []
for step in range(45):
    batch = sequences(16, 25)
    with torch.autocast(device_type, dtype=torch.float16):
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
print("first", sum(losses[:5]) / 5, "last", sum(losses[-5:]) / 5, "scale", scaler.get_scale())
