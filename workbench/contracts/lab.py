"""Experiments on the modules of an observed training: the same passes with changed inputs, nothing of which remains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from workbench.contracts.between_ranks import gather, without_messages
from workbench.contracts.observer import Backward, Call, Observer, by_token
from workbench.contracts.results import Result, Status
from workbench.contracts.tape import Tape
from workbench.contracts.token_labels import IGNORED, TokenLabels
from workbench.formatting import capitalized
from workbench.io.progress import Progress
from workbench.models.calling import bare, is_split
from workbench.models.losses import tensors_in
from workbench.models.probing import undisturbed
from workbench.models.readable_weights import replaced, reshard

#: Most forward passes of all experiments on one training, each counted as one pass of the user's batch.
MOST_PASSES = 25
#: Share of the labels that are the next ids of a decoder.
_NEARLY_ALL = 0.98
#: Words in the names of arguments that are labels, masks or positions, and no inputs.
_TARGETS = ("label", "target", "mask", "position", "type", "segment")
_NOT_SEEN = "how the loss follows from the outputs of the model was not seen"


class NotTestedError(Exception):
    """An experiment cannot be made; the message is the reason."""


class NotApplicableError(NotTestedError):
    """A training does not have what an experiment is about; the message is the reason."""


class PassNeededError(Exception):
    """An experiment needs passes or messages that it may not make now."""


class Lab:
    """Passes of an observed training, made again with changed inputs.

    Args:
        seen: The observed training.

    Attributes:
        failed: Contracts that are known to be broken, whose consequences other experiments would show.
        n_passes: Number of passes made so far; a pass of part of a batch counts in part.
        copies_to_float32: Whether passes may run in float32; not once that has failed.
        may_act: Whether passes, and messages between ranks, may be made; otherwise `PassNeededError` is raised.
    """

    def __init__(self, seen: Observer, *, may_act: bool = True) -> None:
        self.seen, self.n_passes, self.may_act = seen, 0.0, may_act
        self.copies_to_float32 = True
        self.failed: set[str] = set()
        self.whole: dict[int, Tensor] = {}  # tensors that are split over ranks, by the ids of their parts

    @cached_property
    def calls(self) -> list[Call]:
        """Calls of the model that a backward pass reached and whose inputs are kept."""
        found = [call for call in self.seen.main_calls() if call.is_kept]
        if not found:
            raise NotTestedError("no pass of the training called the whole model as one module")
        return found

    @property
    def call(self) -> Call:
        """The first of these calls."""
        return self.calls[0]

    @property
    def model(self) -> nn.Module:
        """The model: the largest module that the loop calls, without wrappers."""
        return bare(self.call.module)

    @cached_property
    def labels(self) -> TokenLabels:
        """Labels of the first call, for losses that are a cross entropy of an output of the model."""
        found = self.call.token_labels
        if found is None:
            raise NotTestedError("the loss is no cross entropy of an output of the model, or its gradient was not seen")
        return found

    @cached_property
    def tokens(self) -> Tensor:
        """Ids at the positions of the labels, shape (batch, token), as an embedding of the first call received them."""
        return self.tokens_of(self.call)

    def tokens_of(self, call: Call) -> Tensor:
        """Return the ids that a call received, shape (batch, token): those of which the labels are the next, if any.

        Otherwise they are ids of the embedding with the most entries that are an argument of the call, if any.
        """
        labels = None if call.token_labels is None else call.token_labels.labels
        shape = None if labels is None or labels.ndim != 2 else labels.shape
        embeddings = [(n, m) for n, m in bare(call.module).named_modules() if isinstance(m, nn.Embedding)]
        sizes = {bare_name(name): each.num_embeddings for name, each in embeddings}
        given = _ids(call)
        fitting = [
            (any(is_same(ids, t) for t in given), sizes.get(bare_name(name), 0), ids)
            for name, each in call.tokens.items()
            for ids in each
            if ids.ndim == 2 and not ids.is_floating_point() and (shape is None or ids.shape == shape)
        ]
        # Compiled modules show no embeddings.
        fitting = fitting or [(True, 0, each) for each in given if each.shape == shape][:1]
        if not fitting and not given and not call.tokens:
            raise NotApplicableError("the model reads no ids")
        if not fitting:
            raise NotTestedError("the model receives no ids of shape (batch, token) at the positions of its loss")
        if labels is not None and shape is not None:
            counts = labels[:, :-1] != IGNORED
            for _, _, ids in fitting:
                is_next = labels[:, :-1][counts] == ids[:, 1:].cpu()[counts]
                if is_next.numel() and float(is_next.double().mean()) > _NEARLY_ALL:
                    return ids
        return max(fitting, key=lambda each: each[:2])[2]

    @cached_property
    def held(self) -> tuple[Tensor, ...]:
        """Parameters and buffers of all modules that were called, those that are no plain tensors excepted."""
        modules = {*self.seen.called, *(part for look in self.seen.looks for part in look.call.module.modules())}
        found = {id(t): t for m in modules for t in (*m.parameters(False), *m.buffers(False))}
        return tuple(t for t in found.values() if type(t) in (Tensor, nn.Parameter) and not t.is_inference())

    @property
    def read_ids(self) -> list[Tensor]:
        """Ids that embeddings of the first call received and that are its arguments, `tokens` first."""
        found = [self.tokens]
        for ids in [ids for each in self.call.tokens.values() for ids in each if ids.ndim == 2]:
            are_given, are_known = (any(is_same(ids, each) for each in of) for of in (_ids(self.call), found))
            found += [ids] * (are_given and not are_known)
        return found

    # Passes

    def outputs(self, call: Call, args: tuple | None = None, kwargs: Mapping[str, Any] | None = None) -> list[Tensor]:
        """Return the floating-point tensors in the output of a call made again in eval mode, with other inputs.

        The pass runs in float32, so that rounding does not hide what outputs depend on, unless the model cannot.
        """
        args, kwargs = call.args if args is None else args, call.kwargs if kwargs is None else kwargs
        inner, own = list[Tensor](), functional.cross_entropy

        def cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
            inner.append(args[0] if args else kwargs["input"])
            return own(*args, **kwargs)

        with self.undisturbed(call), patch.object(functional, "cross_entropy", cross_entropy):
            if self.copies_to_float32:
                self.count_pass()
                module = bare(call.module)
                held = dict((*module.named_parameters(), *module.named_buffers()))
                short = {
                    n: t.detach().float() for n, t in held.items() if t.is_floating_point() and t.element_size() < 4
                }
                kind = next(module.parameters()).device.type
                try:
                    with torch.autocast(kind, enabled=False):
                        output = functional_call(module, short, _float32(args), _float32(kwargs))
                except RuntimeError:  # its code casts to another format
                    self.copies_to_float32 = False
            if not self.copies_to_float32:
                inner.clear()
                output = self.run(call, args, kwargs)
            found = [each.detach() for each in tensors_in(output) if each.is_floating_point()]
            if not any(each.ndim for each in found):  # the module returns its loss alone
                found += [each.detach() for each in inner]
            if any(bool(each.isnan().any()) for each in found):
                raise NotTestedError("outputs have NaN")
            return [by_token(each, call.tokens) for each in found]

    def require_acts(self) -> None:
        """Raise `PassNeededError` if no pass may be made."""
        if not self.may_act:
            raise PassNeededError

    def count_pass(self) -> None:
        """Count a pass, of which there is a limit."""
        self.require_acts()
        self.n_passes += 1
        if self.n_passes > MOST_PASSES:
            raise NotTestedError(f"the experiments have made {MOST_PASSES} passes, the most that they may")

    def run(
        self, call: Call, args: tuple | None = None, kwargs: Mapping[str, Any] | None = None, *, is_bare: bool = True
    ) -> Any:
        """Call the module of a call again, without its wrappers if it is bare, unprotected; see `undisturbed`."""
        self.count_pass()
        module = bare(call.module) if is_bare else call.module
        kind = next(module.parameters()).device.type
        with torch.autocast(kind, call.autocast, enabled=call.autocast is not None):
            return module(*(call.args if args is None else args), **(call.kwargs if kwargs is None else kwargs))

    @contextmanager
    def undisturbed(self, call: Call, *, trains: bool = False, gradients: bool = False) -> Iterator[None]:
        """Return a context in which the module of a call may run, and after which nothing of it remains.

        Args:
            call: The call.
            trains: Whether each module has the mode of the call, with the call's random state, instead of eval mode.
            gradients: Whether graphs are built.
        """
        self.require_acts()
        module = bare(call.module)
        with ExitStack() as stack:
            if is_split(module) and any(id(p) not in self.whole for p in module.parameters() if hasattr(p, "to_local")):
                raise NotTestedError("the model is split over ranks, and was not gathered")
            stack.callback(reshard, module)  # gathered parameters would be taken for those of the model
            stack.enter_context(replaced(module, self.whole, casts=True))
            stack.enter_context(restored_buffers(module))
            stack.enter_context(undisturbed(module))
            if gradients:
                stack.enter_context(torch.enable_grad())
            if trains:
                torch.set_rng_state(call.rng)
                for each in module.modules():
                    each.training = each not in call.in_eval
            yield
            if trains:
                for each in module.modules():
                    each.training = False

    def loss(self, of: Backward) -> Tensor:
        """Return the loss of a recorded backward pass, computed again with the present parameters."""
        tape = self.tape_of(of)
        return tape.loss([self.run(call) for call in tape.calls])

    def tape_of(self, of: Backward) -> Tape:
        """Return the record of a backward pass, by which its loss can be computed again."""
        if of.tape is None or not of.tape.is_complete or not all(call.is_kept for call in of.tape.calls):
            raise NotTestedError(_NOT_SEEN)
        return of.tape

    def taped(self, root: nn.Module | None = None) -> Backward:
        """Return the first backward pass whose loss can be computed again, of those with a call of ``root``."""
        for each in self.seen.passes:
            with suppress(NotTestedError):
                calls = self.tape_of(each).calls
                if root is None or any(bare(call.module) is root for call in calls):
                    return each
        raise NotTestedError(_NOT_SEEN)

    @property
    def tapes(self) -> list[Tape]:
        """Complete records of losses, in the order of their passes."""
        return [each.tape for each in self.seen.passes if each.tape is not None and each.tape.is_complete]

    # Inputs

    def with_tokens(self, call: Call, new: Tensor) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a call with other ids; labels that equal the ids are left as they are."""
        return self._with(call, self.tokens_of(call), new)

    def _with(self, call: Call, old: Tensor, new: Tensor) -> tuple[tuple, dict[str, Any]]:
        found = 0

        def change(value: Any, name: str = "") -> Any:
            nonlocal found
            if isinstance(value, Tensor) and value.shape == old.shape and not any(word in name for word in _TARGETS):
                if value is old or (not found and not value.is_floating_point() and torch.equal(value, old)):
                    found += 1
                    return new.to(value.dtype)
                return value
            if isinstance(value, Mapping):
                return {key: change(each, str(key)) for key, each in value.items()}
            return type(value)(change(each) for each in value) if type(value) in (tuple, list) else value

        args, kwargs = change(tuple(call.args)), change(dict(call.kwargs))
        if not found and "decoder_input_ids" in signature(bare(call.module).forward).parameters:
            return args, {**kwargs, "decoder_input_ids": new}
        if not found:
            raise NotTestedError("the ids that the embedding receives are no argument of the model")
        return args, kwargs

    def logits(self, call: Call, args: tuple | None = None, kwargs: Mapping[str, Any] | None = None) -> Tensor:
        """Return the logits of a call made again in eval mode: the output whose gradient is that of the cross entropy.

        For other losses, it is the largest output.
        """
        found = self.outputs(call, args, kwargs)
        which = next((i for i, each in call.labels.items() if each.is_cross_entropy), None)
        if which is None or which >= len(found):
            return max(found, key=lambda each: each.numel())
        return found[which]

    @cached_property
    def base(self) -> Tensor:
        """Logits of the first call in eval mode, with its own inputs."""
        return self.logits(self.call)

    def rounding(self, values: Tensor) -> float:
        """Return the size of what rounding may change in outputs: 64 of the last places of the largest."""
        autocast = None if self.copies_to_float32 else self.call.autocast
        eps = max(torch.finfo(kind).eps for kind in (values.dtype, autocast) if kind is not None)
        return 64 * eps * float(values.abs().amax())


@contextmanager
def restored_buffers(module: nn.Module) -> Iterator[None]:
    """Restore buffers, also the statistics of norms over the batch, which operations write without saying so."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape and entries."""
    return a.shape == b.shape and torch.equal(a, b)


def _ids(call: Call) -> list[Tensor]:
    """Return the arguments of a call that may be ids, and are no labels, masks or positions."""
    named = [(str(name), each) for name, each in (*enumerate(call.args), *call.kwargs.items())]
    named = [
        (name, each) for name, each in named if isinstance(each, Tensor) and each.dtype in (torch.int64, torch.int32)
    ]
    return [each for name, each in named if not any(word in name for word in _TARGETS)]


def arguments(call: Call) -> list[Tensor]:
    """Return the tensors among the arguments of a call."""
    return [each for each in (*call.args, *call.kwargs.values()) if isinstance(each, Tensor)]


def _float32(value: Any) -> Any:
    """Return nested containers with their floating-point tensors in float32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _float32(each) for name, each in value.items()}
    return type(value)(_float32(each) for each in value) if type(value) in (tuple, list) else value


def bare_name(name: str) -> str:
    """Return a path without the prefixes that DDP and torch.compile add."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


Contract = Callable[[Lab], Result]
#: All contracts by id, in the order in which they are tested.
CONTRACTS: dict[str, Contract] = {}
#: Those whose passes are not made beside a training that goes on.
APART: set[str] = set()
#: Those that are about the author's loop.
_OF_LOOP: set[str] = set()


def contract(id: str, *, apart: bool = False, of_loop: bool = False) -> Callable[[Contract], Contract]:
    """Register the experiment on a contract under its id.

    Args:
        id: The id.
        apart: Whether its passes need a training that waits.
        of_loop: Whether it says nothing if the check itself makes the updates.
    """

    def register(function: Contract) -> Contract:
        APART.update([id] if apart else [])
        _OF_LOOP.update([id] if of_loop else [])
        CONTRACTS[id] = function
        return function

    return register


def passed(evidence: str) -> Result:
    """Return the result of a contract that holds."""
    return Result("", Status.PASSED, evidence)


def failed(
    evidence: str, *, where: str, remedy: str, proof: str = "", picture: tuple[tuple[float, ...], ...] = ()
) -> Result:
    """Return the result of a contract that is broken."""
    return Result("", Status.FAILED, evidence, where, remedy, proof, picture)


def not_applicable(reason: str) -> Result:
    """Return the result of a contract about something that the training does not have."""
    return Result("", Status.NOT_APPLICABLE, reason)


def not_tested(reason: str, *, where: str = "") -> Result:
    """Return the result of a contract that could not be tested, or that the author has to answer in one line."""
    return Result("", Status.NOT_TESTED, reason, where)


def show_progress(progress: bool | Callable[[str], None]) -> Progress:
    """Return the display of the progress of `all_results`."""
    return Progress(progress, "tested", unit="contract", total=len(CONTRACTS))


def all_results(seen: Observer, accepted: tuple[str, ...], bar: Progress) -> list[Result]:
    """Make the experiments on all contracts, and return their results."""
    lab, found = Lab(seen), []
    lab.whole = gather(seen.roots)
    for id in CONTRACTS:
        bar.describe(id)
        result = result_of(lab, id)
        is_accepted = id in accepted and result.status is Status.FAILED
        found.append(replace(result, status=Status.ACCEPTED) if is_accepted else result)
        bar.update()
    return found


def result_of(lab: Lab, id: str) -> Result:
    """Make the experiment on a contract, and return its result."""
    start = time.perf_counter()
    try:
        if id in _OF_LOOP and not lab.seen.sees_loop:
            raise NotApplicableError("the updates are those of the check, not of your loop; check the script for it")
        # The loop may be between a forward and a backward pass, whose graph holds what is changed and restored.
        with torch.autograd._unsafe_preserve_version_counter(lab.held), without_messages():
            result = CONTRACTS[id](lab)
    except NotTestedError as reason:
        of = not_applicable if isinstance(reason, NotApplicableError) else not_tested
        result = of(f"{capitalized(str(reason))}.")
    except PassNeededError:
        raise
    except Exception as error:  # noqa: BLE001  (models are of any kind, and the other contracts can be tested)
        words = str(error).strip().splitlines()
        result = not_tested(f"The experiment ended with {type(error).__name__}: {words[0] if words else ''}.")
    if result.status is Status.FAILED:
        lab.failed.add(id)
    return replace(result, id=id, seconds=time.perf_counter() - start)
