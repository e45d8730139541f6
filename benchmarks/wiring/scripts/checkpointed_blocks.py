import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self, d, h, p):
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.o = nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.h, self.drop = h, nn.Dropout(p)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.drop(self.o(a))
        return x + self.drop(self.down(F.silu(self.up(self.n2(x)))))


class LM(nn.Module):
    def __init__(self, vocab, d=64, h=4, depth=3, length=48):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(length, d)
        self.layers = nn.ModuleList([Layer(d, h, 0.1) for _ in range(depth)])
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


def counting_sequences(n, length):
    start = torch.randint(0, 40, (n, 1))
    step = torch.randint(1, 6, (n, 1))
    return (start + step * torch.arange(length)) % 40


torch.manual_seed(4)
lm = LM(40)
optimizer = torch.optim.AdamW(lm.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=45)
for step in range(45):
    seq = counting_sequences(16, 33)
    logits = lm(seq[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, 40), seq[:, 1:].reshape(-1))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 15 == 14:
        print(f"{step + 1} loss {loss.item():.4f}")
