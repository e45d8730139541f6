"""Trials of models as people write them by hand: where the residual is added, how states are passed, laid out, named.

Each model gives its states by a method of its own, from the same code that its forward runs.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.foreign.trial import Pairs, Trial

VOCABULARY, WIDTH, DEPTH = 97, 24, 4
Packed = namedtuple("Packed", "states cache")


def tokens(n_rows: int = 16, n_tokens: int = 9) -> Tensor:
    return torch.randint(3, VOCABULARY, (n_rows, n_tokens))


def vectors() -> Tensor:
    return torch.randn(16, 9, WIDTH)


# --- parts -----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention without its residual; over axis 1, or 0 where time comes first."""

    def __init__(self, width: int = WIDTH, *, time_first: bool = False):
        super().__init__()
        self.qkv, self.out, self.time_first = nn.Linear(width, 3 * width), nn.Linear(width, width), time_first

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x.transpose(0, 1) if self.time_first else x
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        y = self.out(mixed.transpose(1, 2).flatten(2))
        return y.transpose(0, 1) if self.time_first else y


class Mlp(nn.Sequential):
    def __init__(self, width: int = WIDTH):
        super().__init__(nn.Linear(width, 40), nn.GELU(), nn.Linear(40, width))


class DynamicTanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha, self.weight, self.bias = (nn.Parameter(torch.rand(n)) for n in (1, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.tanh(self.alpha * x) + self.bias


class Block(nn.Module):
    """A whole block: Pre-LN attention and MLP."""

    def __init__(self, norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(WIDTH), **options: Any):
        super().__init__()
        self.ln1, self.ln2, self.attention, self.mlp = norm(), norm(), Attention(**options), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class ParallelBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        return x + self.attention(h) + self.mlp(h)


class PostBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.ln1(x + self.attention(x))
        return self.ln2(x + self.mlp(x))


class SandwichBlock(Block):
    def __init__(self):
        super().__init__()
        self.after1, self.after2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after1(self.attention(self.ln1(x)))
        return x + self.after2(self.mlp(self.ln2(x)))


class NormalizedBlock(Block):
    """nGPT: steps on the sphere."""

    def __init__(self):
        super().__init__()
        self.rates = nn.Parameter(torch.rand(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for rate, branch in zip(self.rates, (self.attention, self.mlp), strict=True):
            x = functional.normalize(x + rate * (functional.normalize(branch(x), dim=-1) - x), dim=-1)
        return x


class ScaledBlock(Block):
    """ReZero, LayerScale and DeepNorm in one: factors of the stream and of the branches."""

    def __init__(self, *, stream: float = 1.0, per_feature: bool = False):
        super().__init__()
        self.stream, self.scale = stream, nn.Parameter(torch.rand(WIDTH if per_feature else 1) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stream * x + self.scale * self.attention(self.ln1(x))
        return self.stream * x + self.scale * self.mlp(self.ln2(x))


class InPlaceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.attention(self.ln1(x))
        x += self.mlp(self.ln2(x))
        return x


class DropBlock(Block):
    """Stochastic depth, and dropout of the branches."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.5:
            return x
        return super().forward(functional.dropout(x, 0.1, self.training))


class MixingBlock(Block):
    """modded-nanoGPT: the first state enters every block, and the first values every attention."""

    def __init__(self):
        super().__init__()
        self.lambdas = nn.Parameter(torch.tensor([0.9, 0.1]))

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return super().forward(self.lambdas[0] * x + self.lambdas[1] * first)


class ConditionedBlock(Block):
    """DiT: shift, scale and gate from a condition."""

    def __init__(self):
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(condition)[:, None].chunk(3, -1)
        x = x + gate * self.attention(self.ln1(x) * (1 + scale) + shift)
        return x + gate * self.mlp(self.ln2(x))


class Experts(nn.Module):
    """A mixture of experts, one per token."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out[choice == number] = expert(x[choice == number])
        return out * weight[..., None]


class MixtureBlock(Block):
    def __init__(self):
        super().__init__()
        self.mlp = Experts()


class Highway(nn.Module):
    """A gate between the state and its update."""

    def __init__(self):
        super().__init__()
        self.gate, self.update = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.constant_(self.gate.bias, -1.0)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        return (1 - gate) * x + gate * torch.tanh(self.update(x))


class Mixer(nn.Module):
    """MLP-Mixer: over tokens, then over features."""

    def __init__(self):
        super().__init__()
        self.ln1, self.ln2, self.over_tokens, self.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Mlp(9), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.ln1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.ln2(x))


class Convolution(nn.Module):
    """A residual block of convolutions, features second."""

    def __init__(self, n_dims: int = 2):
        super().__init__()
        kind = nn.Conv2d if n_dims == 2 else nn.Conv1d
        self.first, self.second = (kind(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(functional.gelu(self.first(x)))


class DepthRouted(Block):
    """Mixture of depths: the better half of the tokens passes the block, the others skip it."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (
            self.router(x)[..., 0].topk(x.shape[1] // 2, dim=1).indices.sort(1).values[..., None].expand(-1, -1, WIDTH)
        )
        return x.scatter(1, chosen, super().forward(x.gather(1, chosen)))


# --- models ----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Embedding, blocks in a list, head; subclasses say how the states follow from each other."""

    def __init__(self, make: Callable[[], nn.Module] = Block, depth: int = DEPTH):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = self.make_blocks(make, depth)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def make_blocks(self, make: Callable[[], nn.Module], depth: int) -> nn.Module:
        return nn.ModuleList(make() for _ in range(depth))

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))

    def states(self, ids: Tensor) -> list[Tensor] | Pairs:
        found = [self.embed(ids)]
        for block in self.blocks:
            found.append(block(found[-1].clone()))
        return found

    def forward(self, ids: Tensor) -> Tensor:
        states = self.states(ids)
        last = states[-1]
        return self.head(self.norm(last[1] if isinstance(last, tuple) else last))


class Keyword(Model):
    """The state is passed by keyword, the output is a dataclass, a named tuple, a dict or a tuple."""

    kind: str = "tuple"

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for block in self.blocks:
            found.append(block(hidden=found[-1]))
        return found


class Returning(Block):
    """A block that returns its state inside something."""

    def __init__(self, pack: Callable[[Tensor], Any]):
        super().__init__()
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(super().forward(x))


@dataclass
class Output:
    states: Tensor
    cache: Any = None


class Unpacking(Model):
    """The blocks return the state inside something."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]):
        super().__init__(lambda: Returning(pack))
        self.unpack = unpack

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for block in self.blocks:
            found.append(self.unpack(block(found[-1])))
        return found


class Nested(Model):
    """The state is passed on inside a list or a dict of states."""

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for block in self.blocks:
            found.append(block({"x": found[-1], "t": 0})["x"])
        return found


class NestedBlock(Block):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "x": super().forward(state["x"])}


class Attributes(Model):
    """Blocks as attributes, each with a name."""

    def make_blocks(self, make: Callable[[], nn.Module], depth: int) -> nn.Module:
        for number in range(depth):
            setattr(self, f"block{number}", make())
        return None

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for number in range(DEPTH):
            found.append(getattr(self, f"block{number}")(found[-1]))
        return found


class Dictionary(Model):
    def make_blocks(self, make: Callable[[], nn.Module], depth: int) -> nn.Module:
        return nn.ModuleDict({f"h{number}": make() for number in range(depth)})

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for block in self.blocks.values():
            found.append(block(found[-1]))
        return found


class Staged(Model):
    """Two stages of one width."""

    def make_blocks(self, make: Callable[[], nn.Module], depth: int) -> nn.Module:
        return nn.ModuleList(nn.ModuleList(make() for _ in range(depth // 2)) for _ in range(2))

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for stage in self.blocks:
            for block in stage:
                found.append(block(found[-1]))
        return found


class Universal(Model):
    """One block, over and over."""

    def __init__(self):
        super().__init__(depth=1)

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for _ in range(DEPTH):
            found.append(self.blocks[0](found[-1]))
        return found


class Checkpointed(Model):
    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for block in self.blocks:
            found.append(checkpoint(block, found[-1], use_reentrant=False))
        return found


class TimeFirst(Model):
    """States (token, batch, feature)."""

    def __init__(self):
        super().__init__(lambda: Block(time_first=True))

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids).transpose(0, 1).contiguous()


class FirstState(Model):
    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for block in self.blocks:
            found.append(block(found[-1], found[0]))
        return found


class Conditioned(Model):
    """Vectors and a condition, as a denoiser has them."""

    def states(self, x: Tensor, condition: Tensor) -> list[Tensor]:
        found = [x]
        for block in self.blocks:
            found.append(block(found[-1], condition))
        return found

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.head(self.norm(self.states(x, condition)[-1]))


class Between(Model):
    """Whole blocks, and something done to the stream between them; what enters and what leaves a block are kept."""

    def __init__(self):
        super().__init__()
        self.weights, self.mid = (
            nn.Parameter(torch.rand(DEPTH) * 0.2 + 0.4),
            nn.Parameter(torch.randn(1, 64, WIDTH) * 0.1),
        )

    def before(self, number: int, x: Tensor, pairs: Pairs) -> Tensor:
        raise NotImplementedError

    def states(self, ids: Tensor) -> Pairs:
        x, pairs = self.embed(ids), []
        for number, block in enumerate(self.blocks):
            x = self.before(number, x, pairs)
            pairs.append((x, block(x)))
            x = pairs[-1][1]
        return pairs


class Scalars(Between):
    """modded-nanoGPT as a loop: the stream is scaled and the first state added."""

    def before(self, number: int, x: Tensor, pairs: Pairs) -> Tensor:
        return self.weights[number] * x + 0.1 * pairs[0][0] if pairs else x


class Skips(Between):
    """The second half gets the states of the first half once more."""

    def before(self, number: int, x: Tensor, pairs: Pairs) -> Tensor:
        return x + self.weights[number] * pairs[DEPTH - 1 - number][1] if number >= DEPTH // 2 else x


class Positions(Between):
    """Positions are added before every block."""

    def before(self, number: int, x: Tensor, pairs: Pairs) -> Tensor:
        return x + self.mid[:, : x.shape[1]]


class PerFeature(Between):
    """A scale per feature before every block."""

    def before(self, number: int, x: Tensor, pairs: Pairs) -> Tensor:
        return x * (1 + self.mid[0, number])


class Averages(Between):
    """DenseFormer: an average over all states so far."""

    def before(self, number: int, x: Tensor, pairs: Pairs) -> Tensor:
        return 0.8 * x + sum(0.2 / len(pairs) * before for before, _ in pairs) if pairs else x


class Normed(Between):
    """A norm without parameters between blocks."""

    def before(self, number: int, x: Tensor, pairs: Pairs) -> Tensor:
        return functional.rms_norm(x, (WIDTH,))


class Loop(nn.Module):
    """Parts in lists of their own, and a loop that adds."""

    def __init__(self, **parts: Callable[[], nn.Module]):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.make(parts)

    def make(self, parts: dict[str, Callable[[], nn.Module]]) -> None:
        for name, make in parts.items():
            setattr(self, name, nn.ModuleList(make() for _ in range(DEPTH)))

    def step(self, number: int, x: Tensor) -> Tensor:
        raise NotImplementedError

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embedding(ids)]
        for number in range(DEPTH):
            found.append(self.step(number, found[-1]))
        return found

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.states(ids)[-1])


def norm() -> nn.Module:
    return nn.LayerNorm(WIDTH)


class ParallelLists(Loop):
    """Norms, attentions and MLPs each in a list."""

    def __init__(self):
        super().__init__(ln1=norm, attentions=Attention, ln2=norm, mlps=Mlp)

    def step(self, number: int, x: Tensor) -> Tensor:
        x = x + self.attentions[number](self.ln1[number](x))
        return x + self.mlps[number](self.ln2[number](x))


class ParallelPostLists(ParallelLists):
    """The same with norms of the sums, as XLM."""

    def step(self, number: int, x: Tensor) -> Tensor:
        x = self.ln1[number](x + self.attentions[number](x))
        return self.ln2[number](x + self.mlps[number](x))


class Pairs2(Loop):
    """Lists of parts, as in lucidrains' repositories."""

    def make(self, parts: Any) -> None:
        pair = lambda: nn.ModuleList([nn.Sequential(norm(), Attention()), nn.Sequential(norm(), Mlp())])  # noqa: E731
        self.layers = nn.ModuleList(pair() for _ in range(DEPTH))

    def step(self, number: int, x: Tensor) -> Tensor:
        attention, mlp = self.layers[number]
        x = attention(x) + x
        return mlp(x) + x


class Dicts(Loop):
    """A ModuleDict for each layer, as in nanoGPT's ``transformer``."""

    def make(self, parts: Any) -> None:
        one = lambda: nn.ModuleDict({"ln1": norm(), "attention": Attention(), "ln2": norm(), "mlp": Mlp()})  # noqa: E731
        self.layers = nn.ModuleList(one() for _ in range(DEPTH))

    def step(self, number: int, x: Tensor) -> Tensor:
        layer = self.layers[number]
        x = x + layer["attention"](layer["ln1"](x))
        return x + layer["mlp"](layer["ln2"](x))


class Holders(Loop):
    """Modules that only hold parts, whose forward nobody calls."""

    def make(self, parts: Any) -> None:
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))

    def step(self, number: int, x: Tensor) -> Tensor:
        layer = self.layers[number]
        x = x + layer.attention(layer.ln1(x))
        return x + layer.mlp(layer.ln2(x))


class ForwardCalled(Loop):
    """Whole blocks, called by ``forward``, so that their own hooks do not run."""

    def make(self, parts: Any) -> None:
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))

    def step(self, number: int, x: Tensor) -> Tensor:
        return self.layers[number].forward(x)


class Recurrent(Loop):
    """LSTMs with a residual."""

    def __init__(self):
        super().__init__(cells=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))

    def step(self, number: int, x: Tensor) -> Tensor:
        return x + self.cells[number](x)[0]


class Wide(nn.Module):
    """Hyper-connections with a stream axis of its own, (batch, stream, token, feature)."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch, self.ln = Attention(), nn.LayerNorm(WIDTH)
            self.read, self.write, self.mix = (
                nn.Parameter(t) for t in (torch.rand(3), torch.rand(3), torch.eye(3) + 0.1 * torch.rand(3, 3))
            )

        def forward(self, x: Tensor) -> Tensor:
            added = self.branch(self.ln(torch.einsum("s,bstd->btd", self.read, x)))
            return torch.einsum("rs,bstd->brtd", self.mix, x) + self.write[:, None, None] * added[:, None]

    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(self.Block() for _ in range(DEPTH))

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embedding(ids)[:, None] * torch.arange(1.0, 4.0)[:, None, None]]
        for layer in self.layers:
            found.append(layer(found[-1]))
        return found

    def forward(self, ids: Tensor) -> Tensor:
        return self.states(ids)[-1].sum(1)


class Reversible(nn.Module):
    """RevNet: two streams that update each other."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = Attention(), Mlp()

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            a = a + self.f(b)
            return a, b + self.g(a)

    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(self.Block() for _ in range(DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        a = b = self.embedding(ids)
        for layer in self.layers:
            a, b = layer(a, b)
        return a + b


class Gathered(Model):
    """Mixture of depths in the loop: each block gets the tokens that its router chooses."""

    def __init__(self):
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(DEPTH))

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for block, router in zip(self.blocks, self.routers, strict=True):
            x = found[-1]
            chosen = (
                router(x)[..., 0].topk(x.shape[1] // 2, dim=1).indices.sort(1).values[..., None].expand(-1, -1, WIDTH)
            )
            found.append(x.scatter(1, chosen, block(x.gather(1, chosen))))
        return found


class Plain(nn.Module):
    """Modules one after the other, without a residual."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class PlainRecurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Unregistered(nn.Module):
    """Blocks in a plain list, which torch does not know."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = [Block() for _ in range(DEPTH)]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Towers(nn.Module):
    """Two encoders of different depth, as CLIP has them; the deeper one is the stream that is read."""

    def __init__(self):
        super().__init__()
        self.text, self.image = Model(depth=DEPTH), nn.ModuleList(Block() for _ in range(2))

    def states(self, ids: Tensor, x: Tensor) -> list[Tensor]:
        return self.text.states(ids)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        for block in self.image:
            x = block(x)
        return self.text(ids).mean(1)[:, :WIDTH] @ x.mean(1).T


class FusedBlock(Block):
    """Returns its last branch and the sum before it apart, so that the next norm can add them (mamba_ssm, vLLM)."""

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else hidden + residual
        residual = residual + self.attention(self.ln1(residual))
        return self.mlp(self.ln2(residual)), residual


class Fused(Model):
    def __init__(self):
        super().__init__(FusedBlock)

    def states(self, ids: Tensor) -> list[Tensor]:
        hidden, residual = self.embed(ids), None
        found = [hidden]
        for block in self.blocks:
            hidden, residual = block(hidden, residual)
            found.append(hidden + residual)
        return found


class Residual(nn.Module):
    """A branch and its residual."""

    def __init__(self, branch: nn.Module):
        super().__init__()
        self.ln, self.branch = nn.LayerNorm(WIDTH), branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.ln(x))


class ResidualPairs(Model):
    """Branches with their residuals, two in each list."""

    def make_blocks(self, make: Callable[[], nn.Module], depth: int) -> nn.Module:
        return nn.ModuleList(nn.ModuleList([Residual(Attention()), Residual(Mlp())]) for _ in range(depth))

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for pair in self.blocks:
            for block in pair:
                found.append(block(found[-1]))
        return found


class FlatTokens(Model):
    """All tokens of the batch in one axis."""

    def __init__(self):
        super().__init__(lambda: Residual(Mlp()))

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids).flatten(0, 1)


class Graph(nn.Module):
    """A graph network: nodes and an adjacency matrix."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            return x + torch.relu(adjacency @ self.map(x))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(DEPTH))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, adjacency)
        return x


class CrossBlock(Block):
    def __init__(self):
        super().__init__()
        self.cross = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return super().forward(x + self.cross(x, memory, memory)[0])


class Translator(nn.Module):
    """An encoder and a decoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.target = Model(depth=2), nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(DEPTH))

    def states(self, source: Tensor, target: Tensor) -> list[Tensor]:
        memory, found = self.encoder.states(source)[-1], [self.target(target)]
        for block in self.decoder:
            found.append(block(found[-1], memory))
        return found

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.states(source, target)[-1]


class Looped(Model):
    """Recurrent depth: the embedding is mixed in by a matrix before every round."""

    def __init__(self):
        super().__init__(depth=2)
        self.adapter = nn.Linear(2 * WIDTH, WIDTH)

    def states(self, ids: Tensor) -> list[Tensor]:
        x = first = self.embed(ids)
        for _ in range(3):
            x = self.adapter(torch.cat([x, first], -1))
            for block in self.blocks:
                x = block(x)
        return [x]


class Merging(Model):
    """Tokens are dropped between blocks."""

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for block in self.blocks:
            found.append(block(found[-1])[:, :-1])
        return found


class Stacked(nn.Module):
    """The weights of all layers in one parameter, and no modules."""

    def __init__(self):
        super().__init__()
        self.embedding, self.weight = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(DEPTH, WIDTH, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for weight in self.weight:
            x = x + torch.tanh(x @ weight)
        return x


class Inference(Model):
    @torch.inference_mode()
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)


class CompiledForward(Model):
    @torch.compile(backend="eager")
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)


# --- trials ----------------------------------------------------------------------------------------------------------


def own_states(model: nn.Module, inputs: Any) -> Any:
    return model.states(*inputs) if isinstance(inputs, tuple) else model.states(inputs)


def written(
    name: str, make: Callable[[], nn.Module], inputs: Callable[[], Any] = tokens, *, states: Any = own_states, refusal: str = "",
    n_blocks: int = DEPTH, axis: int = -1, **options: Any,
) -> Trial:  # fmt: skip
    def build() -> tuple[nn.Module, Any]:
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return model, inputs()

    return Trial(name, build, states, n_blocks, WIDTH, refusal, options, axis=axis)


def torch_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 40, dropout=0.0, **options)


def images(n_dims: int = 2) -> Tensor:
    return torch.randn(8, WIDTH, *(6, 7)[:n_dims])


WRITTEN = (
    written("nanoGPT", Model),
    written("RMSNorm", lambda: Model(lambda: Block(lambda: nn.RMSNorm(WIDTH)))),
    written("no norm", lambda: Model(lambda: Block(nn.Identity))),
    written("dynamic tanh (DyT)", lambda: Model(lambda: Block(DynamicTanh))),
    written("sandwich norm", lambda: Model(SandwichBlock)),
    written("parallel attention and MLP", lambda: Model(ParallelBlock)),
    written("Post-LN", lambda: Model(PostBlock)),
    written("nGPT", lambda: Model(NormalizedBlock)),
    written("ReZero", lambda: Model(ScaledBlock)),
    written("LayerScale", lambda: Model(lambda: ScaledBlock(per_feature=True))),
    written("DeepNorm", lambda: Model(lambda: ScaledBlock(stream=1.6))),
    written("in-place sums", lambda: Model(InPlaceBlock)),
    written("stochastic depth", lambda: Model(DropBlock)),
    written("mixture of experts", lambda: Model(MixtureBlock)),
    written("highway network", lambda: Plain(Highway), vectors, states="layers.*"),
    written("MLP-Mixer", lambda: Plain(Mixer), vectors, states="layers.*"),
    written("mixture of depths in the block", lambda: Model(DepthRouted)),
    written("first state in every block", lambda: FirstState(MixingBlock)),
    written("conditioned blocks (DiT)", lambda: Conditioned(ConditionedBlock), lambda: (vectors(), torch.randn(16, WIDTH))),
    written("blocks return a tuple", lambda: Unpacking(lambda x: (x, None), lambda y: y[0])),
    written("blocks return a named tuple", lambda: Unpacking(lambda x: Packed(x, None), lambda y: y.states)),
    written("blocks return a dict", lambda: Unpacking(lambda x: {"x": x}, lambda y: y["x"])),
    written("blocks return a dataclass", lambda: Unpacking(Output, lambda y: y.states)),
    written("a dict is passed on", lambda: Nested(NestedBlock)),
    written("blocks as attributes", Attributes),
    written("blocks in a ModuleDict", Dictionary),
    written("stages of one width", Staged),
    written("universal transformer", Universal),
    written("checkpointed blocks", Checkpointed),
    written("time first", TimeFirst),
    written("residual scalars between blocks", Scalars),
    written("U-net skips between blocks", Skips),
    written("positions before every block", Positions),
    written("scale per feature between blocks", PerFeature),
    written("averages over depth (DenseFormer)", Averages),
    written("norm between blocks", Normed),
    written("lists of pairs", Pairs2),
    written("dicts of parts", Dicts),
    written("parts in parallel lists", ParallelLists),
    written("parts in parallel lists, Post-LN", ParallelPostLists),
    written("modules that only hold parts", Holders),
    written("blocks called by forward()", ForwardCalled),
    written("LSTMs with residuals", Recurrent),
    written("two towers", Towers, lambda: (tokens(), vectors())),
    written("residual convolutions, images", lambda: Plain(Convolution), images, states="layers.*", axis=1),
    written("residual convolutions, series", lambda: Plain(lambda: Convolution(1)), lambda: torch.randn(16, WIDTH, 9), refusal="features second: only of images (batch, feature, height, width) is that read"),
    written("nn.Sequential", lambda: nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 5)), states="[1234]"),
    written("nn.TransformerEncoder", lambda: nn.TransformerEncoder(torch_layer(batch_first=True), DEPTH), vectors, states="layers.*"),
    written("nn.TransformerEncoder, time first", lambda: nn.TransformerEncoder(torch_layer(norm_first=True), DEPTH), vectors, states="layers.*"),
    written("nn.Transformer", lambda: nn.Transformer(WIDTH, 4, 2, DEPTH, 40, dropout=0.0, batch_first=True), lambda: (vectors(), torch.randn(16, 9, WIDTH)), states="decoder.layers.*"),
    written("hyper-connections, stream 1", Wide, states=lambda m, x: [s[:, 1] for s in m.states(x)], stack="layers:1"),
    written("hyper-connections", Wide, refusal="it carries three streams; one is named by stack="),
    written("reversible network", Reversible, refusal="it carries two streams of equal right"),
    written("mixture of depths in the loop", Gathered, refusal="each block sees other tokens, so no state passes through all blocks"),
    written("sum and last branch apart (mamba_ssm, vLLM)", Fused),
    written("residual modules in pairs", ResidualPairs, n_blocks=2 * DEPTH),
    written("all tokens in one axis", FlatTokens),
    written("images with features last", lambda: Plain(lambda: Residual(Mlp())), lambda: torch.randn(4, 5, 6, WIDTH), states="layers.*"),
    written("graph network", Graph, lambda: (torch.randn(60, WIDTH), torch.rand(60, 60) / 60), states="layers.*"),
    written("encoder and decoder", Translator, lambda: (tokens(), tokens())),
    written("forward in inference mode", Inference),
    written("forward compiled by a decorator", CompiledForward),
    written("one block, named", lambda: Model(depth=1), n_blocks=1, stack="blocks"),
    written("one block", lambda: Model(depth=1), refusal="a single module is no stack; it can be named as stack="),
    written("recurrent depth with an adapter", Looped, refusal="a matrix mixes the stream with the embedding between rounds"),
    written("tokens dropped between blocks", Merging, refusal="each block sees fewer tokens"),
    written("weights of all layers in one parameter", Stacked, refusal="it has no modules whose calls could be seen"),
    written("plain MLP", lambda: Plain(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())), vectors, refusal="it has no residual stream"),
    written("plain CNN", lambda: Plain(lambda: nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU())), images, refusal="it has no residual stream"),
    written("plain LSTM", PlainRecurrent, vectors, refusal="it has no residual stream"),
    written("linear regression", lambda: nn.Linear(WIDTH, WIDTH), vectors, refusal="it has no residual stream"),
    written("blocks in a plain list", Unregistered, refusal="torch does not know modules in a plain list, so no hook reaches them"),
)  # fmt: skip
