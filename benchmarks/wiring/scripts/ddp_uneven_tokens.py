import random

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group(backend="gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
rng = random.Random(1000 + rank)


def make_batch(n=8):
    rows = []
    for _ in range(n):
        a, length = rng.randrange(2, 18), rng.randint(2, 20)
        rows.append([a, 18] + [2 + (a + 3 * k) % 16 for k in range(length)] + [1])
    width = max(map(len, rows))
    ids = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    labels = ids.masked_fill(ids == 0, -100)
    labels[:, :2] = -100
    return ids, (ids != 0).long(), labels


config = LlamaConfig(
    vocab_size=20, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=32, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=1,
)
model = DistributedDataParallel(LlamaForCausalLM(config).train())
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)

for step in range(35):
    ids, mask, labels = make_batch()
    n_tokens = (labels[:, 1:] != -100).sum()
    dist.all_reduce(n_tokens)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss_sum = cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="sum")
    loss = loss_sum * world / n_tokens
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    shown = loss.detach() / world
    dist.all_reduce(shown)
    if rank == 0 and step % 7 == 6:
        print(f"step {step + 1}: {shown.item():.4f}", flush=True)
dist.destroy_process_group()
