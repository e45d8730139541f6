"""Properties that all models of the zoo share."""

import copy
import io

import numpy as np
import pytest
import torch

import workbench as wb
from tests.zoo.zoo_models import IMAGE, MAKERS, inputs_for, perturbed
from workbench.zoo.constructors import is_zoo_model

every_model = pytest.mark.parametrize("name", MAKERS)
every_text_model = pytest.mark.parametrize("name", [name for name in MAKERS if not name.startswith("vit")])


@every_model
def test_logits_have_the_documented_shape_and_all_parameters_gradients(name):
    model = perturbed(MAKERS[name](0))
    inputs = inputs_for(model)
    logits = model(inputs)
    assert logits.shape == ((3, 5) if model.config.family == "vit" else (3, 20, 32))
    assert logits.dtype == torch.float32
    assert model.training
    loss = logits.square().mean()
    if hasattr(model, "auxiliary_loss"):
        loss = loss + model.auxiliary_loss()
    loss.backward()
    unreached = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert unreached == []
    # A bias of the keys shifts all scores of a query equally, so its gradient is zero; an expert may receive no token.
    idle = [key for key, p in model.named_parameters() if not p.grad.any() and "expert" not in key]
    assert all(key.endswith("key.bias") for key in idle)


@every_text_model
def test_no_position_depends_on_later_tokens(name):
    model = perturbed(MAKERS[name](0)).eval()
    tokens = inputs_for(model)
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 32
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=1e-5, atol=1e-6)
    assert ((before - after)[:, 12].abs().amax(-1) > 1e-4).all()


@every_model
def test_the_seed_determines_the_parameters_and_the_global_random_state_is_unchanged(name):
    before = torch.get_rng_state()
    one, same, other = (MAKERS[name](seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[key], same[key]) for key in one)
    embedding = next(key for key in one if "embedding" in key)
    assert not torch.equal(one[embedding], other[embedding])
    assert all(torch.isfinite(tensor).all() for tensor in one.values())
    assert one[embedding].std() == pytest.approx(0.02, rel=0.25)


@every_model
def test_profile_finds_every_block(name):
    model = MAKERS[name](0)
    spectra = wb.profile(model, inputs_for(model, n_examples=16), progress=False)
    assert spectra.sizes["layer"] == model.config.n_layers == 2
    assert spectra.sizes["mode"] == 16
    assert np.isfinite(spectra.spectral_radius).all()
    starts_as_identity = name in ("fixup", "rezero")
    assert (spectra.is_informative == (not starts_as_identity)).all()
    assert spectra.attrs["subject"] == type(model).__name__


@every_model
def test_copies_are_complete(name):
    model = perturbed(MAKERS[name](0))
    inputs = inputs_for(model)
    logits = model(inputs)  # creates an autograd graph, which must not prevent copying
    copied = copy.deepcopy(model)
    assert torch.equal(copied(inputs), logits)
    assert {id(p) for p in copied.parameters()}.isdisjoint(id(p) for p in model.parameters())
    assert sum(1 for _ in copied.parameters()) == sum(1 for _ in model.parameters())
    torch.save(model, io.BytesIO())


@every_model
def test_the_configuration_builds_the_same_model(name):
    model = MAKERS[name](5)
    again = wb.zoo.build(wb.zoo.ArchitectureConfig.from_dict(model.config.as_dict()))
    assert type(again) is type(model)
    assert again.config == model.config
    state = again.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    assert is_zoo_model(model)


# Vision


def test_patches_are_those_of_a_strided_convolution():
    model = wb.zoo.vit(**IMAGE)
    images = inputs_for(model)
    kernel = model.patch_embedding.weight.unflatten(1, (2, 2, 2))
    expected = torch.nn.functional.conv2d(images, kernel, model.patch_embedding.bias, stride=2)
    found = model.patch_embedding(model._patches(images))
    torch.testing.assert_close(found, expected.flatten(2).transpose(1, 2))
