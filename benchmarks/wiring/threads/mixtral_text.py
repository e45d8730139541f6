import shlex

import torch
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(15)
config = MixtralConfig(
    vocab_size=128, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64, router_aux_loss_coef=0.02,
    output_router_logits=True, use_cache=False, bos_token_id=1, eos_token_id=2,
)
model = MixtralForCausalLM(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = torch.tensor(list(open(shlex.__file__, "rb").read())).clamp(max=127)
for step in range(30):
    at = torch.randint(len(text) - 48, (8,)).tolist()
    ids = torch.stack([text[i : i + 48] for i in at])
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.3f}")
