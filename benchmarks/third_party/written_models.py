"""Trials of hand-written models, which differ in where residuals are added and how states are passed and laid out.

The method ``states`` of a model returns its states, computed by the same code as its ``forward``.
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

from benchmarks.third_party.trial import Pairs, Trial

VOCABULARY, WIDTH, DEPTH = 97, 24, 4
Packed = namedtuple("Packed", "states cache")


def tokens(n_rows: int = 16, n_tokens: int = 9) -> Tensor:
    return torch.randint(3, VOCABULARY, (n_rows, n_tokens))


def vectors() -> Tensor:
    return torch.randn(16, 9, WIDTH)


# --- parts -----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention without its residual, over axis 1, or over axis 0 with ``time_first``."""

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
    """A complete Pre-LN block of attention and MLP."""

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
    """Block of nGPT, whose updates move states on the unit sphere."""

    def __init__(self):
        super().__init__()
        self.rates = nn.Parameter(torch.rand(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for rate, branch in zip(self.rates, (self.attention, self.mlp), strict=True):
            x = functional.normalize(x + rate * (functional.normalize(branch(x), dim=-1) - x), dim=-1)
        return x


class ScaledBlock(Block):
    """Block with factors of the stream and of the branches, as in ReZero, LayerScale and DeepNorm."""

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
    """Block with stochastic depth, and dropout of its input, in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.5:
            return x
        return super().forward(functional.dropout(x, 0.1, self.training))


class MixingBlock(Block):
    """Block of modded-nanoGPT, which adds the first state to its input."""

    def __init__(self):
        super().__init__()
        self.lambdas = nn.Parameter(torch.tensor([0.9, 0.1]))

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return super().forward(self.lambdas[0] * x + self.lambdas[1] * first)


class ConditionedBlock(Block):
    """Block of DiT, whose shift, scale and gate depend on a condition."""

    def __init__(self):
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(condition)[:, None].chunk(3, -1)
        x = x + gate * self.attention(self.ln1(x) * (1 + scale) + shift)
        return x + gate * self.mlp(self.ln2(x))


class Experts(nn.Module):
    """Mixture of experts with one expert per token."""

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
    """Highway layer: a gate weights the state and its update."""

    def __init__(self):
        super().__init__()
        self.gate, self.update = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.constant_(self.gate.bias, -1.0)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        return (1 - gate) * x + gate * torch.tanh(self.update(x))


class Mixer(nn.Module):
    """Block of MLP-Mixer, which mixes tokens, then features."""

    def __init__(self):
        super().__init__()
        self.ln1, self.ln2, self.over_tokens, self.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Mlp(9), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.ln1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.ln2(x))


class Convolution(nn.Module):
    """Residual block of convolutions, with features on axis 1."""

    def __init__(self, n_dims: int = 2):
        super().__init__()
        kind = nn.Conv2d if n_dims == 2 else nn.Conv1d
        self.first, self.second = (kind(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(functional.gelu(self.first(x)))


class DepthRouted(Block):
    """Mixture of depths: half of the tokens, chosen by a router, pass through the block; the others skip it."""

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
    """Model of an embedding, blocks and a head; subclasses define how the states follow from each other."""

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


class Returning(Block):
    """Block that returns its state inside a container."""

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
    """Model whose blocks return the state inside a container."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]):
        super().__init__(lambda: Returning(pack))
        self.unpack = unpack

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for block in self.blocks:
            found.append(self.unpack(block(found[-1])))
        return found


class Nested(Model):
    """Model whose blocks receive and return the state inside a dict."""

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for block in self.blocks:
            found.append(block({"x": found[-1], "t": 0})["x"])
        return found


class NestedBlock(Block):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "x": super().forward(state["x"])}


class Attributes(Model):
    """Model whose blocks are separate attributes."""

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
    """Model with two stages of the same width."""

    def make_blocks(self, make: Callable[[], nn.Module], depth: int) -> nn.Module:
        return nn.ModuleList(nn.ModuleList(make() for _ in range(depth // 2)) for _ in range(2))

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for stage in self.blocks:
            for block in stage:
                found.append(block(found[-1]))
        return found


class Universal(Model):
    """Universal transformer, which applies one block repeatedly."""

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
    """Model with states of shape (token, batch, feature)."""

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
    """Model of vectors and a condition, as in a denoiser."""

    def states(self, x: Tensor, condition: Tensor) -> list[Tensor]:
        found = [x]
        for block in self.blocks:
            found.append(block(found[-1], condition))
        return found

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.head(self.norm(self.states(x, condition)[-1]))


class Between(Model):
    """Model that changes the stream between complete blocks; ``states`` returns the pairs entering and leaving blocks."""

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
    """Loop of modded-nanoGPT, which scales the stream and adds the first state between blocks."""

    def before(self, number: int, x: Tensor, pairs: Pairs) -> Tensor:
        return self.weights[number] * x + 0.1 * pairs[0][0] if pairs else x


class Skips(Between):
    """U-Net skips: the states of the first half are added before the blocks of the second half."""

    def before(self, number: int, x: Tensor, pairs: Pairs) -> Tensor:
        return x + self.weights[number] * pairs[DEPTH - 1 - number][1] if number >= DEPTH // 2 else x


class Positions(Between):
    """Position embeddings are added before every block."""

    def before(self, number: int, x: Tensor, pairs: Pairs) -> Tensor:
        return x + self.mid[:, : x.shape[1]]


class PerFeature(Between):
    """The stream is scaled by feature before every block."""

    def before(self, number: int, x: Tensor, pairs: Pairs) -> Tensor:
        return x * (1 + self.mid[0, number])


class Averages(Between):
    """DenseFormer: the stream is averaged with all previous states between blocks."""

    def before(self, number: int, x: Tensor, pairs: Pairs) -> Tensor:
        return 0.8 * x + sum(0.2 / len(pairs) * before for before, _ in pairs) if pairs else x


class Normed(Between):
    """A norm without parameters is applied between blocks."""

    def before(self, number: int, x: Tensor, pairs: Pairs) -> Tensor:
        return functional.rms_norm(x, (WIDTH,))


class Loop(nn.Module):
    """Model whose blocks are not modules: a loop calls parts, kept in separate lists, and adds the residuals."""

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
    """Norms, attentions and MLPs in separate lists."""

    def __init__(self):
        super().__init__(ln1=norm, attentions=Attention, ln2=norm, mlps=Mlp)

    def step(self, number: int, x: Tensor) -> Tensor:
        x = x + self.attentions[number](self.ln1[number](x))
        return x + self.mlps[number](self.ln2[number](x))


class ParallelPostLists(ParallelLists):
    """Parts in separate lists with norms of the sums, as in XLM."""

    def step(self, number: int, x: Tensor) -> Tensor:
        x = self.ln1[number](x + self.attentions[number](x))
        return self.ln2[number](x + self.mlps[number](x))


class PairLists(Loop):
    """A list of pairs of parts, as in x-transformers and vit-pytorch."""

    def make(self, parts: Any) -> None:
        pair = lambda: nn.ModuleList([nn.Sequential(norm(), Attention()), nn.Sequential(norm(), Mlp())])  # noqa: E731
        self.layers = nn.ModuleList(pair() for _ in range(DEPTH))

    def step(self, number: int, x: Tensor) -> Tensor:
        attention, mlp = self.layers[number]
        x = attention(x) + x
        return mlp(x) + x


class Dicts(Loop):
    """One ModuleDict of parts for each layer."""

    def make(self, parts: Any) -> None:
        one = lambda: nn.ModuleDict({"ln1": norm(), "attention": Attention(), "ln2": norm(), "mlp": Mlp()})  # noqa: E731
        self.layers = nn.ModuleList(one() for _ in range(DEPTH))

    def step(self, number: int, x: Tensor) -> Tensor:
        layer = self.layers[number]
        x = x + layer["attention"](layer["ln1"](x))
        return x + layer["mlp"](layer["ln2"](x))


class Holders(Loop):
    """Blocks that only contain parts; their ``forward`` is never called."""

    def make(self, parts: Any) -> None:
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))

    def step(self, number: int, x: Tensor) -> Tensor:
        layer = self.layers[number]
        x = x + layer.attention(layer.ln1(x))
        return x + layer.mlp(layer.ln2(x))


class ForwardCalled(Loop):
    """Complete blocks whose ``forward`` is called directly, so that their hooks do not run."""

    def make(self, parts: Any) -> None:
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))

    def step(self, number: int, x: Tensor) -> Tensor:
        return self.layers[number].forward(x)


class Recurrent(Loop):
    """LSTMs with residuals."""

    def __init__(self):
        super().__init__(cells=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))

    def step(self, number: int, x: Tensor) -> Tensor:
        return x + self.cells[number](x)[0]


class Wide(nn.Module):
    """Hyper-connections with a separate stream axis: states of shape (batch, stream, token, feature)."""

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
    """RevNet, whose two streams update each other."""

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
    """Mixture of depths in the loop: each block receives the tokens that its router chooses."""

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


class Chain(nn.Module):
    """Modules in sequence, without residuals outside of them."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Lstm(nn.Module):
    """LSTM without residuals."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Unregistered(nn.Module):
    """Blocks in a Python list, which does not register them as submodules."""

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
    """Two encoders of different depth, as in CLIP; the stream of the deeper one is measured."""

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
    """Block that returns its last branch and the previous sum separately; the next block adds them (mamba_ssm, vLLM)."""

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
    """A branch with its residual."""

    def __init__(self, branch: nn.Module):
        super().__init__()
        self.ln, self.branch = nn.LayerNorm(WIDTH), branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.ln(x))


class ResidualPairs(Model):
    """Branches with their residuals, in lists of two."""

    def make_blocks(self, make: Callable[[], nn.Module], depth: int) -> nn.Module:
        return nn.ModuleList(nn.ModuleList([Residual(Attention()), Residual(Mlp())]) for _ in range(depth))

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for pair in self.blocks:
            for block in pair:
                found.append(block(found[-1]))
        return found


class FlatTokens(Model):
    """Model with all tokens of the batch on one axis."""

    def __init__(self):
        super().__init__(lambda: Residual(Mlp()))

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids).flatten(0, 1)


class Graph(nn.Module):
    """Graph network of node states and an adjacency matrix."""

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
    """Encoder and decoder."""

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
    """Recurrent depth: a matrix mixes the embedding into the stream before every round."""

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
    """Model that drops tokens between blocks."""

    def states(self, ids: Tensor) -> list[Tensor]:
        found = [self.embed(ids)]
        for block in self.blocks:
            found.append(block(found[-1])[:, :-1])
        return found


class Stacked(nn.Module):
    """Model without modules as blocks: the weights of all layers are one parameter."""

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


def states_of(model: nn.Module, inputs: Any) -> Any:
    return model.states(*inputs) if isinstance(inputs, tuple) else model.states(inputs)


def written(
    name: str, make: Callable[[], nn.Module], inputs: Callable[[], Any] = tokens, *, states: Any = states_of, rejection: str = "",
    n_blocks: int = DEPTH, axis: int = -1, **options: Any,
) -> Trial:  # fmt: skip
    def build() -> tuple[nn.Module, Any]:
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return model, inputs()

    return Trial(name, build, states, n_blocks, WIDTH, rejection, options, axis=axis)


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
    written("highway network", lambda: Chain(Highway), vectors, states="layers.*"),
    written("MLP-Mixer", lambda: Chain(Mixer), vectors, states="layers.*"),
    written("mixture of depths in the block", lambda: Model(DepthRouted)),
    written("first state in every block", lambda: FirstState(MixingBlock)),
    written("conditioned blocks (DiT)", lambda: Conditioned(ConditionedBlock), lambda: (vectors(), torch.randn(16, WIDTH))),
    written("blocks return a tuple", lambda: Unpacking(lambda x: (x, None), lambda y: y[0])),
    written("blocks return a named tuple", lambda: Unpacking(lambda x: Packed(x, None), lambda y: y.states)),
    written("blocks return a dict", lambda: Unpacking(lambda x: {"x": x}, lambda y: y["x"])),
    written("blocks return a dataclass", lambda: Unpacking(Output, lambda y: y.states)),
    written("a dict is passed between blocks", lambda: Nested(NestedBlock)),
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
    written("lists of pairs", PairLists),
    written("dicts of parts", Dicts),
    written("parts in parallel lists", ParallelLists),
    written("parts in parallel lists, Post-LN", ParallelPostLists),
    written("modules that only contain parts", Holders),
    written("blocks called by forward()", ForwardCalled),
    written("LSTMs with residuals", Recurrent),
    written("two towers", Towers, lambda: (tokens(), vectors())),
    written("residual convolutions, images", lambda: Chain(Convolution), images, states="layers.*", axis=1),
    written("residual convolutions, series", lambda: Chain(lambda: Convolution(1)), lambda: torch.randn(16, WIDTH, 9), rejection="features on axis 1 are supported only for images (batch, feature, height, width)"),
    written("nn.Sequential", lambda: nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 5)), states="[1234]"),
    written("nn.TransformerEncoder", lambda: nn.TransformerEncoder(torch_layer(batch_first=True), DEPTH), vectors, states="layers.*"),
    written("nn.TransformerEncoder, time first", lambda: nn.TransformerEncoder(torch_layer(norm_first=True), DEPTH), vectors, states="layers.*"),
    written("nn.Transformer", lambda: nn.Transformer(WIDTH, 4, 2, DEPTH, 40, dropout=0.0, batch_first=True), lambda: (vectors(), torch.randn(16, 9, WIDTH)), states="decoder.layers.*"),
    written("hyper-connections, stream 1", Wide, states=lambda m, x: [s[:, 1] for s in m.states(x)], stack="layers:1"),
    written("hyper-connections", Wide, rejection="it has three streams; one can be selected with stack="),
    written("reversible network", Reversible, rejection="it has two equivalent streams"),
    written("mixture of depths in the loop", Gathered, rejection="each block receives different tokens, so that no state passes through all blocks"),
    written("sum and last branch separate (mamba_ssm, vLLM)", Fused),
    written("residual modules in pairs", ResidualPairs, n_blocks=2 * DEPTH),
    written("all tokens on one axis", FlatTokens),
    written("images with features last", lambda: Chain(lambda: Residual(Mlp())), lambda: torch.randn(4, 5, 6, WIDTH), states="layers.*"),
    written("graph network", Graph, lambda: (torch.randn(60, WIDTH), torch.rand(60, 60) / 60), states="layers.*"),
    written("encoder and decoder", Translator, lambda: (tokens(), tokens())),
    written("forward in inference mode", Inference),
    written("forward compiled by a decorator", CompiledForward),
    written("one block, selected with stack=", lambda: Model(depth=1), n_blocks=1, stack="blocks"),
    written("one block", lambda: Model(depth=1), rejection="a single module is not a stack; it can be selected with stack="),
    written("recurrent depth with an adapter", Looped, rejection="a matrix mixes the stream with the embedding between rounds"),
    written("tokens dropped between blocks", Merging, rejection="each block receives fewer tokens than the previous one"),
    written("weights of all layers in one parameter", Stacked, rejection="it has no modules whose calls could be recorded"),
    written("MLP without residuals", lambda: Chain(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())), vectors, rejection="it has no residual stream"),
    written("CNN without residuals", lambda: Chain(lambda: nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU())), images, rejection="it has no residual stream"),
    written("LSTM without residuals", Lstm, vectors, rejection="it has no residual stream"),
    written("linear regression", lambda: nn.Linear(WIDTH, WIDTH), vectors, rejection="it has no residual stream"),
    written("blocks in a Python list", Unregistered, rejection="modules in a Python list are not registered, so that no hooks can be placed"),
)  # fmt: skip
