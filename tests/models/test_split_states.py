"""States that blocks pass on as two tensors: their sum is read; two parallel streams are rejected."""

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from benchmarks.third_party.written_models import DEPTH, VOCABULARY, WIDTH, Block, Fused, FusedBlock, Model
from tests.models.layout_models import built, seen
from workbench.errors import AnatomyError
from workbench.models.block_hooks import BlockHooks


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (12, 9), generator=torch.Generator().manual_seed(0))


class FromZeros(Fused):
    """A model whose first block receives zeros as its second term."""

    def states(self, ids):
        hidden = self.embed(ids)
        residual, found = torch.zeros_like(hidden), [hidden]
        for block in self.blocks:
            hidden, residual = block(hidden, residual)
            found.append(hidden + residual)
        return found


class KeywordBlock(FusedBlock):
    def forward(self, hidden, *, residual=None):
        hidden, residual = super().forward(hidden, residual)
        return {"hidden": hidden, "residual": residual}


class ByKeyword(Fused):
    def __init__(self):
        Model.__init__(self, KeywordBlock)

    def states(self, ids):
        state, found = {"hidden": self.embed(ids)}, []
        found.append(state["hidden"])
        for block in self.blocks:
            state = block(state["hidden"], residual=state.get("residual"))
            found.append(state["hidden"] + state["residual"])
        return found


@pytest.mark.parametrize("kind", [FromZeros, ByKeyword])
def test_states_are_the_sums(kind, tokens):
    model = built(kind)
    anatomy = wb.read_anatomy(model, tokens)
    assert (anatomy.stack, len(anatomy.sites), anatomy.width) == ("blocks", DEPTH, WIDTH)
    entered, left = seen(model, anatomy, tokens)
    with torch.no_grad():
        expected = model.states(tokens)
    for found, states in ((entered, expected[:-1]), (left, expected[1:])):
        assert all(torch.equal(one, other) for one, other in zip(found, states, strict=True))


def test_spectra_are_those_of_the_same_blocks_with_one_state(tokens):
    fused, plain = built(Fused), built(lambda: Model(Block))
    plain.load_state_dict(fused.state_dict())
    found, expected = (wb.profile(m, tokens, progress=False, n_snapshots=None) for m in (fused, plain))
    np.testing.assert_allclose(found["spectral_radius"], expected["spectral_radius"], rtol=1e-4)
    np.testing.assert_allclose(found["nonlinearity_ratio"], expected["nonlinearity_ratio"], rtol=1e-4)


def test_another_state_can_enter(tokens):
    model = built(Fused)
    anatomy = wb.read_anatomy(model, tokens)
    twice = []
    hooks = BlockHooks(
        [anatomy.sites[2]],
        lambda call: 2 * call.state_in,
        lambda call: twice.append(call.state_out.clone()),
    )
    with torch.no_grad():
        states = model.states(tokens)
        with hooks:
            model(tokens)
        expected = sum(model.blocks[2](2 * states[2]))
    torch.testing.assert_close(twice[0], expected, rtol=1e-4, atol=1e-5)


class Swapped(nn.Module):
    """A model of two streams of one shape that pass through the same blocks independently."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(self.Layer() for _ in range(3))

    class Layer(Block):
        def forward(self, a, b):
            return super().forward(a), super().forward(b)

    def forward(self, ids):
        a, b = self.embedding(ids), self.embedding(ids.flip(1))
        for layer in self.layers:
            a, b = layer(a, b)
        return a + b


@pytest.mark.parametrize("kind", [Swapped])
def test_two_streams_are_rejected(kind, tokens):
    with pytest.raises(AnatomyError, match="stream"):
        wb.read_anatomy(built(kind), tokens)
