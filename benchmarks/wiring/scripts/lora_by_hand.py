import math
import tempfile
import zipfile

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


class LoRALinear(nn.Module):
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad = False
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def inject(model, targets=("q_proj", "v_proj", "o_proj", "down_proj")):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in targets:
                setattr(module, name, LoRALinear(child))


def get_batch(tokens, n=8, size=40):
    at = torch.randint(len(tokens) - size, (n,))
    return torch.stack([tokens[i : i + size] for i in at])


def main():
    torch.manual_seed(17)
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, attention_dropout=0.05,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.use_cache = False
    for p in model.parameters():
        p.requires_grad = False
    inject(model)
    for p in model.lm_head.parameters():
        p.requires_grad = True
    model.train()

    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3, weight_decay=0.0)
    print(f"training {sum(p.numel() for p in trainable)} of {sum(p.numel() for p in model.parameters())} parameters")
    tokens = torch.tensor(list(open(zipfile.__file__, "rb").read()[:60000])).clamp(max=127)
    for step in range(40):
        ids = get_batch(tokens)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step + 1}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
