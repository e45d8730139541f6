"""Complete blocks between which a loop changes the stream: read if it is one stream, rejected if it is none."""

import pytest
import torch
from torch import nn

import workbench as wb
from benchmarks.third_party.written_models import (
    DEPTH,
    VOCABULARY,
    WIDTH,
    Averages,
    Block,
    Gathered,
    Model,
    Normed,
    PerFeature,
    Positions,
    Scalars,
    Skips,
    Towers,
)
from tests.models.layout_models import built, seen
from workbench.errors import AnatomyError


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", [Scalars, Skips, Positions, PerFeature, Averages, Normed])
def test_states_are_those_that_enter_and_leave_the_blocks(kind, tokens):
    model = built(kind)
    anatomy = wb.read_anatomy(model, tokens)
    assert (anatomy.stack, len(anatomy.sites), anatomy.width) == ("blocks", DEPTH, WIDTH)
    entered, left = seen(model, anatomy, tokens)
    with torch.no_grad():
        expected = model.states(tokens)
    for (x, y), *found in zip(expected, entered[:DEPTH], left[:DEPTH], strict=True):
        assert torch.equal(found[0], x)
        assert torch.equal(found[1], y)


class Shifted(Model):
    """Every block receives the tokens of the previous one in another order."""

    def states(self, ids):
        found = [self.embed(ids)]
        for block in self.blocks:
            found.append(block(found[-1].roll(1, dims=1)))
        return found


class Apart(Model):
    """Every block receives the embedding: parallel branches, no stream."""

    def states(self, ids):
        x = self.embed(ids)
        return [x, sum(block(x) for block in self.blocks)]


class Mapped(Model):
    """A dense map between the blocks that changes every direction."""

    def __init__(self):
        super().__init__()
        self.between = nn.Parameter(torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0])

    def states(self, ids):
        found = [self.embed(ids)]
        for block in self.blocks:
            found.append(block(found[-1] @ self.between))
        return found


@pytest.mark.parametrize("kind", [Gathered, Shifted, Apart, Mapped])
def test_models_without_a_stream_are_rejected(kind, tokens):
    with pytest.raises(AnatomyError):
        wb.read_anatomy(built(kind), tokens)


def test_the_number_of_blocks_must_be_that_of_the_config(tokens):
    model = built(Scalars)
    model.config = {"num_hidden_layers": DEPTH}
    assert len(wb.read_anatomy(model, tokens).sites) == DEPTH
    model.config = {"num_hidden_layers": DEPTH + 1}
    with pytest.raises(AnatomyError):
        wb.read_anatomy(model, tokens)


def test_a_chain_is_preferred(tokens):
    """Of two towers, the longer one is a chain, because its blocks pass their states on unchanged."""
    model = built(Towers)
    assert wb.read_anatomy(model, (tokens, torch.randn(3, 9, WIDTH))).stack == "text.blocks"


def test_the_change_between_blocks_is_not_part_of_the_spectra(tokens):
    """The spectrum of the first block, which has the same input states, is that of the model without the change."""
    torch.manual_seed(0)
    unaltered = Model(Block).eval()
    altered = built(Scalars)
    altered.load_state_dict(unaltered.state_dict(), strict=False)
    ids = torch.randint(VOCABULARY, (12, 9))
    one, other = (wb.profile(m, ids, progress=False, n_snapshots=None) for m in (unaltered, altered))
    assert one["spectral_radius"].values[0] == pytest.approx(other["spectral_radius"].values[0], rel=1e-6)
    assert one["spectral_radius"].values[1] != pytest.approx(other["spectral_radius"].values[1], rel=1e-3)
