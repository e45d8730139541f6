"""Checkpoints with tensors that do not fit, names that wrappers changed, or a wrong config.json."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import workbench as wb
from tests.about import about, says
from tests.models.model_families import BY_NAME, FAMILIES_BY_TIER, build
from tests.models.test_gguf_file import llama
from tests.models.weight_models import change_config, rejection
from workbench.errors import CheckpointError, OptionError

TOKENS = torch.randint(3, 97, (20, 7), generator=torch.Generator().manual_seed(0))


def change_weights(folder, change):
    """Rewrite every file of weights, and the index if there is one."""
    held = {}
    for file in sorted(folder.glob("*.safetensors")):
        state = {name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}
        save_file(state, file, metadata={"format": "pt"})
        held |= dict.fromkeys(state, file.name)
    if (folder / "model.safetensors.index.json").exists():
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": held}))


def as_pickles(folder):
    """Rewrite the weights in the format that transformers used before safetensors."""
    for file in sorted(folder.glob("*.safetensors")):
        torch.save(load_file(file), folder / f"pytorch_{file.stem}.bin")
        file.unlink()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        text = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
        (folder / "pytorch_model.bin.index.json").write_text(text)
        index.unlink()


def prefixed(prefix):
    return lambda state: {prefix + name: tensor for name, tensor in state.items()}


def only(keep):
    return lambda state: {name: tensor for name, tensor in state.items() if keep(name)}


def each(change):
    return lambda state: {name: change(name, tensor) for name, tensor in state.items()}


def assert_same_weights(found, expected):
    found, expected = found.state_dict(), expected.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def found(source, **options):
    """Return the sentence of the error that rejects a source."""
    return str(rejection(source, **options))


@pytest.mark.parametrize("family", FAMILIES_BY_TIER, ids=str)
def test_every_family_is_reopened_bit_for_bit(family, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path)
    subject = wb.open_checkpoint(tmp_path)
    assert type(subject.model) is type(model)
    assert subject.unloaded == ""
    assert_same_weights(subject.model, model)


#: Changes of a Llama of three layers, and what the error finds.
MISFITS = {
    "a tensor is missing": (
        only(lambda name: name != "model.layers.1.mlp.up_proj.weight"),
        {},
        "lacks 1 tensor (model.layers.1.mlp.up_proj.weight)",
    ),
    "deeper config": (
        None,
        {"num_hidden_layers": 5},
        "lacks 18 tensors (model.layers.3.input_layernorm.weight, model.layers.3.mlp.down_proj.weight, "
        "model.layers.3.mlp.gate_proj.weight, ...)",
    ),
    "a transposed tensor": (
        each(lambda name, tensor: tensor.T if "1.mlp.up_proj" in name else tensor),
        {},
        "has 1 tensor of another shape (model.layers.1.mlp.up_proj.weight: (24, 40) instead of (40, 24))",
    ),
    "a scalar": (
        lambda state: {**state, "model.norm.weight": torch.tensor(1.0)},
        {},
        "has 1 tensor of another shape (model.norm.weight: () instead of (24))",
    ),
    "integers": (
        each(lambda name, tensor: tensor.to(torch.int8) if "q_proj" in name else tensor),
        {},
        "has 3 integer tensors in place of floats (model.layers.0.self_attn.q_proj.weight, ",
    ),
    "some names prefixed": (
        lambda state: {f"module.{n}" if ".0." in n else n: tensor for n, tensor in state.items()},
        {},
        "and has 9 unexpected tensors (module.model.layers.0.input_layernorm.weight, ",
    ),
    "prefixed and one missing": (
        lambda state: prefixed("module.")(only(lambda name: name != "model.norm.weight")(state)),
        {},
        "lacks 1 tensor (model.norm.weight)",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_weights_that_do_not_fit_are_rejected(case, copy_of, capfd):
    change, options, value = MISFITS[case]
    _, folder = copy_of("llama")
    if change is not None:
        change_weights(folder, change)
    change_config(folder, **options)
    error = rejection(folder)
    assert says("LlamaForCausalLM")(error)
    assert value in str(error)
    assert "strict=False" in str(error)
    assert "LOAD REPORT" not in capfd.readouterr().err


@pytest.mark.medium
def test_without_strict_the_fitting_weights_are_opened(copy_of):
    model, folder = copy_of("llama")
    lost = "model.layers.1.mlp.up_proj.weight"
    change_weights(
        folder,
        lambda state: {
            **{name: tensor for name, tensor in state.items() if name != lost},
            "model.norm.weight": torch.ones(3),
            "extra.weight": torch.ones(2),
        },
    )
    subject = wb.open_checkpoint(folder, strict=False)
    assert subject.unloaded == (
        f"2 tensors ({lost}, model.norm.weight) left at random values, 1 tensor (extra.weight) ignored"
    )
    opened = subject.model.state_dict()
    random = {lost, "model.norm.weight"}
    assert all(torch.equal(opened[k], tensor) for k, tensor in model.state_dict().items() if k not in random)
    assert wb.profile(subject, TOKENS, progress=False).attrs["unloaded"] == subject.unloaded
    complete = wb.open_checkpoint(copy_of("gpt2")[1], strict=False)
    assert complete.unloaded == ""
    assert "unloaded" not in wb.profile(complete, TOKENS, progress=False).attrs


@pytest.mark.parametrize("empty", [{}, {"x": torch.zeros(0)}])
def test_a_model_that_would_be_completely_random_is_never_opened(empty, copy_of):
    _, folder = copy_of("llama")
    save_file(empty, folder / "model.safetensors")
    for strict in (True, False):
        error = rejection(folder, strict=strict)
        assert "lacks 30 tensors (lm_head.weight, " in str(error)
        assert "strict=False" not in str(error)


def test_a_config_of_a_far_larger_model_is_rejected_before_memory_is_allocated(copy_of):
    _, folder = copy_of("llama")
    change_config(folder, vocab_size=10**12)  # 96 terabytes
    assert "model.embed_tokens.weight: (97, 24) instead of (1000000000000, 24)" in found(folder)


@pytest.mark.parametrize("kind", ["safetensors", "pickle", "sharded", "sharded pickle"])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_wrapped_names_are_read_without_their_wrappers(kind, prefix, copy_of):
    model, folder = copy_of("llama", max_shard_size="20KB" if "sharded" in kind else "1GB")
    change_weights(folder, prefixed(prefix))
    if "pickle" in kind:
        as_pickles(folder)
    subject = wb.open_checkpoint(folder)
    assert_same_weights(subject.model, model)
    assert subject.unloaded == ""
    assert subject.model.config.name_or_path == str(folder)
    assert subject.model.generation_config.eos_token_id == 2
    assert not subject.model.training


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_written", [True, False])
def test_wrapped_names_keep_the_dtype(dtype, is_written, copy_of):
    _, folder = copy_of("llama")
    change_weights(folder, lambda state: {f"module.{k}": tensor.to(dtype) for k, tensor in state.items()})
    change_config(folder, dtype=str(dtype).removeprefix("torch.") if is_written else ...)
    subject = wb.open_checkpoint(folder)
    held = load_file(folder / "model.safetensors")
    assert all(torch.equal(held[f"module.{k}"], tensor) for k, tensor in subject.model.state_dict().items())
    assert wb.open_checkpoint(folder, dtype="float32").model.dtype == torch.float32


@pytest.mark.parametrize("n_experts", [4, 8])
def test_another_number_of_experts_is_rejected(n_experts, copy_of):
    _, folder = copy_of("mixtral")
    change_config(folder, num_local_experts=n_experts)
    assert (
        "has 9 tensors of another shape (model.layers.0.mlp.experts.down_proj: "
        f"(6, 24, 40) instead of ({n_experts}, 24, 40), " in found(folder)
    )
    assert "9 tensors (model.layers.0.mlp." in wb.open_checkpoint(folder, strict=False).unloaded


EXPERT = "model.layers.0.block_sparse_moe.experts.2.w1.weight"


@pytest.mark.parametrize(
    "change",
    [
        only(lambda name: name != EXPERT),
        each(lambda name, tensor: tensor[:-1] if name == EXPERT else tensor),
    ],
)
def test_experts_that_cannot_be_assembled_are_rejected(change, copy_of):
    _, folder = copy_of("mixtral")
    change_weights(folder, change)
    assert about(str(folder), ("model.layers.0.mlp.experts.gate_up_proj",))(rejection(folder))


def test_integer_experts_are_rejected(copy_of):
    _, folder = copy_of("mixtral")
    change_weights(folder, each(lambda name, tensor: tensor.to(torch.int8) if name == EXPERT else tensor))
    assert f"has 1 integer tensor in place of floats ({EXPERT})" in found(folder)
    unloaded = wb.open_checkpoint(folder, strict=False).unloaded
    assert unloaded.startswith(f"1 integer tensor ({EXPERT}) ")
    assert unloaded.endswith(" floats")


def test_weights_in_eight_bits_need_another_dtype(copy_of):
    _, folder = copy_of("llama")
    change_weights(folder, each(lambda _, tensor: tensor.to(torch.float8_e4m3fn)))
    change_config(folder, dtype=...)
    assert says("bits or fewer, with which no model can run; pass")(rejection(folder))
    assert wb.open_checkpoint(folder, dtype="bfloat16").model.dtype == torch.bfloat16


def test_tied_and_ignored_tensors_are_not_required(copy_of):
    model, folder = copy_of("gpt2")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    change_weights(  # masks that older versions saved; names without the prefix of the base model
        folder,
        lambda state: {
            **{name.removeprefix("transformer."): tensor for name, tensor in state.items()},
            "h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8),
        },
    )
    subject = wb.open_checkpoint(folder)
    assert_same_weights(subject.model, model)
    assert subject.unloaded == ""


def test_tables_that_are_computed_are_not_required(copy_of):
    model, folder = copy_of("esm")
    change_weights(folder, only(lambda name: not name.endswith("inv_freq")))
    subject = wb.open_checkpoint(folder)
    assert_same_weights(subject.model, model)
    assert subject.unloaded == ""


@pytest.mark.medium
def test_tensors_of_another_head_are_ignored(tmp_path):
    from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

    config = BertConfig(**BY_NAME["bert"].config)
    BertForPreTraining(config).save_pretrained(tmp_path / "pretrained")
    change_config(tmp_path / "pretrained", architectures=["BertForMaskedLM"])  # as of the first BERT on the hub
    subject = wb.open_checkpoint(tmp_path / "pretrained")
    assert type(subject.model) is BertForMaskedLM
    assert subject.unloaded == (
        "4 tensors (bert.pooler.dense.bias, bert.pooler.dense.weight, cls.seq_relationship.bias, ...) "
        "of another head ignored"
    )
    change_config(tmp_path / "pretrained", architectures=["BertForSequenceClassification"])
    assert "lacks 2 tensors (classifier.bias, classifier.weight)" in found(tmp_path / "pretrained")
    BertForMaskedLM(config).save_pretrained(tmp_path / "masked")
    change_config(tmp_path / "masked", architectures=["BertModel"])
    assert "lacks 2 tensors (pooler.dense.bias, pooler.dense.weight)" in found(tmp_path / "masked")


def test_sharded_checkpoints_with_damaged_indices(copy_of):
    model, folder = copy_of("llama", max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    intact = json.loads(index.read_text())
    lacking = {name: file for name, file in intact["weight_map"].items() if name != "model.norm.weight"}
    for harmless in ({**intact, "weight_map": lacking}, {"weight_map": intact["weight_map"]}):
        index.write_text(json.dumps(harmless))
        assert_same_weights(wb.open_checkpoint(folder).model, model)
    for damaged in ([], 3, {"metadata": {}, "weight_map": {}}, {"metadata": {}, "weight_map": {"x": 3}}):
        index.write_text(json.dumps(damaged))
        assert about("model.safetensors.index.json")(rejection(folder))
    index.write_text("{ not json")
    assert about("model.safetensors.index.json")(rejection(folder))
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"x": "../secret.safetensors"}}))
    assert says("which is not in the folder; download that file too.")(rejection(folder))
    index.write_text(json.dumps(intact))
    name = intact["weight_map"]["model.norm.weight"]
    (folder / name).unlink()
    assert says("which is not in the folder; download that file too.")(rejection(folder))


OWN_CODE = """
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

class OwnConfig(PreTrainedConfig):
    model_type = "own"

    def __init__(self, depth=2, **options):
        self.depth = depth
        super().__init__(**options)

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(config.depth))
        self.post_init()
"""


def test_models_with_their_own_code_are_checked_too(tmp_path, monkeypatch):
    import transformers.dynamic_module_utils

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.py").write_text(OWN_CODE)
    places = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    config = {"model_type": "own", "architectures": ["OwnModel"], "auto_map": places}
    (folder / "config.json").write_text(json.dumps(config))
    weights = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
    for prefix in ("", "module."):
        save_file(prefixed(prefix)(weights.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
        assert_same_weights(wb.open_checkpoint(folder, trust_remote_code=True).model, weights)
    change_config(folder, depth=3)
    assert "lacks 2 tensors (layers.2.bias, layers.2.weight)" in found(folder, trust_remote_code=True)


@pytest.mark.parametrize("named", ["LlamaForCausalLM", None, [], ["AutoModel"], ["LlamaConfig"], ["Nope"], ["models"]])
def test_a_class_that_is_certain_is_found(named, copy_of):
    model, folder = copy_of("llama")
    change_config(folder, architectures=named)
    opened = wb.open_checkpoint(folder).model
    assert type(opened) is type(model)
    assert_same_weights(opened, model)


@pytest.mark.medium
def test_the_class_is_found_by_its_head(tmp_path):
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    config = BertConfig(**BY_NAME["bert"].config)
    for cls in (BertForMaskedLM, BertForSequenceClassification):
        cls(config).save_pretrained(tmp_path / cls.__name__)
        change_config(tmp_path / cls.__name__, architectures=None)
        assert type(wb.open_checkpoint(tmp_path / cls.__name__).model) is cls


def test_a_subject_is_already_open():
    module = nn.Linear(2, 2)
    subject = wb.open_checkpoint(module, strict=True, dtype="float32")
    assert wb.open_checkpoint(subject) is subject
    assert wb.open_checkpoint(subject, module=module, strict=False) is subject
    assert wb.open_checkpoint(subject, name="other").name == "other"
    for source in (subject, module):
        assert says("Both a Linear and module= are passed; pass one of them.")(
            rejection(source, module=nn.Linear(2, 2))
        )
        assert says("dtype= applies to weights that are read from a file;")(rejection(source, dtype="float16"))


@pytest.mark.parametrize("dtype", ["float99", "nn", "int8", torch.int8, torch.float8_e4m3fn, "complex64"])
def test_an_unknown_dtype_is_rejected(dtype, saved, tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "linear.pt")
    module = nn.Linear(2, 2)
    for source, options in ((saved("llama")[1], {}), (tmp_path / "linear.pt", {"module": module}), (module, {})):
        error = rejection(source, dtype=dtype, **options)
        assert about("dtype", str(dtype), ("auto", "float32", "bfloat16", "float16"))(error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_a_dtype_applies_to_all_sources(dtype, saved, tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "linear.pt")
    module = nn.Linear(2, 2)
    wb.open_checkpoint(tmp_path / "linear.pt", module=module, dtype=dtype)
    assert module.weight.dtype == torch.bfloat16
    assert wb.open_checkpoint(saved("llama")[1], dtype=dtype).model.dtype == torch.bfloat16


def test_other_arguments_of_a_wrong_type_are_rejected(saved):
    _, folder = saved("llama")
    for name, value in (("name", 3), ("module", 3), ("dtype", 3)):
        with pytest.raises(OptionError, check=about(name, value)):
            wb.open_checkpoint(folder, **{name: value})
    assert says("module= is used only with a file of weights, which")(rejection(folder, module=nn.Linear(2, 2)))
    missing = rejection(folder / "missing.pt", module=nn.Linear(2, 2))
    assert says("There is no file or folder")(missing)


def small(seed=0, **options):
    return wb.zoo.transformer("rms_norm", d_model=16, n_layers=2, n_heads=2, vocab_size=32, seed=seed, **options)


def with_compiled_block():
    model = small()
    model.blocks[1] = torch.compile(model.blocks[1])
    return model


class _Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = small()


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize(
    "make",
    [
        small,
        lambda: torch.compile(small()),
        lambda: nn.DataParallel(small()),
        lambda: nn.DataParallel(torch.compile(small())),
        with_compiled_block,
        _Wrapper,
    ],
)
def test_wrapped_modules_accept_wrapped_weights(prefix, make, tmp_path):
    model = small(seed=1)
    save_file(prefixed(prefix)(model.state_dict()), tmp_path / "weights.safetensors")
    target = make()
    subject = wb.open_checkpoint(tmp_path / "weights.safetensors", module=target)
    assert subject.model is target
    assert subject.unloaded == ""
    assert all(map(torch.equal, target.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize(
    ("change", "value", "unloaded"),
    [
        (
            only(lambda name: name != "head.weight"),
            "lacks 1 tensor (head.weight)",
            "1 tensor (head.weight) left at the module's own values",
        ),
        (
            lambda state: {**state, "head.weight": torch.ones(3, 3)},
            "has 1 tensor of another shape (head.weight: (3, 3) instead of (32, 16))",
            "1 tensor (head.weight) left at the module's own values",
        ),
        (
            lambda state: {**state, "head.weight": torch.ones(32, 16, dtype=torch.int8)},
            "has 1 integer tensor in place of floats (head.weight)",
            "1 integer tensor (head.weight) loaded as floats",
        ),
        (
            lambda state: {f"module.{k}" if k == "head.weight" else k: v for k, v in state.items()},
            "lacks 1 tensor (head.weight) and has 1 unexpected tensor (module.head.weight)",
            "1 tensor (head.weight) left at the module's own values, 1 tensor (module.head.weight) ignored",
        ),
    ],
)
def test_state_dicts_that_do_not_fit(change, value, unloaded, tmp_path):
    model, target = small(seed=1), small()
    torch.save(change(model.state_dict()), tmp_path / "weights.pt")
    assert about("weights.pt", value)(rejection(tmp_path / "weights.pt", module=target))
    subject = wb.open_checkpoint(tmp_path / "weights.pt", module=target, strict=False)
    assert subject.unloaded == unloaded
    own = model.state_dict()
    assert all(torch.equal(own[k], tensor) for k, tensor in target.state_dict().items() if k != "head.weight")


def test_a_state_dict_without_any_fitting_tensor_is_rejected(tmp_path):
    torch.save({"x": torch.ones(1)}, tmp_path / "weights.pt")
    for strict in (True, False):
        value = found(tmp_path / "weights.pt", module=small(), strict=strict)
        assert "has 1 unexpected tensor (x)" in value


def test_tied_tensors_of_a_state_dict(tmp_path):
    def tied(seed):
        return wb.zoo.gpt2_style(d_model=16, n_layers=2, vocab_size=32, max_length=8, seed=seed)

    state = tied(1).state_dict()
    for omitted in ("head.weight", "token_embedding.weight"):  # saved once, under either name
        target = tied(0)
        torch.save(only(lambda name, out=omitted: name != out)(state), tmp_path / "weights.pt")
        assert wb.open_checkpoint(tmp_path / "weights.pt", module=target).unloaded == ""
        assert all(torch.equal(state[name], tensor) for name, tensor in target.state_dict().items())
    diverged = dict(state) | {
        name: torch.full((32, 16), torch.nan) for name in ("head.weight", "token_embedding.weight")
    }
    torch.save(diverged, tmp_path / "weights.pt")
    assert wb.open_checkpoint(tmp_path / "weights.pt", module=tied(0)).model.head.weight.isnan().all()
    torch.save({**state, "head.weight": state["head.weight"] + 1}, tmp_path / "weights.pt")
    target = tied(0)
    assert "should equal another (head.weight)" in found(tmp_path / "weights.pt", module=target)
    subject = wb.open_checkpoint(tmp_path / "weights.pt", module=target, strict=False)
    assert subject.unloaded == "1 tensor (head.weight) ignored in favor of the tensor tied to it"
    assert torch.equal(target.head.weight, state["token_embedding.weight"])


class _WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"scale": 1}

    def set_extra_state(self, state):
        pass


def test_modules_of_special_kinds(tmp_path):
    torch.save({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "weights.pt")
    for module in (_WithExtraState(2, 2), nn.LazyLinear(2)):
        assert wb.open_checkpoint(tmp_path / "weights.pt", module=module).model.weight.sum() == 4
    with pytest.raises(CheckpointError, check=says("The weights of Linear are on the meta device and have no")):
        wb.open_checkpoint(tmp_path / "weights.pt", module=nn.Linear(2, 2, device="meta"))
    torch.save({"weight": torch.eye(2).to_sparse(), "bias": torch.ones(2)}, tmp_path / "weights.pt")
    sparse = rejection(tmp_path / "weights.pt", module=nn.Linear(2, 2))
    assert says("weights.pt contains sparse, quantized or nested tensors;")(sparse)
    torch.save({1: torch.ones(1)}, tmp_path / "weights.pt")
    assert says("weights.pt contains no state dict; save")(rejection(tmp_path / "weights.pt", module=nn.Linear(2, 2)))


def test_zoo_folders_that_do_not_fit(tmp_path):
    folder = wb.save_checkpoint(small(), tmp_path / "zoo")
    intact = (folder / "model.safetensors").read_bytes()
    change_config(folder, n_layers=3)
    assert "lacks 14 tensors (blocks.2." in found(folder)
    assert wb.open_checkpoint(folder, strict=False).unloaded.endswith(", ...) left at random values")
    change_config(folder, n_layers=2)
    change_weights(folder, lambda _: {})
    assert "lacks 32 tensors" in found(folder, strict=False)
    (folder / "model.safetensors").write_bytes(intact)
    for option in ({"n_layers": "four"}, {"n_layers": 2.5}, {"norm": 3}, {"n_heads": 0}):
        change_config(folder, n_layers=2, norm="rms_norm", n_heads=2)
        change_config(folder, **option)
        assert about(*option, *option.values())(rejection(folder))
    change_config(folder, n_heads=2, vocab_size=10**13)  # too large to allocate
    assert says("config.json")(rejection(folder))
    for family in ([], {}, None, 3):
        change_config(folder, workbench_architecture=family)
        assert says("family")(rejection(folder))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("change", "n_blocks", "value", "unloaded"),
    [
        (
            only(lambda name: name != "blk.1.ffn_up.weight"),
            2,
            "lacks 1 tensor (model.layers.1.mlp.up_proj.weight)",
            "1 tensor (model.layers.1.mlp.up_proj.weight) left at random values",
        ),
        (
            lambda shapes: {**shapes, "blk.0.ffn_up.weight": (64, 64)},
            2,
            "has 1 tensor of another shape (model.layers.0.mlp.up_proj.weight: (64, 64) instead of (96, 64))",
            "1 tensor (model.layers.0.mlp.up_proj.weight) left at random values",
        ),
        (dict, 3, "lacks 9 tensors (model.layers.2.", "9 tensors (model.layers.2."),
        (dict, 1, "has 9 unexpected tensors (blk.1.", "9 tensors (blk.1."),
    ],
)
def test_a_gguf_file_that_does_not_fit(change, n_blocks, value, unloaded, tmp_path, cache):
    llama(tmp_path / "model.gguf", change=change, n_blocks=n_blocks)
    assert value in found(tmp_path / "model.gguf")
    subject = wb.open_checkpoint(tmp_path / "model.gguf", strict=False)
    assert subject.unloaded.startswith(unloaded)
    assert subject.source == str(tmp_path / "model.gguf")
    assert not cache.exists()


@pytest.mark.parametrize("is_downloaded_first", [False, True])
def test_a_hub_name_is_checked_too(is_downloaded_first, copy_of, tmp_path, monkeypatch):
    import huggingface_hub

    from workbench.models.pretrained import open_pretrained

    model, folder = copy_of("llama")
    change_weights(folder, prefixed("module."))
    repository = tmp_path / "hub" / "models--somebody--tiny"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    if is_downloaded_first:  # the first look-up finds nothing, as before a download
        answers = [None]
        look_up = huggingface_hub.try_to_load_from_cache
        monkeypatch.setattr(
            huggingface_hub, "try_to_load_from_cache", lambda *given: answers.pop() if answers else look_up(*given)
        )
        opened, unloaded = open_pretrained("somebody/tiny", None)
    else:
        subject = wb.open_checkpoint("somebody/tiny")
        assert (subject.name, subject.source) == ("tiny", "hub somebody/tiny")
        opened, unloaded = subject.model, subject.unloaded
    assert unloaded == ""
    assert_same_weights(opened, model)
    assert opened.config.name_or_path == "somebody/tiny"
    assert opened.generation_config.eos_token_id == 2
    change_config(snapshot, num_hidden_layers=4)
    error = rejection("somebody/tiny")
    assert says("lacks 9 tensors (model.layers.3.")(error)
    assert wb.open_checkpoint("somebody/tiny", strict=False).unloaded.startswith("9 tensors (model.layers.3.")
