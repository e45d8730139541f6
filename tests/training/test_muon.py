import copy

import pytest
import torch

import workbench as wb
from tests.about import says
from workbench.errors import OptionError
from workbench.training.muon import muon_for, orthogonalized

SIZE = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 32}


def trained(model, optimizer, n_steps=3, start=0):
    for step in range(start, start + n_steps):
        tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(step))
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach().clone() for weight in model.parameters()]


def test_both_parts_agree_with_the_optimizers_of_torch():
    model = wb.zoo.transformer(**SIZE)
    other = copy.deepcopy(model)
    found = trained(model, muon_for(model, lr=0.01), n_steps=1)
    matrices = [w for name, w in other.named_parameters() if "blocks" in name and w.ndim == 2]
    rest = [w for name, w in other.named_parameters() if "blocks" not in name or w.ndim != 2]
    muon = torch.optim.Muon(matrices, lr=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))

    class Both:
        def step(self):
            muon.step(), adamw.step()

        def zero_grad(self):
            muon.zero_grad(), adamw.zero_grad()

    start = [weight.detach().clone() for weight in other.parameters()]
    expected = trained(other, Both(), n_steps=1)
    for one, two, before in zip(found, expected, start, strict=True):
        # torch iterates in bfloat16, which has three digits.
        assert (one - two).norm() <= 0.15 * (two - before).norm() + 1e-6


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_singular_values_are_close_to_one_and_singular_vectors_are_kept(shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalized(matrices)
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    rotated = u.mT @ found @ v.mT
    diagonal = rotated.diagonal(dim1=-2, dim2=-1)
    assert (rotated - torch.diag_embed(diagonal)).abs().max() < 1e-4
    kept = s > 1e-2 * s.max()
    assert ((diagonal > 0.65) & (diagonal < 1.2))[kept].all()
    assert torch.equal(orthogonalized(torch.zeros(1, *shape)), torch.zeros(1, *shape))


def test_a_saved_state_continues_bit_for_bit():
    model = wb.zoo.transformer(**SIZE)
    optimizer = muon_for(model, lr=0.01)
    trained(model, optimizer)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    expected = trained(model, optimizer, start=3)
    other = wb.zoo.transformer(**SIZE)
    other.load_state_dict(weights)
    restored = muon_for(other, lr=1.0)
    restored.load_state_dict(state)
    assert all(torch.equal(one, two) for one, two in zip(trained(other, restored, start=3), expected, strict=True))


def test_muon_updates_only_matrices_of_products():
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.log_decay = (torch.nn.Parameter(torch.zeros(4, 3)) for _ in range(2))
            self.inner, self.attention = torch.nn.Linear(3, 4), torch.nn.MultiheadAttention(4, 2)

    optimizer = muon_for(torch.nn.ModuleList([Experts()]), lr=0.1)
    assert sorted(tuple(weight.shape) for weight in optimizer.param_groups[0]["params"]) == [(4, 3), (4, 4), (12, 4)]


def test_parameters_cannot_be_added():
    optimizer = muon_for(wb.zoo.transformer(**SIZE), lr=0.1)
    with pytest.raises(OptionError, check=says("Parameters cannot be added to MuonWithAdamW; create a new")):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert len(copy.deepcopy(optimizer).param_groups) == 2


def test_a_copy_continues_bit_for_bit():
    model = wb.zoo.transformer(**SIZE)
    optimizer = muon_for(model, lr=0.01)
    trained(model, optimizer)
    other, copied = copy.deepcopy((model, optimizer))
    expected = trained(model, optimizer, start=3)
    assert all(torch.equal(one, two) for one, two in zip(trained(other, copied, start=3), expected, strict=True))
