"""A torchtitan-like script for torchrun, split over ranks, with or without a fault; run by test_split_script.py."""

import sys

import torch
from torch import distributed
from torch.nn.functional import cross_entropy

from tests.callbacks.sharded_models import LENGTH, VOCAB, split, titan


def main(kind, fault):
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    policy = {"param_dtype": torch.bfloat16 if fault == "bf16" else None}
    model, n_parts, part = split(titan(torch.float32), kind, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        seed = 100 * step + (rank if fault == "own data" else 0)
        ids = torch.randint(VOCAB, (8, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        ids = ids[0 if fault == "same data" else part :: n_parts]
        optimizer.zero_grad()
        loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
