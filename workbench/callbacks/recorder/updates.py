"""Measures of one update by module: its gradients, its size and the optimizer's moments."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.callbacks.recorder.joint_optimizer import JointOptimizer, OptimizedParameters
from workbench.callbacks.recorder.options import jointly, summed_over_ranks
from workbench.callbacks.recorder.shards import HeldParts, summed
from workbench.models.readable_weights import Measurement, in_pieces, local_part, read_numbers
from workbench.monitors.optimizer_health import adam_staleness, gradient_rms, n_unchanged, signal_share

if TYPE_CHECKING:
    from workbench.models.anatomy import Anatomy
    from workbench.models.block_calls import Site

#: Quantities summed over each module, each as a sum of squares and a count.
_GRADIENT, _WEIGHT, _CHANGE, _STALENESS, _FIRST_MOMENT, _SECOND_MOMENT, _UNCHANGED, _WITH_GRADIENT = range(8)
_N_QUANTITIES = 8
#: Entries of each tensor from which the size of every update is computed.
_SAMPLED = 4096
#: Largest number of entries that are joined: on the host as many as fit its caches, elsewhere enough to occupy the
#: device.
_JOINED_ON_HOST, _JOINED = 2**17, 2**22


class _Weight(NamedTuple):
    """A parameter with its group in the optimizer and the index of its module."""

    group: dict[str, Any]
    weight: Tensor
    module: int


class UpdateCollector:
    """Measurement of an update, right before and right after it. Frozen parameters are not measured.

    Sums of squares are added over the ranks that hold shards; no parameter is gathered. Small tensors of a module are
    concatenated into one vector, since on a GPU launching a computation takes about as long as computing with a small
    tensor.
    """

    def __init__(self, parts: HeldParts, parameters: OptimizedParameters, anatomy: Anatomy | None) -> None:
        self.optimizer, self._parts = parts.optimizer, parts
        sites = () if anatomy is None else anatomy.sites
        blocks: dict[int, tuple[int, Site]] = {}
        for layer, site in enumerate(sites):
            blocks.setdefault(id(site.module), (layer, site))
        self.module_names = [*(site.name for _, site in blocks.values()), "outside"]
        self.layers = [*(layer for layer, _ in blocks.values()), -1]
        place: dict[str, int] = {}
        for i, (_, site) in enumerate(blocks.values()):
            place |= {f"{site.name.split('#')[0]}.{name}": i for name, _ in site.module.named_parameters()}
        outside = len(self.module_names) - 1
        self._module = {key: place.get(name, outside) for key, name in parameters.moved_names().items()}
        self._before: dict[int, Tensor] = {}
        self._roots: list[tuple[int, int, Tensor, float]] = []  # module, quantity, root mean square, count
        self._steps: tuple[dict[int, float], int] = {}, 0  # counts of a fused optimizer, and updates seen until then
        self._late, self._late_steps = list[int](), torch.zeros(0)

    @torch.no_grad()
    def begin(self) -> None:
        """Measure gradients and copy the parameters, right before the update."""
        self._before, self._roots = {}, []
        for taken in self._together(lambda each: None):
            before = _joined([each.weight.detach() for each in taken], copies=True)
            parts = before.split([local_part(each.weight).numel() for each in taken])
            self._before |= {id(each.weight): part for each, part in zip(taken, parts, strict=True)}
            for (part,) in in_pieces(before):
                self._add(taken, _WEIGHT, part)
            if taken[0].weight.grad is not None:
                for (part,) in in_pieces(_joined([self._parts.gradient_of(each.weight) for each in taken])):
                    self._add(taken, _GRADIENT, _unscaled(self.optimizer, part))

    @torch.no_grad()
    def end(self) -> Measurement[tuple[dict[str, np.ndarray], dict[int, str]]]:
        """Measure the update, right after it.

        Returns:
            For each variable an array (module,), and a description of layers with values that are not finite.
        """
        is_split = self._parts.are_split
        eps, ages = jointly(self._measure) if is_split else self._measure()
        roots, self._roots = self._roots, []
        counted = self.optimizer.n_updates
        *values, late = yield [*(root for _, _, root, _ in roots), self._late_steps]
        self._steps = dict(zip(self._late, late.tolist(), strict=True)), counted
        sums = np.zeros((len(self.module_names), _N_QUANTITIES, 2))  # of squares, and counts
        for (module, what, _, count), value in zip(roots, values, strict=True):
            sums[module, what] += (value.item() ** 2 * count, count)
        return self._values(summed_over_ranks(sums) if is_split else sums, eps, ages)

    def _measure(self) -> tuple[list[float], list[tuple[float, float]]]:
        """Compute the roots of this rank, and return eps, and beta1 and age of the moments, of each module."""
        eps = [math.nan] * len(self.module_names)
        ages = [(0.0, 0.0)] * len(self.module_names)  # beta1, and number of updates in the moments
        n_steps = self._read_steps()
        for taken in self._together(lambda each: self._kept_for(each, n_steps)):
            group, weight, module = taken[0]
            before = _joined([self._before[id(each.weight)] for each in taken])
            after = _joined([each.weight.detach() for each in taken])
            for old, new in in_pieces(before, after):
                self._add(taken, _CHANGE, new.float() - old.float())
            if weight.grad is None:
                continue
            gradient = _joined([self._parts.gradient_of(each.weight) for each in taken])
            part_weight = self._parts.weight_of(weight)
            rate = group.get("lr")  # if it is a tensor, it is not read: the host would have to wait for it
            if not (isinstance(rate, float | int) and rate == 0):
                for parts in in_pieces(before, after, gradient):
                    for what, n in zip((_UNCHANGED, _WITH_GRADIENT), n_unchanged(*parts), strict=True):
                        self._roots.append((module, what, n.float().sqrt(), part_weight))  # its square is summed
            has_first, has_second, done = self._kept_for(taken[0], n_steps)
            if not has_second:
                continue
            eps[module] = found if isinstance(found := group.get("eps"), float) else math.nan  # Adafactor has two
            correction = _correction(group, done)
            moment = _joined([self.optimizer.state[each.weight]["exp_avg_sq"] for each in taken])
            for grad, second in in_pieces(gradient, moment):
                staleness = adam_staleness(
                    grad, second / correction, eps=0.0 if math.isnan(eps[module]) else eps[module]
                )
                self._roots.append((module, _STALENESS, staleness, grad.numel() * part_weight))
            if has_first and done and "betas" in group:
                beta1 = float(group["betas"][0])
                ages[module] = (beta1, done)
                first = _joined([self.optimizer.state[each.weight]["exp_avg"] for each in taken])
                for one, second in in_pieces(first, moment):
                    self._add(taken, _FIRST_MOMENT, one / (1 - beta1**done))
                    self._add(taken, _SECOND_MOMENT, (second / correction).clamp_min(0).sqrt())
        self._before = {}
        return eps, ages

    def _values(
        self, sums: np.ndarray, eps: list[float], ages: list[tuple[float, float]]
    ) -> tuple[dict[str, np.ndarray], dict[int, str]]:
        with np.errstate(divide="ignore", invalid="ignore"):
            total, count = sums[..., 0], sums[..., 1]
            rms = np.sqrt(total / np.where(count > 0, count, np.nan))
            has_gradient = count[:, _GRADIENT] > 0
            values = {
                "module_grad_norm": np.where(has_gradient, np.sqrt(total[:, _GRADIENT]), np.nan),
                "module_weight_norm": np.where(count[:, _WEIGHT] > 0, np.sqrt(total[:, _WEIGHT]), np.nan),
                "update_ratio": rms[:, _CHANGE] / rms[:, _WEIGHT],
                "unchanged_share": np.where(
                    total[:, _WITH_GRADIENT] > 0, total[:, _UNCHANGED] / total[:, _WITH_GRADIENT], np.nan
                ),
                "adam_staleness": rms[:, _STALENESS],
                "gradient_rms": rms[:, _GRADIENT],
                "gradient_rms_over_eps": rms[:, _GRADIENT] / np.array(eps),
            }
            of_moments = zip(rms[:, _FIRST_MOMENT] / rms[:, _SECOND_MOMENT], ages, strict=True)
            shares = [signal_share(float(root) ** 2, beta1=beta1, n_updates=n) for root, (beta1, n) in of_moments]
            values["gradient_signal_share"] = np.array(shares)
        is_bad = ~np.isfinite(total[:, _WEIGHT] + total[:, _GRADIENT] + total[:, _CHANGE])
        broken = {
            layer: "weights or gradients" for layer, bad in zip(self.layers, is_bad, strict=True) if bad and layer >= 0
        }
        return values, broken

    @property
    def copies(self) -> dict[int, Tensor]:
        """Copies of the parameters from before the update, flat, by the id of the parameter, until it is measured."""
        return self._before

    def forget(self) -> None:
        """Release the copy of the parameters if the update was skipped."""
        self._before, self._roots = {}, []

    def _weights(self) -> list[_Weight]:
        return [
            _Weight(group, weight, self._module[id(weight)])
            for group in self.optimizer.param_groups
            for weight in group["params"]
            if id(weight) in self._module and (weight.requires_grad or weight.grad is not None)
        ]

    def _together(self, key_of: Callable[[_Weight], Any]) -> Iterator[list[_Weight]]:
        """Yield parameters to measure as one vector: of one module and key, with few entries in total."""
        portions: dict[Any, list[_Weight]] = {}
        sizes: Counter[Any] = Counter()
        for each in self._weights():
            weight, own = each.weight, local_part(each.weight)
            if not own.numel():
                continue
            gradient_kind = None if weight.grad is None else weight.grad.dtype
            key = (
                each.module,
                id(each.group),
                own.dtype,
                own.device,
                gradient_kind,
                self._parts.weight_of(weight),
                key_of(each),
            )
            limit = _JOINED_ON_HOST if own.device.type == "cpu" else _JOINED
            if key in portions and sizes[key] + own.numel() > limit:
                yield portions.pop(key)
                del sizes[key]
            portions.setdefault(key, []).append(each)
            sizes[key] += own.numel()
        yield from portions.values()

    def _kept_for(self, each: _Weight, n_steps: Mapping[int, float]) -> tuple[bool, bool, float | None]:
        """Return whether there are first and second moments of a parameter, and of how many updates."""
        state = self.optimizer.state.get(each.weight, {})
        moments = [state.get(name) for name in ("exp_avg", "exp_avg_sq")]
        # Optimizers in 8 bits store codes, in tensors of the same shape or of a class of their own.
        first, second = (
            isinstance(m, Tensor)
            and m.shape == each.weight.shape
            and m.is_floating_point()
            and (type(m) in (Tensor, torch.nn.Parameter) or hasattr(m, "to_local"))
            for m in moments
        )
        return first, second, n_steps.get(id(each.weight))

    def _add(self, taken: Sequence[_Weight], what: int, entries: Tensor) -> None:
        module, part_weight = taken[0].module, self._parts.weight_of(taken[0].weight)
        self._roots.append((module, what, gradient_rms(entries), entries.numel() * part_weight))

    def _read_steps(self) -> dict[int, float]:
        """Return the optimizer's step count of each parameter by its id.

        Fused optimizers count on the device: the host waits for these counts once, and then adds the updates since the
        last ones that it has read.
        """
        found = {
            id(each.weight): self.optimizer.state.get(each.weight, {}).get("step", each.group.get("step"))
            for each in self._weights()
        }
        here = {key: v.detach().numpy() for key, v in found.items() if isinstance(v, Tensor) and v.device.type == "cpu"}
        found |= here
        late = {key: value for key, value in found.items() if isinstance(value, Tensor)}
        known, counted = self._steps
        if not late.keys() <= known.keys():
            known, counted = dict(zip(late, read_numbers([*late.values()]), strict=True)), self.optimizer.n_updates
        found |= {key: known[key] + self.optimizer.n_updates - counted for key in late}
        self._late = [*late]
        steps = [value.detach().reshape(()) for value in late.values()]
        self._late_steps = torch.stack(steps) if steps else torch.zeros(0)
        return {key: float(value) for key, value in found.items() if value is not None}


class SampledUpdate:
    """Size of each update, over a fixed range of entries of every tensor to keep its cost negligible."""

    def __init__(self, parts: HeldParts) -> None:
        self._parts = parts
        self._before: list[Tensor] = []  # kept from step to step: new memory costs more than the copies
        self._n_copied = 0

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the sampled entries, right before the update."""
        parts, _ = self._sampled()
        if [(each.shape, each.device) for each in parts] != [(each.shape, each.device) for each in self._before]:
            self._before = [torch.empty_like(part, dtype=torch.float32) for part in parts]
        if parts:
            torch._foreach_copy_(self._before, parts)
        self._n_copied = len(parts)

    @torch.no_grad()
    def end(self) -> list[Tensor]:
        """Return the sums of squares of the change and of the parameters on this rank; none if they changed."""
        n_copied, self._n_copied = self._n_copied, 0
        parts, multiplicities = self._sampled()
        if len(parts) != n_copied:
            return []
        if not parts:
            return [torch.zeros(())] * 2
        before = self._before
        device = before[0].device  # a model may be on several devices
        weights = torch.tensor(multiplicities, dtype=torch.float32).to(device, non_blocking=True)
        norms = torch._foreach_norm(before)
        torch._foreach_sub_(before, [part.float() for part in parts])
        return [
            (torch.stack([norm.to(device) for norm in each]).square() * weights).sum()
            for each in (torch._foreach_norm(before), norms)
        ]

    def _sampled(self) -> tuple[list[Tensor], list[float]]:
        """Return a range of entries from the middle of each tensor, and how many entries each of them represents."""
        parts, multiplicities = [], []
        for weight in self._parts.optimizer.parameters:
            if weight.grad is None or not weight.numel() or not local_part(weight.detach()).is_contiguous():
                continue
            entries = self._parts.sample(weight, _SAMPLED)
            if entries.numel():
                parts.append(entries)
                factor = self._parts.weight_of(weight)
                multiplicities.append(factor * weight.numel() / min(weight.numel(), _SAMPLED))
        return parts, multiplicities


@torch.no_grad()
def gradient_square(parts: HeldParts) -> list[Tensor]:
    """Return the square of the norm of the gradients, and their number, as summands of this rank."""
    held = [(each, parts.gradient_of(each)) for each in parts.optimizer.parameters]
    known = [(parts.weight_of(each), own) for each, own in held if own is not None]
    if not known:
        return [torch.zeros((), dtype=torch.float64)] * 2
    norms = torch._foreach_norm([own for _, own in known])
    device = norms[0].device
    weights = torch.tensor([weight for weight, _ in known], dtype=torch.float64).to(device, non_blocking=True)
    sizes = torch.stack([_unscaled(parts.optimizer, norm.to(device, torch.float64)) for norm in norms])
    return [(sizes.square() * weights).sum(), torch.full((), len(known), dtype=torch.float64, device=device)]


def total_gradient_norm(optimizer: JointOptimizer) -> Tensor | float:
    """Return the norm of all gradients that the optimizer receives, 0-dim and on the device; NaN if there are none."""
    parts = HeldParts(optimizer)
    if parts.are_split:
        parts.settle()
        square, n = summed(gradient_square(parts))
        return torch.where(n > 0, square.sqrt(), math.nan)
    gradients = [local_part(each.grad) for each in optimizer.parameters if each.grad is not None]
    return _unscaled(optimizer, torch.nn.utils.get_total_norm(gradients).detach()) if gradients else math.nan


def _joined(tensors: Sequence[Tensor | None], *, copies: bool = False) -> Tensor:
    """Return the entries of tensors on this rank as one vector; a copy if there are several, or if requested."""
    flat = [local_part(tensor).reshape(-1) for tensor in tensors if tensor is not None]
    if len(flat) > 1:
        return torch.cat(flat)
    return flat[0].clone() if copies else flat[0]


def _correction(group: dict, n_steps: float | None) -> float:
    """Return the bias correction by which Adam's second moment is divided."""
    betas = group.get("betas")
    return 1.0 if n_steps is None or betas is None or n_steps <= 0 else 1 - float(betas[1]) ** n_steps


def overflow_of(optimizer: Any) -> float | Tensor:
    """Return 1 if a fused optimizer just skipped its update because gradients overflowed in float16, else 0."""
    found = getattr(optimizer, "found_inf", None)
    return found.reshape(()).float() if isinstance(found, Tensor) else float(found or 0.0)


def _unscaled(optimizer: JointOptimizer, gradient: Tensor) -> Tensor:
    """Return the gradient without the scale of a gradient scaler, which a fused optimizer removes only in its step."""
    scale = getattr(optimizer, "grad_scale", None)
    return gradient if scale is None else gradient / scale
