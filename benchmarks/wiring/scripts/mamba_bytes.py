import json.encoder
from itertools import islice

import torch
from transformers import MambaConfig, MambaForCausalLM

settings = {"seed": 5, "updates": 35, "batch": 8, "window": 32, "lr": 5e-3}


def windows(path, size, batch, seed):
    rng = torch.Generator().manual_seed(seed)
    raw = list(open(path, "rb").read())
    tokens = torch.tensor([b if b < 128 else 63 for b in raw])
    while True:
        offsets = torch.randint(len(tokens) - size, (batch,), generator=rng)
        yield torch.stack([tokens[o : o + size] for o in offsets.tolist()])


torch.manual_seed(settings["seed"])
model = MambaForCausalLM(
    MambaConfig(vocab_size=128, hidden_size=48, state_size=8, num_hidden_layers=2, pad_token_id=0, use_cache=False)
)
model.train()
optim = torch.optim.AdamW(model.parameters(), lr=settings["lr"], weight_decay=0.0)

source = windows(json.encoder.__file__, settings["window"], settings["batch"], settings["seed"])
for n, x in enumerate(islice(source, settings["updates"])):
    loss = model(input_ids=x, labels=x)["loss"]
    optim.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    if n % 5 == 0:
        print(f"[{n}] {loss.item():.4f}")
print(f"[end] {loss.item():.4f}")
