"""The feature axis of images, including images whose sizes are widths of the blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import workbench as wb
from tests.about import about, says
from workbench.errors import AnatomyError

WIDTH = 8


class ChannelsSecond(nn.Module):
    """A block as in ConvNeXt: a convolution of (batch, feature, height, width), then linear maps with features last."""

    def __init__(self, hidden):
        super().__init__()
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        inner = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(torch.tanh(self.up(inner))).permute(0, 3, 1, 2)


class ChannelsLast(nn.Module):
    """A block as in Swin and MetaFormer: a norm with features last, then a convolution."""

    def __init__(self, hidden):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        x = x + self.mix(self.norm(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + self.down(torch.tanh(self.up(x)))


class WithoutBias(nn.Module):
    """A block whose only parameter is the kernel of a convolution."""

    def __init__(self, hidden):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.conv(x))


class CustomMap(nn.Module):
    """A block with a custom linear map, from which the axis cannot be determined."""

    def __init__(self, hidden):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x):
        return x + torch.tanh(torch.einsum("bchw,cd->bdhw", x, self.matrix))


@pytest.mark.parametrize("hidden", [12, 20])
@pytest.mark.parametrize(
    ("block", "shape"),
    [
        (ChannelsSecond, (3, WIDTH, 5, 12)),  # as wide as the hidden layer
        (ChannelsSecond, (3, WIDTH, 5, WIDTH)),  # as wide as there are features
        (ChannelsSecond, (3, WIDTH, WIDTH, WIDTH)),
        (ChannelsLast, (3, 12, 5, WIDTH)),
        (ChannelsLast, (3, WIDTH, WIDTH, WIDTH)),
        (WithoutBias, (3, WIDTH, 5, 12)),
        (WithoutBias, (3, WIDTH, 5, WIDTH)),
    ],
)
def test_layers_determine_which_axis_counts_features(block, shape, hidden):
    torch.manual_seed(0)
    model, images = nn.Sequential(*(block(hidden) for _ in range(3))), torch.randn(shape)
    anatomy = wb.read_anatomy(model, images)
    expected = -1 if block is ChannelsLast else 1
    assert anatomy.width == WIDTH
    assert {site.feature_axis for site in anatomy.sites} == {expected}
    with torch.no_grad():
        state = anatomy.sites[0].state_in((images,), {})
    assert torch.equal(state, images.movedim(expected, -1))


def test_an_axis_that_cannot_be_determined_is_an_error():
    model = nn.Sequential(*(CustomMap(0) for _ in range(3)))
    assert wb.read_anatomy(model, torch.randn(2, WIDTH, 5, 7)).sites[0].feature_axis == 1
    with pytest.raises(AnatomyError, check=says("or the last one counts features, because both sizes are")):
        wb.read_anatomy(model, torch.randn(2, WIDTH, 5, WIDTH))


def test_sequences_with_features_second_are_rejected_for_every_length():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.gate = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Linear(12, 12)

        def forward(self, x):
            return x + torch.tanh(self.conv(x))

    model = nn.Sequential(*(Block() for _ in range(3)))
    for n_tokens in (9, 12, WIDTH):
        with pytest.raises(AnatomyError, check=about("shape", (2, WIDTH, n_tokens))):
            wb.read_anatomy(model, torch.randn(2, WIDTH, n_tokens))


def test_sequences_with_as_many_tokens_as_features_have_features_last():
    class Block(nn.Module):
        """A block with a convolution along tokens, as in state-space models."""

        def __init__(self):
            super().__init__()
            self.scale, self.conv = nn.Parameter(torch.ones(WIDTH)), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

        def forward(self, x):
            return x + torch.tanh(self.conv((self.scale * x).transpose(1, 2))).transpose(1, 2)

    model = nn.Sequential(*(Block() for _ in range(3)))
    assert wb.read_anatomy(model, torch.randn(2, WIDTH, WIDTH)).sites[0].feature_axis == -1
