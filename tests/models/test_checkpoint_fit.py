"""Checkpoints whose weights do not fit, whose names were changed by wrappers, or whose config.json is wrong."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import workbench as wb
from tests.models.model_families import BY_NAME, FAMILIES_BY_TIER, build
from workbench.errors import CheckpointError
from workbench.models.state_fit import plain_names

TOKENS = torch.randint(3, 97, (20, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Name of a family -> the model and the folder that it was saved to, made once; never change that folder."""
    made = {}

    def give(name, max_shard_size="1GB"):
        if (name, max_shard_size) not in made:
            folder = tmp_path_factory.mktemp("saved") / name
            model = build(BY_NAME[name])
            model.save_pretrained(folder, max_shard_size=max_shard_size)
            made[name, max_shard_size] = model, folder
        return made[name, max_shard_size]

    return give


@pytest.fixture
def copy_of(saved, tmp_path):
    """Name of a family -> the model and a folder of its own."""

    def give(name, **options):
        model, folder = saved(name, **options)
        return model, shutil.copytree(folder, tmp_path / name)

    return give


def change_config(folder, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def change_weights(folder, change):
    """Rewrite every file of weights, and the index where there is one."""
    held = {}
    for file in sorted(folder.glob("*.safetensors")):
        state = {name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}
        save_file(state, file, metadata={"format": "pt"})
        held |= dict.fromkeys(state, file.name)
    if (folder / "model.safetensors.index.json").exists():
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": held}))


def as_pickles(folder):
    """The weights as transformers kept them before safetensors."""
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


def refusal(source, **options):
    """The one sentence that refuses a source."""
    with pytest.raises(CheckpointError) as caught:
        wb.open_checkpoint(source, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


@pytest.mark.parametrize("family", FAMILIES_BY_TIER, ids=str)
def test_every_family_opens_again_bit_for_bit(family, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path)
    subject = wb.open_checkpoint(tmp_path)
    assert type(subject.model) is type(model)
    assert subject.unloaded == ""
    assert_same_weights(subject.model, model)


#: What is done to a Llama of three layers, and what the refusal says of it.
MISFITS = {
    "a tensor is missing": (
        only(lambda name: name != "model.layers.1.mlp.up_proj.weight"),
        {},
        "it lacks 1 tensor (model.layers.1.mlp.up_proj.weight); fetch the checkpoint again",
    ),
    "a tensor is renamed": (
        lambda state: {name.replace("1.mlp.up_proj", "1.mlp.up"): tensor for name, tensor in state.items()},
        {},
        "it lacks 1 tensor (model.layers.1.mlp.up_proj.weight) and has 1 unexpected tensor "
        "(model.layers.1.mlp.up.weight); fetch",
    ),
    "deeper config": (
        None,
        {"num_hidden_layers": 5},
        "it lacks 18 tensors (model.layers.3.input_layernorm.weight, model.layers.3.mlp.down_proj.weight, "
        "model.layers.3.mlp.gate_proj.weight, ...); fetch",
    ),
    "shallower config": (
        None,
        {"num_hidden_layers": 2},
        "it has 9 unexpected tensors (model.layers.2.input_layernorm.weight, ",
    ),
    "an unexpected tensor": (
        lambda state: {**state, "extra.weight": torch.ones(2)},
        {},
        "it has 1 unexpected tensor (extra.weight); fetch",
    ),
    "a transposed tensor": (
        each(lambda name, tensor: tensor.T if "1.mlp.up_proj" in name else tensor),
        {},
        "it has 1 tensor of another shape (model.layers.1.mlp.up_proj.weight: (24, 40) instead of (40, 24)); fetch",
    ),
    "a scalar": (
        lambda state: {**state, "model.norm.weight": torch.tensor(1.0)},
        {},
        "it has 1 tensor of another shape (model.norm.weight: () instead of (24)); fetch",
    ),
    "another vocabulary": (
        None,
        {"vocab_size": 50},
        "it has 2 tensors of another shape (lm_head.weight: (97, 24) instead of (50, 24), "
        "model.embed_tokens.weight: (97, 24) instead of (50, 24)); fetch",
    ),
    "no head": (only(lambda name: "lm_head" not in name), {}, "it lacks 1 tensor (lm_head.weight); fetch"),
    "integers": (
        each(lambda name, tensor: tensor.to(torch.int8) if "q_proj" in name else tensor),
        {},
        "it has 3 integer tensors in place of floats (model.layers.0.self_attn.q_proj.weight, ",
    ),
    "some names prefixed": (
        lambda state: {f"module.{n}" if ".0." in n else n: tensor for n, tensor in state.items()},
        {},
        "and has 9 unexpected tensors (module.model.layers.0.input_layernorm.weight, ",
    ),
    "prefixed and one missing": (
        lambda state: prefixed("module.")(only(lambda name: name != "model.norm.weight")(state)),
        {},
        "it lacks 1 tensor (model.norm.weight); fetch",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_weights_that_do_not_fit_are_refused(case, copy_of, capfd):
    change, options, message = MISFITS[case]
    _, folder = copy_of("llama")
    if change is not None:
        change_weights(folder, change)
    change_config(folder, **options)
    text = refusal(folder)
    assert text.startswith(f"{folder} does not fit LlamaForCausalLM: it ")
    assert message in text
    assert text.endswith("correct config.json, or pass strict=False to open it with what fits.")
    assert "LOAD REPORT" not in capfd.readouterr().err


@pytest.mark.medium
def test_what_fits_is_opened_where_that_is_asked_for(copy_of):
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
    whole = wb.open_checkpoint(copy_of("gpt2")[1], strict=False)
    assert whole.unloaded == ""
    assert "unloaded" not in wb.profile(whole, TOKENS, progress=False).attrs


@pytest.mark.parametrize("empty", [{}, {"x": torch.zeros(0)}])
def test_a_model_that_would_be_all_random_is_never_opened(empty, copy_of):
    _, folder = copy_of("llama")
    save_file(empty, folder / "model.safetensors")
    for strict in (True, False):
        text = refusal(folder, strict=strict)
        assert "it lacks 30 tensors (lm_head.weight, " in text
        assert "strict=False" not in text


def test_a_config_of_a_far_larger_model_is_refused_before_memory_is_taken(copy_of):
    _, folder = copy_of("llama")
    change_config(folder, vocab_size=10**12)  # 96 terabytes
    assert "model.embed_tokens.weight: (97, 24) instead of (1000000000000, 24)" in refusal(folder)


def test_a_model_that_seemed_too_large_has_its_weights(copy_of, monkeypatch):
    model, folder = copy_of("llama")
    change_config(folder, architectures=["LlamaModel"])
    monkeypatch.setattr("workbench.models.pretrained._Loader._n_parameters", lambda *_: 10**12)
    subject = wb.open_checkpoint(folder)
    assert subject.unloaded == "1 tensor (lm_head.weight) of another head ignored"
    assert_same_weights(subject.model, model.model)


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


def test_names_of_compiled_layers_are_read(copy_of):
    model, folder = copy_of("mixtral")
    change_weights(
        folder,
        lambda s: {name.replace("layers.1.", "layers.1._orig_mod."): tensor for name, tensor in s.items()},
    )
    assert_same_weights(wb.open_checkpoint(folder).model, model)


def test_experts_under_wrapped_names_are_put_together(copy_of):
    model, folder = copy_of("mixtral")
    change_weights(folder, prefixed("module."))
    assert_same_weights(wb.open_checkpoint(folder).model, model)


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


def test_plain_names():
    def plain(*names):
        return list(plain_names(names).values())

    assert plain("module.a", "module.b.c") == ["a", "b.c"]
    assert plain("module.module.a") == ["a"]
    assert plain("_orig_mod.module._orig_mod.a") == ["a"]
    assert plain("layers.0._orig_mod.weight", "layers.1.weight") == ["layers.0.weight", "layers.1.weight"]
    assert plain("module.layers.0._orig_mod.a._orig_mod.b") == ["layers.0.a.b"]
    for kept in (
        ("module.a", "b"),  # only some
        ("_orig_mod.a", "b"),
        ("layers.0._orig_mod.weight", "layers.0.bias"),
        ("the_orig_mod.a", "modules.b"),  # other names
    ):
        assert plain(*kept) == list(kept)
    assert plain_names([]) == {}


@pytest.mark.parametrize("n_experts", [4, 8])
def test_another_number_of_experts_is_refused(n_experts, copy_of):
    _, folder = copy_of("mixtral")
    change_config(folder, num_local_experts=n_experts)
    assert (
        "it has 9 tensors of another shape (model.layers.0.mlp.experts.down_proj: "
        f"(6, 24, 40) instead of ({n_experts}, 24, 40), " in refusal(folder)
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
def test_experts_that_cannot_be_put_together_are_refused(change, copy_of):
    _, folder = copy_of("mixtral")
    change_weights(folder, change)
    text = refusal(folder)
    assert "it lacks parts of model.layers.0.mlp.experts.gate_up_proj, or has them in several shapes; fetch" in text


def test_integer_experts_are_refused(copy_of):
    _, folder = copy_of("mixtral")
    change_weights(folder, each(lambda name, tensor: tensor.to(torch.int8) if name == EXPERT else tensor))
    assert f"it has 1 integer tensor in place of floats ({EXPERT}); fetch" in refusal(folder)
    assert wb.open_checkpoint(folder, strict=False).unloaded == f"1 integer tensor ({EXPERT}) taken as floats"


def test_weights_in_eight_bits_say_how_to_open_them(copy_of):
    _, folder = copy_of("llama")
    change_weights(folder, each(lambda _, tensor: tensor.to(torch.float8_e4m3fn)))
    change_config(folder, dtype=...)
    assert "pass dtype=torch.bfloat16 or torch.float32 to convert them." in refusal(folder)
    assert wb.open_checkpoint(folder, dtype="bfloat16").model.dtype == torch.bfloat16


def test_tied_and_ignored_tensors_are_not_missed(copy_of):
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


def test_tables_that_are_computed_are_not_missed(copy_of):
    model, folder = copy_of("esm")
    change_weights(folder, only(lambda name: not name.endswith("inv_freq")))
    subject = wb.open_checkpoint(folder)
    assert_same_weights(subject.model, model)
    assert subject.unloaded == ""


@pytest.mark.medium
def test_tensors_of_another_head_do_no_harm(tmp_path):
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
    assert "it lacks 2 tensors (classifier.bias, classifier.weight); fetch" in refusal(tmp_path / "pretrained")
    BertForMaskedLM(config).save_pretrained(tmp_path / "masked")
    change_config(tmp_path / "masked", architectures=["BertModel"])
    assert "it lacks 2 tensors (pooler.dense.bias, pooler.dense.weight); fetch" in refusal(tmp_path / "masked")


def test_sharded_checkpoints_with_damaged_indices(copy_of):
    model, folder = copy_of("llama", max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    lacking = {name: file for name, file in whole["weight_map"].items() if name != "model.norm.weight"}
    for harmless in ({**whole, "weight_map": lacking}, {"weight_map": whole["weight_map"]}):
        index.write_text(json.dumps(harmless))
        assert_same_weights(wb.open_checkpoint(folder).model, model)
    for damaged in ([], 3, {"metadata": {}, "weight_map": {}}, {"metadata": {}, "weight_map": {"x": 3}}):
        index.write_text(json.dumps(damaged))
        assert refusal(folder) == "model.safetensors.index.json is no index of a sharded checkpoint; fetch it again."
    index.write_text("{ not json")
    assert refusal(folder) == "model.safetensors.index.json is no index of a sharded checkpoint; fetch it again."
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"x": "../secret.safetensors"}}))
    assert "names ../secret.safetensors, which is not in the folder" in refusal(folder)
    index.write_text(json.dumps(whole))
    name = whole["weight_map"]["model.norm.weight"]
    (folder / name).unlink()
    assert refusal(folder) == f"{index.name} names {name}, which is not in the folder; fetch that file too."


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


def test_models_with_code_of_their_own_are_checked_too(tmp_path, monkeypatch):
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
    text = refusal(folder, trust_remote_code=True)
    assert "does not fit OwnModel: it lacks 2 tensors (layers.2.bias, layers.2.weight); fetch" in text


def test_a_stale_pickle_beside_the_weights_is_not_looked_at(copy_of):
    model, folder = copy_of("llama")
    torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")
    assert_same_weights(wb.open_checkpoint(folder).model, model)


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


@pytest.mark.parametrize("named", ["GPT2LMHeadModel", ["BertModel"], ["Nope", "MistralForCausalLM"]])
def test_a_class_of_another_model_type_is_refused(named, copy_of):
    _, folder = copy_of("llama")
    change_config(folder, architectures=named)
    assert "which is no model of its model_type 'llama'; correct one of the two." in refusal(folder)


@pytest.mark.parametrize("named", [3, {}, [3], [None], [["LlamaForCausalLM"]], False])
def test_architectures_that_are_no_names_are_refused(named, copy_of):
    _, folder = copy_of("llama")
    change_config(folder, architectures=named)
    assert f"config.json has architectures = {named!r}, expected a list" in refusal(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", None, "'hidden_size' expected int, got NoneType"),
        ("hidden_size", 0, "(24) instead of (0)"),
        ("hidden_size", -1, "is not a multiple of"),
        ("num_hidden_layers", "four", "'num_hidden_layers' expected int, got str"),
        ("num_hidden_layers", 0, "it has 27 unexpected tensors"),
        ("num_attention_heads", 0, "ZeroDivisionError"),
        ("vocab_size", None, "'vocab_size' expected int, got NoneType"),
        ("vocab_size", 0, "IndexError"),
        ("vocab_size", -1, "negative dimension"),
        ("rope_parameters", 3, "'rope_parameters' with value 3"),
        ("hidden_act", "nope", "it does not know 'nope'"),
        ("head_dim", 0, "ZeroDivisionError"),
        ("pad_token_id", 10**6, "AssertionError"),
        ("dtype", "float99", "has no attribute 'float99'"),
        ("quantization_config", 3, "AttributeError"),
        ("auto_map", 3, "TypeError"),
        ("transformers_weights", 3, "AttributeError"),
        ("model_type", 3, "has model_type = 3, expected a name"),
        ("model_type", [], "has model_type = [], expected a name"),
        ("model_type", "nope", "has model type `nope`"),
        ("model_type", ..., "Should have a `model_type` key"),
        ("model_type", "gpt2", "which is no model of its model_type 'gpt2'"),
    ],
)
def test_wrong_fields_of_a_config_are_one_sentence(field, value, message, copy_of):
    _, folder = copy_of("llama")
    change_config(folder, **{field: value})
    assert message in refusal(folder)


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null", "[" * 100_000, "", "\0", '{"a": ' + 5000 * "9" + "}"])
def test_a_config_that_is_no_object_is_refused(text, copy_of):
    _, folder = copy_of("llama")
    (folder / "config.json").write_text(text)
    assert "config.json " in refusal(folder)


class _BytesPath:
    def __fspath__(self):
        return b"model"


@pytest.mark.parametrize("source", [None, 3, 2.5, True, b"x", [], {}, (), _BytesPath()])
def test_what_is_no_source_is_refused(source):
    name = type(source).__name__
    assert refusal(source) == (
        f"open_checkpoint() got an object of type {name}; pass the path of a folder or file, a hub name, "
        "or an nn.Module."
    )


def test_a_class_is_no_source():
    assert refusal(nn.Linear) == "The model is the class Linear; pass a model, not its class, such as Linear(...)."


@pytest.mark.parametrize("text", ["", " ", "\0", 5000 * "x", "~nobody-here/x", "foo..bar", "a--b", "-x", "x.git"])
def test_what_is_neither_path_nor_name_is_refused(text):
    assert len(refusal(text)) < 400


def test_a_subject_is_opened_already():
    module = nn.Linear(2, 2)
    subject = wb.open_checkpoint(module, strict=True, dtype="float32")
    assert wb.open_checkpoint(subject) is subject
    assert wb.open_checkpoint(subject, module=module, strict=False) is subject
    assert wb.open_checkpoint(subject, name="other").name == "other"
    for source in (subject, module):
        assert "Both a Linear and module= are given; pass one of them" in refusal(source, module=nn.Linear(2, 2))
        assert "convert the Linear with .to()" in refusal(source, dtype="float16")


@pytest.mark.parametrize("dtype", ["float99", 3, "nn", "int8", torch.int8, torch.float8_e4m3fn, "complex64", {}])
def test_an_unknown_dtype_is_refused(dtype, saved, tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "linear.pt")
    module = nn.Linear(2, 2)
    for source, options in ((saved("llama")[1], {}), (tmp_path / "linear.pt", {"module": module}), (module, {})):
        text = refusal(source, dtype=dtype, **options)
        assert text == f"dtype={dtype!r} is no dtype of weights; pass 'auto', 'float32', 'bfloat16' or 'float16'."


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_a_dtype_is_understood_everywhere(dtype, saved, tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "linear.pt")
    module = nn.Linear(2, 2)
    wb.open_checkpoint(tmp_path / "linear.pt", module=module, dtype=dtype)
    assert module.weight.dtype == torch.bfloat16
    assert wb.open_checkpoint(saved("llama")[1], dtype=dtype).model.dtype == torch.bfloat16


def test_other_arguments_of_a_wrong_type_are_refused(saved):
    _, folder = saved("llama")
    assert "name=3 is no text" in refusal(folder, name=3)
    assert "module= is of type int, expected the nn.Module" in refusal(folder, module=3)
    assert f"module= goes with a file of weights, which {folder} is not" in refusal(folder, module=nn.Linear(2, 2))
    assert "There is no file or folder" in refusal(folder / "missing.pt", module=nn.Linear(2, 2))


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
def test_wrapped_modules_take_wrapped_weights(prefix, make, tmp_path):
    model = small(seed=1)
    save_file(prefixed(prefix)(model.state_dict()), tmp_path / "weights.safetensors")
    target = make()
    subject = wb.open_checkpoint(tmp_path / "weights.safetensors", module=target)
    assert subject.model is target
    assert subject.unloaded == ""
    assert all(map(torch.equal, target.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize(
    ("change", "message", "unloaded"),
    [
        (
            only(lambda name: name != "head.weight"),
            "it lacks 1 tensor (head.weight); pass the module",
            "1 tensor (head.weight) left at the module's own values",
        ),
        (
            lambda state: {**state, "extra": torch.ones(1)},
            "it has 1 unexpected tensor (extra); pass the module",
            "1 tensor (extra) ignored",
        ),
        (
            lambda state: {**state, "head.weight": torch.ones(3, 3)},
            "it has 1 tensor of another shape (head.weight: (3, 3) instead of (32, 16)); pass the module",
            "1 tensor (head.weight) left at the module's own values",
        ),
        (
            lambda state: {**state, "head.weight": torch.ones(32, 16, dtype=torch.int8)},
            "it has 1 integer tensor in place of floats (head.weight); pass the module",
            "1 integer tensor (head.weight) taken as floats",
        ),
        (
            lambda state: {f"module.{k}" if k == "head.weight" else k: v for k, v in state.items()},
            "it lacks 1 tensor (head.weight) and has 1 unexpected tensor (module.head.weight); pass the module",
            "1 tensor (head.weight) left at the module's own values, 1 tensor (module.head.weight) ignored",
        ),
    ],
)
def test_state_dicts_that_do_not_fit(change, message, unloaded, tmp_path):
    model, target = small(seed=1), small()
    torch.save(change(model.state_dict()), tmp_path / "weights.pt")
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    assert message in refusal(tmp_path / "weights.pt", module=target)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
    subject = wb.open_checkpoint(tmp_path / "weights.pt", module=target, strict=False)
    assert subject.unloaded == unloaded
    own = model.state_dict()
    assert all(torch.equal(own[k], tensor) for k, tensor in target.state_dict().items() if k != "head.weight")


def test_a_state_dict_of_which_nothing_fits_is_refused(tmp_path):
    torch.save({"x": torch.ones(1)}, tmp_path / "weights.pt")
    for strict in (True, False):
        text = refusal(tmp_path / "weights.pt", module=small(), strict=strict)
        assert text.endswith("has 1 unexpected tensor (x); pass the module that it was saved from.")


def test_tied_tensors_of_a_state_dict(tmp_path):
    def tied(seed):
        return wb.zoo.gpt2_style(d_model=16, n_layers=2, vocab_size=32, max_length=8, seed=seed)

    state = tied(1).state_dict()
    for left_out in ("head.weight", "token_embedding.weight"):  # kept once, under either name
        target = tied(0)
        torch.save(only(lambda name, out=left_out: name != out)(state), tmp_path / "weights.pt")
        assert wb.open_checkpoint(tmp_path / "weights.pt", module=target).unloaded == ""
        assert all(torch.equal(state[name], tensor) for name, tensor in target.state_dict().items())
    diverged = dict(state) | {
        name: torch.full((32, 16), torch.nan) for name in ("head.weight", "token_embedding.weight")
    }
    torch.save(diverged, tmp_path / "weights.pt")
    assert wb.open_checkpoint(tmp_path / "weights.pt", module=tied(0)).model.head.weight.isnan().all()
    torch.save({**state, "head.weight": state["head.weight"] + 1}, tmp_path / "weights.pt")
    target = tied(0)
    assert "it has 1 tensor that should equal another (head.weight); pass" in refusal(
        tmp_path / "weights.pt", module=target
    )
    subject = wb.open_checkpoint(tmp_path / "weights.pt", module=target, strict=False)
    assert subject.unloaded == "1 tensor (head.weight) ignored for the one tied to it"
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
    text = refusal(tmp_path / "weights.pt", module=nn.Linear(2, 2, device="meta"))
    assert text.startswith("The weights of Linear are on the meta device and hold nothing; call module.to_empty(")
    torch.save({"weight": torch.eye(2).to_sparse(), "bias": torch.ones(2)}, tmp_path / "weights.pt")
    assert "holds sparse, quantized or nested tensors" in refusal(tmp_path / "weights.pt", module=nn.Linear(2, 2))
    torch.save({1: torch.ones(1)}, tmp_path / "weights.pt")
    assert "holds no state dict" in refusal(tmp_path / "weights.pt", module=nn.Linear(2, 2))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_zoo_folders_under_wrapped_names(prefix, tmp_path):
    model = small(seed=1).double()
    folder = wb.save_checkpoint(model, tmp_path / "zoo")
    change_weights(folder, prefixed(prefix))
    subject = wb.open_checkpoint(folder)
    assert_same_weights(subject.model, model)
    assert subject.unloaded == ""


def test_zoo_folders_that_do_not_fit(tmp_path):
    folder = wb.save_checkpoint(small(), tmp_path / "zoo")
    whole = (folder / "model.safetensors").read_bytes()
    change_config(folder, n_layers=3)
    assert "does not fit Transformer: it lacks 14 tensors (blocks.2." in refusal(folder)
    assert wb.open_checkpoint(folder, strict=False).unloaded.endswith(", ...) left at random values")
    change_config(folder, n_layers=2)
    change_weights(folder, lambda _: {})
    assert "it lacks 32 tensors" in refusal(folder, strict=False)
    (folder / "model.safetensors").write_bytes(whole)
    for option in ({"n_layers": "four"}, {"n_layers": 2.5}, {"norm": 3}, {"n_heads": 0}, {"vocab_size": 10**13}):
        change_config(folder, n_layers=2, norm="rms_norm", n_heads=2, vocab_size=32)
        change_config(folder, **option)
        assert "config.json does not describe a transformer" in refusal(folder)
    for family in ([], {}, None, 3):
        change_config(folder, workbench_architecture=family)
        assert f"holds a '{family}', which this version does not know" in refusal(folder)


def write_gguf(path, change=lambda shapes: shapes, n_blocks=2):
    """A Llama of two blocks, whose header says that it has ``n_blocks``."""
    import numpy as np
    from gguf import GGUFWriter

    width, hidden, vocabulary = 32, 64, 32
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(n_blocks)
    writer.add_context_length(32)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*(chr(65 + i) for i in range(vocabulary - 1)), "AB"])
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    square, up = (width, width), (hidden, width)
    block = {
        "attn_norm": (width,), "ffn_norm": (width,), "attn_q": square, "attn_k": square, "attn_v": square,
        "attn_output": square, "ffn_gate": up, "ffn_up": up, "ffn_down": (width, hidden),
    }  # fmt: skip
    shapes = {"token_embd.weight": (vocabulary, width), "output_norm.weight": (width,)}
    shapes |= {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in block.items()}
    generator = np.random.default_rng(0)
    for name, shape in change(shapes).items():
        writer.add_tensor(name, generator.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("change", "n_blocks", "message", "unloaded"),
    [
        (
            only(lambda name: name != "blk.1.ffn_up.weight"),
            2,
            "it lacks 1 tensor (model.layers.1.mlp.up_proj.weight); fetch it again",
            "1 tensor (model.layers.1.mlp.up_proj.weight) left at random values",
        ),
        (
            lambda shapes: {**shapes, "blk.0.ffn_up.weight": (32, 32)},
            2,
            "it has 1 tensor of another shape (model.layers.0.mlp.up_proj.weight: (32, 32) instead of (64, 32)); fetch",
            "1 tensor (model.layers.0.mlp.up_proj.weight) left at random values",
        ),
        (lambda shapes: shapes, 3, "it lacks 9 tensors (model.layers.2.", "9 tensors (model.layers.2."),
        (lambda shapes: shapes, 1, "it has 9 unexpected tensors (blk.1.", "9 tensors (blk.1."),
    ],
)
def test_a_gguf_file_that_does_not_fit(change, n_blocks, message, unloaded, tmp_path, cache):
    write_gguf(tmp_path / "model.gguf", change, n_blocks)
    assert message in refusal(tmp_path / "model.gguf")
    subject = wb.open_checkpoint(tmp_path / "model.gguf", strict=False)
    assert subject.unloaded.startswith(unloaded)
    assert subject.source == str(tmp_path / "model.gguf")
    assert not cache.exists()


def test_a_gguf_file_that_fits(tmp_path, cache):
    write_gguf(tmp_path / "model.gguf")
    for strict in (False, True):
        assert wb.open_checkpoint(tmp_path / "model.gguf", strict=strict).unloaded == ""
    assert not cache.exists()


@pytest.mark.parametrize("is_fetched_first", [False, True])
def test_a_hub_name_is_checked_too(is_fetched_first, copy_of, tmp_path, monkeypatch):
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
    if is_fetched_first:  # the files come with the first load
        answers = [None]
        look = huggingface_hub.try_to_load_from_cache
        monkeypatch.setattr(
            huggingface_hub, "try_to_load_from_cache", lambda *given: answers.pop() if answers else look(*given)
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
    message = "somebody/tiny does not fit LlamaForCausalLM: it lacks 9 tensors (model.layers.3."
    assert refusal("somebody/tiny").startswith(message)
    assert wb.open_checkpoint("somebody/tiny", strict=False).unloaded.startswith("9 tensors (model.layers.3.")
