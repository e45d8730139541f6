"""Small sound trainings, each step of which is one line that `workbench.course.miswired` can replace."""

from __future__ import annotations

import inspect
import io
import time
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint
from torch.utils.data import DataLoader

from workbench.contracts import check as check  # registers all contracts
from workbench.contracts.lab import all_results, show_progress
from workbench.contracts.observer import Observer
from workbench.contracts.results import CheckReport, Result

_LENGTH, _N_IDS, _WIDTH, _N_HEADS = 24, 32, 32, 4
_SIDE = 8
#: Updates of a check, after which every contract can be tested.
_N_UPDATES = 6


def texts(n: int, seed: int) -> Tensor:
    """Return ids of shape (n, 16, 24): an id is often followed by the next one, short texts last, with padding 0."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.where(torch.rand(n, 16, _LENGTH, generator=generator) < 0.7, 1, 5)
    ids = (steps.cumsum(-1) + torch.randint(0, _N_IDS - 1, (n, 16, 1), generator=generator)) % (_N_IDS - 1) + 1
    ends = torch.randint(_LENGTH // 3, _LENGTH + 1, (n, 16, 1), generator=generator).sort(1, descending=True).values
    return ids.where(torch.arange(_LENGTH) < ends, 0)


def _loader(examples: Any) -> DataLoader:
    held: Any = list(examples)
    return DataLoader(held, batch_size=16)


def steps_of(kind: type) -> dict[str, str]:
    """Return the steps of a training or a model, the functions that may be replaced, with what each is for."""
    own = ("forward", "update", "train", "check", "loader", "parts")
    found = {
        name: inspect.getdoc(value) or ""
        for each in reversed(kind.__mro__)
        if each.__module__ == __name__
        for name, value in vars(each).items()
        if inspect.isfunction(value) and not name.startswith("_") and name not in own
    }
    return {name: words.partition("\n")[0] for name, words in found.items()}


class Block(nn.Module):
    """Attention and a network of two layers, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.network = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH))

    def forward(self, states: Tensor, model: Decoder, visible: Tensor) -> Tensor:
        """Return the states after the block; ``visible`` is where a token (row) may look (column)."""
        qkv = self.qkv(self.norm(states)).unflatten(-1, (3, _N_HEADS, -1)).movedim(-3, 0).transpose(-2, -3)
        read = model.weights(model.scores(qkv[0], qkv[1]), visible) @ qkv[2]
        states = states + model.dropped(self.out(read.transpose(-2, -3).flatten(-2)))
        return states + self.network(self.norm2(states))


class Decoder(nn.Module):
    """A decoder of two blocks with learned positions, whose padding is id 0."""

    n_outputs = _N_IDS

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_N_IDS, _WIDTH, padding_idx=0)
        self.positions = nn.Embedding(_LENGTH, _WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, self.n_outputs)
        self.initialize()

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of shape (batch, token, id)."""
        states = self.states(ids)
        for block in self.blocks:
            states = self.through(block, states, self.visible(ids))
        return self.outputs(states, ids)

    def initialize(self) -> None:
        """Set the first weights of the embedding."""
        nn.init.normal_(self.embedding.weight[1:], std=0.5)

    def states(self, ids: Tensor) -> Tensor:
        """Make the states that the first block reads."""
        return self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))

    def visible(self, ids: Tensor) -> Tensor:
        """Say which tokens a token may look at."""
        return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()

    def through(self, block: nn.Module, states: Tensor, visible: Tensor) -> Tensor:
        """Pass the states through a block."""
        return block(states, self, visible)

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Compute the scores of attention."""
        return queries @ keys.mT / queries.shape[-1] ** 0.5

    def weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Turn scores into weights of attention."""
        return scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)

    def dropped(self, update: Tensor) -> Tensor:
        """Drop entries of the update of attention."""
        return functional.dropout(update, 0.1, self.training)

    def outputs(self, states: Tensor, ids: Tensor) -> Tensor:
        """Turn the last states into outputs."""
        return self.head(self.norm(states))


class Encoder(Decoder):
    """An encoder that tells whether the mean id of a text is large; fixed positions, a mean over tokens."""

    n_outputs = 2

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(_LENGTH, _WIDTH).requires_grad_(False)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits of shape (batch, 2); the mask has the shape (batch, token)."""
        real = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask
        states = self.states(ids)
        for block in self.blocks:
            states = self.through(block, states, real[:, None, None, :])
        return self.head(self.pooled(self.norm(states), real[..., None]))

    def pooled(self, states: Tensor, real: Tensor) -> Tensor:
        """Take the mean of the states over the tokens of a text."""
        return (states * real).sum(1) / real.sum(1).clamp_min(1)


class Checkpointed(Decoder):
    """The decoder, whose blocks are computed again in the backward pass."""

    def through(self, block: nn.Module, states: Tensor, visible: Tensor) -> Tensor:
        """Pass the states through a block."""
        return checkpoint.checkpoint(block, states, self, visible, use_reentrant=False)


class Tied(Decoder):
    """The decoder, whose head is its embedding, as its configuration says."""

    _tied_weights_keys: ClassVar = {"head.weight": "embedding.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"tie_word_embeddings": True})()
        self.tie()

    def initialize(self) -> None:
        """Set the first weights of the embedding, which are those of the head."""
        nn.init.normal_(self.embedding.weight[1:], std=0.1)

    def tie(self) -> None:
        """Give the head the weights of the embedding."""
        self.head.weight = self.embedding.weight


class Mixture(Decoder):
    """The decoder with four experts before its head, and a loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(_WIDTH, 4), nn.ModuleList([nn.Linear(_WIDTH, _WIDTH) for _ in range(4)])

    def outputs(self, states: Tensor, ids: Tensor) -> Tensor:
        """Turn the last states into outputs."""
        shares = self.router(states).softmax(-1)
        best = functional.one_hot(shares.argmax(-1), 4)
        self.balance_loss = self.balance(shares, best)
        chosen = (torch.stack([each(states) for each in self.experts], -1) * (shares * best)[..., None, :]).sum(-1)
        return self.head(self.norm(states + chosen))

    def balance(self, shares: Tensor, best: Tensor) -> Tensor:
        """Compute the loss that balances the experts."""
        return 4 * (shares.mean((0, 1)) * best.float().mean((0, 1))).sum()


class Vision(nn.Module):
    """A small convolutional network that says how far to the right a bright spot is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.dropout, self.head = nn.Conv2d(8, 8, 3, 2), nn.Dropout(0.1), nn.Linear(72, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return one number for each image, shape (batch, 1)."""
        return self.head(self.dropout(self.outputs(self.norm(self.conv(images)).relu())))

    def outputs(self, states: Tensor) -> Tensor:
        """Turn the states of the first layer into features."""
        return self.conv2(states).relu().flatten(1)


class Training:
    """A small training and its loop, each step of which is one line; `workbench.course.miswired` returns one.

    Args:
        network: Class of its model.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        schedule: Schedule of its learning rate.

    Example:
        >>> import workbench as wb
        >>> training = wb.course.miswired()
        >>> len(training.train(3)), training.check().verdict
        (3, 'passed')

    See Also:
        `workbench.course.miswired`: Creates one with a wrong line.
    """

    network: ClassVar[type[nn.Module]] = Decoder
    rate: ClassVar[float] = 3e-3
    n_parts: ClassVar[int] = 1

    def __init__(self, network: type[nn.Module] | None = None) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model: Any = self.converted((network or self.network)())
            self.optimizer = self.optimized(self.model.parameters())
            self.finish()
        self.schedule = self.scheduled()
        self.set_mode()

    def update(self, batch: Any) -> float:
        """Make one update on a batch, and return its loss."""
        parts, total = self.parts(batch), 0.0
        for part in parts:
            loss = self.loss(self.model, part) * self.share(part, batch)
            self.backward(loss)
            total += float(loss.detach())
        for name in self.order():
            getattr(self, name)()
        return total

    def train(self, n_updates: int, *, seed: int = 0) -> list[float]:
        """Make updates, and return their losses; random numbers outside are left as they are."""
        loader = self.loader(n_updates, seed=seed)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch, about some of the faults
            torch.manual_seed(seed)
            stream = iter(loader)
            return [self.update(self.chosen(loader, stream)) for _ in range(n_updates)]

    def check(self, *, updates: int = _N_UPDATES) -> CheckReport:
        """Test the contracts of this training, model and loop, on one that is made anew.

        Args:
            updates: Number of updates.

        Returns:
            Results by contract, printed as a table.
        """
        found: list[Result] = []

        def ready(seen: Observer) -> None:
            with show_progress(False) as bar:
                found.extend(all_results(seen, (), bar))

        start = time.perf_counter()
        with warnings.catch_warnings(), Observer(updates, ready) as seen:
            warnings.simplefilter("ignore")
            seen.sees_all = True
            losses = type(self)(type(self.model)).train(updates)
            seen.finish()
        return CheckReport(found, seen.n_done, time.perf_counter() - start, losses)

    def loader(self, n: int, *, seed: int = 0) -> DataLoader:
        """Return a loader of batches of 16 examples."""
        return _loader(texts(n, seed).flatten(0, 1))

    def parts(self, batch: Any) -> list[Any]:
        """Return the micro-batches of a batch."""
        return list(batch.chunk(self.n_parts))

    def converted(self, model: nn.Module) -> nn.Module:
        """Give the model its dtype."""
        return model.float()

    def optimized(self, parameters: Any) -> torch.optim.Optimizer:
        """Build the optimizer."""
        return torch.optim.AdamW(parameters, lr=self.rate)

    def finish(self) -> None:
        """Set the first weights of the head."""
        self.model.head.reset_parameters()

    def scheduled(self) -> torch.optim.lr_scheduler.LRScheduler:
        """Build the schedule of the learning rate, a warm-up of ten updates."""
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 10))

    def set_mode(self) -> None:
        """Set the mode of the model."""
        self.model.train()

    def chosen(self, loader: DataLoader, stream: Iterator[Any]) -> Any:
        """Choose the batch of an update."""
        return next(stream)

    def labels(self, ids: Tensor) -> Tensor:
        """Make the labels of a batch."""
        return ids[:, 1:]

    def loss(self, model: Any, ids: Tensor) -> Tensor:
        """Compute the loss."""
        return functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), self.labels(ids).flatten(), ignore_index=0)

    def share(self, part: Any, batch: Any) -> float:
        """Weigh the loss of a micro-batch."""
        return float((part[:, 1:] != 0).sum() / (batch[:, 1:] != 0).sum())

    def backward(self, loss: Tensor) -> None:
        """Compute gradients."""
        loss.backward()

    def order(self) -> list[str]:
        """Put the steps after the backward pass in their order."""
        return ["clip", "step", "follow", "clear"]

    def clip(self) -> None:
        """Clip the gradients."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def step(self) -> Any:
        """Make the update."""
        self.optimizer.step()

    def follow(self) -> None:
        """Move the schedule."""
        self.schedule.step()

    def clear(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad()


class Accumulated(Training):
    """The decoder with two micro-batches for each update."""

    n_parts = 2


class Encoding(Training):
    """An encoder of whole texts, some of which are empty."""

    network = Encoder

    def loader(self, n: int, *, seed: int = 0) -> DataLoader:
        """Return a loader of texts; from the second batch on, the last one is empty."""
        found = texts(n, seed)
        found[1:, -1] = 0
        return _loader(found.flatten(0, 1))

    def labels(self, ids: Tensor) -> Tensor:
        """Make the labels of a batch."""
        return (ids.sum(1) > 16 * (ids != 0).sum(1)).long()

    def loss(self, model: Any, ids: Tensor) -> Tensor:
        """Compute the loss."""
        return functional.cross_entropy(model(ids, attention_mask=ids != 0), self.labels(ids))


class Seeing(Training):
    """A regression on images."""

    network = Vision

    def loader(self, n: int, *, seed: int = 0) -> DataLoader:
        """Return a loader of images of shape (1, 8, 8) with the column of their bright spot, from 0 to 1."""
        generator = torch.Generator().manual_seed(seed)
        images, columns = torch.rand(n, 16, 1, _SIDE, _SIDE, generator=generator), torch.arange(_SIDE)
        spots = torch.randint(_SIDE, (n, 16), generator=generator)
        images[..., _SIDE // 2, :] += 3.0 * (columns == spots[..., None])[:, :, None]
        return _loader(zip(images.flatten(0, 1), (spots / (_SIDE - 1)).flatten(), strict=True))

    def parts(self, batch: Any) -> list[Any]:
        """Return the micro-batches of a batch."""
        return [batch]

    def loss(self, model: Any, batch: Any) -> Tensor:
        """Compute the loss."""
        return (model(batch[0]).squeeze(-1) - batch[1]).square().mean()

    def share(self, part: Any, batch: Any) -> float:
        """Weigh the loss of a micro-batch."""
        return 1.0


class Compiling(Training):
    """The decoder, compiled."""

    def __init__(self, network: type[nn.Module] | None = None) -> None:
        super().__init__(network)
        self.called: Any = torch.compile(self.model, backend="eager")

    def loss(self, model: Any, ids: Tensor) -> Tensor:
        """Compute the loss."""
        return super().loss(self.called, ids)


class Checkpointing(Training):
    """The decoder with activation checkpointing."""

    network = Checkpointed


class Tying(Training):
    """The decoder with tied weights."""

    network = Tied

    def finish(self) -> None:
        """Set the first weights of the head, which are those of the embedding."""


class Mixing(Training):
    """The decoder with a mixture of experts."""

    network = Mixture

    def loss(self, model: Any, ids: Tensor) -> Tensor:
        """Compute the loss."""
        return super().loss(model, ids) + self.balanced(model.balance_loss)

    def balanced(self, balance_loss: Tensor) -> Tensor | float:
        """Weigh the loss that balances the experts."""
        return 0.01 * balance_loss


class Half(Training):
    """The decoder in float16 with a gradient scaler."""

    def __init__(self, network: type[nn.Module] | None = None) -> None:
        super().__init__(network)
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loss(self, model: Any, ids: Tensor) -> Tensor:
        """Compute the loss."""
        with torch.autocast("cpu", torch.float16):
            return super().loss(model, ids)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients."""
        self.scaler.scale(loss).backward()

    def order(self) -> list[str]:
        """Put the steps after the backward pass in their order."""
        return ["unscale", "clip", "step", "follow", "clear"]

    def unscale(self) -> None:
        """Divide the scale of the loss out of the gradients."""
        self.scaler.unscale_(self.optimizer)

    def step(self) -> Any:
        """Make the update, and choose the next scale."""
        return self.scaler.step(self.optimizer), self.scaler.update()


class Unclipped(Half):
    """The decoder in float16 without clipping."""

    def order(self) -> list[str]:
        """Put the steps after the backward pass in their order."""
        return ["step", "follow", "clear"]


class Continued(Training):
    """The decoder with a small rate, as in fine-tuning."""

    rate = 1e-4


class Resumed(Training):
    """The decoder, which is saved and read again after three updates."""

    n_done = 0

    def update(self, batch: Any) -> float:
        """Make one update on a batch, and return its loss."""
        if self.n_done == 3:
            file, parts = io.BytesIO(), {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
            torch.save({name: each.state_dict() for name, each in parts.items()}, file)
            file.seek(0)
            saved = torch.load(file)
            self.optimizer = self.optimized(self.model.parameters())
            self.schedule = self.scheduled()
            self.model.load_state_dict(saved["model"])
            self.schedule.load_state_dict(saved["schedule"])
            self.restore(saved)
        self.n_done += 1
        return super().update(batch)

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore the optimizer."""
        self.optimizer.load_state_dict(saved["optimizer"])
