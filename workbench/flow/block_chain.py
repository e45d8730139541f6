"""Signal and gradient between the blocks of a model whose residual stream cannot be read.

If the stream is mixed between blocks, or a block is no sum, there are no branches to compare. The states between blocks
can still be measured if later blocks depend on earlier ones only through the output of the block in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.errors import AnatomyError
from workbench.flow.branch_reader import norm_of, rms
from workbench.flow.gains import Loss, eager_options, end_of
from workbench.models.block_calls import Call, record_calls, results, with_item
from workbench.models.calling import config_options, run_model
from workbench.models.probing import undisturbed, watch
from workbench.models.stacks import MIN_COVERAGE, fraction_of_repeated

#: Possible places of the state in the output of a block: the output itself, or the first item of a tuple or list.
_SLOTS = (None, 0)


def chain_sizes(
    model: nn.Module, batch: Any, *, targets: Any = None, loss: Loss | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the root mean square of each block's output, and the norm of the loss's gradient with respect to it.

    The model runs in eval mode with the outputs of all blocks detached from the graph. The gradient is then propagated
    back block by block, and each block must pass it only to the output of the previous block. Both arrays have shape
    (block,), float64. If the loss has no gradient, as with an output head of zeros, the gradient is that of the last
    block's output along a random direction.
    """
    blocks = _blocks_of(model, batch)
    cuts: list[tuple[Tensor, Tensor]] = []

    def cut(_: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        slot = next(slot for slot, value in results(output) if slot in _SLOTS and isinstance(value, Tensor))
        state = output if slot is None else output[slot]
        leaf = state.detach().requires_grad_()
        cuts.append((state, leaf))
        given = leaf.clone()  # the next block may write to it
        return given if slot is None else with_item(output, slot, given)

    with undisturbed(model), config_options(eager_options(model)), torch.enable_grad():
        with watch((block, cut, False) for block in blocks):
            output = run_model(model, batch)
        end, _ = end_of(output, batch, targets, loss, seed=0)
        leaves = [leaf for _, leaf in cuts]
        gradient = _to_last(end, None, leaves)
        if not gradient.any():  # as with a head of zeros
            generator = torch.Generator().manual_seed(0)
            gradient = torch.randn(gradient.shape, generator=generator).to(gradient)
        gradients = [gradient]
        for i in range(len(cuts) - 1, 0, -1):
            gradient = _to_last(cuts[i][0], gradient, leaves[:i])
            gradients.append(gradient)
    return np.array([rms(leaf) for leaf in leaves]), np.array([norm_of(each) for each in reversed(gradients)])


def _to_last(end: Tensor, gradient: Tensor | None, leaves: list[Tensor]) -> Tensor:
    """Return the gradient with respect to the last of some leaves, which must be the only one that it reaches."""
    try:
        found = torch.autograd.grad(end, leaves, gradient, allow_unused=True, retain_graph=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # such as a state that is overwritten
        reason = str(error).splitlines()[0].rstrip(".")
        raise AnatomyError(f"No gradient passes between blocks: {reason}.") from error
    if any(each is not None and bool(each.any()) for each in found[:-1]):
        raise AnatomyError("The outputs of some blocks bypass later ones, so that no state between blocks is complete.")
    if found[-1] is None:
        raise AnatomyError(f"The output does not depend on that of block {len(leaves) - 1}.")
    return found[-1]


def _blocks_of(model: nn.Module, batch: Any) -> list[nn.Module]:
    """Return the blocks of the container with the most parameters that run once each, in order, with equal shapes."""
    calls: dict[nn.Module, list[Call]] = {}
    for call in record_calls(model, batch, everything=True):
        calls.setdefault(call.module, []).append(call)

    def is_chain(members: list[nn.Module]) -> bool:
        own = [calls[member][0] for member in members if len(calls.get(member, ())) == 1]
        shapes = {next((state.shape for state in call.outputs if state.slot in _SLOTS), None) for call in own}
        starts = [call.index for call in own]
        is_in_order = len(own) == len(members) > 1 and starts == sorted(starts)
        return is_in_order and len(shapes) == 1 and None not in shapes

    chains = [
        members
        for each in model.modules()
        if isinstance(each, nn.ModuleList | nn.Sequential)
        and is_chain(members := list(each))
        and fraction_of_repeated(model, members) >= MIN_COVERAGE
    ]
    if not chains:
        raise AnatomyError("No container has blocks that run once each, in order, with outputs of one shape.")
    return max(chains, key=lambda members: (fraction_of_repeated(model, members), len(members)))
