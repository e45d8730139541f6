"""torchrun --nproc-per-node 2 ddp_decoder.py"""
import locale
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Source(Dataset):
    def __init__(self, length=33):
        data = torch.tensor(list(open(locale.__file__, "rb").read()[:40000])) % 128
        self.rows = data[: len(data) // length * length].view(-1, length)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Decoder(nn.Module):
    def __init__(self, vocab=128, d=48, heads=4, depth=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(32, d)
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(d), enable_nested_tensor=False)
        self.head = nn.Linear(d, vocab)

    def forward(self, idx):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1))
        return self.head(self.blocks(self.wte(idx) + self.wpe.weight[: idx.size(1)], mask=mask, is_causal=True))


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(100 + rank)
    dataset = Source()
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)
    model = DDP(Decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5))
    step = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for rows in loader:
            logits = model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            step += 1
            if step == 40:
                break
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.3f}", flush=True)
        if step == 40:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
