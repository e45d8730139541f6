"""Inputs of all forms that users have: unambiguous ones work, all others raise an error of one sentence."""

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import workbench as wb
from tests.about import about, says
from workbench.errors import AnatomyError, SnapshotError, WorkbenchError

pytestmark = pytest.mark.filterwarnings("ignore::workbench.koopman.spectra.RankWarning")
TOKENS = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)).eval()


@pytest.fixture(scope="module")
def gpt2():
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def vit():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(num_hidden_layers=2, image_size=16, patch_size=4, **sizes)).eval()


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (TOKENS.float(), "integer token ids, and float32 was given; pass ids.long()"),
        (TOKENS > 3, "integer token ids, and bool was given"),
        (TOKENS.to(torch.complex64), "holds complex numbers"),
        (TOKENS + 60, r"Token ids range from \d+ to \d+, but GPT2LMHeadModel has 64 tokens \(0 to 63\)"),
        (TOKENS - 60, r"Token ids range from -\d+ to -?\d+"),
        (TOKENS.repeat(1, 6), "Sequences have 96 tokens, but GPT2LMHeadModel takes at most 64"),
        (TOKENS[:0], "The inputs are empty"),
        (torch.zeros(8, 0, dtype=torch.int64), r"The inputs are empty.*shape \(8, 0\)"),
        (TOKENS.to("meta"), "on the meta device and holds no values"),
        (TOKENS.to_sparse(), "sparse tensor, expected a dense tensor"),
        (torch.nested.nested_tensor([TOKENS[0], TOKENS[1, :5]], layout=torch.jagged), "nested tensor.*as a list"),
        (torch.quantize_per_tensor(TOKENS.float(), 1.0, 0, torch.quint8), "quantized tensor"),
        (torch.tensor(3), "holds no tensor"),
        (np.array(["a", "b"]), "not of numbers"),
        ({"input_ids": [[1, 2, 3], [1, 2]]}, "pad its sequences to one length"),
        ({"input_ids": "text"}, "holds no tensor"),
        ({"tokens": TOKENS}, "cannot run on inputs of tokens int64"),
        (IMAGES, "cannot run on inputs of float32"),
        (torch.randn(2, 5, 32), "pass them as {'inputs_embeds': vectors}"),
        (b"text", "The inputs are a bytes"),
        (3.5, "The inputs are a float"),
    ],
)
def test_other_inputs_are_explained_in_one_sentence(gpt2, inputs, sentence):
    for call in (wb.profile, wb.read_anatomy, wb.flow.measure, wb.query_key_weights, wb.router_weights):
        with pytest.raises(SnapshotError, match=sentence) as caught:
            call(gpt2, inputs)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (IMAGES[0], r"takes images of shape \(image, 3, 16, 16\), and a single image was given; pass image\[None\]"),
        (torch.randn(2, 3, 20, 20), r"takes images of shape \(image, 3, 16, 16\), .* have shape \(2, 3, 20, 20\)"),
        (torch.randn(2, 1, 16, 16), r"takes images of shape \(image, 3, 16, 16\)"),
        (TOKENS, r"takes images of shape \(image, 3, 16, 16\)"),
        (IMAGES.to("meta"), "meta device"),
    ],
)
def test_wrong_images_are_explained_in_one_sentence(vit, inputs, sentence):
    with pytest.raises(SnapshotError, match=sentence):
        wb.profile(vit, inputs, progress=False)


def test_the_error_of_the_model_is_the_cause(gpt2):
    with pytest.raises(SnapshotError) as caught:
        wb.profile(gpt2, TOKENS + 60, progress=False)
    assert isinstance(caught.value.__cause__, IndexError)


def test_models_that_cannot_be_analyzed_are_rejected():
    zoo = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
    with pytest.raises(AnatomyError, check=says("Transformer is TorchScript")):
        wb.profile(torch.jit.trace(zoo, TOKENS), TOKENS, progress=False)
    with pytest.raises(SnapshotError, check=says("are on the meta device, without values; load the")):
        wb.profile(zoo.to("meta"), TOKENS, progress=False)
    for call in (wb.read_anatomy, wb.query_key_weights, wb.router_weights):
        with pytest.raises(AnatomyError, check=about("model", None)):
            call(None, TOKENS)


def test_a_subject_is_accepted_in_place_of_a_model(llama):
    subject = wb.open_checkpoint(llama)
    assert len(wb.read_anatomy(subject, TOKENS).sites) == 2
    weights = wb.query_key_weights(subject, [TOKENS, TOKENS])  # a list means batches here too
    assert torch.equal(weights[0].query, wb.query_key_weights(llama, TOKENS)[0].query)
    assert wb.router_weights(subject, TOKENS) == []


def test_samples_accept_text_and_tasks():
    sample = wb.samples.load("pre_ln")
    options = {"n_snapshots": 256, "progress": False}
    texts = ["The capital of France is Paris.", "Some other text of another length, in one line."] * 3
    assert dict(wb.profile(sample, wb.tasks.text_bytes(), **options).sizes) == {"layer": 6, "mode": 64}
    of_list, of_tuple = (wb.profile(sample, kind(texts), **options) for kind in (list, tuple))
    np.testing.assert_array_equal(of_list["spectral_radius"].values, of_tuple["spectral_radius"].values)


def test_text_needs_a_tokenizer():
    model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
    with pytest.raises(WorkbenchError, check=says("Transformer has no tokenizer; pass token ids instead of")):
        wb.profile(model, ["some text"], progress=False)
    subject = wb.Subject(model, name="mine", source="here", own_tokenizer=wb.ByteTokenizer())
    assert wb.profile(subject, ["some text"], progress=False).sizes["layer"] == 2


def test_a_batch_with_its_targets_is_explained():
    with pytest.raises(SnapshotError, match=r"a batch with its targets; pass only its tokens, batch\[0\]") as caught:
        wb.profile(wb.samples.load("pre_ln"), wb.tasks.text_bytes().batch(0), progress=False)
    assert "TypeError" not in str(caught.value)
