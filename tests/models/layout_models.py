"""Small models whose axes, streams and depth differ from the usual (batch, token, feature)."""

import torch
from torch import nn
from torch.nn import functional

from workbench.models.block_hooks import BlockHooks

VOCABULARY, WIDTH = 64, 16


def built(kind):
    """Return a model with fixed random weights in eval mode."""
    torch.manual_seed(0)
    return kind().eval()


def seen(model, anatomy, tokens):
    """Return the states that enter and that leave each block in one pass."""
    entered, left = [], []
    hooks = BlockHooks(
        anatomy.sites,
        lambda call: entered.append(call.state_in.clone()) and None,
        lambda call: left.append(call.state_out.clone()),
    )
    with torch.no_grad(), hooks:
        model(tokens)
    return entered, left


class Residual(nn.Module):
    """A block that processes every token separately."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.map = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.map(x))


class Chain(nn.Module):
    """Blocks on vectors, without attention."""

    def __init__(self, n_blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(n_blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Decoder(nn.Module):
    """A causal decoder whose token ids and states are each (batch, token) or (token, batch).

    Padding, 0 in a mask laid out as the ids, is hidden from attention.
    """

    def __init__(self, *, ids_first, states_first):
        super().__init__()
        self.ids_first, self.states_first = ids_first, states_first
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=states_first)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        if self.ids_first != self.states_first:
            x = x.transpose(0, 1)
        n_tokens = x.shape[1 if self.states_first else 0]
        mask = torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(1)
        hidden = None
        if attention_mask is not None:
            hidden = (attention_mask if self.ids_first else attention_mask.T) == 0
        return self.encoder(x, mask=mask, src_key_padding_mask=hidden)


class JointBlock(nn.Module):
    """Attention over two streams together, as in SD3; the last block returns only one of them."""

    def __init__(self, *, is_last):
        super().__init__()
        self.a, self.b, self.is_last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), is_last

    def forward(self, hidden_states, encoder_hidden_states):
        n = hidden_states.shape[1]
        both = torch.cat([hidden_states, encoder_hidden_states], dim=1)
        mixed = functional.scaled_dot_product_attention(both, both, both)
        states = hidden_states + self.a(mixed[:, :n])
        return None if self.is_last else encoder_hidden_states + self.b(mixed[:, n:]), states


class TwoStreams(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer_blocks = nn.ModuleList(JointBlock(is_last=i == 3) for i in range(4))

    def forward(self, hidden_states, encoder_hidden_states):
        for block in self.transformer_blocks:
            encoder_hidden_states, hidden_states = block(hidden_states, encoder_hidden_states)
        return hidden_states


class FoldedStreams(nn.Module):
    """Hyper-connections: four copies of the stream in the batch axis."""

    def __init__(self, n_streams=4):
        super().__init__()
        self.embedding, self.n_streams = nn.Embedding(VOCABULARY, WIDTH), n_streams
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True) for _ in range(3)]
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens):
        x = self.embedding(tokens).repeat_interleave(self.n_streams, dim=0)
        for layer in self.layers:
            x = layer(x)
        return x.view(-1, self.n_streams, *x.shape[1:]).sum(1)


class Branch(nn.Module):
    """Attention without its residual."""

    def __init__(self, width=64):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Gain(nn.Module):
    """A custom norm."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return functional.rms_norm(x, x.shape[-1:]) * self.gain


class ResidualOutside(nn.Module):
    """Pairs of norms and a branch, as in x-transformers: the residual is added between modules."""

    def __init__(self, n_branches=6, width=64):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        pairs = [nn.ModuleList([nn.ModuleList([Gain(width)]), Branch(width)]) for _ in range(n_branches)]
        self.layers = nn.ModuleList(pairs)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for (norm,), branch in self.layers:
            x = x + branch(norm(x))
        return x


class EarlyExit(nn.Module):
    """Two of four blocks where the first token is below 32."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1 and tokens[0, 0] < 32:
                break
        return x


class Universal(nn.Module):
    """One block, called twice or four times."""

    def __init__(self):
        super().__init__()
        self.embedding, self.block = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Residual()])

    def forward(self, tokens):
        x = self.embedding(tokens)
        for _ in range(2 if tokens[0, 0] < 32 else 4):
            x = self.block[0](x)
        return x


class OutsideStream(nn.Module):
    """Keeps the states of its stream, which no module returns; subclasses define how a layer changes a state."""

    n_layers = 4

    def __init__(self, width=WIDTH):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(self.members(i, width) for i in range(self.n_layers))
        self.final_norm = Gain(width)

    def states(self, tokens):
        """Return the states before each layer and after the last."""
        found = [self.embedding(tokens)]
        for i, parts in enumerate(self.layers):
            found.append(self.step(i, found, *parts))
        return found

    def forward(self, tokens):
        return self.final_norm(self.states(tokens)[-1])


class Sum(nn.Module):
    """A residual as a module, its scale one number per feature."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x, residual, **unused):
        return x + residual * self.scale


class Triples(OutsideStream):
    """Norms, branch and residual, as in x-transformers; attention and MLP alternate."""

    def members(self, i, width):
        branch = Branch(width) if i % 2 == 0 else nn.Sequential(nn.Linear(width, 24), nn.Tanh(), nn.Linear(24, width))
        return nn.ModuleList([nn.ModuleList([Gain(width), None, None]), branch, Sum(width)])

    def step(self, i, before, norms, branch, residual):
        x, inner = before[-1], before[-1]
        return residual(branch(norms[0](x)), inner, mask=None)


class Pairs(OutsideStream):
    """Attention and MLP, each with its norm inside, as in vit-pytorch."""

    def members(self, i, width):
        return nn.ModuleList(
            [nn.Sequential(Gain(width), Branch(width)), nn.Sequential(Gain(width), nn.Linear(width, width))]
        )

    def step(self, i, before, attention, mlp):
        x = attention(before[-1]) + before[-1]
        return mlp(x) + x


class ScaledSums(OutsideStream):
    """A number for the stream and one for the branch, neither in a module."""

    def members(self, i, width):
        return nn.ModuleList([Gain(width), Branch(width)])

    def step(self, i, before, norm, branch):
        return 0.8 * before[-1] + 0.3 * branch(norm(before[-1]))


class Sandwich(OutsideStream):
    """A norm before and one after the branch."""

    def members(self, i, width):
        return nn.ModuleList([Gain(width), Branch(width), Gain(width)])

    def step(self, i, before, norm, branch, after):
        return before[-1] + after(branch(norm(before[-1])))


class PostNorms(OutsideStream):
    """A norm of the sum, twice per layer."""

    def members(self, i, width):
        return nn.ModuleList([Branch(width), nn.LayerNorm(width), nn.Linear(width, width), nn.LayerNorm(width)])

    def step(self, i, before, attention, first, mlp, second):
        x = first(before[-1] + attention(before[-1]))
        return second(x + mlp(x))


class AddedSkips(ScaledSums):
    """The second half adds the states of the first half to its own."""

    def step(self, i, before, norm, branch):
        x = before[-1] + branch(norm(before[-1]))
        return x + 0.5 * before[3 - i] if i >= 2 else x


class MergedSkips(ScaledSums):
    """The second half combines its state with one of the first half, like a U-net."""

    def __init__(self, width=WIDTH):
        super().__init__(width)
        self.merges = nn.ModuleList([None, None, None, nn.Linear(2 * width, width)])

    def states(self, tokens):
        x, entering, leaving = self.embedding(tokens), [], []
        for merge, (norm, branch) in zip(self.merges, self.layers, strict=True):
            x = x if merge is None else merge(torch.cat([x, entering[0]], -1))
            entering.append(x)
            x = x + branch(norm(x))
            leaving.append(x)
        return [*entering, leaving[-1]]


class Gated(ScaledSums):
    """A gate for each token and feature, computed from the state: not a sum with constant factors."""

    def step(self, i, before, norm, branch):
        gate = torch.sigmoid(before[-1])
        return gate * before[-1] + (1 - gate) * branch(norm(before[-1]))


class NoResidual(ScaledSums):
    """Branches in sequence, without residuals."""

    def step(self, i, before, norm, branch):
        return branch(norm(before[-1]))


class Repeated(ScaledSums):
    """Runs the list of layers once or twice, depending on the first token."""

    def states(self, tokens):
        found = [self.embedding(tokens)]
        for _ in range(1 if tokens[0, 0] < 32 else 2):
            for norm, branch in self.layers:
                found.append(self.step(0, found, norm, branch))
        return found


class Streams(nn.Module):
    """Hyper-connections: a block reads a mixture of several streams, adds to each and mixes them.

    Args:
        axis: Axis of the states that counts streams.
    """

    n_streams = 4

    class Block(nn.Module):
        def __init__(self, axis, n_streams):
            super().__init__()
            self.axis, self.branch = axis, Branch(WIDTH)
            self.read, self.write = (nn.Parameter(torch.rand(n_streams)) for _ in range(2))
            self.mix = nn.Parameter(torch.eye(n_streams) + 0.1 * torch.randn(n_streams, n_streams))

        def forward(self, state):
            streams = state.movedim(self.axis, 0)
            added = self.branch(torch.einsum("s,s...->...", self.read, streams))
            mixed = torch.einsum("st,t...->s...", self.mix, streams) + torch.einsum("s,...->s...", self.write, added)
            return mixed.movedim(0, self.axis)

    def __init__(self, axis):
        super().__init__()
        self.axis, self.embedding = axis, nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(self.Block(axis, self.n_streams) for _ in range(3))

    def states(self, tokens):
        found = [torch.stack([self.embedding(tokens) * (i + 1) for i in range(self.n_streams)], self.axis)]
        for layer in self.layers:
            found.append(layer(found[-1]))
        return found

    def forward(self, tokens):
        return self.states(tokens)[-1].sum(self.axis)
