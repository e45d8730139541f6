"""Short documents packed into rows, with a block-diagonal mask and positions that begin anew."""
import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROW, DOC_END = 64, 1


def documents(rng):
    while True:
        word = [rng.randrange(2, 34) for _ in range(rng.randint(2, 4))]
        yield (word * 8)[: rng.randint(8, 24)] + [DOC_END]


def pack(docs):
    tokens, doc_ids, positions = [], [], []
    number = 0
    while len(tokens) < ROW:
        doc = next(docs)
        tokens += doc
        doc_ids += [number] * len(doc)
        positions += range(len(doc))
        number += 1
    return tokens[:ROW], doc_ids[:ROW], positions[:ROW]


def batch(docs, rows):
    tokens, doc_ids, positions = (torch.tensor(t) for t in zip(*[pack(docs) for _ in range(rows)]))
    same_doc = doc_ids[:, :, None] == doc_ids[:, None, :]
    allowed = same_doc & torch.ones(ROW, ROW, dtype=torch.bool).tril()
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]
    labels = tokens.clone()
    labels[positions == 0] = -100
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, "labels": labels}


torch.manual_seed(0)
docs = documents(random.Random(0))
config = LlamaConfig(
    vocab_size=34, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=ROW, attn_implementation="eager", use_cache=False,
)
model = LlamaForCausalLM(config)
model.train()
opt = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
for step in range(45):
    opt.zero_grad()
    loss = model(**batch(docs, 8)).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 9 == 0:
        print("step", step, "loss", round(loss.item(), 3))
print("final", round(loss.item(), 3))
