"""Residual streams that are added in loops: read bit for bit if they are sums, otherwise rejected."""

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from benchmarks.third_party.written_models import ParallelLists
from tests.about import says
from tests.models.layout_models import (
    VOCABULARY,
    WIDTH,
    AddedSkips,
    Branch,
    Gain,
    Gated,
    MergedSkips,
    NoResidual,
    Pairs,
    PostNorms,
    Repeated,
    Sandwich,
    ScaledSums,
    Triples,
    built,
    seen,
)
from workbench.errors import AnatomyError, SnapshotError
from workbench.models.attention_weights import QueryKey
from workbench.models.block_hooks import BlockHooks

pytestmark = pytest.mark.filterwarnings("ignore::workbench.koopman.spectra.RankWarning")
READ = [Triples, Pairs, ScaledSums, Sandwich, PostNorms, AddedSkips, MergedSkips]


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", READ)
def test_states_are_those_of_the_loop(kind, tokens):
    model = built(kind)
    anatomy = wb.read_anatomy(model, tokens)
    assert (anatomy.stack, len(anatomy.sites), anatomy.width) == ("layers", 4, WIDTH)
    with torch.no_grad():
        states = model.states(tokens)
    entered, left = seen(model, anatomy, tokens)
    assert len(entered) == len(left) == 4
    for i in range(4):
        assert torch.equal(entered[i], states[i])
        if kind is not MergedSkips or i < 2:
            assert torch.equal(left[i], states[i + 1])
    assert torch.equal(left[3], states[4])
    # A batch of another shape; hooks are removed.
    assert (
        wb.profile(model, tokens[:2, :9], anatomy=anatomy, n_snapshots=None, progress=False).attrs["n_snapshots"] == 18
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_merged_skip_lies_between_two_layers(tokens):
    """Check that the state that leaves the previous layer does not contain the skip."""
    model = built(MergedSkips)
    _, left = seen(model, wb.read_anatomy(model, tokens), tokens)
    with torch.no_grad():
        states = model.states(tokens)
        norm, branch = model.layers[2]
        assert torch.equal(left[2], states[2] + branch(norm(states[2])))
        assert not torch.equal(left[2], states[3])


class CompleteBlocks(nn.Module):
    """The layers of another model as modules that add the residual themselves."""

    def __init__(self, model):
        super().__init__()

        class Layer(nn.Module):
            def __init__(self, parts):
                super().__init__()
                self.parts = parts

            def forward(self, x):
                return model.step(0, [x], *self.parts)

        self.embedding, self.blocks = model.embedding, nn.ModuleList(Layer(parts) for parts in model.layers)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("kind", [Triples, Pairs, PostNorms])
def test_spectra_and_weights_are_those_of_complete_blocks(kind, tokens):
    model = built(kind)
    complete = CompleteBlocks(model)
    expected, found = (wb.profile(m, tokens, n_snapshots=None, progress=False) for m in (complete, model))
    np.testing.assert_array_equal(found["eigenvalue"], expected["eigenvalue"])
    same = [q.query for q in wb.query_key_weights(complete, tokens) if isinstance(q, QueryKey)]
    weights = [q.query for q in wb.query_key_weights(model, tokens) if isinstance(q, QueryKey)]
    assert len(weights) == len(same) > 1
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


def test_names_state_the_kind_of_branch(tokens):
    """Check that a list that alternates attention and MLP has a layer for each."""
    names = wb.profile(built(Triples), tokens, progress=False)["layer_name"].values
    assert list(names) == ["layers.0#Branch", "layers.1#Sequential", "layers.2#Branch", "layers.3#Sequential"]
    assert [site.name for site in wb.read_anatomy(built(Pairs), tokens).sites][:2] == ["layers.0", "layers.1"]


@pytest.mark.parametrize("kind", [Gated, NoResidual])
def test_states_that_are_no_sums_are_rejected(kind, tokens):
    for stack in (None, "layers", "layers.*", "layers.0"):
        with pytest.raises(AnatomyError):
            wb.read_anatomy(built(kind), tokens, stack=stack)
    with pytest.raises(AnatomyError, match="The members of layers are called in sequence, but .* is not the sum"):
        wb.read_anatomy(built(kind), tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", [Triples, Pairs, PostNorms])
def test_other_precisions(kind, dtype, tokens):
    assert len(wb.read_anatomy(built(kind).to(dtype), tokens).sites) == 4
    with pytest.raises(AnatomyError):
        wb.read_anatomy(built(NoResidual).to(dtype), tokens)


def test_a_branch_and_its_sum_are_no_blocks(tokens):
    """Check two modules that are called in sequence, as blocks are; the error suggests a stack."""
    model = built(Triples)
    with pytest.raises(AnatomyError, match=r"can also be passed as stack=: layers \(4 layers"):
        wb.read_anatomy(model, tokens, stack="layers.0")


def test_depth_that_depends_on_data(tokens):
    model = built(Repeated)
    shallow, deep = tokens.clone(), tokens.clone()
    shallow[0, 0], deep[0, 0] = 1, 60
    assert len(wb.read_anatomy(model, shallow, batch_first=True).sites) == 4
    anatomy = wb.read_anatomy(model, deep, batch_first=True)
    assert [site.name for site in anatomy.sites][3:6] == ["layers.3#Branch", "layers.0#Branch#1", "layers.1#Branch#1"]
    with pytest.raises(SnapshotError, check=says("runs on these inputs but did not run when the anatomy was")):
        wb.profile(model, [shallow, deep], batch_first=True, progress=False)


def test_the_depth_in_the_config_may_count_pairs_of_layers(tokens):
    model = built(Triples)
    model.config = {"num_hidden_layers": 2}
    assert len(wb.read_anatomy(model, tokens).sites) == 4
    model.config = {"num_hidden_layers": 3}
    with pytest.raises(AnatomyError, match=r"num_hidden_layers = 3.*can also be passed as stack=: layers \(4 layers"):
        wb.read_anatomy(model, tokens)


def test_states_can_be_read_but_not_replaced(tokens):
    model = built(Pairs)
    for measure in (lambda: wb.flow.measure(model, tokens), lambda: wb.flow.measure(model, tokens, jacobian=False)):
        with pytest.raises(AnatomyError, check=says("is added outside of modules, so its states can be read but")):
            measure()


def test_states_keep_their_graph(tokens):
    """Check the gradients of functions that only read states, such as penalties on the stream."""
    model = built(Pairs)
    entered, left = [], []
    hooks = BlockHooks(
        wb.read_anatomy(model, tokens).sites,
        lambda call: entered.append(call.state_in),
        lambda call: left.append(call.state_out),
    )
    with hooks:
        model(tokens)
    for before, after, parts in zip(entered, left, model.layers, strict=True):
        expected = model.step(0, [before], *parts)
        (found,), (gradient,) = (
            torch.autograd.grad(y.square().sum(), before, retain_graph=True) for y in (after, expected)
        )
        torch.testing.assert_close(found, gradient)


class TwoPasses(ParallelLists):
    """A model that runs all attentions before all MLPs, so that its lists do not form layers."""

    def states(self, ids):
        found = [self.embedding(ids)]
        for norm, attention in zip(self.ln1, self.attentions, strict=True):
            found.append(found[-1] + attention(norm(found[-1])))
        for norm, mlp in zip(self.ln2, self.mlps, strict=True):
            found.append(found[-1] + mlp(norm(found[-1])))
        return found


def test_lists_that_do_not_alternate_are_no_layers(tokens):
    torch.manual_seed(0)
    with pytest.raises(AnatomyError) as caught:
        wb.read_anatomy(TwoPasses().eval(), tokens)
    assert "+" not in str(caught.value)


class MergesInside(MergedSkips):
    """A model whose layers merge earlier states themselves: layer 2 merges the state that entered layer 1."""

    def members(self, i, width):
        return nn.ModuleList([nn.Linear(2 * width, width) if i >= 2 else None, Gain(width), Branch(width)])

    def states(self, tokens):
        x, entering, leaving = self.embedding(tokens), [], []
        for i, (merge, norm, branch) in enumerate(self.layers):
            x = x if merge is None else merge(torch.cat([entering[3 - i], x], -1))
            entering.append(x)
            x = x + branch(norm(x))
            leaving.append(x)
        return [(*pair,) for pair in zip(entering, leaving, strict=True)]

    def forward(self, tokens):
        return self.final_norm(self.states(tokens)[-1][1])


def test_a_merge_inside_of_a_layer(tokens):
    """Check that the state that leaves layer 1 is distinguished from the one that entered it, concatenated with it."""
    model = built(MergesInside)
    anatomy = wb.read_anatomy(model, tokens)
    assert (anatomy.stack, len(anatomy.sites)) == ("layers", 4)
    entered, left = seen(model, anatomy, tokens)
    with torch.no_grad():
        for found, expected in zip(zip(entered, left, strict=True), model.states(tokens), strict=True):
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
