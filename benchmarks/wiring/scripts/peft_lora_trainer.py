import string
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(8)
folder = tempfile.mkdtemp()
Qwen2ForCausalLM(Qwen2Config(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, tie_word_embeddings=False, attention_dropout=0.05,
)).save_pretrained(folder)

model = AutoModelForCausalLM.from_pretrained(folder, use_cache=False)
lora = LoraConfig(
    r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj", "gate_proj"],
    modules_to_save=["lm_head"], task_type="CAUSAL_LM",
)
model = get_peft_model(model, lora)
model.print_trainable_parameters()
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3, weight_decay=0.0)

text = torch.tensor(list(open(string.__file__, "rb").read())) % 128
for step in range(40):
    starts = torch.randint(0, len(text) - 40, (8,))
    ids = torch.stack([text[s : s + 40] for s in starts])
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(step + 1, round(loss.item(), 4))
