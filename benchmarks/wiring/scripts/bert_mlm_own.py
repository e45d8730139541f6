import argparse
import difflib
import inspect

import torch
from transformers import BertConfig, BertForMaskedLM


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=45)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seq-len", type=int, default=48)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--mlm-probability", type=float, default=0.15)
    p.add_argument("--seed", type=int, default=11)
    return p.parse_args()


MASK_ID, VOCAB = 128, 130


def mask_tokens(inputs, probability):
    labels = inputs.clone()
    chosen = torch.bernoulli(torch.full(inputs.shape, probability)).bool()
    labels[~chosen] = -100
    inputs = inputs.clone()
    replaced = chosen & (torch.rand(inputs.shape) < 0.8)
    inputs[replaced] = MASK_ID
    randomised = chosen & ~replaced & (torch.rand(inputs.shape) < 0.5)
    inputs[randomised] = torch.randint(0, 128, (int(randomised.sum()),))
    return inputs, labels


@torch.no_grad()
def evaluate(model, chunks, args):
    model.eval()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    inputs, labels = mask_tokens(chunks[:64], args.mlm_probability)
    torch.set_rng_state(state)
    loss = model(input_ids=inputs, labels=labels).loss
    model.train()
    return loss.item()


def main():
    args = parse()
    torch.manual_seed(args.seed)
    raw = torch.tensor(list(inspect.getsource(difflib).encode("ascii", "ignore")))
    n = len(raw) // args.seq_len
    chunks = raw[: n * args.seq_len].view(n, args.seq_len)
    held_out, chunks = chunks[:64], chunks[64:]
    model = BertForMaskedLM(BertConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=64,
    ))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 8))
    for step in range(args.steps):
        batch = chunks[torch.randint(0, len(chunks), (args.batch_size,))]
        inputs, labels = mask_tokens(batch, args.mlm_probability)
        loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 15 == 14:
            print(f"{step + 1}: train {loss.item():.3f} eval {evaluate(model, held_out, args):.3f}")
    print("final eval loss", evaluate(model, held_out, args))


main()
