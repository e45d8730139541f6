"""Checks whether modules are residual blocks: the state that leaves a block must contain the state that entered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from workbench.errors import AnatomyError
from workbench.models.batches import Batches
from workbench.models.block_calls import Site, has_matrix
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import on_device_of, run_model, runnable
from workbench.models.probing import undisturbed

#: Minimum of the mean cosine between a small change of the state that enters and the resulting change of the state that
#: leaves. Residual blocks, including Post-LN, had 0.5 and more; attention and MLP branches without residual below 0.15.
MIN_COSINE = 0.3
_RELATIVE_SIZE = 1e-2
#: Operators that multiply by a matrix, as torch names them below autograd. Their output contains their input only in
#: mixtures of features or of tokens. Those of _SUMS add another tensor, their first argument, to the product.
_SUMS = {"addmm", "baddbmm", "addbmm", "addmv"}
_PRODUCTS = {*_SUMS, "mm", "bmm", "mv", "dot", "_addmm_activation", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm"}
_PRODUCTS |= {"_int_mm", "_weight_int4pack_mm", "_weight_int8pack_mm", "mkldnn_linear", "_mkldnn_linear", "_trilinear"}
_PRODUCTS |= {"convolution", "_convolution", "_conv_depthwise2d", "mkldnn_rnn_layer", "_cudnn_rnn"}
_ATTENTION = "_scaled_dot_product"


def lack_of_residual(model: nn.Module, inputs: Any, sites: Sequence[Site]) -> str:
    """Return why modules are no residual blocks (their output does not contain their input), or an empty string.

    A random vector with 1 % of the norm of the state is added to the state that enters the first, the middle and the
    last of them. A residual block passes it on, so the output changes in the same direction; a branch whose residual is
    added elsewhere maps it to an unrelated direction.
    """
    if reason := lack_of_matrix(sites):
        return reason
    for place in sorted({0, len(sites) // 2, len(sites) - 1}):
        cosine = _carried_on(model, inputs, sites[place])
        if not cosine >= MIN_COSINE:
            return (
                f"a change of the state that enters {sites[place].name} leaves it in an unrelated direction (cosine "
                f"{cosine:.2f}), so its residual is added outside of it"
            )
    return ""


def require_residuals(model: nn.Module, inputs: Any, stack: str, sites: Sequence[Site]) -> None:
    """Raise AnatomyError if no block passes on the state that it receives: such a chain has no residual stream.

    The state that enters the first, the middle or the last block is changed, while every matrix product inside returns
    its output from before the change. A residual connection, even if it is scaled, gated or normalized, carries the
    change past the products; in a chain without residuals the state that leaves is bitwise identical. Where the
    products themselves pass on the state, as those that mix several streams do, the direction of the change decides.
    """
    model = runnable(model)
    if any(site.exit is not None or site.stream is not None for site in sites):
        return  # states outside of modules were checked to be sums; parallel streams add to each other
    inputs = on_device_of(model, Batches.of(inputs).probe_and_all()[0])
    tried = [sites[place] for place in sorted({0, len(sites) // 2, len(sites) - 1})]
    for site in tried:  # whether a change reaches the leaving state while matrix products are fixed
        products = _Products()
        inside = BlockHooks([site], products.begin, products.end)
        plain = states_of(model, inputs, [site], None, inside, products)
        if products.are_others:
            return
        products.replay()
        changed = states_of(model, inputs, [site], random_change, inside, products)
        if products.are_others or not torch.equal(changed[-1].double(), plain[-1].double()):
            return
    if any(_carried_on(model, inputs, site) >= MIN_COSINE for site in tried):
        return
    where = f"'{stack}'" if stack else "the model"
    raise AnatomyError(
        f"The modules of {where} are a chain without residuals: the output of {tried[0].name} depends on its input "
        "only through matrix products, and Koopman spectra need blocks that add to their state; choose another model, "
        "or name these modules in wb.profile(..., stack=) if they should be read nevertheless."
    )


def lack_of_matrix(sites: Sequence[Site]) -> str:
    """Return why modules are no residual blocks if one of them has no matrix, as a norm; empty if all have one."""
    norm = next((s.name for s in sites if not has_matrix(s.module)), "")
    return f"{norm} has no matrix among its parameters, so it only rescales the state" if norm else ""


def _carried_on(model: nn.Module, inputs: Any, site: Site) -> float:
    """Return the mean cosine over tokens between changes of the state that enters and of the state that leaves."""
    plain, changed = (states_of(model, inputs, [site], change) for change in (None, random_change))
    (before, after), (new_before, new_after) = ([state.double() for state in states] for states in (plain, changed))
    return float(torch.cosine_similarity(new_after - after, new_before - before, dim=-1).nanmean())


class _Products(TorchDispatchMode):
    """Mode that records the outputs of matrix products inside a block and replays them in a second pass."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._is_inside = False
        self.are_others = False  # whether the second pass called different products, or the states have no values
        self._kept: list[tuple[Any, Any, Any]] = []
        self._next: int | None = None

    def begin(self, call: BlockCall) -> None:
        """Record or replay products from now on; without values residuals cannot be tested, nor anything measured."""
        self._is_inside = True
        self.are_others |= call.state_in.is_meta

    def end(self, call: BlockCall) -> None:
        """Leave products alone from now on."""
        self._is_inside = False

    def replay(self) -> None:
        """Return the recorded outputs from now on, in order."""
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
        if not self._is_inside or not (name in _PRODUCTS or name.startswith(_ATTENTION)):
            return func(*args, **kwargs)
        if self._next is None:
            found = func(*args, **kwargs)
            self._kept.append((func, _copied(args[0]) if name in _SUMS else None, _copied(found)))
            return found
        if self._next == len(self._kept) or self._kept[self._next][0] is not func:
            self.are_others = True  # a different path through the block, to which the recorded outputs do not belong
            return func(*args, **kwargs)
        _, added, found = self._kept[self._next]
        self._next += 1
        if added is not None and not torch.equal(added, args[0]):
            return func(*args, **kwargs)  # the state passes as the tensor that is added to the product
        return _copied(found)


def _copied(values: Any) -> Any:
    """Return copies, because the model may write to the output of a product."""
    return tree_map_only(Tensor, torch.clone, values)


def random_change(state: Tensor) -> Tensor:
    """Return a state plus a random vector with 1 % of its norm; deterministic."""
    given = state.cpu().double()  # some devices have no float64
    scale = given.norm(dim=-1, keepdim=True) / state.shape[-1] ** 0.5
    noise = torch.randn(state.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (given + _RELATIVE_SIZE * scale * noise).to(state.dtype).to(state.device)


def states_of(
    model: nn.Module,
    inputs: Any,
    sites: Sequence[Site],
    change: Callable[[Tensor], Tensor] | None = None,
    *contexts: AbstractContextManager[Any],
) -> list[Tensor]:
    """Return the states entering and leaving each block, on the host; ``change`` maps the first block's input."""
    found: list[Tensor] = []

    def keep(state: Tensor) -> None:
        found.append(state.detach() if state.is_meta else state.detach().cpu().clone())

    def enter(call: BlockCall) -> Tensor | None:
        changed = None if change is None or call.layer else change(call.state_in)
        keep(call.state_in if changed is None else changed)
        return changed

    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        stack.enter_context(BlockHooks(sites, enter, lambda call: keep(call.state_out)))
        for context in contexts:
            stack.enter_context(context)
        run_model(model, inputs)
    return found
