import argparse

import torch
import torch.nn.functional as F
from torch import nn
from transformers import CLIPConfig, CLIPModel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch", type=int, default=24)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=9)
args = parser.parse_args()
torch.manual_seed(args.seed)

SHADES, PLACES, BOS, EOS = 6, 9, 1, 39


def captioned_images(n):
    """A square of some shade in one of nine places; the caption names both."""
    combos = torch.randperm(SHADES * PLACES)[:n]
    shade, place = combos // PLACES, combos % PLACES
    img = 0.05 * torch.randn(n, 3, 24, 24)
    for i in range(n):
        y, x = 8 * (place[i] // 3), 8 * (place[i] % 3)
        img[i, shade[i] % 3, y : y + 8, x : x + 8] += 1.0 if shade[i] < 3 else -1.0
    text = torch.stack([torch.full((n,), BOS), 10 + shade, 20 + place, torch.full((n,), EOS)], dim=1)
    return img, text


small = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
model = CLIPModel(CLIPConfig(
    text_config=dict(vocab_size=40, max_position_embeddings=8, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=0, **small),
    vision_config=dict(image_size=24, patch_size=8, **small),
    projection_dim=32,
))
model.train()
decay = [p for n, p in model.named_parameters() if p.ndim >= 2]
plain = [p for n, p in model.named_parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0}], lr=args.lr)
for step in range(args.steps):
    images, captions = captioned_images(args.batch)
    out = model(input_ids=captions, pixel_values=images)
    labels = torch.arange(args.batch)
    loss = (F.cross_entropy(out.logits_per_image, labels) + F.cross_entropy(out.logits_per_text, labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, 4.6)
    if step % 6 == 5:
        print(f"{step + 1:3d}/{args.steps} loss {loss.item():.4f}")
