"""LoRA adapters as saved by PEFT, compared with a model that computes with unmerged matrices."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import workbench as wb
from tests.about import about, says
from tests.models.weight_models import TOKENS, rejection
from workbench.models.lazy_state import lazy_state

pytestmark = pytest.mark.medium


def base_of(kind):
    """Return a small model of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16)).eval()
    options = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=False, **options)).eval()


class _Unmerged(nn.Module):
    """A layer with its two LoRA matrices, computed like PEFT without merging."""

    def __init__(self, layer, a, b, scale):
        super().__init__()
        self.layer, self.a, self.b, self.scale = layer, a, b, scale

    def forward(self, x):
        if isinstance(self.layer, nn.Embedding):
            return self.layer(x) + self.scale * nn.functional.embedding(x, self.a.T) @ self.b.T
        return self.layer(x) + self.scale * (x @ self.a.T @ self.b.T)


TARGETS = {
    "llama": ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.embed_tokens", "lm_head"],
    "gpt2": ["transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_proj", "transformer.h.1.mlp.c_fc"],
}


def adapter(folder, kind, base, *, rank=4, alpha=8, **options):
    """Write an adapter of a base model, and return a model that computes the same without merging."""
    folder.mkdir(exist_ok=True)
    oracle = base_of(kind)
    generator = torch.Generator().manual_seed(1)
    state = {}
    scale = alpha / rank**0.5 if options.get("use_rslora") else alpha / rank
    for target in TARGETS[kind]:
        layer = oracle.get_submodule(target)
        is_embedding = isinstance(layer, nn.Embedding)
        n_in, n_out = layer.weight.shape if kind == "gpt2" or is_embedding else layer.weight.shape[::-1]
        a, b = torch.randn(rank, n_in, generator=generator), torch.randn(n_out, rank, generator=generator)
        ends = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight")
        state |= {f"base_model.model.{target}.{end}": tensor for end, tensor in zip(ends, (a, b), strict=True)}
        oracle.set_submodule(target, _Unmerged(layer, a, b, scale))
    save_file(state, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "base_model_name_or_path": str(base), "r": rank, "lora_alpha": alpha, "use_dora": False,
        "fan_in_fan_out": kind == "gpt2", "bias": "none", "target_modules": ["q_proj"], "task_type": "CAUSAL_LM",
        "init_lora_weights": True, "lora_dropout": 0.1, "modules_to_save": None, "alpha_pattern": {}, **options,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return oracle.eval()


def change_config(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder, change):
    file = folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


@pytest.fixture
def llama(tmp_path):
    """Folders of a base model and of an adapter for it."""
    base_of("llama").save_pretrained(tmp_path / "base")
    adapter(tmp_path / "adapter", "llama", tmp_path / "base")
    return tmp_path / "base", tmp_path / "adapter"


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"rank": 2, "alpha": 3}])
def test_an_adapter_is_merged_into_its_base(kind, options, tmp_path):
    base_of(kind).save_pretrained(tmp_path / "base")
    oracle = adapter(tmp_path / "adapter", kind, tmp_path / "base", **options)
    expected = oracle(TOKENS).logits
    subject = wb.open_checkpoint(tmp_path / "adapter")
    assert (subject.name, subject.source, subject.unloaded) == ("adapter", str(tmp_path / "adapter"), "")
    assert type(subject.model) is type(base_of(kind))
    torch.testing.assert_close(subject.model(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(base_of(kind)(TOKENS).logits, expected, atol=0.1)
    module = base_of(kind)
    assert wb.open_checkpoint(tmp_path / "adapter", module=module).model is module
    assert torch.equal(module(TOKENS).logits, subject.model(TOKENS).logits)
    own = subject.model.state_dict()
    assert all(torch.equal(own[name], tensor.read()) for name, tensor in lazy_state(tmp_path / "adapter").items())


def test_wrapped_and_half_precision_bases(llama):
    _, folder = llama
    expected = wb.open_checkpoint(folder).model.state_dict()
    module = nn.DataParallel(base_of("llama"))
    wb.open_checkpoint(folder, module=module)
    assert all(torch.equal(module.module.state_dict()[name], tensor) for name, tensor in expected.items())
    half = wb.open_checkpoint(folder, dtype="bfloat16").model.state_dict()
    for name, tensor in expected.items():  # rounded once or twice
        assert half[name].dtype == torch.bfloat16
        torch.testing.assert_close(half[name].float(), tensor, rtol=2**-7, atol=2**-7)


def test_fully_trained_modules_replace_those_of_the_base(llama):
    _, folder = llama
    change_weights(folder, lambda state: {**state, "base_model.model.model.norm.weight": torch.full((16,), 3.0)})
    change_config(folder, modules_to_save=["norm"])
    assert (wb.open_checkpoint(folder).model.model.norm.weight == 3).all()
    change_weights(folder, lambda state: {**state, "base_model.model.model.norm.weight": torch.ones(17)})
    assert says("adapter_model.safetensors has model.norm.weight, which the")(rejection(folder))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"something_new": 3, "target_parameters": ["x"]}, "something_new"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"peft_type": None}, "peft_type"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"base_model_name_or_path": "somebody/llama"}, "base_model_name_or_path"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path"),
        ({"base_model_name_or_path": "."}, "base_model_name_or_path"),
    ],
)
def test_other_adapters_are_rejected(changes, name, llama, monkeypatch):
    _, folder = llama
    monkeypatch.chdir(folder)
    change_config(folder, **changes)
    assert about(name, changes[name])(rejection(folder))


def test_adapters_that_do_not_fit_are_rejected(llama):
    _, folder = llama
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    saved = load_file(folder / "adapter_model.safetensors")
    factor = name.removeprefix("base_model.model.")

    def rejected(change):
        save_file(change(dict(saved)), folder / "adapter_model.safetensors")
        return rejection(folder, base_of("llama"))

    for other in (factor.replace(".0.", ".7."), factor.replace("q_proj", "act")):
        moved = rejected(lambda s, other=other: {f"base_model.model.{other}": s.pop(name), **s})
        assert about(other, (4, 16))(moved)
    assert says("which fits no matrix of the base model; pass the model it")(
        rejected(lambda s: s | {name: torch.ones(4, 16, 1)})
    )
    assert says("adapter_model.safetensors does not fit the base model")(
        rejected(lambda s: s | {name: torch.ones(4, 17)})
    )
    assert says("adapter_model.safetensors does not fit the base model")(
        rejected(lambda s: s | {name: torch.ones(5, 16)})
    )
    without_b = rejected(lambda s: {k: v for k, v in s.items() if k != name.replace("_A", "_B")})
    assert says("which fits no matrix of the base model; pass the model it")(without_b)
    without_a = rejected(lambda s: {k: v for k, v in s.items() if k != name})
    assert says("which the base model does not have, or has in another")(without_a)
    assert says("adapter_model.safetensors holds no LoRA matrices ();")(rejected(lambda _: {}))
    (folder / "adapter_config.json").write_text("[]")
    assert about("adapter_config.json", folder / "adapter_config.json", "a configuration of a model")(rejection(folder))
    (folder / "adapter_config.json").write_text("{")
    assert about("adapter_config.json", expected="a configuration of a model")(rejection(folder))


def test_a_change_of_one_of_two_tied_tensors_is_rejected(tmp_path):
    base_of("gpt2").save_pretrained(tmp_path / "base")
    folder = tmp_path / "adapter"
    adapter(folder, "gpt2", tmp_path / "base")
    target = "base_model.model.transformer.wte.lora_embedding_"
    more = {f"{target}A": torch.ones(4, 32), f"{target}B": torch.ones(16, 4)}
    change_weights(folder, lambda state: state | more)
    assert says("tensor that should equal another (lm_head.weight); pass the")(rejection(folder))


def test_quantized_bases_are_rejected(llama):
    base, folder = llama
    state = load_file(base / "model.safetensors")
    state["lm_head.weight"] = state["lm_head.weight"].to(torch.int8)
    save_file(state, base / "model.safetensors")
    with pytest.raises(wb.WorkbenchError, check=says("lm_head.weight of the base model is quantized; pass the")):
        lazy_state(folder)
