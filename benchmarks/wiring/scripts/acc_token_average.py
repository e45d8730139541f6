"""Accumulation with answers of uneven lengths, loss averaged over all tokens of the update."""
import random
from itertools import islice

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import MistralConfig, MistralForCausalLM

random.seed(21)
torch.manual_seed(21)
ACCUMULATION = 4
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)


def conversation():
    letter = random.randrange(3, 20)
    count = random.randint(1, 10)
    return [letter, 20 + count, 1], [letter] * count + [2]


def loader(batch_size):
    while True:
        rows = [conversation() for _ in range(batch_size)]
        width = max(len(q) + len(a) for q, a in rows)
        ids = torch.zeros(batch_size, width, dtype=torch.long)
        labels = torch.full((batch_size, width), -100)
        for i, (q, a) in enumerate(rows):
            ids[i, : len(q) + len(a)] = torch.tensor(q + a)
            labels[i, len(q) : len(q) + len(a)] = torch.tensor(a)
        yield {"input_ids": ids, "attention_mask": (ids != 0).long()}, labels


model = MistralForCausalLM(MistralConfig(
    vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=32, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
))
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
model, optimizer = accelerator.prepare(model, optimizer)
stream = loader(4)

for update in range(30):
    group = list(islice(stream, ACCUMULATION))
    tokens = sum(int((labels[:, 1:] != -100).sum()) for _, labels in group)
    reported = 0.0
    for inputs, labels in group:
        with accelerator.accumulate(model):
            logits = model(**inputs).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / tokens
            reported += loss.item()
            accelerator.backward(loss * ACCUMULATION)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if update % 6 == 5:
        accelerator.print(f"update {update + 1} loss {reported:.4f}")
