import ast
import pathlib

import torch
from transformers import MixtralConfig, MixtralForCausalLM, get_scheduler

torch.manual_seed(42)
CONTEXT = 48
TOTAL = 40

corpus = torch.frombuffer(bytearray(pathlib.Path(ast.__file__).read_bytes()), dtype=torch.uint8).long().clamp(max=127)

config = MixtralConfig(
    vocab_size=128,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=128,
    output_router_logits=True,
    router_aux_loss_coef=0.02,
    use_cache=False,
)
model = MixtralForCausalLM(config)
model.train()

no_decay = ("norm", "bias")
groups = [
    {"params": [p for n, p in model.named_parameters() if not any(k in n for k in no_decay)], "weight_decay": 0.1},
    {"params": [p for n, p in model.named_parameters() if any(k in n for k in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=3e-3)
lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=4, num_training_steps=TOTAL)

for step in range(TOTAL):
    starts = torch.randint(0, len(corpus) - CONTEXT, (8,))
    input_ids = torch.stack([corpus[s : s + CONTEXT] for s in starts])
    outputs = model(input_ids=input_ids, labels=input_ids)
    outputs.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    lr_scheduler.step()
    optimizer.zero_grad()
    if step % 8 == 0:
        print(f"step {step:3d}  loss {outputs.loss.item():.3f}  lr {lr_scheduler.get_last_lr()[0]:.2e}")
print(f"loss at the end {outputs.loss.item():.3f}")
