"""Whether modules are residual blocks: what enters one must still be in what leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from workbench.errors import AnatomyError
from workbench.models.batches import Batches
from workbench.models.block_calls import has_matrix
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import on_device_of, run_foreign
from workbench.models.probing import undisturbed
from workbench.models.wrapping import runnable

if TYPE_CHECKING:
    from workbench.models.site import Site

#: Mean cosine between a small change of the state that enters and the change of what leaves. Residual blocks, Post-LN
#: included, were seen to have .5 and more; attention and MLP branches without their residual below .15.
LEAST_COSINE = 0.3
_RELATIVE_SIZE = 1e-2
#: Operators that multiply by a matrix, as torch names them below autograd: what they return holds their input only
#: in mixtures of features or of tokens. Those of _SUMS add another tensor, their first argument, to the product.
_SUMS = {"addmm", "baddbmm", "addbmm", "addmv"}
_PRODUCTS = {*_SUMS, "mm", "bmm", "mv", "dot", "_addmm_activation", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm"}
_PRODUCTS |= {"_int_mm", "_weight_int4pack_mm", "_weight_int8pack_mm", "mkldnn_linear", "_mkldnn_linear", "_trilinear"}
_PRODUCTS |= {"convolution", "_convolution", "_conv_depthwise2d", "mkldnn_rnn_layer", "_cudnn_rnn"}
_ATTENTION = "_scaled_dot_product"


def why_no_blocks(model: nn.Module, inputs: Any, sites: Sequence[Site]) -> str:
    """Why modules are no residual blocks: their output does not contain their input; empty if it does.

    A random direction, 1 % of the state in size, is added to the state that enters a block. A residual block hands it
    on, so the output changes in the same direction; a branch whose residual is added elsewhere maps it to an unrelated
    one.

    Args:
        model: Model to run; it is not changed.
        inputs: Inputs of the model.
        sites: Sites of the modules; the first, the middle one and the last are tried.

    Returns:
        One clause.
    """
    if reason := without_matrix(sites):
        return reason
    for place in sorted({0, len(sites) // 2, len(sites) - 1}):
        cosine = _carried_on(model, inputs, sites[place])
        if not cosine >= LEAST_COSINE:
            return (
                f"a change of the state that enters {sites[place].name} leaves it in an unrelated direction (cosine "
                f"{cosine:.2f}), so its residual is added outside of it"
            )
    return ""


def refuse_plain_chain(model: nn.Module, inputs: Any, stack: str, sites: Sequence[Site]) -> None:
    """Refuse blocks of which none hands on the state that it gets: a plain chain has no residual stream.

    The state that enters a block is changed, while every matrix product inside returns what it did before the change.
    A residual, also one that is scaled, gated or normalized, carries the change past the products; in a plain chain the
    state that leaves is the same to the bit. Where the products themselves hand the state on, as those that mix several
    streams do, the direction of the change shows it.

    Args:
        model: Model to run; it is not changed.
        inputs: Inputs of the model.
        stack: Name of the stack, for the message.
        sites: Sites of its blocks; the first, the middle one and the last are tried, until one hands its state on.

    Raises:
        AnatomyError: If none of them does.
    """
    model = runnable(model)
    if any(site.exit is not None or site.stream is not None for site in sites):
        return  # that the states are sums was checked when they were found; of streams, the others add to each
    inputs = on_device_of(model, Batches.of(inputs).probe_and_all()[0])
    tried = [sites[place] for place in sorted({0, len(sites) // 2, len(sites) - 1})]
    if any(_passes_products(model, inputs, site) for site in tried):
        return
    if any(_carried_on(model, inputs, site) >= LEAST_COSINE for site in tried):
        return
    where = f"'{stack}'" if stack else "the model"
    raise AnatomyError(
        f"The modules of {where} are a plain chain without residuals: what leaves {tried[0].name} depends "
        "on what enters it through matrix products alone, and Koopman spectra need blocks that add to their state; "
        "choose another model, or pass stack= where these modules are to be read all the same."
    )


def without_matrix(sites: Sequence[Site]) -> str:
    """Why modules are no residual blocks: one of them has no matrix, as norms have none; empty if all have."""
    norm = next((s.name for s in sites if not has_matrix(s.module)), "")
    return f"{norm} has no matrix among its parameters, so it only rescales what passes" if norm else ""


def _carried_on(model: nn.Module, inputs: Any, site: Site) -> float:
    """Mean cosine, over tokens, between a change of the state that enters and that of the state that leaves."""
    plain, changed = (_states_of(model, inputs, site, is_changed=is_changed) for is_changed in (False, True))
    return float(torch.cosine_similarity(changed["out"] - plain["out"], changed["change"], dim=-1).nanmean())


def _passes_products(model: nn.Module, inputs: Any, site: Site) -> bool:
    """Whether a change of the state that enters reaches the state that leaves while all matrix products stay."""
    products = _Products()
    plain = _states_of(model, inputs, site, products, is_changed=False)
    if products.are_others:
        return True
    products.replay()
    changed = _states_of(model, inputs, site, products, is_changed=True)
    return products.are_others or not torch.equal(changed["out"], plain["out"])


class _Products(TorchDispatchMode):
    """Keeps what matrix products return while it is on, and returns the same to the same calls once more."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.is_on = self.are_others = False
        self._kept: list[tuple[Any, Any, Any]] = []
        self._next: int | None = None

    def replay(self) -> None:
        """From now on return what was kept, in order."""
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
        if not self.is_on or not (name in _PRODUCTS or name.startswith(_ATTENTION)):
            return func(*args, **kwargs)
        if self._next is None:
            found = func(*args, **kwargs)
            self._kept.append((func, _copied(args[0]) if name in _SUMS else None, _copied(found)))
            return found
        if self._next == len(self._kept) or self._kept[self._next][0] is not func:
            self.are_others = True  # another way through the block: what was kept belongs elsewhere
            return func(*args, **kwargs)
        _, added, found = self._kept[self._next]
        self._next += 1
        if added is not None and not torch.equal(added, args[0]):
            return func(*args, **kwargs)  # the state passes by as what is added to the product
        return _copied(found)


def _copied(values: Any) -> Any:
    """Copies, as what a product returns may be written into."""
    return tree_map_only(Tensor, torch.clone, values)


def random_change(state: Tensor) -> Tensor:
    """A state with a random direction added, 1 % of it in size; the same every time."""
    given = state.cpu().double()  # some devices have no float64
    scale = given.norm(dim=-1, keepdim=True) / state.shape[-1] ** 0.5
    noise = torch.randn(state.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (given + _RELATIVE_SIZE * scale * noise).to(state.dtype).to(state.device)


def _states_of(
    model: nn.Module, inputs: Any, site: Site, products: _Products | None = None, *, is_changed: bool
) -> dict[str, Tensor]:
    """What leaves a block, ``out``, float64; and the random ``change``, if any, that was added to what entered it."""
    found: dict[str, Tensor] = {}

    def enter(call: BlockCall) -> Tensor | None:
        changed = None
        if is_changed:
            changed = random_change(call.state_in)
            found["change"] = changed.cpu().double() - call.state_in.cpu().double()
        if products is not None:
            products.is_on = True
            # Without values nothing can be told, and nothing will be measured.
            products.are_others |= call.state_in.is_meta
        return changed

    def leave(call: BlockCall) -> None:
        if products is not None:
            products.is_on = False
        state = call.state_out.detach()
        found["out"] = state if state.is_meta else state.cpu().double().clone()

    with undisturbed(model), BlockHooks([site], enter, leave), products or nullcontext():
        run_foreign(model, inputs)
    return found
