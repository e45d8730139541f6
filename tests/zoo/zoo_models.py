"""Small models of every kind in the zoo, and inputs for them."""

import torch

import workbench as wb

SMALL = {"d_model": 16, "n_layers": 2}
TEXT = {**SMALL, "vocab_size": 32, "max_length": 24}
IMAGE = {**SMALL, "image_size": 8, "patch_size": 2, "n_channels": 2, "n_classes": 5}

#: Name -> function from a seed to a model.
MAKERS = {
    "transformer": lambda seed: wb.zoo.transformer(seed=seed, **TEXT),
    "gpt2": lambda seed: wb.zoo.gpt2_style(seed=seed, **TEXT),
    "llama": lambda seed: wb.zoo.llama_style(n_kv_heads=2, window=6, qk_norm=True, seed=seed, **TEXT),
    "parallel": lambda seed: wb.zoo.transformer("post_ln", is_parallel=True, n_kv_heads=1, seed=seed, **TEXT),
    "fixup": lambda seed: wb.zoo.transformer("none", initialization="fixup", seed=seed, **TEXT),
    "rezero": lambda seed: wb.zoo.transformer("none", initialization="rezero", seed=seed, **TEXT),
    "moe": lambda seed: wb.zoo.moe(seed=seed, **TEXT),
    "switch": lambda seed: wb.zoo.moe("none", top_k=1, n_experts=4, seed=seed, **TEXT),
    "mixtral": lambda seed: wb.zoo.mixtral_style(n_kv_heads=2, ties_embeddings=True, seed=seed, **TEXT),
    "mamba": lambda seed: wb.zoo.mamba(seed=seed, **TEXT),
    "mamba tied": lambda seed: wb.zoo.mamba(ties_embeddings=True, has_bias=True, seed=seed, **TEXT),
    "kan": lambda seed: wb.zoo.kan(seed=seed, **TEXT),
    "kan xavier": lambda seed: wb.zoo.kan("sub_ln", initialization="xavier", spline_order=2, seed=seed, **TEXT),
    **{f"vit {norm}": lambda seed, norm=norm: wb.zoo.vit(norm, seed=seed, **IMAGE) for norm in wb.zoo.NORMS},
}


def inputs_for(model, *, n_examples=3, n_tokens=20, seed=0):
    """Return random token ids, or images for vision models."""
    generator = torch.Generator().manual_seed(seed)
    if model.config.family == "vit":
        return torch.randn(n_examples, 2, 8, 8, generator=generator)
    return torch.randint(32, (n_examples, n_tokens), generator=generator)


def perturbed(model, seed=1):
    """Add noise to all parameters, so that initial zeros and ones hide no error, and return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model
