"""Complete blocks between which a loop changes the stream: read if it is one stream, rejected if it is none."""

import pytest
import torch
from torch import nn

import workbench as wb
from benchmarks.third_party.written_models import (
    DEPTH,
    VOCABULARY,
    WIDTH,
    Block,
    Model,
    Scalars,
)
from tests.models.layout_models import built
from workbench.errors import AnatomyError


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))


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


@pytest.mark.parametrize("kind", [Shifted, Apart, Mapped])
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
