"""Axes that count sequences, several streams, and modules that are not blocks: read with certainty, or rejected."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import XLNetConfig, XLNetModel

import workbench as wb
from tests.about import about, says
from tests.models.layout_models import (
    VOCABULARY,
    WIDTH,
    Chain,
    Decoder,
    EarlyExit,
    FoldedStreams,
    ResidualOutside,
    Streams,
    TwoStreams,
    Universal,
)
from workbench.errors import AnatomyError, SnapshotError
from workbench.models.block_hooks import BlockHooks

pytestmark = pytest.mark.filterwarnings("ignore::workbench.koopman.spectra.RankWarning")
N_EXAMPLES, N_TOKENS = 6, 20


def ids_of(model, n_examples=N_EXAMPLES, n_tokens=N_TOKENS, seed=0):
    tokens = torch.randint(VOCABULARY, (n_examples, n_tokens), generator=torch.Generator().manual_seed(seed))
    return tokens if model.ids_first else tokens.T.contiguous()


def axes(model, inputs, **options):
    layout = wb.read_anatomy(model, inputs, **options).layout
    return layout.inputs, layout.states


def spectra(model, inputs, **options):
    return wb.profile(model, inputs, progress=False, n_snapshots=None, **options)


@pytest.fixture(params=[(True, True), (True, False), (False, True), (False, False)], ids=str)
def decoder(request):
    torch.manual_seed(1)
    ids_first, states_first = request.param
    return Decoder(ids_first=ids_first, states_first=states_first).eval()


@pytest.mark.parametrize(("n_examples", "n_tokens"), [(6, 20), (20, 6), (7, 7), (2, 9), (9, 2), (2, 2), (1, 8)])
def test_axes_are_found_whatever_their_lengths(decoder, n_examples, n_tokens):
    expected = (0 if decoder.ids_first else 1, 0 if decoder.states_first else 1)
    assert axes(decoder, ids_of(decoder, n_examples, n_tokens)) == expected
    assert axes(decoder, ids_of(decoder, n_examples, n_tokens), batch_first=decoder.ids_first) == expected


@pytest.mark.parametrize(("n_examples", "n_tokens"), [(6, 20), (8, 8)])
def test_masks_and_first_tokens_act_on_sequences(decoder, n_examples, n_tokens):
    tokens = ids_of(decoder, n_examples, n_tokens)
    mask = torch.ones(n_examples, n_tokens, dtype=torch.int64)
    mask[1:, 5:] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask if decoder.ids_first else mask.T}
    unmasked = {"input_ids": tokens, "attention_mask": torch.ones_like(inputs["attention_mask"])}
    # All tokens of the first sequence count, but only five of each other sequence.
    assert spectra(decoder, inputs).attrs["n_snapshots"] == n_tokens + 5 * (n_examples - 1)
    assert spectra(decoder, inputs, skip_first=2).attrs["n_snapshots"] == n_tokens - 2 + 3 * (n_examples - 1)
    assert spectra(decoder, unmasked, skip_first=2).attrs["n_snapshots"] == (n_tokens - 2) * n_examples


def test_spectra_are_those_of_the_model_with_sequences_first(decoder):
    """The same weights with both axes exchanged have the same spectra."""
    usual = Decoder(ids_first=True, states_first=True).eval()
    usual.load_state_dict(decoder.state_dict())
    tokens = ids_of(usual, 30, 12)
    mask = torch.ones_like(tokens)
    mask[3:, 7:] = 0
    given = {"input_ids": tokens, "attention_mask": mask}
    transposed = given if decoder.ids_first else {name: value.T.contiguous() for name, value in given.items()}
    expected, found = spectra(usual, given, skip_first=1), spectra(decoder, transposed, skip_first=1)
    np.testing.assert_allclose(found["spectral_radius"], expected["spectral_radius"], rtol=1e-4)
    np.testing.assert_allclose(found["update_norm"], expected["update_norm"], rtol=1e-4)


def test_large_inputs_are_split_between_sequences(decoder):
    """5,000 tokens take two passes; a sequence that was split would have other states."""
    tokens = ids_of(decoder, 50, 100)
    seen = []
    decoder.embedding.register_forward_hook(lambda module, args, output: seen.append(args[0].shape))
    spectra(decoder, tokens)
    lengths = {shape[1 if decoder.ids_first else 0] for shape in seen[-2:]}
    assert lengths == {100}
    assert sum(shape[0 if decoder.ids_first else 1] for shape in seen[-2:]) == 50


def test_layouts_of_pytorch_layers_are_documented():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    assert axes(encoder, torch.randn(N_TOKENS, N_EXAMPLES, WIDTH)) == (1, 1)
    hidden = torch.zeros(N_EXAMPLES, N_TOKENS, dtype=torch.bool)
    hidden[2:, 4:] = True
    inputs = {"src": torch.randn(N_TOKENS, N_EXAMPLES, WIDTH), "src_key_padding_mask": hidden}
    assert spectra(encoder, inputs).attrs["n_snapshots"] == int((~hidden).sum())


def test_states_with_tokens_first_inside_transformers():
    model = XLNetModel(XLNetConfig(vocab_size=VOCABULARY, d_model=WIDTH, n_layer=2, n_head=4, d_inner=32)).eval()
    tokens = torch.randint(VOCABULARY, (5, 9))
    assert axes(model, tokens) == (0, 1)
    mask = torch.ones(5, 9)
    mask[1:, :4] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask}
    assert spectra(model, inputs).attrs["n_snapshots"] == int(mask.sum())


def test_batch_first_is_required_where_no_token_depends_on_another():
    model, inputs = Chain(), torch.randn(4, 7, WIDTH)
    assert axes(model, inputs) == (None, None)
    assert spectra(model, inputs).attrs["n_snapshots"] == 28
    with pytest.raises(AnatomyError, check=says("counts sequences; this cannot be determined, because no")):
        spectra(model, inputs, skip_first=1)
    assert spectra(model, inputs, skip_first=1, batch_first=True).attrs["n_snapshots"] == 24
    assert spectra(model, inputs, skip_first=1, batch_first=False).attrs["n_snapshots"] == 21


class MixesSequences(Chain):
    """Subtracts the mean over the batch, like batch normalization, and over tokens."""

    def forward(self, x):
        return super().forward(x - x.mean((0, 1), keepdim=True))


def test_dependent_sequences_are_rejected_without_batch_first():
    model, inputs = MixesSequences(), torch.randn(4, 7, WIDTH)
    with pytest.raises(AnatomyError, check=says("so the axes of batch and token cannot be distinguished;")):
        wb.read_anatomy(model, inputs)
    assert axes(model, inputs, batch_first=True) == (0, 0)
    assert axes(model, inputs, batch_first=False) == (1, 1)


def test_several_streams_are_rejected():
    both = torch.randn(2, 9, WIDTH), torch.randn(2, 5, WIDTH)
    with pytest.raises(AnatomyError, check=says("expected one; choose another model, or another stack by")):
        wb.read_anatomy(TwoStreams(), both)
    for batch_first in (None, True):
        with pytest.raises(AnatomyError, check=says("several residual streams are folded into the batch, or")):
            wb.read_anatomy(FoldedStreams().eval(), torch.randint(VOCABULARY, (4, 11)), batch_first=batch_first)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_one_of_several_streams_can_be_selected(axis):
    torch.manual_seed(0)
    model, tokens = Streams(axis).eval(), torch.randint(VOCABULARY, (3, 11))
    with pytest.raises(AnatomyError, check=about("layers")):
        wb.read_anatomy(model, tokens)
    with torch.no_grad():
        states = model.states(tokens)
    seen = []
    for number in (0, 3):
        anatomy = wb.read_anatomy(model, tokens, stack=f"layers:{number}")
        assert (anatomy.stack, anatomy.width, anatomy.layout.states) == (f"layers:{number}", WIDTH, 0)
        with torch.no_grad(), BlockHooks(anatomy.sites, on_leave=lambda call: seen.append(call.state_out)):
            model(tokens)
        for found, state in zip(seen[-3:], states[1:], strict=True):
            assert torch.equal(found, state.select(axis, number))
    one = spectra(model, tokens, stack="layers:3", skip_first=1)
    assert (one.attrs["stack"], one.attrs["n_snapshots"]) == ("layers:3", 30)
    gains = wb.flow.measure(model, tokens, stack="layers:3", jacobian=False)["signal_gain"]  # states are replaced there
    rms = [float(state.select(axis, 3).square().mean().sqrt()) for state in states]
    np.testing.assert_allclose(gains, np.divide(rms[1:], rms[:-1]), rtol=1e-5)


def test_streams_that_do_not_exist_are_rejected():
    model, tokens = Streams(1).eval(), torch.randint(VOCABULARY, (3, 11))
    with pytest.raises(AnatomyError, check=says("expected exactly one axis in addition to those of the tokens")):
        wb.read_anatomy(model, tokens, stack="layers:4")
    with pytest.raises(AnatomyError, check=says("expected exactly one axis in addition to those of the tokens")):
        wb.read_anatomy(wb.zoo.transformer(d_model=16, n_layers=3, n_heads=2), tokens, stack="blocks:0")
    with pytest.raises(AnatomyError, check=says("expected exactly one axis in addition to those of the tokens")):
        wb.read_anatomy(model, tokens[:, :4], stack="layers:1")  # four tokens, four streams
    with pytest.raises(AnatomyError):
        wb.read_anatomy(ResidualOutside().eval(), tokens, stack="layers:0")


def test_blocks_with_fewer_states_than_tokens():
    """States are counted, not tokens; a mask that does not fit them is rejected."""

    class Pooled(Decoder):
        def forward(self, input_ids, attention_mask=None):
            return super().forward(input_ids[:, ::2])

    model, tokens = Pooled(ids_first=True, states_first=True).eval(), torch.randint(VOCABULARY, (3, 12))
    assert spectra(model, tokens).attrs["n_snapshots"] == 18
    mask = torch.ones_like(tokens)
    mask[:, 8:] = 0
    with pytest.raises(SnapshotError, check=says("so padding cannot be distinguished from tokens; pass inputs")):
        spectra(model, {"input_ids": tokens, "attention_mask": mask})


def test_branches_are_neither_profiled_nor_suggested():
    model, tokens = ResidualOutside().eval(), torch.randint(VOCABULARY, (2, 11))
    for stack in ("layers.*", "layers.0"):
        with pytest.raises(AnatomyError, check=about("stack", stack)) as caught:
            wb.read_anatomy(model, tokens, stack=stack)
        assert "layers (6 layers" in str(caught.value)  # the stack that can be selected
    with pytest.raises(AnatomyError, check=says("has no matrix among its parameters, so it only rescales the")):
        wb.read_anatomy(model, tokens, stack="layers.*.*")
    with pytest.raises(AnatomyError, check=says("whose modules ran; no module of this model is a residual")):
        wb.read_anatomy(model, tokens, stack="nothing")


@pytest.mark.parametrize("model", [EarlyExit(), Universal()], ids=["early exit", "universal"])
def test_snapshots_are_counted_by_layer_where_depth_depends_on_data(model):
    generator = torch.Generator().manual_seed(0)
    deep, shallow = (torch.randint(VOCABULARY, (n, 40), generator=generator) for n in (3, 2))
    deep[0, 0], shallow[0, 0] = 60, 1
    found = spectra(model, [deep, shallow])
    assert found["layer_snapshots"].values.tolist() == [200, 200, 120, 120]
    assert found.attrs["n_snapshots"] == 200
    assert "layer_snapshots" not in spectra(model, [deep, deep])
    with pytest.raises(SnapshotError, check=about("anatomy")):
        spectra(model, [shallow, deep])
    found = spectra(model, [shallow, deep], anatomy=wb.read_anatomy(model, deep))
    assert found["layer_snapshots"].values.tolist() == [200, 200, 120, 120]


def test_flow_and_weights_of_a_model_with_tokens_first(decoder):
    """Every measurement over sequences has the same result as with sequences first."""
    usual = Decoder(ids_first=True, states_first=True).eval()
    usual.load_state_dict(decoder.state_dict())
    tokens = ids_of(usual, 5, 9)
    expected = wb.flow.measure(usual, tokens, jacobian=False)
    found = wb.flow.measure(decoder, tokens if decoder.ids_first else tokens.T.contiguous(), jacobian=False)
    np.testing.assert_allclose(found["token_cosine"], expected["token_cosine"], rtol=1e-3, atol=1e-6)
    weights = [wb.query_key_weights(model, ids)[0] for model, ids in ((usual, tokens), (decoder, ids_of(decoder)))]
    assert torch.equal(weights[0].query, weights[1].query)


def test_kss_draws_complete_sequences():
    torch.manual_seed(0)
    model = Decoder(ids_first=False, states_first=False)
    lengths = []
    model.embedding.register_forward_hook(lambda module, args, output: lengths.append(tuple(args[0].shape)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    kss = wb.KSS.published()
    with kss.attach(model, optimizer):
        for step in range(12):
            optimizer.zero_grad()
            model(ids_of(model, 40, 30, seed=step)).square().mean().backward()
            optimizer.step()
    assert {length for length, n_examples in lengths if n_examples > 2} == {30}
