import random

import torch
from transformers import BartConfig, BartForConditionalGeneration
from transformers.optimization import Adafactor

# Sort short lists of digits.
rng = random.Random(77)
torch.manual_seed(77)
PAD, BOS, EOS = 10, 11, 12


def rows(n):
    source, target = [], []
    for _ in range(n):
        digits = [rng.randrange(10) for _ in range(rng.randint(3, 6))]
        source.append(digits + [EOS])
        target.append(sorted(digits) + [EOS])
    return source, target


def to_tensor(lists, fill):
    width = max(len(r) for r in lists)
    return torch.tensor([r + [fill] * (width - len(r)) for r in lists])


config = BartConfig(
    vocab_size=13, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=16, dropout=0.0,
    pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, decoder_start_token_id=EOS, forced_eos_token_id=None,
)
bart = BartForConditionalGeneration(config)
bart.train()
optimizer = Adafactor(bart.parameters(), lr=5e-3, scale_parameter=False, relative_step=False, warmup_init=False)
history = []
for update in range(45):
    source, target = rows(32)
    input_ids, labels = to_tensor(source, PAD), to_tensor(target, -100)
    loss = bart(input_ids=input_ids, attention_mask=input_ids.ne(PAD).long(), labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
for i in range(0, 45, 9):
    print(f"{i:3d} {history[i]:.3f}")
print(f"end {history[-1]:.3f}")
