"""A small model in two copies, and the error of a checkpoint that does not open, for tests of file formats."""

import json

import pytest
import torch

import workbench as wb
from workbench.errors import CheckpointError

TOKENS = torch.arange(12).reshape(2, 6)


class Bomb:
    """An object whose pickle writes a file when it is loaded."""

    def __reduce__(self):
        return (open, ("exploded", "w"))


def small(seed=0):
    """Return a model whose weights depend on the seed."""
    return wb.zoo.transformer("rms_norm", d_model=16, n_layers=2, n_heads=2, vocab_size=32, seed=seed).eval()


def assert_opens(source, saved, **options):
    """Open a source with another copy of the saved model, and check that its logits are bitwise identical."""
    target = small(seed=9)
    before = target(TOKENS)
    subject = wb.open_checkpoint(source, module=target, **options)
    assert subject.model is target
    assert subject.unloaded == ""
    assert torch.equal(target(TOKENS), saved(TOKENS))
    assert not torch.equal(target(TOKENS), before)
    return subject


def rejection(source, module=None, **options):
    """Return the error of a source that does not open, and check that the module is not changed."""
    before = {} if module is None else {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        wb.open_checkpoint(source, module=module, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    if module is not None:
        assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    return caught.value


def change_config(folder, **changes):
    """Change fields of a config.json; ``...`` deletes a field."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
