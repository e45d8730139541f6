import pytest
import torch

import workbench as wb
from tests.zoo.zoo_models import TEXT, inputs_for, perturbed
from workbench.zoo.decoders import selective_scan

NAMES = {
    "mixer_norm": "norm", "mixer.expand": "mixer.in_proj", "mixer.convolution": "mixer.conv1d",
    "mixer.selection": "mixer.x_proj", "mixer.time_step": "mixer.dt_proj", "mixer.log_decay": "mixer.A_log",
    "mixer.skip": "mixer.D", "mixer.out": "mixer.out_proj",
}  # fmt: skip
ENDS = {"token_embedding": "backbone.embeddings", "final_norm": "backbone.norm_f", "head": "lm_head"}


def their_name(name):
    """Return the name of a parameter of the zoo in the Mamba of transformers."""
    if not name.startswith("blocks."):
        module, _, kind = name.rpartition(".")
        return f"{ENDS[module]}.{kind}"
    _, layer, rest = name.split(".", 2)
    ours = next(ours for ours in NAMES if rest.startswith(ours))
    return f"backbone.layers.{layer}.{NAMES[ours]}{rest.removeprefix(ours)}"


def transformers_mamba(config):
    """Return the Mamba of transformers with the same sizes and its own initial parameters."""
    from transformers import MambaConfig, MambaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MambaForCausalLM(
            MambaConfig(
                hidden_size=config.d_model, num_hidden_layers=config.n_layers, vocab_size=config.vocab_size,
                state_size=config.state_size, conv_kernel=config.conv_width, expand=config.expand,
                use_bias=config.has_bias, layer_norm_epsilon=config.norm_eps, initializer_range=config.init_std,
                tie_word_embeddings=config.ties_embeddings, pad_token_id=None, bos_token_id=None, eos_token_id=None,
            )
        ).eval()  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{}, {"has_bias": True, "state_size": 3, "conv_width": 2, "expand": 3}, {"ties_embeddings": True}]
)
def test_mamba_computes_the_same_as_that_of_transformers(options):
    model = perturbed(wb.zoo.mamba(**TEXT, **options)).eval()
    theirs = transformers_mamba(model.config)
    theirs.load_state_dict({their_name(name): tensor for name, tensor in model.state_dict().items()})
    expected = theirs(inputs_for(model)).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(model(inputs_for(model)), expected, rtol=0, atol=1e-6)


def test_mamba_is_initialized_like_that_of_transformers():
    model = wb.zoo.mamba(d_model=64, n_layers=2, init_std=0.05)
    theirs = dict(transformers_mamba(model.config).named_parameters())
    ours = dict(model.named_parameters())
    assert {their_name(name) for name in ours} == set(theirs)
    for name, tensor in ours.items():
        other = theirs[their_name(name)]
        assert tensor.std(correction=0).item() == pytest.approx(other.std(correction=0).item(), rel=0.12), name
        assert tensor.abs().max().item() == pytest.approx(other.abs().max().item(), rel=0.4), name
    mixer = model.blocks[0].mixer
    step = torch.nn.functional.softplus(mixer.time_step.bias)
    assert 0.00099 < step.min() < 0.0015 < 0.07 < step.max() < 0.1001
    assert step.log().mean().item() == pytest.approx(-4.605, abs=0.4)  # log of the geometric mean of 0.001 and 0.1
    assert torch.equal(mixer.log_decay.exp().round(), torch.arange(1.0, 17).expand(128, 16))


def test_the_scan_follows_its_recursion_and_is_differentiable_twice():
    generator = torch.Generator().manual_seed(0)
    signal, step = (torch.rand(2, 5, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    rate = -torch.rand(3, 4, dtype=torch.float64, generator=generator)
    write, read = (torch.randn(2, 5, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    found = selective_scan(signal, step, rate, write, read)
    for row in range(2):
        for channel in range(3):
            state = torch.zeros(4, dtype=torch.float64)
            for t in range(5):
                size = step[row, t, channel]
                state = torch.exp(size * rate[channel]) * state + size * write[row, t] * signal[row, t, channel]
                torch.testing.assert_close(found[row, t, channel], read[row, t] @ state)
    arguments = [tensor[:1, :3].requires_grad_() if tensor.ndim == 3 else tensor.requires_grad_()
                 for tensor in (signal, step, rate, write, read)]  # fmt: skip
    torch.autograd.gradcheck(selective_scan, arguments)
    torch.autograd.gradgradcheck(selective_scan, arguments)


def test_the_last_map_is_scaled_by_the_number_of_branches():
    unscaled, scaled = (wb.zoo.mamba(scales_residual_init=flag, **TEXT).state_dict() for flag in (False, True))
    for name, tensor in unscaled.items():
        is_last = name.endswith("out.weight")
        torch.testing.assert_close(scaled[name], tensor / 2**0.5 if is_last else tensor)
