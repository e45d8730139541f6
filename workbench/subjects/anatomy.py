"""Find the residual stream of any model: run it once, and see which repeated modules hand their output to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from workbench.errors import AnatomyError
from workbench.subjects.block_calls import Slot, arguments, record_calls, results
from workbench.subjects.probing import call_model, unwrap
from workbench.subjects.stacks import (
    Candidate,
    choose,
    choose_by_name,
    find_candidates,
    is_outer,
    links_between,
    overlap,
    refuse_several_streams,
)

__all__ = ["Anatomy", "Site", "call_model", "read_anatomy"]


@dataclass(frozen=True)
class Site:
    """One place where the residual stream passes a block.

    Attributes:
        name: Module path, such as ``transformer.h.3``; later calls of a shared module end in ``#1``, ``#2``, ...
        module: The block.
        call: Which call of this module within one forward, from 0.
        input_slot: Where the state sits in the arguments: a position or a keyword.
        output_slot: Where it sits in the output: an index or a key; None if the output is the state.
    """

    name: str
    module: nn.Module
    call: int
    input_slot: Slot = 0
    output_slot: Slot = None

    def state_in(self, args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
        """Residual stream entering the block, shape (batch, token, feature) or (batch, ..., feature).

        Args:
            args: Positional arguments, as a forward pre-hook sees them.
            kwargs: Keyword arguments, as a forward pre-hook with ``with_kwargs=True`` sees them.

        Raises:
            AnatomyError: If the state is not where it was when the anatomy was read.
        """
        return _take(dict(arguments(args, kwargs)), self.input_slot, self.name, "arguments")

    def state_out(self, output: Any) -> Tensor:
        """Residual stream leaving the block, shaped like `state_in`.

        Args:
            output: What the block returned: a tensor, or a tuple or mapping that holds it.

        Raises:
            AnatomyError: If the state is not where it was when the anatomy was read.
        """
        return _take(dict(results(output)), self.output_slot, self.name, "output")


@dataclass(frozen=True)
class Anatomy:
    """The residual blocks of a model, in the order in which the stream passes them.

    Attributes:
        stack: What holds the blocks: a module path such as ``transformer.h``; with ``*`` for an index where the blocks
            are spread over several containers; ``path[Class]`` for blocks that are plain attributes of ``path``.
        sites: One per block and call.
        width: Size of the stream's last dimension.
        other_stacks: Further complete stacks, such as the encoder when the decoder was chosen.
    """

    stack: str
    sites: tuple[Site, ...]
    width: int
    other_stacks: tuple[str, ...] = ()


def read_anatomy(model: nn.Module, inputs: Any, *, stack: str | None = None) -> Anatomy:
    """Find the residual blocks by running the model once.

    A stack is a set of modules in one container, or of one class under one parent, each of which returns a state of
    the shape it got, and the very state that the next one gets. Stacks inside the members of another are dropped, and
    the longest is taken; its length must be the one that ``model.config`` promises, where there is a config. In an
    encoder-decoder model the decoder is taken.

    The model runs in eval mode without gradients. Training flags, random states, weights, buffers and hooks are left
    as they were, also if it raises.

    Args:
        model: Any module.
        inputs: What `call_model` takes; one short sequence is enough.
        stack: The stack to read instead of the one that would be chosen, named as in ``Anatomy.stack``. Its blocks
            must keep the shape of the stream, but need not hand it on unchanged, nor be as many as the config says.

    Returns:
        The blocks.

    Raises:
        AnatomyError: If there is no stack, if the longest one is not complete, if its length is not the config's, or
            if it carries several residual streams at once.
    """
    model = unwrap(model)
    calls = record_calls(model, inputs)
    candidates = find_candidates(model, calls)
    plausible = [c for c in candidates if len(c.calls) > 1 and 2 * c.n_links >= len(c.calls) - 1]
    chosen = choose(model, plausible) if stack is None else choose_by_name(candidates, stack)
    refuse_several_streams(chosen, inputs)
    sites = _sites(chosen)
    others = [
        c.name
        for c in plausible
        if c is not chosen and c.is_complete and not overlap(c, chosen) and is_outer(c, plausible)
    ]
    return Anatomy(chosen.name, sites, chosen.shape[-1], tuple(dict.fromkeys(others)))


def _take(values: dict[Slot, Any], slot: Slot, name: str, what: str) -> Tensor:
    value = values.get(slot)
    if not isinstance(value, Tensor):
        where = "itself" if slot is None else f"at {slot!r}"
        raise AnatomyError(
            f"The {what} of {name} held no tensor {where}, where the residual stream was when the anatomy was read; "
            "read the anatomy again with the kind of inputs that you use."
        )
    return value


def _sites(chosen: Candidate) -> tuple[Site, ...]:
    calls, shape = chosen.calls, chosen.shape
    into: list[list[Slot]] = [[s.slot for s in call.inputs if s.shape == shape] for call in calls]
    out: list[list[Slot]] = [[s.slot for s in call.changed if s.shape == shape] for call in calls]
    for position, (before, after) in enumerate(pairwise(calls)):
        if links := links_between(before, after, shape):
            out[position] = [a for a, _ in links]
            into[position + 1] = [b for _, b in links]
    sites, n_calls = [], {}
    for call, input_slots, output_slots in zip(calls, into, out, strict=True):
        number = n_calls[call.module] = n_calls.get(call.module, -1) + 1
        name = f"{call.name}#{number}" if number else call.name
        sites.append(Site(name, call.module, number, _prevailing(input_slots, into), _prevailing(output_slots, out)))
    return tuple(sites)


def _prevailing(slots: list[Slot], all_slots: list[list[Slot]]) -> Slot:
    """Of several slots that fit, the one that fits in most sites; the first of equals."""
    return max(dict.fromkeys(slots), key=lambda slot: sum(slot in others for others in all_slots))
