"""Identification of calls of blocks: shared blocks, several passes, exceptions, and removal of hooks."""

import pytest
import torch
from torch import nn

from tests.about import says
from workbench.errors import SnapshotError
from workbench.models.block_calls import Site
from workbench.models.block_hooks import BlockCall, BlockHooks, raise_on_unknown


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.raises = 0

    def forward(self, state, *, scale=1.0):
        if self.raises:
            self.raises -= 1
            raise ValueError("not this time")
        return state + scale * torch.tanh(self.inner(state))


class Stack(nn.Module):
    """Calls its blocks in the given order, possibly several times each."""

    def __init__(self, order=(0, 1, 0, 1), n_blocks=2):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(n_blocks))
        self.order = order
        self.retries = False

    def forward(self, x):
        x = self.embed(x)
        for i in self.order:
            try:
                x = self.blocks[i](x)
            except ValueError:
                if not self.retries:
                    raise
                x = self.blocks[i](x)
        return x


def sites_of(model):
    counts = {}
    sites = []
    for i in model.order:
        counts[i] = counts.get(i, -1) + 1
        sites.append(Site(f"blocks.{i}#{counts[i]}", model.blocks[i], counts[i]))
    return tuple(sites)


def n_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.fixture
def inputs():
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))


class Log:
    def __init__(self):
        self.entered, self.left = [], []

    def enter(self, call: BlockCall):
        self.entered.append((call.layer, call.state_in.detach().clone()))

    def leave(self, call: BlockCall):
        self.left.append((call.layer, call.state_out.detach().clone()))

    @property
    def layers(self):
        return [layer for layer, _ in self.entered], [layer for layer, _ in self.left]


def test_calls_of_shared_blocks_are_separate_layers(inputs):
    model, log = Stack(), Log()
    with BlockHooks(sites_of(model), log.enter, log.leave):
        out = model(inputs)
    assert log.layers == ([0, 1, 2, 3], [0, 1, 2, 3])
    for (_, left), (_, entered) in zip(log.left[:-1], log.entered[1:], strict=True):
        torch.testing.assert_close(left, entered, rtol=0, atol=0)
    torch.testing.assert_close(log.left[-1][1], out, rtol=0, atol=0)
    assert n_hooks(model) == 0


def test_each_pass_counts_from_zero(inputs):
    model, log = Stack(), Log()
    with BlockHooks(sites_of(model), log.enter, log.leave) as hooks:
        model(inputs)
        hooks.begin_pass()
        model(inputs)
    with hooks:  # and each context
        model(inputs)
    assert log.layers == ([0, 1, 2, 3] * 3, [0, 1, 2, 3] * 3)


def test_calls_without_a_site_are_ignored_or_reported(inputs):
    model, log = Stack(order=(0, 1)), Log()
    sites = sites_of(model)
    model.order = (0, 1, 1)
    with BlockHooks(sites, log.enter, log.leave):
        model(inputs)
    assert log.layers == ([0, 1], [0, 1])
    unknown = []
    with BlockHooks(sites, on_unknown=unknown.append):
        model(inputs)
    assert unknown == [sites[1]]
    with (
        BlockHooks(sites, on_unknown=raise_on_unknown),
        pytest.raises(SnapshotError, check=says("runs on these inputs but did not run when the anatomy was")),
    ):
        model(inputs)
    assert n_hooks(model) == 0


def test_some_layers_only(inputs):
    model, log, unknown = Stack(), Log(), []
    with BlockHooks(sites_of(model), log.enter, log.leave, layers={2}, on_unknown=unknown.append) as hooks:
        model(inputs)
        assert n_hooks(model) == 2
    assert log.layers == ([2], [2])
    assert hooks.blocks == (model.blocks[0],)
    assert unknown == []  # sites that are not followed are not unknown


def test_hooks_are_removed_after_an_error_of_the_model(inputs):
    model, log = Stack(order=(0, 1)), Log()
    model.blocks[1].raises = 1
    hooks = BlockHooks(sites_of(model), log.enter, log.leave)
    with pytest.raises(ValueError, match="not this time"), hooks:
        model(inputs)
    assert n_hooks(model) == 0
    assert log.layers == ([0, 1], [0])
    with hooks:  # the failed pass has no effect on the next
        model(inputs)
    assert log.layers == ([0, 1, 0, 1], [0, 0, 1])


def test_hooks_are_removed_after_an_error_of_the_caller(inputs):
    model = Stack()

    def stop(call):
        raise RuntimeError("enough")

    for hooks in (BlockHooks(sites_of(model), stop), BlockHooks(sites_of(model), on_leave=stop)):
        with pytest.raises(RuntimeError, match="enough"), hooks:
            model(inputs)
        assert n_hooks(model) == 0


def test_a_call_that_raised_inside_the_model_is_counted(inputs):
    model, log = Stack(order=(0, 1)), Log()
    sites = sites_of(model)
    sites = (*sites, Site("blocks.1#1", model.blocks[1], 1))
    model.blocks[1].raises, model.retries = 1, True
    with BlockHooks(sites, log.enter, log.leave):
        model(inputs)
    assert log.layers == ([0, 1, 2], [0, 2])


def test_the_result_of_on_enter_enters_the_block(inputs):
    model = Stack(order=(0, 1))
    sites, log = sites_of(model), Log()
    with BlockHooks(sites, lambda call: 2 * call.state_in, layers={1}), BlockHooks(sites, log.enter, log.leave):
        out = model(inputs)
    _, left = log.left[0]
    torch.testing.assert_close(log.entered[1][1], 2 * left, rtol=0, atol=0)
    torch.testing.assert_close(out, model.blocks[1](2 * left), rtol=0, atol=0)


def test_states_passed_by_keyword_and_other_arguments(inputs):
    block = Block()
    state = torch.randn(2, 3, 8)
    seen = []

    def enter(call):
        seen.append(dict(call.kwargs))
        return call.state_in + 1

    with BlockHooks([Site("block", block, 0, "state")], enter):
        out = block(state=state, scale=0.5)
    assert seen[0]["scale"] == 0.5
    torch.testing.assert_close(out, block(state + 1, scale=0.5), rtol=0, atol=0)


def test_recomputation_in_the_backward_pass_is_not_another_layer(inputs):
    model, log = Stack(order=(0, 1)), Log()
    run = torch.utils.checkpoint.checkpoint
    with BlockHooks(sites_of(model), log.enter, log.leave):
        state = model.embed(inputs)
        for block in model.blocks:
            state = run(block, state, use_reentrant=False)
        state.sum().backward()
    assert log.layers == ([0, 1], [0, 1])
