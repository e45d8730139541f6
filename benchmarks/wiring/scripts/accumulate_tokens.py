"""Instruction tuning of a small GPT-NeoX: loss on answers alone, micro-batches with uneven numbers of tokens."""
import random

import torch
import torch.nn.functional as F
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

random.seed(9)
torch.manual_seed(9)
PAD, SEP, END = 0, 1, 2


def example():
    key = random.randrange(3, 20)
    prompt = [random.randrange(3, 20) for _ in range(random.randint(1, 6))] + [key, SEP]
    answer = [key + 17] * random.randint(1, 12) + [END]
    return prompt, answer


def make_micro_batch(n):
    rows = [example() for _ in range(n)]
    width = max(len(p) + len(a) for p, a in rows)
    ids = torch.full((n, width), PAD)
    labels = torch.full((n, width), -100)
    mask = torch.zeros(n, width, dtype=torch.long)
    for i, (p, a) in enumerate(rows):
        size = len(p) + len(a)
        ids[i, :size] = torch.tensor(p + a)
        labels[i, len(p) : size] = torch.tensor(a)
        mask[i, :size] = 1
    return ids, mask, labels


config = GPTNeoXConfig(
    vocab_size=40, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=32, hidden_dropout=0.0, attention_dropout=0.0, use_cache=False, eos_token_id=END, bos_token_id=SEP,
)
model = GPTNeoXForCausalLM(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

for update in range(30):
    micro_batches = [make_micro_batch(4) for _ in range(4)]
    n_tokens = sum((labels[:, 1:] != -100).sum() for _, _, labels in micro_batches)
    total = 0.0
    for ids, mask, labels in micro_batches:
        logits = model(input_ids=ids, attention_mask=mask).logits
        summed = F.cross_entropy(
            logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
        )
        loss = summed / n_tokens
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if update % 5 == 4:
        print(f"update {update + 1}: {total:.4f}")
