"""Teach a small T5 to reverse strings of letters."""
import random
import string

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import T5Config, T5ForConditionalGeneration

PAD, EOS, OFFSET = 0, 1, 2


class Reversals(Dataset):
    def __init__(self, size, seed):
        rng = random.Random(seed)
        self.words = ["".join(rng.choices(string.ascii_lowercase[:12], k=rng.randint(2, 6))) for _ in range(size)]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        word = [ord(c) - 97 + OFFSET for c in self.words[i]]
        return word + [EOS], word[::-1] + [EOS]


def pad(rows, value):
    longest = max(len(r) for r in rows)
    return torch.tensor([r + [value] * (longest - len(r)) for r in rows])


def collate(items):
    sources, targets = zip(*items)
    input_ids = pad(sources, PAD)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != PAD).long(),
        "labels": pad(targets, -100),
    }


if __name__ == "__main__":
    torch.manual_seed(7)
    config = T5Config(
        vocab_size=OFFSET + 12, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=EOS,
    )
    model = T5ForConditionalGeneration(config)
    model.train()
    loader = DataLoader(Reversals(1600, 7), batch_size=32, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=len(loader), pct_start=0.2)
    for i, batch in enumerate(loader):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if i % 10 == 0:
            print(f"batch {i}/{len(loader)} loss {loss.item():.3f}")
    print(f"loss {loss.item():.3f}")
