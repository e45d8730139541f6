"""Compiled, offloaded, adapted, quantized and sharded models are measured like the unmodified model."""

import copy

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import LlamaConfig, LlamaForCausalLM

import workbench as wb
from tests.about import says
from workbench.errors import AnatomyError

pytestmark = pytest.mark.filterwarnings("ignore::workbench.koopman.spectra.RankWarning")
TOKENS = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def make(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=3, **SIZES, **options)).eval()


@pytest.fixture(scope="module")
def plain():
    return make()


def eigenvalues(model):
    return wb.profile(model, TOKENS, progress=False)["eigenvalue"].values


def compiled_by_replacement(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    return model


def compiled_in_place(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


@pytest.mark.slow
@pytest.mark.medium
@pytest.mark.parametrize("compiled", [compiled_by_replacement, compiled_in_place])
def test_blocks_that_are_compiled_separately(plain, compiled):
    model = compiled(copy.deepcopy(plain))
    with torch.no_grad():
        before = model(TOKENS).logits
        np.testing.assert_array_equal(eigenvalues(model), eigenvalues(plain))
        expected = wb.query_key_weights(plain, TOKENS)
        for found, same in zip(wb.query_key_weights(model, TOKENS), expected, strict=True):
            assert torch.equal(found.query, same.query)
        assert torch.equal(model(TOKENS).logits, before)


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.map = nn.LayerNorm(32), torch.compile(nn.Sequential(nn.Linear(32, 32)), backend="eager")

    def forward(self, x):
        return x + self.map(self.norm(x))


def test_blocks_that_contain_a_compiled_sequence():
    model = nn.Sequential(nn.Embedding(64, 32), nn.Sequential(*(Narrow() for _ in range(3))))
    assert wb.profile(model, TOKENS, progress=False).attrs["stack"] == "1"


def test_flex_attention_of_transformers(plain):
    import torch._dynamo  # noqa: F401  (otherwise transformers compiles the kernel in the first pass, which is slow)

    model = make(attn_implementation="flex_attention")
    np.testing.assert_allclose(eigenvalues(model), eigenvalues(plain), atol=1e-4)


class FlexBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + flex_attention(q, k, v).transpose(1, 2).flatten(2)


def test_flex_attention_without_compilation():
    model = nn.Sequential(nn.Embedding(64, 32), nn.Sequential(*(FlexBlock() for _ in range(3))))
    assert len(wb.profile(model, TOKENS, progress=False)["layer"]) == 3


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_offloaded_models(plain, where, tmp_path):
    host = torch.device("cpu")
    model = copy.deepcopy(plain)
    model = cpu_offload(model, host) if where == "memory" else disk_offload(model, tmp_path, host)
    assert all(parameter.is_meta for parameter in model.parameters())
    np.testing.assert_array_equal(eigenvalues(model), eigenvalues(plain))
    assert all(parameter.is_meta for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)


# --- weights that are no parameters ----------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A linear map with an adapter that is not merged, with the names of PEFT."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base_layer, self.scaling = base, {"default": 2.0}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x):
        added = self.lora_B["default"](self.lora_A["default"](x))
        return self.base_layer(x) + added * self.scaling["default"]

    def effective(self):
        return self.base_layer.weight + 2.0 * self.lora_B["default"].weight @ self.lora_A["default"].weight


class Int8(nn.Module):
    """A linear map whose matrix is stored as int8 with a scale per output."""

    def __init__(self, base):
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        scale = base.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (base.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def effective(self):
        return self.weight.float() * self.scale

    def forward(self, x):
        return nn.functional.linear(x, self.effective())


class Packed(torch.Tensor):
    """A tensor subclass with int8 values and scales, as in torchao."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values, scale):
        self.values_, self.scale = values, scale

    def unpacked(self):
        return self.values_.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Packed(args[0].values_, args[0].scale)
        return func(*(a.unpacked() if isinstance(a, Packed) else a for a in args), **(kwargs or {}))


def adapted(linear):
    return LowRank(linear)


def int8(linear):
    return Int8(linear)


def packed(linear):
    small = Int8(linear)
    linear.weight = nn.Parameter(Packed(small.weight, small.scale), requires_grad=False)
    return linear


def effective_of(linear):
    if isinstance(linear.weight if isinstance(linear, nn.Linear) else None, Packed):
        return linear.weight.unpacked()
    return linear.effective() if hasattr(linear, "effective") else linear.weight


KINDS = [adapted, int8, packed, nn.utils.parametrizations.weight_norm, nn.utils.weight_norm]


@pytest.fixture
def changed(plain, request):
    torch.manual_seed(1)
    model = copy.deepcopy(plain)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj"):
            setattr(layer.self_attn, name, request.param(getattr(layer.self_attn, name)))
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("changed", KINDS, indirect=True, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_effective_weights_are_read(changed):
    names = {name: id(value) for name, value in changed.named_parameters()}
    with torch.no_grad():
        before = changed(TOKENS).logits
    found = wb.query_key_weights(changed, TOKENS)
    for reading, layer in zip(found, changed.model.layers, strict=True):
        query = effective_of(layer.self_attn.q_proj).detach().view(4, 8, 32).transpose(1, 2)
        key = effective_of(layer.self_attn.k_proj).detach().view(2, 8, 32).transpose(1, 2)
        torch.testing.assert_close(reading.query, query, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(reading.key, key, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(reading.read(changed).query, query, rtol=1e-5, atol=1e-6)
    assert {name: id(value) for name, value in changed.named_parameters()} == names
    with torch.no_grad():
        assert torch.equal(changed(TOKENS).logits, before)
    assert wb.profile(changed, TOKENS, progress=False).attrs["stack"] == "model.layers"


@pytest.mark.parametrize("changed", [adapted], indirect=True)
def test_an_adapter_that_was_zero_at_first_is_read_when_it_is_not(changed):
    query = changed.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        query.lora_B["default"].weight.zero_()
    reading = wb.query_key_weights(changed, TOKENS)[0]
    assert "not a parameter, but the matrix that model.layers.0.self_attn.q_proj applies" in reading.notes
    with torch.no_grad():
        query.lora_B["default"].weight.normal_()
    expected = query.effective().detach().view(4, 8, 32).transpose(1, 2)
    torch.testing.assert_close(reading.read(changed).query, expected, rtol=1e-5, atol=1e-5)


class Shell(nn.Module):
    """A module that contains a model but has no forward, such as a LightningModule."""

    def __init__(self, model, **others):
        super().__init__()
        self.net, self.loss = model, nn.CrossEntropyLoss()
        for name, part in others.items():
            setattr(self, name, part)


def test_the_model_in_a_shell_without_forward_is_measured(plain):
    np.testing.assert_array_equal(eigenvalues(Shell(plain)), eigenvalues(plain))
    reading = wb.query_key_weights(Shell(plain), TOKENS)[0]
    assert torch.equal(reading.read(Shell(plain)).query, wb.query_key_weights(plain, TOKENS)[0].query)
    with pytest.raises(
        AnatomyError, match=r"model\.net", check=says("of its parts have parameters, expected one; pass the part")
    ):
        wb.profile(Shell(plain, other=nn.Linear(2, 2)), TOKENS, progress=False)


# --- parameters that are split over ranks ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def fsdp(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    by_column = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, by_column | {"self_attn.o_proj": RowwiseParallel()})
    return model


@pytest.mark.medium
@pytest.mark.parametrize("split", [fsdp, tensor_parallel])
def test_sharded_parameters_are_gathered(plain, mesh, split):
    model = split(copy.deepcopy(plain), mesh)
    np.testing.assert_array_equal(eigenvalues(model), eigenvalues(plain))
    expected = wb.query_key_weights(plain, TOKENS)
    for found, same in zip(wb.query_key_weights(model, TOKENS), expected, strict=True):
        assert torch.equal(found.query, same.query)
        assert torch.equal(found.read(model).key, same.key)
    assert all(hasattr(p, "full_tensor") for p in model.model.layers[0].self_attn.q_proj.parameters())


@pytest.mark.filterwarnings("ignore")
def test_flat_parameters(plain, mesh):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(copy.deepcopy(plain), device_id=torch.device("cpu"))
    with pytest.raises(AnatomyError, check=says("FullyShardedDataParallel keeps the parameters of many")):
        eigenvalues(model)
    model = FullyShardedDataParallel(copy.deepcopy(plain), device_id=torch.device("cpu"), use_orig_params=True)
    np.testing.assert_array_equal(eigenvalues(model), eigenvalues(plain))
    # An interrupted pass would leave the parameters gathered, and the model could not be measured again.
    np.testing.assert_array_equal(eigenvalues(model), eigenvalues(plain))
