import typing

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import OPTConfig, OPTForCausalLM, get_linear_schedule_with_warmup

CFG = dict(context=40, batch=8, accumulate=2, updates=30, peak=3e-3, warmup=4, clip=1.0)


class Spans(IterableDataset):
    def __init__(self, module, size, seed=0):
        self.tokens = torch.tensor([min(b, 127) for b in open(module.__file__, "rb").read()])
        self.size, self.seed = size, seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        while True:
            i = int(torch.randint(len(self.tokens) - self.size, (), generator=g))
            yield self.tokens[i : i + self.size]


torch.manual_seed(10)
model = OPTForCausalLM(OPTConfig(
    vocab_size=128, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, dropout=0.1, word_embed_proj_dim=64, pad_token_id=1, use_cache=False,
))
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=CFG["peak"], betas=(0.9, 0.95), weight_decay=0.1)
scheduler = get_linear_schedule_with_warmup(optimizer, CFG["warmup"], CFG["updates"])
batches = iter(DataLoader(Spans(typing, CFG["context"]), batch_size=CFG["batch"]))

for update in range(CFG["updates"]):
    running = 0.0
    for _ in range(CFG["accumulate"]):
        ids = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        (loss / CFG["accumulate"]).backward()
        running += loss.item() / CFG["accumulate"]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CFG["clip"])
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if update % 6 == 5:
        print(f"update {update + 1} loss {running:.3f} grad norm {norm.item():.2f}")
