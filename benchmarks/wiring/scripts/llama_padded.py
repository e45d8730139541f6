import random

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

random.seed(0)
torch.manual_seed(0)
PAD, BOS, EOS = 0, 1, 2


def make_example():
    start, step, n = random.randrange(20), random.randrange(1, 4), random.randrange(5, 22)
    return torch.tensor([BOS] + [3 + (start + step * i) % 40 for i in range(n)] + [EOS])


def collate(examples):
    input_ids = pad_sequence(examples, batch_first=True, padding_value=PAD)
    attention_mask = (input_ids != PAD).long()
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def main():
    dataset = [make_example() for _ in range(400)]
    loader = DataLoader(dataset, batch_size=16, shuffle=True, collate_fn=collate, drop_last=True)
    config = LlamaConfig(
        vocab_size=43, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    step = 0
    for epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f}")
    print(f"done, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
