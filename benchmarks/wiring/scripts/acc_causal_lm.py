import argparse
import heapq
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPTNeoConfig, GPTNeoForCausalLM, get_scheduler


def parse_args():
    parser = argparse.ArgumentParser(description="Train a small causal language model")
    parser.add_argument("--block_size", type=int, default=32)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    parser.add_argument("--num_warmup_steps", type=int, default=4)
    parser.add_argument("--max_train_steps", type=int, default=35)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    raw = open(heapq.__file__, "rb").read() + open(os.__file__, "rb").read()
    ids = torch.tensor([b % 128 for b in raw])
    blocks = ids[: len(ids) // args.block_size * args.block_size].view(-1, args.block_size)
    train_dataloader = DataLoader(
        [{"input_ids": b, "labels": b.clone()} for b in blocks], shuffle=True, drop_last=True,
        batch_size=args.per_device_train_batch_size,
    )
    model = GPTNeoForCausalLM(GPTNeoConfig(
        vocab_size=128, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=0, use_cache=False,
    ))
    no_decay = ["bias", "ln_"]
    grouped = [
        {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.05},
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(grouped, lr=args.learning_rate)
    lr_scheduler = get_scheduler(
        "linear", optimizer, num_warmup_steps=args.num_warmup_steps, num_training_steps=args.max_train_steps
    )
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)

    model.train()
    completed_steps = 0
    for batch in train_dataloader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            completed_steps += 1
            if completed_steps % 7 == 0:
                accelerator.print(f"{completed_steps}: {loss.item():.3f} lr {lr_scheduler.get_last_lr()[0]:.2e}")
        if completed_steps >= args.max_train_steps:
            break


if __name__ == "__main__":
    main()
