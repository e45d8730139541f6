"""Whole blocks between which a loop changes the stream: read where it is one stream, refused where it is none."""

import pytest
import torch
from torch import nn

import workbench as wb
from benchmarks.foreign.written_models import (
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
from workbench.errors import AnatomyError
from workbench.models.block_hooks import BlockHooks


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))


def built(kind):
    torch.manual_seed(0)
    return kind().eval()


@pytest.mark.parametrize("kind", [Scalars, Skips, Positions, PerFeature, Averages, Normed])
def test_states_are_those_that_enter_and_leave_the_blocks(kind, tokens):
    model = built(kind)
    anatomy = wb.read_anatomy(model, tokens)
    assert (anatomy.stack, len(anatomy.sites), anatomy.width) == ("blocks", DEPTH, WIDTH)
    entered, left = [], []
    hooks = BlockHooks(
        anatomy.sites,
        lambda call: entered.append(call.state_in.clone()) and None,
        lambda call: left.append(call.state_out.clone()),
    )
    with torch.no_grad(), hooks:
        model(tokens)
        expected = model.states(tokens)
    for (x, y), *found in zip(expected, entered[:DEPTH], left[:DEPTH], strict=True):
        assert torch.equal(found[0], x)
        assert torch.equal(found[1], y)


class Shifted(Model):
    """Every block gets the tokens of the one before in another order."""

    def states(self, ids):
        found = [self.embed(ids)]
        for block in self.blocks:
            found.append(block(found[-1].roll(1, dims=1)))
        return found


class Apart(Model):
    """Every block gets the embedding: branches side by side, no stream."""

    def states(self, ids):
        x = self.embed(ids)
        return [x, sum(block(x) for block in self.blocks)]


class Mapped(Model):
    """A dense map between the blocks, after which no direction is what it was."""

    def __init__(self):
        super().__init__()
        self.between = nn.Parameter(torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0])

    def states(self, ids):
        found = [self.embed(ids)]
        for block in self.blocks:
            found.append(block(found[-1] @ self.between))
        return found


@pytest.mark.parametrize("kind", [Gathered, Shifted, Apart, Mapped])
def test_what_is_no_stream_is_refused(kind, tokens):
    with pytest.raises(AnatomyError):
        wb.read_anatomy(built(kind), tokens)


def test_the_config_has_the_last_word(tokens):
    model = built(Scalars)
    model.config = {"num_hidden_layers": DEPTH}
    assert len(wb.read_anatomy(model, tokens).sites) == DEPTH
    model.config = {"num_hidden_layers": DEPTH + 1}
    with pytest.raises(AnatomyError):
        wb.read_anatomy(model, tokens)


def test_a_chain_is_preferred(tokens):
    """Two towers: the one whose blocks hand their state on is a chain, and the longer one."""
    model = built(Towers)
    assert wb.read_anatomy(model, (tokens, torch.randn(3, 9, WIDTH))).stack == "text.blocks"


def test_the_change_between_blocks_is_no_part_of_the_spectra(tokens):
    """The same blocks on the same states: the first block is that of the model without the change."""
    torch.manual_seed(0)
    plain = Model(Block).eval()
    altered = built(Scalars)
    altered.load_state_dict(plain.state_dict(), strict=False)
    ids = torch.randint(VOCABULARY, (12, 9))
    one, other = (wb.profile(m, ids, progress=False, n_snapshots=None) for m in (plain, altered))
    assert one["spectral_radius"].values[0] == pytest.approx(other["spectral_radius"].values[0], rel=1e-6)
    assert one["spectral_radius"].values[1] != pytest.approx(other["spectral_radius"].values[1], rel=1e-3)
