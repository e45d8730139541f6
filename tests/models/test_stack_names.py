import pytest
import torch
import transformers
from torch import nn

import workbench as wb
from tests.about import says
from workbench.errors import AnatomyError

TOKENS = torch.arange(18).reshape(2, 9)
IMAGES = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))}


class Hyper(nn.Module):
    """A model of three parallel streams, of which each block reads and writes a mixture."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(HyperBlock() for _ in range(3))

    def forward(self, ids):
        x = self.embedding(ids)[:, None] * torch.arange(1.0, 4.0)[None, :, None, None]
        for layer in self.layers:
            x = layer(x)
        return x.sum(1)


class HyperBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch, self.read, self.write = (
            nn.Linear(16, 16),
            nn.Parameter(torch.randn(3)),
            nn.Parameter(torch.randn(3)),
        )

    def forward(self, x):
        update = self.branch((x * self.read[None, :, None, None]).sum(1)).tanh()
        return x + self.write[None, :, None, None] * update[:, None]


def swin():
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2, 4], "num_heads": [1, 2, 4]}
    return transformers.SwinModel(transformers.SwinConfig(**sizes, window_size=2))


def convnext():
    sizes = {"hidden_sizes": [8, 16], "depths": [2, 3], "num_stages": 2, "patch_size": 2}
    return transformers.ConvNextModel(transformers.ConvNextConfig(**sizes))


def t5():
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return transformers.T5Model(transformers.T5Config(**sizes))


@pytest.mark.parametrize(
    ("make", "inputs", "expected"),
    [
        (lambda: wb.zoo.transformer(d_model=16, n_layers=3, n_heads=2), TOKENS, {"blocks": (3, 16)}),
        (
            swin,
            IMAGES,
            {f"encoder.layers.{i}.blocks": size for i, size in enumerate([(2, 8), (2, 16), (4, 32)])},
        ),
        (convnext, IMAGES, {"encoder.stages.0.layers": (2, 8), "encoder.stages.1.layers": (3, 16)}),
        (Hyper, TOKENS, {f"layers:{i}": (3, 16) for i in range(3)}),
        (
            t5,
            {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :4]},
            {"decoder.block": (2, 16), "encoder.block": (2, 16)},
        ),
    ],
)
def test_each_stack_can_be_profiled_by_its_name(make, inputs, expected):
    torch.manual_seed(0)
    model = make().eval()
    names = wb.list_stacks(model, inputs)
    assert names == list(expected)
    found = {name: wb.profile(model, inputs, stack=name, n_snapshots=None, progress=False) for name in names}
    assert {name: spectra.sizes["layer"] for name, spectra in found.items()} == {k: v[0] for k, v in expected.items()}
    widths = {name: wb.read_anatomy(model, inputs, stack=name).width for name in names}
    assert widths == {name: width for name, (_, width) in expected.items()}


def test_a_model_without_a_stack_is_rejected():
    with pytest.raises(AnatomyError, check=says("Linear has no stack of residual blocks: no two modules of")):
        wb.list_stacks(nn.Linear(4, 4), torch.randn(3, 4))
