import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(33)


class FeedForward(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.w_in = nn.Linear(d, 4 * d)
        self.w_out = nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.w_out(F.gelu(self.w_in(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, d=64, depth=3, classes=6):
        super().__init__()
        self.embed = nn.Linear(12, d)
        self.blocks = nn.ModuleList(FeedForward(d) for _ in range(depth))
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


centers = 0.9 * torch.randn(6, 12)
model = Classifier()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

torch.manual_seed(500 + rank)
micro_batches = 2
for update in range(40):
    for i in range(micro_batches):
        model.set_requires_gradient_sync(i == micro_batches - 1)
        label = torch.randint(0, 6, (32,))
        points = centers[label] + 0.7 * torch.randn(32, 12)
        loss = F.cross_entropy(model(points).float(), label) / micro_batches
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and update % 10 == 9:
        print(f"{update + 1}: loss {micro_batches * loss.item():.4f}", flush=True)
dist.destroy_process_group()
