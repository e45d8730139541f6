"""Who spoiled the update: faults planted in a rank, a micro-batch or a row, and healthy updates.

Plan, fixed before the held-out part was run
--------------------------------------------

A *training* is one model, one seed and either one process with 4 micro-batches an update, or 3 ranks (DDP, gloo) with 2
each. After 20 and after 60 healthy updates (of ranks: after 30) the state of model, optimizer and search is kept. From
that state each fault is planted, ``watched.blame()`` is asked right after the update, and the state is restored; so
every question has the same healthy past. A fault of a rank lasts: it is in each of 8 updates, and the question comes
after the last one (and once more, beside, right after the first). Every update is sketched (``budget=None``).

*Dose*: how much a fault changes the gradient that the optimizer receives, against its healthy twin (same state, same
batches), over the standard deviation of that gradient between 6 healthy updates of other batches from the same state;
Euclidean, all parameters. A fault whose dose is below 1 changes its update less than the choice of the batch does.
Of a fault that lasts it is the dose of its first update; of one that is not finite, infinite. Parameters that lag
behind are compared exactly, whatever their dose.

Fit part: all models, kinds and severities of an earlier version of this benchmark, seed 0; the constants of
`workbench.probes.blame` were chosen on it. Held out, looked at once: the models ``bert`` (masked tokens), ``lstm``,
``mixer`` (images) and ``t5`` (encoder and decoder), the kinds of `HELD_FAULTS` and new severities of the fit kinds,
seeds 10 and 11, with ranks 10.

Headline: the share of held-out faults with a dose of at least 1 for which the right place is named (the rank; the
micro-batch; the micro-batch and the row), asked for 95 %; and the share of healthy held-out updates, at least 150, for
which anybody is named, asked for at most 2 %. All other doses, levels and kinds are shown beside it.

Healthy updates: 8 of each state, two updates apart; the ranks read different sources (text and code), rows have
different lengths, and before every fourth question the rate of one update is 20 times as large.

Baselines: the largest loss, the largest gradient norm, and a random one, of all ranks, micro-batches or rows. They are
told at which level the fault is. The first two also with a threshold: the departure of the largest from the median, in
multiples of the median, from which they name it is chosen for each level on the fit part, so that 2 % of the healthy
updates are blamed.

Run ``python -m benchmarks.blame --out FOLDER --part fit`` and ``--part held`` (one file a training, so that it can be
interrupted), then ``--report``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import math
import os
import pickle
import random
import socket
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import workbench as wb
from workbench.callbacks.recorder import blame as search_module
from workbench.probes.blame import judge

ROOT = Path(__file__).resolve().parent.parent
MODELS = {"fit": ("gpt", "images", "moe", "hf", "norm"), "held": ("bert", "lstm", "mixer", "t5")}
IMAGES, LABELLED = ("images", "norm", "mixer"), ("hf", "bert", "t5")
SEEDS, SEEDS_OF_RANKS = {"fit": (0,), "held": (10, 11)}, (0, 10)
STAGES, STAGES_OF_RANKS, N_HEALTHY, N_RANKS, N_LASTING, N_TWINS = (20, 60), (30,), 8, 3, 8, 6
LENGTH, VOCAB, N_CLASSES, SIDE, MASK = 32, 128, 10, 8, 1
N_LEVEL = {"rank": 1, "micro": 2, "row": 3}
#: Kind -> level and severities.
FIT_FAULTS = {
    "labels of a rank": ("rank", (0.5, 1.0)),
    "scaled rank": ("rank", (3.0, 10.0, 0.1)),
    "broken arithmetic": ("rank", (1.0, 3.0, 10.0)),
    "lagging parameters": ("rank", (1, 10)),
    "zero gradients": ("rank", (1,)),
    "shuffled labels": ("micro", (0.5, 1.0)),
    "scaled micro-batch": ("micro", (3.0, 10.0, 0.1)),
    "garbage inputs": ("micro", (0.5, 1.0)),
    "dropped mask": ("micro", (1,)),
    "row with other labels": ("row", (1,)),
    "row with huge inputs": ("row", (3.0, 10.0, 1000.0)),
    "row with one label": ("row", (1,)),
    "repeated input": ("row", (1.0,)),
    "row that is not finite": ("row", (1,)),
    "row of another kind": ("row", (1,)),
    "weighted row": ("row", (10.0, 30.0)),
}
HELD_FAULTS = {
    "sum of a rank": ("rank", (1,)),
    "labels of a rank one off": ("rank", (1,)),
    "noise for a rank": ("rank", (1.0,)),
    "one bad parameter of a rank": ("rank", (30.0,)),
    "gradients of a rank turned round": ("rank", (1,)),
    "same batch again": ("rank", (1,)),
    "labels of a rank": ("rank", (0.75,)),
    "scaled rank": ("rank", (5.0, 30.0)),
    "broken arithmetic": ("rank", (5.0,)),
    "lagging parameters": ("rank", (3,)),
    "sum of a micro-batch": ("micro", (1,)),
    "labels one off": ("micro", (1,)),
    "labels of the row before": ("micro", (1,)),
    "shuffled labels": ("micro", (0.75,)),
    "scaled micro-batch": ("micro", (5.0, 30.0)),
    "garbage inputs": ("micro", (0.75,)),
    "row of zeros": ("row", (1,)),
    "row with labels one off": ("row", (1,)),
    "row with labels of the one before": ("row", (1,)),
    "row twice": ("row", (1,)),
    "row with other labels": ("row", (1,)),
    "row with huge inputs": ("row", (30.0,)),
    "row that is not finite": ("row", (1,)),
    "weighted row": ("row", (20.0, 100.0)),
}
FAULTS = {"fit": FIT_FAULTS, "held": HELD_FAULTS}


def sources():
    """Return the bytes of the project's texts and of its code."""
    texts = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")])
    code = sorted((ROOT / "workbench" / "models").glob("*.py"))
    found = [b"".join(path.read_bytes() for path in paths) for paths in (texts, code)]
    return [np.frombuffer(each, dtype=np.uint8).clip(0, VOCAB - 1).astype(np.int64) for each in found]


class Data:
    """Batches of one model: inputs, labels, and which inputs count."""

    def __init__(self, model, seed):
        self.model, self.seed, self.sources = model, seed, sources()
        self.prototypes = torch.randn(N_CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(99))
        self.n_rows = 12 if model in IMAGES else 6

    def batch(self, index, rank=0):
        rng = np.random.default_rng([self.seed, index, rank])
        if self.model in IMAGES:
            labels = torch.from_numpy(rng.integers(N_CLASSES, size=self.n_rows))
            noise = torch.from_numpy(rng.normal(size=(self.n_rows, 1, SIDE, SIDE)).astype(np.float32))
            images = self.prototypes[labels] + 1.5 * noise
            if self.model == "norm":  # one in ten has four times the contrast
                images *= torch.from_numpy(np.where(rng.random(self.n_rows) < 0.1, 4.0, 1.0)).float().view(-1, 1, 1, 1)
            return {"inputs": images, "labels": labels, "mask": None}
        source = self.sources[int(self.model == "moe" or rank == 1)]
        starts = rng.integers(len(source) - 2 * LENGTH, size=self.n_rows)
        rows = torch.from_numpy(np.stack([source[a : a + 2 * LENGTH] for a in starts]))
        mask = torch.ones(self.n_rows, LENGTH, dtype=torch.long)
        if self.model != "gpt":
            for row, n in enumerate(rng.integers(LENGTH // 4, LENGTH + 1, size=self.n_rows)):
                mask[row, n:] = 0
        inputs, labels = rows[:, :LENGTH].clone(), rows[:, 1 : LENGTH + 1].clone()
        if self.model == "bert":
            chosen = torch.from_numpy(rng.random(inputs.shape) < 0.3)
            chosen[:, 0] = True
            labels = torch.where(chosen, inputs, -100)
            inputs = torch.where(chosen, MASK, inputs)
        if self.model == "t5":  # the words that follow, of which many are copied
            labels = torch.cat([rows[:, : LENGTH // 2], rows[:, LENGTH : LENGTH + LENGTH // 2]], 1)
        return {"inputs": inputs.where(mask > 0, 0), "labels": labels.where(mask > 0, -100), "mask": mask}


class Lstm(nn.Module):
    """A language model of one recurrent layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = (
            nn.Embedding(VOCAB, 48), nn.LSTM(48, 64, batch_first=True), nn.Linear(64, VOCAB),
        )  # fmt: skip

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens))[0])


class Mixer(nn.Module):
    """Patches that are mixed among each other and among their channels."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 32, 2, stride=2)
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(4)])
        self.tokens = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)])
        self.channels = nn.ModuleList(
            [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
        )
        self.head = nn.Linear(32, N_CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        for i in range(2):
            x = x + self.tokens[i](self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.channels[i](self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


def build(model, seed):
    torch.manual_seed(seed)
    options = {"d_model": 48, "n_layers": 2, "n_heads": 2, "vocab_size": VOCAB, "max_length": LENGTH, "seed": seed}
    if model == "gpt":
        return wb.zoo.transformer("pre_ln", **options)
    if model == "moe":
        return wb.zoo.moe(n_experts=4, **options)
    if model in LABELLED:
        import transformers as of

        if model == "hf":
            return of.GPT2LMHeadModel(
                of.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=2)
            )
        if model == "bert":
            sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
            return of.BertForMaskedLM(of.BertConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **sizes))
        sizes = {"d_model": 48, "d_kv": 24, "d_ff": 96, "num_layers": 1, "num_heads": 2}
        return of.T5ForConditionalGeneration(of.T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **sizes))
    if model == "lstm":
        return Lstm()
    if model == "mixer":
        return Mixer()
    norm = (lambda n: nn.BatchNorm2d(n)) if model == "norm" else (lambda n: nn.Identity())
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), norm(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1), norm(16),
        nn.ReLU(), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, N_CLASSES),
    )  # fmt: skip


def loss_of(name, called, batch, weights=None):
    labels = batch["labels"]
    if name == "hf":  # the labels of the loop are those of the next token; the model shifts them itself
        labels = torch.cat([torch.full_like(labels[:, :1], -100), labels[:, :-1]], 1)
    if name in LABELLED:
        output = called(input_ids=batch["inputs"], attention_mask=batch["mask"], labels=labels)
        if weights is None:
            return output.loss
        logits, labels = output.logits, batch["labels"]
        if name == "hf":
            labels = torch.cat([labels[:, :-1], torch.full_like(labels[:, :1], -100)], 1)
    else:
        logits = called(batch["inputs"])
        logits = logits[0] if isinstance(logits, tuple) else getattr(logits, "logits", logits)
    losses = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    losses = losses.reshape(len(logits), -1)
    weights = torch.ones(len(logits)) if weights is None else weights
    return (losses * weights[:, None]).sum() / (labels != -100).sum()


def spoiled(kind, severity, batch, rng, row):
    """Return the batch with a fault, the factor on its loss, and the weights of its rows or None."""
    batch = {name: None if value is None else value.clone() for name, value in batch.items()}
    inputs, labels = batch["inputs"], batch["labels"]
    is_image, n, counts = inputs.is_floating_point(), len(inputs), labels != -100
    top = N_CLASSES if is_image else VOCAB
    other = torch.from_numpy(rng.integers(top, size=tuple(labels.shape)))
    if is_image:
        other = (labels + 1 + torch.from_numpy(rng.integers(top - 1, size=n))) % top
    some = torch.ones(n, dtype=torch.bool) if row < 0 else torch.arange(n) == row
    if kind in ("labels of a rank", "shuffled labels", "garbage inputs", "noise for a rank"):
        some = torch.zeros(n, dtype=torch.bool)
        some[torch.from_numpy(rng.permutation(n))[: max(1, round(severity * n))]] = True
    which = some.view(-1, *[1] * (labels.ndim - 1)) & counts
    if kind in ("labels of a rank", "shuffled labels", "row with other labels"):
        batch["labels"] = torch.where(which, other, labels)
    elif kind == "row with one label":
        batch["labels"] = torch.where(which, torch.full_like(labels, int(rng.integers(1, top))), labels)
    elif "one off" in kind:
        batch["labels"] = torch.where(which, (labels + 1) % top if is_image else labels.roll(1, 1).clamp_min(0), labels)
    elif kind in ("labels of the row before", "row with labels of the one before"):
        batch["labels"] = torch.where(which, labels.roll(1, 0).clamp_min(0), labels)
    elif kind in ("garbage inputs", "row of another kind", "noise for a rank"):
        noise = torch.from_numpy(rng.normal(size=tuple(inputs.shape)).astype(np.float32)) * 3 if is_image else None
        noise = torch.from_numpy(rng.integers(top, size=tuple(inputs.shape))) if noise is None else noise
        batch["inputs"] = torch.where(some.view(-1, *[1] * (inputs.ndim - 1)), noise, inputs)
        if not is_image and kind == "row of another kind":  # the row is garbage as a whole, with its labels
            batch["labels"] = torch.where(which, other, labels)
    elif kind == "row with huge inputs":
        inputs[row] *= severity
    elif kind == "row of zeros":
        inputs[row] = 0
    elif kind == "row twice":
        inputs[row], labels[row] = inputs[row - 1], labels[row - 1]
        if batch["mask"] is not None:
            batch["mask"][row] = batch["mask"][row - 1]
    elif kind == "repeated input":
        inputs[row] = inputs[row].flatten()[0]
    elif kind == "dropped mask":
        batch["mask"], batch["labels"] = torch.ones_like(batch["mask"]), labels.clamp_min(0)
    factor = severity if kind in ("scaled rank", "scaled micro-batch") else 1.0
    factor = float(counts.sum()) if kind.startswith("sum of") else factor
    weights = None
    if kind in ("weighted row", "row that is not finite"):
        weights = torch.where(some, severity if kind == "weighted row" else math.nan, 1.0)
    return batch, factor, weights


class Training:
    """One model that is watched, on this rank."""

    def __init__(self, name, seed, n_ranks, folder):
        self.name, self.n_ranks = name, n_ranks
        self.rank = distributed.get_rank() if n_ranks > 1 else 0
        self.n_micro = 2 if n_ranks > 1 else 4
        self.data, self.model = Data(name, seed), build(name, seed)
        self.model.train()
        self.called = DistributedDataParallel(self.model) if n_ranks > 1 else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.watched = wb.watch(
            self.called, self.optimizer, store=folder / "run.zarr", shows=False, budget=None,
            every={"precision": None, "activations": None, "attention": None, "router": None, "update": None},
        )  # fmt: skip
        self.step, self.older, self.told = 0, [], []

    @property
    def search(self):
        return self.watched.recorder._attached.blame

    def state(self):
        of = self.search
        of._report = self.told.append
        memory = [copy.deepcopy(of._history), list(of._kept), list(of._earlier), dict(of._answers), of._n_kept]
        values = copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])
        return values, memory, self.step, torch.get_rng_state(), list(self.older)

    def restore(self, state):
        (model, optimizer), (history, kept, earlier, answers, n_kept), self.step, rng, older = state
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        of, self.older = self.search, list(older)
        of._history, of._paused_until, of._asked, of._n_kept = copy.deepcopy(history), 0, -1, n_kept
        for old, new in ((of._kept, kept), (of._earlier, earlier)):
            old.clear()
            old.extend(new)
        of._answers = dict(answers)
        self.arm_again()
        torch.set_rng_state(rng)

    def arm_again(self):
        """Sketch the parameters as they are now, as before the first pass of an update."""
        self.search.sketches.disarm()
        self.search.sketches.arm()

    def lag(self, fault):
        """Set a rank's parameters to earlier ones, before its first update with the fault."""
        if fault[2] == self.rank:
            with torch.no_grad():
                for p, old in zip(self.model.parameters(), self.older[-fault[1]], strict=True):
                    p.copy_(old)
        self.arm_again()

    def update(self, fault=None, *, spike=False, others=0):
        """Make one update; ``fault`` is one of `faults_of`; returns the gradient that the optimizer receives."""
        kind, severity, rank, micro, row, seed, level = fault or ("", 0, -1, -1, -1, 0, "")
        is_mine, handles = rank == self.rank, []
        if is_mine:
            handles = self._hooks(kind, severity, seed + self.step)
        for m in range(self.n_micro):
            number = self.step * self.n_micro + m + others
            is_bad = is_mine and kind and (level == "rank" or m == micro)
            if is_bad and kind == "same batch again":
                number = 0
            batch, factor, weights = self.data.batch(number, self.rank), 1.0, None
            if is_bad:
                rng = np.random.default_rng([seed, m, self.step])
                batch, factor, weights = spoiled(kind, severity, batch, rng, row)
            is_last = m == self.n_micro - 1
            with contextlib.nullcontext() if is_last or self.n_ranks == 1 else self.called.no_sync():
                loss = loss_of(self.name, self.called, batch, weights) * factor / self.n_micro
                loss.backward()
        for handle in handles:
            handle.remove()
        gradient = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]).double().numpy()
        self.older = [*self.older[-12:], [p.detach().clone() for p in self.model.parameters()]]
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (self.step + 1) / 20) * (20 if spike else 1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return gradient

    def _hooks(self, kind, severity, seed):
        generator, parameters = torch.Generator().manual_seed(seed), [*self.model.parameters()]

        def noisy(g):
            return g + severity * g.pow(2).mean().sqrt() * torch.randn(g.shape, generator=generator)

        if kind == "broken arithmetic":
            return [p.register_hook(noisy) for p in parameters]
        if kind == "zero gradients":
            return [p.register_hook(torch.zeros_like) for p in parameters]
        if kind == "gradients of a rank turned round":
            return [p.register_hook(torch.neg) for p in parameters]
        if kind == "one bad parameter of a rank":
            large = max(parameters, key=torch.numel)
            return [large.register_hook(lambda g: g * severity)]
        return []

    def ask(self, fault, dose=math.nan, **more):
        """Ask who spoiled the last update, and return what a later judgement needs."""
        start, captured = time.perf_counter(), {}

        def judged_now(passes, history, groups):
            captured.update(passes=passes, history=copy.deepcopy(history), groups=groups)
            return judge(passes, history, groups)

        search_module.judge = judged_now
        try:
            answer = self.watched.blame()
        finally:
            search_module.judge = judge
        seconds = time.perf_counter() - start
        return {"fault": fault, "answer": answer, "dose": dose, "seconds": seconds, **captured, **more}


def faults_of(part, name, n_ranks, seed, step):
    rng = random.Random(f"{name} {n_ranks} {seed} {step}")
    found, n_rows = [], 12 if name in IMAGES else 6
    for kind, (level, severities) in FAULTS[part].items():
        is_without = (kind == "dropped mask" and name in (*IMAGES, "gpt")) or (
            kind == "row with huge inputs" and name not in IMAGES
        )
        if is_without or (level == "rank") != (n_ranks > 1):
            continue
        for severity in severities:
            rank, micro = (rng.randrange(n_ranks), -1) if n_ranks > 1 else (0, rng.randrange(4))
            row = rng.randrange(n_rows) if level == "row" else -1
            found.append((kind, severity, rank, micro, row, rng.randrange(2**31), level))
    return found


def run(part, name, seed, n_ranks):
    """Run one training; returns the answers to all questions, on rank 0."""
    warnings.simplefilter("ignore")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        if n_ranks > 1:
            box = [folder]
            distributed.broadcast_object_list(box, src=0)
            folder = box[0]
        of = Training(name, seed, n_ranks, Path(folder))
        for stage in STAGES_OF_RANKS if n_ranks > 1 else STAGES:
            while of.step < stage:
                of.update()
            state = of.state()

            def at_first(fault=None, of=of, state=state, **options):
                of.restore(state)
                if fault is not None and fault[0] == "lagging parameters":
                    of.lag(fault)
                return of.update(fault, **options)

            twins = [at_first(others=100_000 * (i + 1)) for i in range(N_TWINS)]
            deviation = math.sqrt(np.square(twins - np.mean(twins, 0)).sum() / (N_TWINS - 1))
            healthy = at_first()
            for fault in faults_of(part, name, n_ranks, seed, stage):
                of.told.clear()
                gradient = at_first(fault)
                by = float(np.linalg.norm(gradient - healthy) / deviation)
                dose = by if math.isfinite(by) else math.inf
                if n_ranks > 1:
                    found.append({"stage": stage, **of.ask(fault, dose, when="at once", told=list(of.told))})
                    for _ in range(N_LASTING - 1):
                        of.update(fault)
                found.append({"stage": stage, **of.ask(fault, dose, when="", told=list(of.told))})
            of.restore(state)
            for i in range(N_HEALTHY):
                of.told.clear()
                of.update(spike=i % 4 == 3)
                of.update()
                found.append({"stage": stage, **of.ask(None, told=list(of.told))})
            of.restore(state)
        of.watched.close()
        if n_ranks > 1:
            distributed.barrier()
    return found


def on_rank(rank, part, jobs, out, port):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(N_RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    for name, seed in jobs:
        start = time.perf_counter()
        found = run(part, name, seed, N_RANKS)
        if rank == 0:
            save(out, part, name, seed, N_RANKS, found, start)
    distributed.destroy_process_group()


def save(out, part, name, seed, n_ranks, found, start):
    path = out / f"{part}_{name}_{seed}_{n_ranks}.pickle"
    partial = path.with_suffix(".part")
    partial.write_bytes(pickle.dumps(found))
    partial.rename(path)
    print(path.name, len(found), f"{time.perf_counter() - start:.0f} s", flush=True)


def values_of(row, level):
    """Return the loss and gradient norm of each place of a level, {place: (loss, norm)}."""
    passes = row["passes"]
    units = [(int(r), int(m)) for r, m in zip(*np.nonzero(passes.is_made), strict=True)]
    if level == "row":
        found = {}
        for each in row["groups"]:
            labels = np.maximum(each["labels"], 1)
            for i in range(len(each.values)) if each.step == passes.step else ():
                found[each.rank, each.micro_batch, i] = each["loss"][i] / labels[i], each["norm"][i]
        return found
    of_pass = {u: (passes.loss[u], np.linalg.norm(passes.sketch[u][:, -1])) for u in units}
    if level == "micro":
        return of_pass
    ranks = {u[0] for u in units}
    return {(r,): tuple(np.mean([of_pass[u] for u in units if u[0] == r], 0)) for r in ranks}


def largest(row, level, which):
    """Return the place with the largest loss (0) or norm (1), and its departure from the median over that."""
    values = {place: np.nan_to_num(each[which], nan=np.inf) for place, each in values_of(row, level).items()}
    if not values:
        return (-1,) * N_LEVEL[level], 0.0
    place = max(values, key=values.get)
    middle = float(np.median([*values.values()]))
    return place, (values[place] - middle) / max(abs(middle), 1e-30)


def judged(out):
    """Return all questions with the answer of the present judgement; what was told before the update comes first."""
    found = []
    for path in sorted(out.glob("*.pickle")):
        part, name, seed, n_ranks = path.stem.split("_")
        for row in pickle.loads(path.read_bytes()):
            answer = judge(row["passes"], row["history"], row["groups"]) if "passes" in row else row["answer"]
            answer = next((each for each in row["told"] if each.is_found), answer)
            found.append(
                {**row, "part": part, "model": name, "seed": int(seed), "n_ranks": int(n_ranks), "answer": answer}
            )
    return found


def is_right(row):
    _, _, rank, micro, number, _, level = row["fault"]
    named = (row["answer"].rank, row["answer"].micro_batch, row["answer"].row)
    n = N_LEVEL[level]
    return named[:n] == (rank, micro, number)[:n]


def is_wrong(row):
    """Return whether another place is named; a micro-batch without its row is right as far as it goes."""
    _, _, rank, micro, number, _, level = row["fault"]
    named = (row["answer"].rank, row["answer"].micro_batch, row["answer"].row)
    truth = (rank, micro, number)[: N_LEVEL[level]]
    return row["answer"].is_found and any(a >= 0 and a != t for a, t in zip(named, truth, strict=False))


def thresholds(rows):
    """Return for each level and baseline the departure that 2 % of the healthy updates of the fit part exceed."""
    healthy = [r for r in rows if r["part"] == "fit" and r["fault"] is None and "passes" in r]
    found = {}
    for level in N_LEVEL:
        of = [r for r in healthy if (r["n_ranks"] > 1) == (level == "rank")]
        for which in (0, 1):
            found[level, which] = np.quantile([largest(r, level, which)[1] for r in of], 0.98) if of else math.inf
    return found


def shares(rows, limits, rng):
    """Return the shares found, in a wrong place, and found by each baseline."""
    counts = np.zeros(7)
    for row in rows:
        level = row["fault"][-1]
        truth = row["fault"][2:5][: N_LEVEL[level]]
        counts[:2] += is_right(row), is_wrong(row)
        if "passes" not in row:
            continue
        for which in (0, 1):
            place, by = largest(row, level, which)
            counts[2 + which] += place == truth
            counts[5 + which] += place == truth and by > limits[level, which]
        counts[4] += rng.choice([*values_of(row, level)] or [()]) == truth
    return counts / max(1, len(rows))


_SHARES = (
    *("found", "wrong place", "largest loss", "largest gradient", "random"),
    *("loss, 2 %", "gradient, 2 %"),
)
_DOSES = (0, 0.1, 0.3, 1, 3, 10, math.inf)


def _headed(*names):
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def _line(*head, shares):
    return f"| {' | '.join(map(str, head))} | " + " | ".join(f"{x:.0%}" for x in shares) + " |"


def report(out):
    rows = judged(out)
    limits, lines = thresholds(rows), []
    for part in ("held", "fit"):
        of_part = [r for r in rows if r["part"] == part]
        faults = [r for r in of_part if r["fault"] is not None and r["when"] == ""]
        healthy = [r for r in of_part if r["fault"] is None]
        if not of_part:
            continue

        def of(select, faults=faults):
            which = [r for r in faults if select(r)]
            return len(which), shares(which, limits, random.Random(0))

        n_false = sum(r["answer"].is_found for r in healthy)
        lines += ["", f"### {part}", "", f"False blame: {n_false} of {len(healthy)} healthy updates."]
        for n_ranks in (1, N_RANKS):
            alike = [r for r in healthy if r["n_ranks"] == n_ranks]
            told = sum(r["answer"].is_found for r in alike)
            lines.append(f"With {n_ranks} ranks: {told} of {len(alike)}.")
        for level, which in limits:
            alike = [r for r in healthy if (r["n_ranks"] > 1) == (level == "rank") and "passes" in r]
            false = np.mean([largest(r, level, which)[1] > limits[level, which] for r in alike]) if alike else math.nan
            lines.append(f"Baseline {('loss', 'gradient')[which]} of {level}, with its threshold: {false:.1%}.")
        lines += ["", _headed("faults", "n", *_SHARES)]
        n, found = of(lambda r: r["dose"] >= 1)
        lines.append(_line("**dose of at least 1**", n, shares=found))
        n, found = of(lambda r: r["dose"] >= 1 and math.isfinite(r["dose"]))
        lines.append(_line("the same, but finite", n, shares=found))
        for level in N_LEVEL:
            n, found = of(lambda r, level=level: r["dose"] >= 1 and r["fault"][-1] == level)
            lines.append(_line(f"{level}, dose of at least 1", n, shares=found))
        for low, high in itertools.pairwise(_DOSES):
            n, found = of(lambda r, low=low, high=high: low <= r["dose"] < high)
            lines.append(_line(f"dose {low} to {high}", n, shares=found))
        once = [r for r in of_part if r["fault"] is not None and r["when"] == "at once"]
        which = [r for r in once if r["dose"] >= 1]
        found = shares(which, limits, random.Random(0))
        lines.append(_line("rank, dose of at least 1, asked at once", len(which), shares=found))
        groups = defaultdict(list)
        for r in faults:
            groups[r["fault"][-1], r["fault"][0], r["fault"][1]].append(r)
        lines += ["", _headed("level", "kind", "severity", "median dose", "n", *_SHARES)]
        for head, which in groups.items():
            dose = f"{np.median([r['dose'] for r in which]):.2g}"
            lines.append(_line(*head, dose, len(which), shares=shares(which, limits, random.Random(0))))
    seconds = [r["seconds"] for r in rows if "passes" in r]
    lines += ["", f"Median time of a question: {np.median(seconds):.2g} s."]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=("fit", "held"), default="fit")
    parser.add_argument("--ranks", type=int, choices=(1, N_RANKS), help="only trainings with so many ranks")
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    if given.report:
        print(report(given.out))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    part = given.part
    jobs = [(name, seed) for seed in SEEDS[part] for name in MODELS[part]]
    for name, seed in jobs if given.ranks != N_RANKS else ():
        if not (given.out / f"{part}_{name}_{seed}_1.pickle").exists():
            start = time.perf_counter()
            save(given.out, part, name, seed, 1, run(part, name, seed, 1), start)
    jobs = [job for job in jobs if job[1] in SEEDS_OF_RANKS]
    left = [job for job in jobs if not (given.out / f"{part}_{job[0]}_{job[1]}_{N_RANKS}.pickle").exists()]
    if left and given.ranks != 1:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.start_processes(
            on_rank, (part, left, given.out, port), nprocs=N_RANKS, start_method="spawn"
        )


if __name__ == "__main__":
    main()
