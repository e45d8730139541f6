"""Who spoiled the update: faults planted in a rank, a micro-batch or a row, and healthy updates.

Plan, fixed before the first run
--------------------------------

A *training* is one model, one seed and either one process with 4 micro-batches an update, or 3 ranks (DDP, gloo) with 2
each. After 15 and after 60 healthy updates (of ranks: after 30) the state of model, optimizer and search is kept. From
that state one update is made for each fault, the question ``watched.blame()`` is asked right after it, and the state is
restored; so every question is about an update with the same healthy past. Every update is sketched (``budget=None``).

Fit part, on which the constants of `workbench.probes.blame` were chosen and frozen: models ``gpt`` (bytes of text, loss
in the loop) and ``images`` (convolutions), kinds ``labels of a rank``, ``scaled rank``, ``shuffled labels``, ``scaled
micro-batch``, ``row with other labels`` and ``row with huge inputs``, seed 0.

Held out, looked at once the constants were frozen: models ``moe`` (experts, rows of different lengths, source code),
``hf`` (GPT-2 of transformers, dropout, loss in the model, padding) and ``norm`` (batch norm, one row in ten with four
times the contrast), all other kinds, seed 10. Headline: held-out kinds on held-out models. The other three
combinations are shown beside it.

Severities, from subtle to gross, are those of `FAULTS`. All are planted and counted, also those that cannot be seen: an
early model has the same loss for any labels, so that the row with wrong ones is like the others.

Healthy updates: 6 of each state, one after the other; the ranks read different sources (text and code); in every second
one the rate of the update before is 20 times as large (as a spike of a warm-up).

Measures: *found* is the share of planted faults for which the right place is named: the rank; the micro-batch; or the
micro-batch and the row. *Wrong place* is the share in which another one is named. *False blame* is the share of healthy
updates for which anybody is named. The target is 95 % found and at most 2 % false blame.
Baselines: the largest loss and the largest gradient norm of all ranks, micro-batches or rows, and a random one. They
are told at which level the fault is, and never say "nobody", so that their false blame is 100 %.

Run ``python -m benchmarks.blame --out FOLDER`` (one file a training, so that it can be interrupted), then ``--report``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
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
from workbench.probes.blame import judge_rows

ROOT = Path(__file__).resolve().parent.parent
FIT_MODELS, HELD_MODELS = ("gpt", "images"), ("moe", "hf", "norm")
FIT_SEEDS, HELD_SEEDS = (0,), (10,)
STAGES, STAGES_OF_RANKS, N_HEALTHY, N_RANKS = (15, 60), (30,), 6, 3
LENGTH, VOCAB, N_CLASSES, SIDE = 48, 128, 10, 8
#: Kind -> level, severities, models without it.
FAULTS = {
    "labels of a rank": ("rank", (0.25, 0.5, 1.0), ()),
    "scaled rank": ("rank", (1.5, 3.0, 10.0, 0.25), ()),
    "broken arithmetic": ("rank", (0.1, 0.3, 1.0), ()),
    "stale parameters": ("rank", (1, 10), ()),
    "zero gradients": ("rank", (1,), ()),
    "shuffled labels": ("micro", (0.5, 1.0), ()),
    "scaled micro-batch": ("micro", (1.5, 2.0, 4.0, 0.25), ()),
    "garbage inputs": ("micro", (0.5, 1.0), ()),
    "dropped mask": ("micro", (1,), ("gpt", "images", "norm")),
    "row with other labels": ("row", (1,), ()),
    "row with huge inputs": ("row", (3.0, 10.0, 1000.0), ("gpt", "moe", "hf")),
    "row with one label": ("row", (1,), ()),
    "repeated input": ("row", (0.5, 1.0), ()),
    "row that is not finite": ("row", (1,), ()),
    "row of another kind": ("row", (1,), ()),
}
FIT_KINDS = (
    *("labels of a rank", "scaled rank", "shuffled labels", "scaled micro-batch"),
    *("row with other labels", "row with huge inputs"),
)


def sources():
    """Return the bytes of the project's texts and of its code."""
    texts = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")])
    code = sorted((ROOT / "workbench" / "models").glob("*.py"))
    found = [b"".join(path.read_bytes() for path in paths) for paths in (texts, code)]
    return [np.frombuffer(each, dtype=np.uint8).clip(0, VOCAB - 1).astype(np.int64) for each in found]


class Data:
    """Batches of one model: inputs, labels, and whether a label counts."""

    def __init__(self, model, seed):
        self.model, self.seed, self.sources = model, seed, sources()
        self.prototypes = torch.randn(N_CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(99))
        self.is_image = model in ("images", "norm")
        self.n_rows = 16 if self.is_image else 8

    def batch(self, index, rank=0):
        rng = np.random.default_rng([self.seed, index, rank])
        if self.is_image:
            labels = torch.from_numpy(rng.integers(N_CLASSES, size=self.n_rows))
            noise = torch.from_numpy(rng.normal(size=(self.n_rows, 1, SIDE, SIDE)).astype(np.float32))
            images = self.prototypes[labels] + 1.5 * noise
            if self.model == "norm":
                images = (
                    images
                    * torch.from_numpy(np.where(rng.random(self.n_rows) < 0.1, 4.0, 1.0))[:, None, None, None].float()
                )
            return {"inputs": images, "labels": labels, "mask": None}
        is_code = self.model == "moe" or rank == 1
        source = self.sources[int(is_code)]
        starts = rng.integers(len(source) - LENGTH - 1, size=self.n_rows)
        rows = torch.from_numpy(np.stack([source[a : a + LENGTH + 1] for a in starts]))
        mask = torch.ones(self.n_rows, LENGTH, dtype=torch.long)
        if self.model != "gpt":
            for row, n in enumerate(rng.integers(LENGTH // 4, LENGTH + 1, size=self.n_rows)):
                mask[row, n:] = 0
        inputs, labels = rows[:, :-1].clone(), rows[:, 1:].clone()
        inputs[mask == 0] = 0
        return {"inputs": inputs, "labels": labels.where(mask > 0, -100), "mask": mask}


def build(model, seed):
    torch.manual_seed(seed)
    options = {"d_model": 48, "n_layers": 2, "n_heads": 2, "vocab_size": VOCAB, "max_length": LENGTH, "seed": seed}
    if model == "gpt":
        return wb.zoo.transformer("pre_ln", **options)
    if model == "moe":
        return wb.zoo.moe(n_experts=4, **options)
    if model == "hf":
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=2))
    norm = (lambda n: nn.BatchNorm2d(n)) if model == "norm" else (lambda n: nn.Identity())
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), norm(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1), norm(16),
        nn.ReLU(), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, N_CLASSES),
    )  # fmt: skip


def loss_of(name, called, batch):
    if name == "hf":
        # The labels of the loop are those of the next token; the model shifts them itself.
        labels = torch.cat([torch.full_like(batch["labels"][:, :1], -100), batch["labels"][:, :-1]], 1)
        return called(input_ids=batch["inputs"], attention_mask=batch["mask"], labels=labels).loss
    logits = called(batch["inputs"])
    logits = logits[0] if isinstance(logits, tuple) else getattr(logits, "logits", logits)
    return functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


def spoiled(kind, severity, batch, rng, row):
    """Return the batch with a fault, and the factor on its loss."""
    batch = {name: None if value is None else value.clone() for name, value in batch.items()}
    inputs, labels = batch["inputs"], batch["labels"]
    is_image, n, counts = inputs.is_floating_point(), len(inputs), labels != -100
    top = N_CLASSES if is_image else VOCAB
    other = torch.from_numpy(rng.integers(top, size=tuple(labels.shape)))
    if is_image:
        other = (labels + 1 + torch.from_numpy(rng.integers(top - 1, size=n))) % top
    some = torch.zeros(n, dtype=torch.bool)
    if kind in ("labels of a rank", "shuffled labels", "garbage inputs"):
        some[torch.from_numpy(rng.permutation(n))[: max(1, round(severity * n))]] = True
    which = some if some.any() else torch.arange(n) == row
    if kind in ("labels of a rank", "shuffled labels", "row with other labels"):
        batch["labels"] = torch.where(_like(which, labels) & counts, other, labels)
    elif kind == "row with one label":
        batch["labels"] = torch.where(
            _like(which, labels) & counts, torch.full_like(labels, int(rng.integers(1, top))), labels
        )
    elif kind in ("garbage inputs", "row of another kind"):
        noise = torch.from_numpy(rng.normal(size=tuple(inputs.shape)).astype(np.float32)) * 3 if is_image else other
        batch["inputs"] = torch.where(_like(which, inputs), noise, inputs)
        if not is_image and kind == "row of another kind":  # the row is garbage as a whole, with its labels
            batch["labels"] = torch.where(_like(which, labels) & counts, other.roll(-1, 1), labels)
    elif kind == "row with huge inputs":
        inputs[row] *= severity
    elif kind == "repeated input":
        flat = inputs[row].flatten()
        flat[: round(severity * len(flat))] = flat[0] if is_image else int(flat[0])
        inputs[row] = flat.reshape(inputs[row].shape)
    elif kind == "row that is not finite":
        if is_image:
            inputs[row].view(-1)[0] = math.nan
    elif kind == "dropped mask":
        batch["mask"], batch["labels"] = torch.ones_like(batch["mask"]), labels.clamp_min(0)
    return batch, (severity if kind in ("scaled rank", "scaled micro-batch") else 1.0)


def _like(which, values):
    return which.reshape(-1, *[1] * (values.ndim - 1))


class Training:
    """One model that is watched, on this rank."""

    def __init__(self, name, seed, n_ranks, folder):
        self.name, self.seed, self.n_ranks = name, seed, n_ranks
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
        self.step, self.older = 0, []

    @property
    def search(self):
        return self.watched.recorder._attached.blame

    def rate(self):
        return 1e-3 * min(1.0, (self.step + 1) / 20)

    def state(self):
        search = self.search
        memory = [copy.deepcopy(search._history), list(search._kept), dict(search._answers)]
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()]), memory, self.step, random_states()

    def restore(self, state):
        (model, optimizer), (history, kept, answers), self.step, rng = state
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        search = self.search
        search._history, search._paused_until, search._asked = copy.deepcopy(history), 0, -1
        search._kept.clear()
        search._kept.extend(kept)
        search._answers = dict(answers)
        torch.set_rng_state(rng)

    def update(self, fault=None, *, spike=False):
        """Make one update; ``fault`` is (kind, severity, rank, micro, row, seed)."""
        kind, severity, rank, micro, row, seed = fault or ("", 0, -1, -1, -1, 0)
        is_mine, handles = rank == self.rank, []
        level = FAULTS[kind][0] if kind else ""
        before = None
        if kind == "stale parameters" and is_mine:
            before = [p.detach().clone() for p in self.model.parameters()]
            with torch.no_grad():
                for p, old in zip(self.model.parameters(), self.older[-severity], strict=True):
                    p.copy_(old)
        if kind == "broken arithmetic" and is_mine:
            generator = torch.Generator().manual_seed(seed)
            for p in self.model.parameters():

                def noisy(g):
                    return g + severity * g.pow(2).mean().sqrt() * torch.randn(g.shape, generator=generator)

                handles.append(p.register_hook(noisy))
        if kind == "zero gradients" and is_mine:
            handles = [p.register_hook(torch.zeros_like) for p in self.model.parameters()]
        self.batches = []
        for m in range(self.n_micro):
            batch, factor = self.data.batch(self.step * self.n_micro + m, self.rank), 1.0
            if is_mine and kind and level == "rank":
                batch, factor = spoiled(kind, severity, batch, np.random.default_rng([seed, m]), -1)
            elif is_mine and kind and m == micro:
                batch, factor = spoiled(kind, severity, batch, np.random.default_rng(seed), row)
            last = m == self.n_micro - 1
            with contextlib.nullcontext() if last or self.n_ranks == 1 else self.called.no_sync():
                loss = loss_of(self.name, self.called, batch) * factor / self.n_micro
                if kind == "row that is not finite" and is_mine and m == micro and not self.data.is_image:
                    loss = loss + self._bad_row(batch, row)
                loss.backward()
            self.batches.append(batch)
        for handle in handles:
            handle.remove()
        if before is not None:
            with torch.no_grad():
                for p, old in zip(self.model.parameters(), before, strict=True):
                    p.copy_(old)
        self.older = [*self.older[-12:], [p.detach().clone() for p in self.model.parameters()]]
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate() * (20 if spike else 1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def _bad_row(self, batch, row):
        """Return the loss of one row, weighted by something that is not finite."""
        one = {name: None if value is None else value[row : row + 1] for name, value in batch.items()}
        return loss_of(self.name, self.called, one) * math.nan

    def ask(self, fault):
        """Ask who spoiled the last update, and return what a later judgement needs."""
        start, captured = time.perf_counter(), {}

        def judge(seen, found, groups, **options):
            captured.update(seen=seen, found=found, groups=groups)
            return judge_rows(seen, found, groups, **options)

        from workbench.callbacks.recorder import blame as module

        module.judge_rows = judge
        try:
            answer = self.watched.blame()
        finally:
            module.judge_rows = judge_rows
        return {
            "fault": fault, "answer": answer, **captured, "seconds": time.perf_counter() - start,
            "unasked": self.search._history and captured["found"].score if captured else math.nan,
        }  # fmt: skip


def random_states():
    return torch.get_rng_state()


def faults_of(name, n_ranks, seed, step):
    rng = random.Random(f"{name} {n_ranks} {seed} {step}")
    found = []
    for kind, (level, severities, without) in FAULTS.items():
        if name in without or (level == "rank") != (n_ranks > 1):
            continue
        for severity in severities:
            rank = rng.randrange(n_ranks) if n_ranks > 1 else 0
            n_rows = 16 if name in ("images", "norm") else 8
            micro = rng.randrange(4) if n_ranks == 1 else -1
            found.append(
                (kind, severity, rank, micro, rng.randrange(n_rows) if level == "row" else -1, rng.randrange(2**31))
            )
    return found


def run(name, seed, n_ranks):
    """Run one training; returns the answers to all questions, on rank 0."""
    warnings.simplefilter("ignore")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        if n_ranks > 1:
            box = [folder]
            distributed.broadcast_object_list(box, src=0)
            folder = box[0]
        training = Training(name, seed, n_ranks, Path(folder))
        for stage in STAGES_OF_RANKS if n_ranks > 1 else STAGES:
            while training.step < stage:
                training.update()
            state = training.state()
            for fault in faults_of(name, n_ranks, seed, stage):
                older = list(training.older)
                training.update(fault)
                found.append({"stage": stage, **training.ask(fault)})
                training.restore(state)
                training.older = older
            for i in range(N_HEALTHY):
                if i % 2:
                    training.update(spike=True)
                training.update()
                found.append({"stage": stage, **training.ask(None)})
            training.restore(state)
        training.watched.close()
        if n_ranks > 1:
            distributed.barrier()
    return found


def on_rank(rank, jobs, out, port):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(N_RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    for name, seed in jobs:
        found = run(name, seed, N_RANKS)
        if rank == 0:
            save(out, name, seed, N_RANKS, found)
    distributed.destroy_process_group()


def save(out, name, seed, n_ranks, found):
    path = out / f"{name}_{seed}_{n_ranks}.pickle"
    partial = path.with_suffix(".part")
    partial.write_bytes(pickle.dumps(found))
    partial.rename(path)
    print(path.name, len(found), flush=True)


def place(level, answer):
    """Return the place that an answer names, as far as a level asks for it."""
    full = (answer.rank, answer.micro_batch, answer.row)
    return full[: {"rank": 1, "micro": 2, "row": 3}[level]]


def guesses(row, level, rng):
    """Return the places of the largest loss, the largest gradient norm, and a random one."""
    seen = row["seen"]
    made = seen.is_made
    units = [(int(r), int(m)) for r, m in zip(*np.nonzero(made), strict=True)]
    norm = {u: np.nan_to_num(np.linalg.norm(seen.sketch[u][:, -1]), nan=np.inf) for u in units}
    loss = {u: np.nan_to_num(seen.loss[u], nan=np.inf) for u in units}
    if level in ("rank", "micro"):
        n = 1 if level == "rank" else 2
        return [max(loss, key=loss.get)[:n], max(norm, key=norm.get)[:n], rng.choice(units)[:n]]
    rows = []
    for each in row["groups"]:
        size = each.features["size"]
        losses = each.features.get("loss", size)
        of_rows = zip(each.numbers, size, losses, strict=True)
        found = [(each.rank, each.micro_batch, n, float(a), float(b)) for n, a, b in of_rows]
        rows += [] if each.is_reference else found
    if not rows:
        return [(-1,) * 3] * 3
    return [max(rows, key=lambda r: r[4])[:3], max(rows, key=lambda r: r[3])[:3], rng.choice(rows)[:3]]


def judged(out):
    """Return all questions with the answer of the present judgement."""
    found = []
    for path in sorted(out.glob("*.pickle")):
        name, seed, n_ranks = path.stem.split("_")
        for row in pickle.loads(path.read_bytes()):
            answer = judge_rows(row["seen"], row["found"], row["groups"]) if "seen" in row else row["answer"]
            found.append({**row, "model": name, "seed": int(seed), "n_ranks": int(n_ranks), "answer": answer})
    return found


def part_of(row):
    kind = "fit" if row["fault"] is None or row["fault"][0] in FIT_KINDS else "held-out"
    return kind, "fit" if row["model"] in FIT_MODELS else "held-out"


def table(rows):
    """Return lines of a table by kind, severity and stage."""
    rng, lines, groups = random.Random(0), [], defaultdict(list)
    for row in rows:
        if row["fault"] is not None:
            groups[FAULTS[row["fault"][0]][0], row["fault"][0], row["fault"][1], row["stage"]].append(row)
    for (level, kind, severity, stage), of in groups.items():
        lines.append((level, kind, severity, stage, len(of), *shares(of, rng)))
    return lines


def shares(rows, rng):
    """Return the shares found, in a wrong place, and found by each baseline."""
    right, wrong, base = 0, 0, [0, 0, 0]
    for row in rows:
        kind, _, rank, micro, number, _ = row["fault"]
        level = FAULTS[kind][0]
        truth = (rank, micro, number)[: {"rank": 1, "micro": 2, "row": 3}[level]]
        answer = place(level, row["answer"])
        right += answer == truth
        # A micro-batch without a row is right as far as it goes, but not found.
        named = (row["answer"].rank, row["answer"].micro_batch, row["answer"].row)
        wrong += row["answer"].is_found and any(a >= 0 and a != t for a, t in zip(named, truth, strict=False))
        for i, guess in enumerate(guesses(row, level, rng) if "seen" in row else []):
            base[i] += tuple(guess) == truth
    n = max(1, len(rows))
    return right / n, wrong / n, *(each / n for each in base)


_SHARES = ("found", "wrong place", "largest loss", "largest gradient", "random")


def _headed(*names):
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def report(out):
    rows = judged(out)
    lines = [
        _headed("kinds", "models", "faults", *_SHARES, "healthy", "false blame"),
    ]
    for kinds in ("held-out", "fit"):
        for models in ("held-out", "fit"):
            of = [r for r in rows if r["fault"] is not None and part_of(r) == (kinds, models)]
            healthy = [r for r in rows if r["fault"] is None and part_of(r)[1] == models]
            false = sum(r["answer"].is_found for r in healthy) / max(1, len(healthy))
            numbers = [f"{each:.0%}" for each in shares(of, random.Random(0))]
            lines.append(f"| {kinds} | {models} | {len(of)} | {' | '.join(numbers)} | {len(healthy)} | {false:.1%} |")
    for models in ("held-out", "fit"):
        lines += [
            "",
            f"On {models} models, by severity and updates before:",
            "",
            _headed("level", "kind", "severity", "updates", "faults", *_SHARES),
        ]
        for *head, n, right, wrong, a, b, c in table([r for r in rows if part_of(r)[1] == models]):
            lines.append(
                f"| {' | '.join(map(str, head))} | {n} | "
                + " | ".join(f"{x:.0%}" for x in (right, wrong, a, b, c))
                + " |"
            )
    lines += ["", f"Median time of a question: {np.median([r['seconds'] for r in rows]):.2g} s."]
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
    models, seeds = (FIT_MODELS, FIT_SEEDS) if given.part == "fit" else (FIT_MODELS + HELD_MODELS, HELD_SEEDS)
    jobs = [(name, seed) for seed in seeds for name in models]
    for name, seed in jobs if given.ranks != N_RANKS else ():
        if not (given.out / f"{name}_{seed}_1.pickle").exists():
            save(given.out, name, seed, 1, run(name, seed, 1))
    left = [job for job in jobs if not (given.out / f"{job[0]}_{job[1]}_{N_RANKS}.pickle").exists()]
    if left and given.ranks != 1:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.start_processes(on_rank, (left, given.out, port), nprocs=N_RANKS, start_method="spawn")


if __name__ == "__main__":
    main()
