"""The residual streams of many families and of models written here, and models that are rejected."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import workbench as wb
from tests.about import says
from tests.model_state import differences, state_of, state_of_process, structure
from tests.models.model_families import (
    BERT,
    BY_NAME,
    FAMILIES_BY_TIER,
    LLAMA,
    N_TOKENS,
    VIT,
    Family,
    build,
    make_inputs,
)
from workbench.errors import AnatomyError, SnapshotError
from workbench.models.anatomy import read_anatomy
from workbench.models.block_calls import results
from workbench.models.calling import call_model
from workbench.models.probing import undisturbed, watch
from workbench.models.residual_check import require_residuals


def passing_states(model, inputs, anatomy):
    """Return (state in, state out) of every site, recorded by separate hooks, and the output."""
    pairs = [[None, None] for _ in anatomy.sites]
    n_calls = {}

    def enter(module, args, kwargs):
        call = n_calls.setdefault(id(module), 0)
        for pair, site in zip(pairs, anatomy.sites, strict=True):
            if site.module is module and site.call == call:
                pair[0] = site.state_in(args, kwargs).clone()

    def leave(module, args, kwargs, output):
        call = n_calls[id(module)]
        n_calls[id(module)] += 1
        for pair, site in zip(pairs, anatomy.sites, strict=True):
            if site.module is module and site.call == call:
                pair[1] = site.state_out(output).clone()

    handles = []
    for module in {id(site.module): site.module for site in anatomy.sites}.values():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        with torch.no_grad():
            output = call_model(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return pairs, output


def everything(model):
    """Return the state of a model and all random states."""
    return state_of(model) | {name: state for name, state in state_of_process().items() if "random" in name}


# --- families --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES_BY_TIER, ids=str)
def test_family(family):
    """Check stack, length, width and the chain of states, and that reading changes nothing, bit for bit."""
    model, inputs = build(family), make_inputs(family)
    with torch.no_grad(), undisturbed(model):  # because RWKV changes its parameters when it runs
        expected = structure(call_model(model, inputs))
    model.train()
    next(model.children()).eval()  # a mixture of modes must be preserved
    before = everything(model)

    anatomy = read_anatomy(model, inputs)

    assert not differences(before, everything(model))
    assert anatomy.stack == family.stack
    assert len(anatomy.sites) == family.n_blocks
    assert anatomy.width == family.width
    assert anatomy.other_stacks == family.others
    assert len({site.name for site in anatomy.sites}) == family.n_blocks
    require_residuals(model, inputs, anatomy.stack, anatomy.sites)

    model.eval()
    with undisturbed(model):
        pairs, output = passing_states(model, inputs, anatomy)
    assert structure(output) == expected
    for (entered, left), (next_entered, _) in pairwise(pairs):
        assert torch.equal(left, next_entered)
        assert not torch.equal(entered, left)
        assert entered.shape[-1] == family.width


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "bloom", "falcon", "bert", "albert", "opt", "zamba2", "vit", "mixtral"]
)
def test_states_are_the_hidden_states_of_transformers(name):
    """An independent reference: ``hidden_states[i]`` enters block i (the last one follows the final norm)."""
    family = BY_NAME[name]
    model, inputs = build(family), make_inputs(family)
    anatomy = read_anatomy(model, inputs)
    pairs, _ = passing_states(model, inputs, anatomy)
    with torch.no_grad():
        hidden = model(inputs, output_hidden_states=True).hidden_states
    for (entered, _), expected in zip(pairs, hidden, strict=False):
        torch.testing.assert_close(entered, expected, rtol=0, atol=0)


def test_shared_module_is_read_once_per_call():
    family = BY_NAME["albert"]
    anatomy = read_anatomy(build(family), make_inputs(family))
    stem = "encoder.albert_layer_groups.0"
    assert [site.name for site in anatomy.sites] == [stem, f"{stem}#1", f"{stem}#2"]
    assert [site.call for site in anatomy.sites] == [0, 1, 2]


# --- models written by hand ------------------------------------------------------------------------------------------


class Branch(nn.Module):
    def __init__(self, width=16, hidden=20):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


class Block(Branch):
    def forward(self, x, extra=None):
        return x + super().forward(x)


class TupleBlock(Block):
    def forward(self, aux, *, state):
        return {"aux": aux, "state": super().forward(state)}


class NanoGpt(nn.Module):
    def __init__(self, n_layer=3, promised=None):
        super().__init__()
        self.config = SimpleNamespace(n_layer=promised or n_layer)
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(50, 16), "h": nn.ModuleList(Block() for _ in range(n_layer)), "ln_f": nn.LayerNorm(16)}
        )

    def forward(self, tokens):
        x = self.transformer.wte(tokens)
        for block in self.transformer.h:
            x = block(x)
        return self.transformer.ln_f(x)


class ResidualOutside(nn.Module):
    """Modules are only branches, as in some libraries: no module returns the sums."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(16), Branch()]) for _ in range(4))

    def forward(self, x):
        for norm, branch in self.layers:
            x = x + branch(norm(x))
        return x


class Grouped(nn.Module):
    """Blocks in groups, or blocks of two parts."""

    def __init__(self, *, parts_differ):
        super().__init__()
        second = (lambda: Block(hidden=30)) if parts_differ else Block
        self.groups = nn.ModuleList(nn.Sequential(Block(), second()) for _ in range(3))

    def forward(self, x):
        for group in self.groups:
            x = group(x)
        return x


class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block(w) for _ in range(n)) for w, n in ((16, 2), (24, 5), (40, 2)))
        self.widen = nn.ModuleList([nn.Linear(16, 24), nn.Linear(24, 40)])

    def forward(self, x):
        for i, stage in enumerate(self.stages):
            for block in stage:
                x = block(x)
            x = self.widen[i](x) if i < 2 else x
        return x


class StagesInOneList(nn.Module):
    """Stages and the maps between them in one list; only the last stage is a long stack of one width."""

    def __init__(self):
        super().__init__()
        stages = [[Block() for _ in range(2)], [nn.Sequential(nn.Linear(16, 24))]]
        stages += [[Block(24) for _ in range(n)] for n in (3, 8)]
        self.net = nn.ModuleList(nn.Sequential(*stage) for stage in stages)

    def forward(self, x):
        for stage in self.net:
            x = stage(x)
        return x


class TwoStreams(nn.Module):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, x, y):
            return self.a(x), self.b(y) + x

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Pair() for _ in range(3))

    def forward(self, x):
        y = 2 * x
        for block in self.blocks:
            x, y = block(x, y)
        return x + y


class ScaledBetween(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x / 2 if i == 3 else x)
        return x


class WideHead(nn.Module):
    """A short chain with a small fraction of all repeated parameters."""

    def __init__(self):
        super().__init__()
        self.tail = nn.Sequential(Block(), Block())
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(16), Branch(hidden=400)]) for _ in range(4))

    def forward(self, x):
        for norm, branch in self.layers:
            x = x + branch(norm(x))
        return self.tail(x)


@pytest.fixture
def vectors():
    return torch.randn(2, N_TOKENS, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("batch_first", [True, False])
def test_pytorch_encoder_does_not_use_its_fast_path(batch_first):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=batch_first).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        before = model(x)
    anatomy = read_anatomy(model, x)
    assert (anatomy.stack, len(anatomy.sites), anatomy.width) == ("layers", 3, 16)
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        assert torch.equal(model(x), before)


def test_states_may_be_in_keywords_and_mappings(vectors):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(TupleBlock() for _ in range(3))

        def forward(self, x):
            aux = torch.zeros_like(x)
            for block in self.blocks:
                x = block(aux, state=x)["state"]
            return x

    anatomy = read_anatomy(Model(), vectors)
    assert {(site.input_slot, site.output_slot) for site in anatomy.sites} == {("state", "state")}
    with pytest.raises(AnatomyError, check=says("where the residual stream was when the anatomy was read;")):
        anatomy.sites[0].state_in((vectors,), {})
    with pytest.raises(AnatomyError, check=says("where the residual stream was when the anatomy was read;")):
        anatomy.sites[0].state_out(vectors)


@dataclass(frozen=True)
class Held:
    state: torch.Tensor
    step: int = 0


class HoldingBlock(Block):
    """Receives its state in a container, and returns it in one."""

    def forward(self, holder, aux=None):
        if isinstance(holder, dict):
            return {**holder, "state": super().forward(holder["state"])}
        if isinstance(holder, Held):
            return Held(super().forward(holder.state))
        return type(holder)([super().forward(holder[0]), *holder[1:]])


@pytest.mark.parametrize(
    ("hold", "slots"),
    [
        (lambda x: {"state": x, "step": 0}, ((0, "state"), "state")),
        (lambda x: Held(x), ((0, "state"), "state")),
        (lambda x: [x, 0], ((0, 0), 0)),
        (lambda x: (x, 0), ((0, 0), 0)),
    ],
    ids=["dict", "dataclass", "list", "tuple"],
)
def test_states_may_be_held_by_an_argument(vectors, hold, slots):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(HoldingBlock() for _ in range(3))

        def forward(self, x):
            holder = hold(x)
            for block in self.blocks:
                holder = block(holder)
            return next(v for _, v in results(holder) if isinstance(v, torch.Tensor))

    model = Model()
    anatomy = read_anatomy(model, vectors)
    assert {(site.input_slot, site.output_slot) for site in anatomy.sites} == {slots}
    with torch.no_grad():
        expected = model.blocks[1](hold(2 * vectors))
        given, before = hold(vectors), vectors.clone()
        args, kwargs = anatomy.sites[1].with_state((given,), {}, 2 * vectors)
        assert torch.equal(
            anatomy.sites[1].state_out(model.blocks[1](*args, **kwargs)), dict(results(expected))[slots[1]]
        )
        assert torch.equal(anatomy.sites[1].state_in((given,), {}), before)  # the argument is unchanged
        assert type(args[0]) is type(given)


@pytest.mark.parametrize(("parts_differ", "stack", "n_blocks"), [(False, "groups.*", 6), (True, "groups", 3)])
def test_groups_of_blocks_and_blocks_of_parts(vectors, parts_differ, stack, n_blocks):
    model = Grouped(parts_differ=parts_differ)
    anatomy = read_anatomy(model, vectors)
    assert (anatomy.stack, len(anatomy.sites)) == (stack, n_blocks)
    model.config = {"num_hidden_layers": 9 - n_blocks}  # the config takes precedence
    assert len(read_anatomy(model, vectors).sites) == 9 - n_blocks


# --- rejected models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "name", "text"),
    [
        (Stages, "stack", r"stages\.\* \(9 blocks, widths 16, 24, 40\).*stages\.1 \(5 blocks"),
        (StagesInOneList, "stack", r"net\.\* \(14 blocks, widths 16, 24\)"),
        (TwoStreams, "blocks", ""),
        (lambda: nn.Sequential(Block()), "model", "stack="),
    ],
    ids=[
        "stages",
        "stages in one list",
        "two streams",
        "single block",
    ],
)
def test_models_without_one_stream_are_rejected(model, name, text, vectors):
    with pytest.raises(AnatomyError, match=text):
        read_anatomy(model(), vectors)


@pytest.mark.parametrize("model", [ResidualOutside, WideHead])
def test_residuals_outside_of_modules(model, vectors):
    """Also where a short chain of complete blocks follows, with a small fraction of all parameters."""
    anatomy = read_anatomy(model(), vectors)
    assert (anatomy.stack, len(anatomy.sites)) == ("layers", 4)


def test_a_small_fraction_of_all_weights_is_rejected(vectors):
    class Unread(WideHead):
        def forward(self, x):
            for norm, branch in self.layers:
                x = torch.maximum(x, branch(norm(x)))
            return self.tail(x)

    with pytest.raises(AnatomyError, check=says("of the parameters of all repeated modules, so the residual")):
        read_anatomy(Unread(), vectors)


def test_a_length_that_differs_from_the_config():
    tokens = torch.arange(14).view(2, 7)
    model = NanoGpt(n_layer=3, promised=4)
    with pytest.raises(AnatomyError, check=says("links); pass to wb.profile(..., stack=) one of transformer.h")):
        read_anatomy(model, tokens)
    assert len(read_anatomy(model, tokens, stack="transformer.h").sites) == 3


def test_a_config_may_count_halves_of_blocks_too():
    """The config of LongCat counts attentions as ``num_hidden_layers``, and blocks as ``num_layers``."""
    tokens = torch.arange(14).view(2, 7)
    model = NanoGpt(n_layer=3, promised=6)
    model.config.num_layers = 3
    assert len(read_anatomy(model, tokens).sites) == 3
    model.config.num_layers = 2
    with pytest.raises(AnatomyError, check=says("links); pass to wb.profile(..., stack=) one of transformer.h")):
        read_anatomy(model, tokens)


def test_stacks_selected_by_name(vectors):
    assert len(read_anatomy(Stages(), vectors, stack="stages.1").sites) == 5
    assert len(read_anatomy(ScaledBetween(), vectors, stack="blocks").sites) == 6
    assert len(read_anatomy(ScaledBetween(), vectors).sites) == 6
    with pytest.raises(AnatomyError, check=says("whose modules ran; expected one of")):
        read_anatomy(Stages(), vectors, stack="nothing")
    with pytest.raises(AnatomyError, check=says("pass to wb.profile(..., stack=) the path of one stage of")):
        read_anatomy(Stages(), vectors, stack="stages.*")


def test_features_are_last_or_second_of_images():
    model = nn.Sequential(*[nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(4)])
    with pytest.raises(AnatomyError, match=r"is not its feature dimension"):
        read_anatomy(model, torch.randn(2, 8, 9))


class ConvBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + 0.3 * torch.tanh(self.conv(x))


class ConvStages(nn.Module):
    """Two stages of images with features second, and a map between them."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(*(ConvBlock(w) for _ in range(3))) for w in (6, 10))
        self.widen = nn.Conv2d(6, 10, 2, stride=2)

    def forward(self, x):
        return self.stages[1](self.widen(self.stages[0](x)))


def test_stages_of_images_with_features_second():
    torch.manual_seed(0)
    model, images = ConvStages(), torch.randn(3, 6, 8, 8)
    with pytest.raises(AnatomyError, match=r"width of its state changes.*stack=\) one of stages\.0 \(3.*stages\.1 \(3"):
        read_anatomy(model, images)
    x = images
    with torch.no_grad():
        for stage, width in ((0, 6), (1, 10)):
            x = model.widen(x) if stage else x
            anatomy = read_anatomy(model, images, stack=f"stages.{stage}")
            assert (anatomy.width, anatomy.layout.states) == (width, 0)
            pairs, _ = passing_states(model, images, anatomy)
            for (entered, left), block in zip(pairs, model.stages[stage], strict=True):
                assert torch.equal(entered, x.movedim(1, -1))
                x = block(x)
                assert torch.equal(left, x.movedim(1, -1))
    found = wb.profile(model, images, stack="stages.1", n_snapshots=None, progress=False)
    assert (found.sizes["mode"], found.attrs["n_snapshots"]) == (10, 3 * 16)
    gains = wb.flow.measure(model, images, stack="stages.1")["signal_gain"]  # states are replaced there
    rms = [float(torch.as_tensor(state).square().mean().sqrt()) for state in (pairs[0][0], pairs[0][1])]
    assert float(gains[0]) == pytest.approx(rms[1] / rms[0], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "auto", "config", "inputs", "found"),
    [
        (
            "swin",
            "AutoModel",
            {
                "image_size": 32,
                "patch_size": 2,
                "embed_dim": 8,
                "depths": [2, 2],
                "num_heads": [2, 2],
                "window_size": 4,
            },
            "pixels",
            says("The config of SwinModel states num_hidden_layers ="),
        ),
        (
            "gemma3n_text",
            "AutoModelForCausalLM",
            {
                **LLAMA,
                "head_dim": 6,
                "vocab_size_per_layer_input": 97,
                "hidden_size_per_layer_input": 8,
                "laurel_rank": 4,
                "num_kv_shared_layers": 0,
                "layer_types": ["full_attention"] * 3,
                "activation_sparsity_pattern": [0.0] * 3,
                "intermediate_size": [40] * 3,
            },
            "tokens",
            says("The stack model.layers carries several residual streams at"),
        ),
        (
            "reformer",
            "AutoModelForCausalLM",
            {
                "vocab_size": 97,
                "hidden_size": 24,
                "attn_layers": ["local", "local"],
                "axial_pos_embds": False,
                "num_attention_heads": 4,
                "attention_head_size": 6,
                "feed_forward_size": 40,
                "is_decoder": True,
                "local_attn_chunk_length": 8,
                "max_position_embeddings": 64,
            },
            "tokens",
            says("expected one; choose another model, or another stack by"),
        ),
    ],
)
def test_families_that_are_rejected(name, auto, config, inputs, found):
    family = Family(name, config, "", auto=auto, inputs=inputs)
    model = build(family)
    images = torch.randn(2, 3, 32, 32)
    before = everything(model)
    with pytest.raises(AnatomyError, check=found):
        read_anatomy(model, images if inputs == "pixels" else make_inputs(family))
    assert not differences(before, everything(model))


def test_two_towers_of_one_length():
    text, vision = {**BERT, "projection_dim": 12}, dict(VIT)
    family = Family("clip", {"text_config": text, "vision_config": vision, "projection_dim": 12}, "", auto="AutoModel")
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "input_ids": make_inputs(family)}
    anatomy = read_anatomy(build(family), inputs)
    assert anatomy.stack == "text_model.encoder.layers"
    assert anatomy.other_stacks == ("vision_model.encoder.layers",)


# --- nothing changes -------------------------------------------------------------------------------------------------


class Stateful(NanoGpt):
    """Draws random numbers, counts its calls, writes to parameters and buffers, and may raise in the middle."""

    def __init__(self, *, raises):
        super().__init__()
        self.raises = raises
        self.n_calls = 0
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens):
        self.n_calls += 1
        self.cache = tokens
        self.seen += 1
        self.seen = self.seen * 2
        with torch.no_grad():
            self.transformer.h[0].up.weight.mul_(0.5)
            self.transformer.h[1].up.weight.data.add_(1.0)
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
        x = self.transformer.wte(tokens)
        for i, block in enumerate(self.transformer.h):
            if self.raises and i == 2:
                raise RuntimeError("in the middle")
            x = block(x)
        return x


@pytest.mark.parametrize("raises", [False, True])
def test_reading_does_not_change_a_stateful_model(raises):
    model = Stateful(raises=raises).train()
    model.transformer.h[0].register_forward_hook(lambda *args: None)
    before = everything(model)
    if raises:
        with pytest.raises(SnapshotError, check=says("RuntimeError: in the middle); pass inputs on which")):
            read_anatomy(model, torch.arange(14).view(2, 7))
    else:
        assert len(read_anatomy(model, torch.arange(14).view(2, 7)).sites) == 3
    assert not differences(before, everything(model))
    assert model.n_calls == 0
    assert torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


def test_watch_removes_hooks_when_attaching_fails(vectors):
    block = Block()
    with pytest.raises(AttributeError), watch([(block, print, True), (None, print, True)]):
        pass
    assert not block._forward_pre_hooks


def test_embedding_and_head_in_the_same_sequential_are_not_blocks():
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(500, 8), *layers, nn.Linear(8, 500))
    found = read_anatomy(model, torch.randint(500, (2, 7)))
    assert [site.name for site in found.sites] == ["1", "2", "3"]


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
