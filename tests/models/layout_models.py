"""Small models whose axes, streams and depth differ from the usual (batch, token, feature)."""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH = 64, 16


class Residual(nn.Module):
    """A block that looks at every token by itself."""

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
    """Attention over two streams together, as in SD3; the last block returns one of them alone."""

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
    """A norm of its own making."""

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


class ScaledOutside(nn.Module):
    """Whole blocks, with the stream scaled between them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, tokens):
        x = first = self.embedding(tokens)
        for block in self.blocks:
            x = block(0.9 * x + 0.1 * first)
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
