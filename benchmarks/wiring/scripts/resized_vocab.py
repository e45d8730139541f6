import csv
import tempfile

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

torch.manual_seed(101)

# a "pretrained" base with 96 printable characters
base_dir = tempfile.mkdtemp()
base = GPT2LMHeadModel(GPT2Config(
    vocab_size=96, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
    tie_word_embeddings=True, use_cache=False,
))
base.save_pretrained(base_dir)

# two more tokens: newline and tab
model = AutoModelForCausalLM.from_pretrained(base_dir)
model.resize_token_embeddings(98)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)


def tokenize(text):
    special = {"\n": 96, "\t": 97}
    return [special.get(c, ord(c) - 32) for c in text if c in special or 32 <= ord(c) < 128]


stream = torch.tensor(tokenize(open(csv.__file__).read()))
losses = []
for step in range(40):
    starts = torch.randint(0, len(stream) - 48, (8,)).tolist()
    input_ids = torch.stack([stream[s : s + 48] for s in starts])
    out = model(input_ids=input_ids, labels=input_ids)
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(out.loss.item())
print("loss", " ".join(f"{v:.2f}" for v in losses[::8]), f"-> {losses[-1]:.2f}")
