import pathlib
import shutil
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def corpus():
    raw = b"".join(p.read_bytes() for p in sorted(pathlib.Path(shutil.__file__).parent.glob("j*.py")))
    raw += pathlib.Path(shutil.__file__).read_bytes()
    return torch.tensor(list(raw)).clamp(max=127)


class Blocks(torch.utils.data.Dataset):
    def __init__(self, tokens, size=40):
        self.blocks = tokens[: len(tokens) // size * size].view(-1, size)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, i):
        return {"input_ids": self.blocks[i], "labels": self.blocks[i]}


def parameter_groups(model, weight_decay):
    decay, rest = [], []
    for name, p in model.named_parameters():
        (rest if p.ndim == 1 or "embed" in name else decay).append(p)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def main():
    set_seed(5)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    ))
    steps = 36
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=3e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps + 1, pct_start=0.15)
    args = TrainingArguments(
        tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=8, logging_steps=6, max_grad_norm=1.0,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, bf16=True,
        save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
    )
    Trainer(model=model, args=args, train_dataset=Blocks(corpus()), optimizers=(optimizer, scheduler)).train()


if __name__ == "__main__":
    main()
