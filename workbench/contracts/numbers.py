"""Contracts of numbers: values that are not finite, and precision that is lost where it costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from workbench.contracts.lab import Lab, NotTestedError, contract, failed, not_tested, passed
from workbench.contracts.observer import Call
from workbench.contracts.results import Result
from workbench.formatting import fine_percent, number_in_words
from workbench.models.calling import bare, config_options, known_options
from workbench.models.losses import tensors_in
from workbench.probes.failed_pass import first_bad_tensor
from workbench.probes.precision import IN_FLOAT64

#: Largest value in float16, half of what it can hold, that leaves room for growth.
_MOST_HALF = 32752.0
#: Modules that multiply by matrices, for whose speed a training uses short number formats.
_PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.Bilinear)
#: Error of a module, over that of float32 or of one rounding, that a few roundings do not reach.
_EXCESS = 16.0
#: Least share of positions with such an error: a token that another expert reads is one position.
_LEAST_SHARE = 0.25
#: Most entries of an output that is compared.
_MOST_COMPARED = 1 << 22


@contract("finite")
def finite(lab: Lab) -> Result:
    """Are all losses and outputs of the observed passes finite?

    Otherwise the pass is repeated, and the first tensor that is not finite is looked for.
    """
    bad = [call for call in lab.seen.calls if call.reached and call.has_nan]
    losses = [each for each in lab.seen.passes if not each.is_finite]
    if not bad and not losses:
        n = len(lab.seen.passes)
        if not n:
            raise NotTestedError("no backward pass was seen")
        words = f"The losses of {n} passes are finite, and no output has NaN"
        name, size = _largest_half(lab)
        if size > _MOST_HALF:
            return failed(
                f"{words}, but values in float16 reach {size:.3g} of at most 65,504: twice of that is infinite.",
                where=name,
                remedy="scale the inputs, normalise before the module, or compute it in bfloat16.",
            )
        return passed(f"{words}.")
    words = f"The loss of {len(losses)} of {len(lab.seen.passes)} passes is not finite"
    if not losses:
        words = f"{len(bad)} of {len(lab.seen.calls)} outputs have NaN, and all losses are finite"
    line = next((each.line for each in losses), "")
    where = f"the loss ({line})"
    for call in bad:
        where = type(bare(call.module)).__name__
        if not call.is_kept:
            continue
        if any(not torch.isfinite(t).all() for t in tensors_in([call.args, call.kwargs]) if t.is_floating_point()):
            if all(bool(torch.isfinite(p).all()) for p in call.module.parameters()):
                return not_tested(f"{words}: inputs are not, and no parameter is spoiled; are they skipped on purpose?")
            where = f"the inputs of the model before update {call.update + 1}"
            break
        if (found := _first_bad(lab, call)) is not None:
            where = found
            break
        earlier = [each for each in lab.seen.passes if each.update < call.update]
        is_known = ~np.isnan(earlier[0].after) if earlier else np.zeros(0, bool)
        if is_known.any() and all(each.is_finite and np.isfinite(each.after[is_known]).all() for each in earlier):
            raise NotTestedError(
                f"{words[0].lower()}{words[1:]}; earlier ones and their gradients are, and with other parameters no "
                "tensor is wrong: updates have spoiled the parameters. Is the learning rate too high?"
            )
    return failed(f"{words}.", where=where, remedy="mask with a large finite number, guard divisions and logarithms.")


def _largest_half(lab: Lab) -> tuple[str, float]:
    """Return the module with the largest absolute value in float16 in a pass, given or returned, and the value."""
    found = ("", 0.0)
    for call in [call for call in lab.seen.calls if call.reached and call.is_kept][-1:]:
        model = bare(call.module)
        if call.autocast != torch.float16 and all(p.dtype != torch.float16 for p in model.parameters()):
            continue

        def note(name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            nonlocal found
            given = args if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) else ()
            made = [*tensors_in(output)]
            if any(t.dtype == torch.float16 for t in made):
                size = max((float(t.abs().amax()) for t in [*tensors_in(given), *made] if t.numel()), default=0.0)
                found = max(found, (name, size), key=lambda each: each[1])

        with _hooked(model, note), lab.undisturbed(call):
            lab.run(call)
    return found


def _first_bad(lab: Lab, call: Call) -> str | None:
    """Return the first tensor of a call that is not finite; None if other parameters give none."""

    def total(module: nn.Module) -> Tensor:
        kind = next(module.parameters()).device.type
        with torch.autocast(kind, call.autocast, enabled=call.autocast is not None):
            output = module(*call.args, **call.kwargs)
        return torch.stack([t.float().sum() for t in tensors_in(output) if t.requires_grad]).sum()

    lab.n_passes += 2
    model, generator = bare(call.module), torch.Generator().manual_seed(0)
    with lab.undisturbed(call, trains=True, gradients=True):
        spoiled = [(p, p.data) for p in model.parameters() if not bool(torch.isfinite(p).all())]
        try:
            for p, data in spoiled:  # by an update after the pass; other numbers show what does not depend on them
                p.data = (0.02 * torch.randn(p.shape, generator=generator)).to(data)
            found = first_bad_tensor(model, total)
        finally:
            for p, data in spoiled:
                p.data = data
    if found is None:
        return None
    operation = f" of {found.operation}" if found.operation else ""
    return f"{found.module or type(model).__name__}: {found.tensor}{operation}"


@contextmanager
def _hooked(model: nn.Module, note: Callable[[str, nn.Module, tuple, dict[str, Any], Any], Any]) -> Iterator[None]:
    handles = [m.register_forward_hook(partial(note, name), with_kwargs=True) for name, m in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# Precision


class _Longer(TorchFunctionMode):
    """Computes in one format whatever the code casts to a shorter one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function with a longer format in the place of shorter ones, in its arguments and its result."""
        if getattr(func, "__name__", "") in ("half", "bfloat16", "float"):
            return _cast(args[0].to(self.dtype), self.dtype)
        args = tuple(self._longer(each) for each in args)
        return _cast(func(*args, **{name: self._longer(each) for name, each in (kwargs or {}).items()}), self.dtype)

    def _longer(self, value: Any) -> Any:
        is_shorter = isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize < self.dtype.itemsize
        return self.dtype if is_shorter else value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return nested containers with their real and complex tensors in at least the given precision."""
    if isinstance(value, Tensor):
        kind = dtype if value.is_floating_point() else dtype.to_complex() if value.is_complex() else value.dtype
        return value.to(kind) if value.dtype.itemsize < kind.itemsize else value
    if isinstance(value, dict):
        return {name: _cast(each, dtype) for name, each in value.items()}
    return type(value)(_cast(each, dtype) for each in value) if type(value) in (tuple, list) else value


@contract("precision_by_position", apart=True)
def precision_by_position(lab: Lab) -> Result:
    """Is precision lost beside the products of matrices, where a short number format costs much and saves nothing?

    The call is made as in the training, and in float64 and in float32 with all casts to shorter formats left out. The
    error of each module, by position, is compared with that in float32, or with one rounding of its outputs. If the
    products are in half precision, modules without weights of two axes, such as norms and rotary embeddings, are
    compared alone, each with its own inputs.
    """
    call, model = lab.call, lab.model
    formats: set[torch.dtype] = set()
    calls: dict[str, tuple[nn.Module, tuple, dict[str, Any], Tensor]] = {}

    def note(name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        found = next((t for t in tensors_in(output) if t.is_floating_point()), None)
        if isinstance(module, _PRODUCTS) and found is not None:
            formats.add(found.dtype)
        is_small = all(t.numel() <= _MOST_COMPARED for t in tensors_in([args, kwargs, output]))
        if found is not None and found.ndim > 1 and is_small and name not in calls:
            calls[name] = module, args, kwargs, found.detach()

    with lab.undisturbed(call), _hooked(model, note):
        before = torch.get_rng_state()
        lab.run(call)
        if not torch.equal(before, torch.get_rng_state()):
            raise NotTestedError("the model draws random numbers in eval mode")
    if call.autocast is not None and formats == {torch.float32}:
        return failed(
            f"The pass runs under autocast to {str(call.autocast).removeprefix('torch.')}, and all products of its "
            "modules are in float32.",
            where=f"{type(model).__name__}.forward",
            remedy="do not switch autocast off around the whole model.",
        )
    eps = max((torch.finfo(kind).eps for kind in formats), default=torch.finfo(torch.float32).eps)
    pairs: list[tuple[str, nn.Module, Tensor, Tensor, Tensor]] = []
    long = (torch.float64, torch.float32)
    if eps > torch.finfo(torch.float32).eps:
        for name, (module, args, kwargs, value) in calls.items():
            if not [*module.children()] and all(p.ndim < 2 for p in module.parameters()):
                with lab.undisturbed(call):
                    exact, plain = (next(tensors_in(_alone(module, args, kwargs, each))) for each in long)
                pairs.append((name, module, value, exact, plain))
    else:
        with config_options(known_options(model, IN_FLOAT64)):
            in_double, in_single = (_states(lab, call, each) for each in long)
        for name, (module, _, _, value) in calls.items():
            if name in in_single and value.shape == in_double[name].shape:
                pairs.append((name, module, value, in_double[name], in_single[name]))
    for name, module, value, exact, plain in pairs:
        error, noise, size = (_by_position(each) for each in (value - exact, plain - exact, exact))
        # Each entry may be rounded once, also where the rounding of its inputs happens to cancel.
        excess = (error / torch.maximum(noise, eps / 4 * size).clamp_min(1e-300)).nan_to_num(0.0)
        if float((excess > _EXCESS).double().mean()) < _LEAST_SHARE:
            continue
        share, k = error / size.clamp_min(1e-300), max(1, len(error) // 4)
        early, late = float(share[:k].mean()), float(share[-k:].mean())
        grows = len(error) >= 8 and late > 4 * early
        where = name or type(model).__name__
        words = (
            f"The outputs of {where} differ from those in float64 by up to {fine_percent(float(share.max()))}, "
            f"{float(excess.median()):.3g} times the error of float32 or of one rounding"
        )
        words += f"; by {fine_percent(early)} at the first positions, {fine_percent(late)} at the last" * grows
        if isinstance(module, _PRODUCTS) and not grows:
            return not_tested(f"{words}: are its inputs in half precision on purpose?", where=where)
        return failed(
            f"{words}.",
            where=where,
            remedy="compute norms and the angles of positions in float32, also under autocast and in models that are "
            "cast.",
        )
    if not pairs:
        raise NotTestedError("no output of a module can be compared with float64")
    return passed(f"Outputs of {len(pairs)} modules are those in float64 up to roundings of {number_in_words(eps)}.")


def _alone(module: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    """Call a module in a format, with none of its casts to shorter ones."""
    held = {name: _cast(t.detach(), dtype) for name, t in (*module.named_parameters(), *module.named_buffers())}
    kind = next((t.device.type for t in [*held.values(), *tensors_in(args)]), "cpu")
    with torch.autocast(kind, enabled=False), _Longer(dtype):
        return functional_call(module, held, _cast(args, dtype), _cast(kwargs, dtype))


def _states(lab: Lab, call: Call, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the output of each module at its first call, computed in a format."""
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        first = next((t for t in tensors_in(output) if t.is_floating_point()), None)
        if first is not None and first.numel() <= _MOST_COMPARED:
            found.setdefault(name, first.detach())

    lab.count_pass()
    with lab.undisturbed(call), _hooked(lab.model, keep):
        _alone(lab.model, tuple(call.args), dict(call.kwargs), dtype)
    return found


def _by_position(value: Tensor) -> Tensor:
    """Return the largest absolute value at each position: along the second axis, or the first of two."""
    return value.double().movedim(1 if value.ndim > 2 else 0, 0).flatten(1).abs().amax(1)
