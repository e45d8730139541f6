"""torchrun --nproc-per-node 2: instruction tuning with answers of uneven lengths, averaged over the tokens of all ranks."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import GPT2Config, GPT2LMHeadModel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(19)
model = DDP(GPT2LMHeadModel(GPT2Config(
    vocab_size=48, n_positions=32, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    use_cache=False, bos_token_id=1, eos_token_id=2,
)).train())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
generator = torch.Generator().manual_seed(700 + rank)


def batch(n=8):
    ids, labels = torch.zeros(n, 20, dtype=torch.long), torch.full((n, 20), -100)
    for i in range(n):
        key = int(torch.randint(3, 20, (), generator=generator))
        length = int(torch.randint(1, 8 if rank else 17, (), generator=generator))
        ids[i, :2] = torch.tensor([key, 1])
        ids[i, 2 : 2 + length] = key + 20
        ids[i, 2 + length] = 2
        labels[i, 2 : 3 + length] = ids[i, 2 : 3 + length]
    return ids, labels


for step in range(30):
    ids, labels = batch()
    logits = model(input_ids=ids).logits[:, :-1]
    total = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    n_tokens = (labels[:, 1:] != -100).sum()
    dist.all_reduce(n_tokens)
    loss = total * world / n_tokens
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if rank == 0 and step % 10 == 9:
        print(step + 1, round(loss.item(), 4), flush=True)
dist.destroy_process_group()
