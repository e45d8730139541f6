"""A small model in two copies, and the refusal of a checkpoint, for the tests of formats."""

import pytest
import torch

import workbench as wb
from workbench.errors import CheckpointError

TOKENS = torch.arange(12).reshape(2, 6)


def small(seed=0):
    """A model whose weights depend on the seed."""
    return wb.zoo.transformer("rms_norm", d_model=16, n_layers=2, n_heads=2, vocab_size=32, seed=seed).eval()


def assert_opens(source, saved, **options):
    """Open a source onto another copy of the saved model; the logits are its to the bit."""
    target = small(seed=9)
    before = target(TOKENS)
    subject = wb.open_checkpoint(source, module=target, **options)
    assert subject.model is target
    assert subject.unloaded == ""
    assert torch.equal(target(TOKENS), saved(TOKENS))
    assert not torch.equal(target(TOKENS), before)
    return subject


def refusal(source, module=None, **options):
    """The one sentence that refuses a source; the module is left as it was."""
    before = {} if module is None else {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        wb.open_checkpoint(source, module=module, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    if module is not None:
        assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    return text
