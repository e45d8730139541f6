"""Two processes that train one model and save the results of each rank; run by test_kss_ranks.py.

The processes are forked, so that torch is imported only once.
"""

import math
import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import workbench as wb
from workbench.callbacks.kss import KSSOptions, PenaltyShape, TrustRegion
from workbench.koopman.dmd import DmdOptions
from workbench.koopman.stacked import StackedMoments

N_RANKS = 2
COUPLINGS = ("gradient", "decoupled", "projection", "trust_region")


def task():
    return wb.tasks.associative_recall(length=12, vocab_size=32, n_pairs=2, batch_size=8, seed=3)


def model():
    options = {"d_model": 8, "n_layers": 4, "n_heads": 2, "vocab_size": 32, "max_length": 16, "init_std": 0.15}
    return wb.zoo.transformer("none", seed=1, **options).double()


def kss(coupling="gradient", **controls):
    options = KSSOptions(
        penalty=PenaltyShape(rank=None),
        n_snapshots=10_000,
        coupling=coupling,
        trust_region=TrustRegion(highest=1.0, rise=0.0005),
    )
    return wb.KSS(**{"strength": 0.5, "interval": 1, "layers": "all", "options": options, **controls})


def parts(n_snapshots=(40, 25)):
    """Snapshots of each rank."""
    generator = torch.Generator().manual_seed(7)
    states = [torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in n_snapshots]
    return [(x + i, 1.2 * x + 0.3 * x.roll(1, 1).tanh()) for i, x in enumerate(states)]


def train(subject, shaping, batches, *, called=None, rate=0.05, before=lambda i, shaper: None):
    """Train in a standard loop, and return the records of all steps."""
    optimizer = torch.optim.SGD(subject.parameters(), lr=rate)
    shapings = []
    with shaping.attach(called or subject, optimizer) as shaper:
        for i, (tokens, targets) in enumerate(batches):
            before(i, shaper)
            optimizer.zero_grad()
            logits = (called or subject)(tokens)
            cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            shapings.append(shaper.last)
    return {
        "weights": [weight.detach().clone() for weight in subject.parameters()],
        "penalty": [s.penalty for s in shapings],
        "radius": [s.spectral_radius for s in shapings],
        "strength": [s.control.strength for s in shapings],
        "enabled": [s.control.enabled for s in shapings],
        "layers": [s.layers for s in shapings],
        "skipped": [dict(s.skipped or {}) for s in shapings],
        "acting": [s.n_acting for s in shapings],
    }


def examples_of(rank, i):
    tokens, targets = task().batch(i)
    return tokens[rank::N_RANKS], targets[rank::N_RANKS]


def together(rank, coupling):
    """Train on the examples of a rank; the result is that of one process on all examples."""
    subject = model()
    return train(
        subject, kss(coupling), [examples_of(rank, i) for i in range(3)], called=DistributedDataParallel(subject)
    )


def one_broken(rank):
    """Train with a layer 2 without finite states on rank 1."""
    subject = model()
    if rank == 1:
        subject.blocks[2].register_forward_hook(lambda block, args, y: y if block.training else y * math.nan)
    return train(subject, kss(), [examples_of(rank, i) for i in range(2)], called=DistributedDataParallel(subject))


class Padded(nn.Module):
    """A model that receives an attention mask, which KSS reads, and ignores it."""

    def __init__(self):
        super().__init__()
        self.inner = model()

    def forward(self, input_ids, attention_mask=None):
        return self.inner(input_ids)


def one_without_states(rank):
    """Train with padding in place of all tokens on rank 1."""
    subject = Padded()
    parallel = DistributedDataParallel(subject)
    mask = torch.full((4, 12), 1 - rank)
    optimizer = torch.optim.SGD(subject.parameters(), lr=0.05)
    with kss().attach(parallel, optimizer) as shaper:
        parallel(examples_of(rank, 0)[0], attention_mask=mask).square().mean().backward()
        optimizer.step()
        skipped = dict(shaper.last.skipped)
    return {"weights": [w.detach().clone() for w in subject.parameters()], "skipped": [skipped]}


def changed_controls(rank):
    """Change controls on rank 0, and others on rank 1, which are overridden."""
    subject, shaping, observed = model(), kss(), []
    shaping.observe(lambda *change: observed.append(change))

    def change_controls(i, shaper):
        if rank == 0 and i == 1:
            shaping.set(strength=0.25, layers=(1, 3))
        if rank == 0 and i == 3:
            shaping.enabled = False
        if rank == 1 and i == 2:
            shaping.strength = 99.0

    batches = [examples_of(rank, i) for i in range(5)]
    result = train(subject, shaping, batches, called=DistributedDataParallel(subject), before=change_controls)
    return result | {"observed": observed, "end": shaping.state_dict()}


def uneven(rank):
    """Train with batches of different sizes on the ranks."""
    subject, shaping = model(), kss(layers="half")
    batches = [tuple(part[: 4 - rank * (i % 2)] for part in examples_of(rank, i)) for i in range(6)]
    result = train(subject, shaping, batches, called=DistributedDataParallel(subject))
    return result | {"end": shaping.state_dict()}


def moments(rank):
    """Return the moments of both parts, and the gradient of a function of them in the part of this rank."""
    leaves = tuple(values.clone().requires_grad_() for values in parts()[rank])
    stack = StackedMoments({0: leaves, 1: leaves}, is_shared=True)
    xx, dx = stack.project(DmdOptions(rank=3)).detach()[0]
    slopes = np.stack([xx.cos().numpy(), dx.numpy()])  # those of xx.sin().sum() + dx.square().sum() / 2
    gradients = [gradient for _, gradient in stack.gradients({0: slopes})]
    return {"facts": stack.facts, "xx": xx, "dx": dx, "gradients": gradients}


def in_lightning(rank):
    """Train under Lightning's DDP, which calls the training step instead of ``forward``."""
    import lightning

    class Shell(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model()

        def forward(self, tokens):
            return self.model(tokens)

        def training_step(self, batch, batch_idx):
            return cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    subject, seen = Shell(), []
    callback = wb.lightning_callback(kss())

    class Observer(lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(callback.attachment.callbacks.callbacks[0].last)

    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", devices=N_RANKS, strategy="ddp", logger=False, use_distributed_sampler=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        callbacks=[callback, Observer()],
    )  # fmt: skip
    trainer.fit(subject, DataLoader([examples_of(rank, i) for i in range(3)], batch_size=None))
    weights = [weight.detach().clone() for weight in subject.model.parameters()]
    return {"weights": weights, "penalty": [s.penalty for s in seen], "acting": [s.n_acting for s in seen]}


SCENARIOS = {
    **{coupling: lambda rank, coupling=coupling: together(rank, coupling) for coupling in COUPLINGS},
    "one broken": one_broken,
    "one without states": one_without_states,
    "changed controls": changed_controls,
    "uneven": uneven,
    "moments": moments,
    "lightning": in_lightning,
}


def main(rank, folder):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(N_RANKS), TORCHELASTIC_RUN_ID="test")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", LOCAL_WORLD_SIZE=str(N_RANKS), GROUP_RANK="0")
    options = {"rank": rank, "world_size": N_RANKS, "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", **options)
    torch.save({name: scenario(rank) for name, scenario in SCENARIOS.items()}, folder / f"rank-{rank}.pt")
    distributed.barrier()
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    import lightning  # noqa: F401 (before forking)
    import torch._dynamo

    torch.multiprocessing.start_processes(main, (Path(sys.argv[1]),), N_RANKS, start_method="fork")
