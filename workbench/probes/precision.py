"""Errors of a run's arithmetic: outputs and gradients of each block compared with the same in float64."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from workbench.errors import OptionError
from workbench.formatting import fine_percent
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.attention_weights import QueryKey, Unreadable, query_key_weights
from workbench.models.block_calls import Site
from workbench.models.block_hooks import BlockCall, BlockHooks
from workbench.models.calling import config_options, known_options, named_arguments, unwrap, visible_attention
from workbench.models.losses import require_graph
from workbench.models.probing import undisturbed, watch
from workbench.models.readable_weights import Measurement, complete, on_device
from workbench.schema.runs import PRECISION

if TYPE_CHECKING:
    import xarray as xr

    from workbench.models.subject import Subject

#: Function from the model to its loss as a 0-dim tensor with a graph.
LossOf = Callable[[nn.Module], Tensor]
#: Function that returns the context in which the run computes its passes.
Around = Callable[[], AbstractContextManager[Any]]
#: Excess that rounding does not reach in the geometric mean over blocks, by the bytes of the run's number format. One
#: block alone may reach _ONE_BLOCK times as much, and one head _ONE_HEAD times as much, because it may have a tiny
#: gradient, whose errors differ widely between two correct kernels. benchmarks/precision.md has the measurements.
_LIMITS = {4: 25.0, 2: 2.0}
_ONE_BLOCK, _ONE_HEAD = 4, 8
#: Options of transformers' configurations whose default kernel does not support float64.
IN_FLOAT64 = {"_experts_implementation_internal": "eager"}
_BY_LAYER = [name for name, variable in PRECISION.items() if "layer" in variable.dims]
#: Relative error of a block, in units of the last place, that rounding within one block does not reach.
_MOST_EPS = 100
#: Relative distance of two neighboring numbers of tf32, in which CUDA devices may multiply float32.
_TF32_EPS = 2.0**-10
#: Places between the random factors of two operations.
_STRIDE = 7919
#: Smallest divisor, so that gradients that are exactly 0 have no excess.
_TINY = 1e-300
#: Name of a block's output among its gradients.
_OUTPUT = ""
#: Factors of a loss in float16.
_SCALES = (1.0, 2.0**8, 2.0**16)
#: The original kernel of torch, even if its public name has been replaced.
_TORCH_ATTENTION = torch._C._nn.scaled_dot_product_attention


def precision_errors(
    model: Subject | nn.Module,
    loss_of: LossOf,
    *,
    anatomy: Anatomy | None = None,
    query_keys: Sequence[QueryKey | Unreadable] | None = None,
    around: Around = nullcontext,
    layers: Collection[int] | None = None,
) -> xr.Dataset:
    """Compare each block's output and gradients, computed with the run's own kernels, with the same in float64.

    One pass of the model records the input of each block and the gradient of the loss with respect to its output. Each
    block is then run separately on these, four times: with the kernels and number format of the run; in that format
    with torch's unfused attention, whose error is due to rounding; in float64; and in float64 with the result of each
    operation changed at random by what rounding would change it (Monte Carlo arithmetic, Parker 1997), which shows how
    far rounding goes where a block magnifies it, as saturated attention does. An ``error_excess`` near 1 means
    that rounding explains the error; it is larger for broken arithmetic. Errors with a constant direction, such as
    those of flash attention in low precision (arXiv:2510.04212), are separated from noise by ``query_gradient_bias``.
    If a CUDA device multiplies float32 in tf32, the rounding of tf32 is taken into account.

    Among 1,000 small models, healthy ones in float32 were never reported as broken, and those whose attention lost one
    bit in the backward pass always were. In bfloat16, healthy models were never reported with torch's kernels and in
    1.3 % with another correct kernel, and those that lost two bits always were (`benchmarks/precision.md`).

    A few examples suffice, 16 to 64 tokens. Cost: about seven passes over them, three of which are in float64. The
    parameters, their ``.grad``, modes, hooks and random states are left unchanged. The passes are in eval mode, without
    dropout.

    Args:
        model: Model to measure.
        loss_of: Function from the model to its loss on fixed examples, a 0-dim tensor; called once.
        anatomy: Anatomy of the blocks; None to read it with the inputs that ``loss_of`` passes to the model.
        query_keys: Result of `workbench.query_key_weights`, for values by head; None to compute it.
        around: Function that returns the context in which the run computes its passes, such as ``lambda:
            torch.autocast("cuda", torch.bfloat16)``.
        layers: Indices of the blocks to measure; None for all.

    Returns:
        Variables of ``schema.PRECISION``, by ``layer`` and ``head``. NaN if a block is not measured, if its input is
        not finite, if its residual is added outside of modules, if it is not trained, if the query weights of a layer
        cannot be read, or if a head does not exist.

    Raises:
        OptionError: If the loss is not a 0-dim tensor with a graph, or the device has no float64.
        AnatomyError: If the blocks cannot be read.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=32)
        >>> tokens = torch.arange(16).reshape(2, 8)
        >>> loss_of = lambda model: model(tokens).logsumexp(-1).mean()
        >>> healthy = wb.probes.precision_errors(model, loss_of)
        >>> bool((healthy["error_excess"] < 100).all())
        True
        >>> coarse = wb.faults.FlashAttentionMode()
        >>> coarse.cut = wb.faults.Cut(n_bits=4, output=True)
        >>> broken = wb.probes.precision_errors(model, loss_of, around=lambda: coarse)
        >>> bool((broken["error_excess"] > 1000).all())
        True

    See Also:
        `workbench.probes.broken_arithmetic`: Evaluates the result.
    """
    subject, model = model, unwrap(model)
    device = next((p.device.type for p in model.parameters()), "cpu")
    if device == "mps":
        raise OptionError("Devices of type mps have no float64 to compute the model in for comparison; use the CPU.")
    if anatomy is None or query_keys is None:
        inputs = _inputs_of(model, loss_of)
        anatomy = read_anatomy(subject, inputs) if anatomy is None else anatomy
        query_keys = query_key_weights(subject, inputs, anatomy=anatomy) if query_keys is None else query_keys
    values, failed = complete(
        precision_reading(model, loss_of, anatomy=anatomy, query_keys=query_keys, around=around, layers=layers)
    )
    for error in failed.values():
        raise error
    import xarray as xr

    names = [site.name for site in anatomy.sites]
    return xr.Dataset(
        {name: (PRECISION[name].dims[1:], value, PRECISION[name].attrs) for name, value in values.items()},
        {
            "layer": np.arange(len(names)),
            "head": np.arange(values[_BY_LAYER[-1]].shape[1]),
            "layer_name": ("layer", names),
        },
    )


def precision_reading(
    model: nn.Module,
    loss_of: LossOf,
    *,
    anatomy: Anatomy,
    query_keys: Sequence[QueryKey | Unreadable],
    around: Around = nullcontext,
    layers: Collection[int] | None = None,
) -> Measurement[tuple[dict[str, np.ndarray], dict[int, Exception]]]:
    """Measure the variables of `precision_errors`; return exceptions of blocks that cannot run alone, too."""
    known = {each.layer: each for each in query_keys if isinstance(each, QueryKey)}
    due = [layer for layer in trained_blocks(anatomy) if layers is None or layer in layers]
    measured, failed, limit = _measured(model, loss_of, anatomy, known, around, due)
    found = iter((yield [each for block in measured for each in block.norms]))
    n_heads = max((len(each.query) for each in known.values()), default=0)
    shapes = {"layer": (len(anatomy.sites),), "head": (len(anatomy.sites), n_heads), "step": ()}
    table = {name: np.full(shapes[variable.dims[-1]], np.nan) for name, variable in PRECISION.items()}
    table["excess_limit"][...] = limit
    for block in measured:
        row = _errors([next(found) for _ in block.norms], block.eps)
        for name, value in zip(_BY_LAYER, row, strict=False):
            table[name][(block.layer, slice(len(value))) if value.ndim else block.layer] = value
    return table, failed


def trained_blocks(anatomy: Anatomy) -> list[int]:
    """Return the layers whose arithmetic can be measured: modules with parameters that are trained."""
    return [
        layer
        for layer, site in enumerate(anatomy.sites)
        if site.exit is None and any(weight.requires_grad for weight in site.module.parameters())
    ]


@dataclass(frozen=True)
class BrokenArithmetic:
    """A block or head where the errors of a run's arithmetic are larger than rounding explains."""

    layer: int
    head: int
    error: float
    excess: float
    is_short: bool = False

    @property
    def sentence(self) -> str:
        """Description of the error, its place and its remedy."""
        where = f"gradient of layer {self.layer}"
        remedy = "a kernel of this block is wrong. Run it in float32."
        if not self.is_short:
            remedy = "a kernel or a cast of this block is wrong. Run it with torch's own kernels, without casts."
        if self.head >= 0:
            where = f"gradient of the queries of layer {self.layer}, head {self.head},"
            remedy = "the attention kernel is wrong. Run attention in float32 with torch's own kernel."
        size = f"{fine_percent(self.error)}, {self.excess:,.0f} times what rounding explains"
        return f"The {where} has an error of {size}: {remedy}"


def broken_arithmetic(errors: Mapping[str, Any]) -> BrokenArithmetic | None:
    """Find the block or head with the largest excess of error above the limit.

    Args:
        errors: Result of `precision_errors`, or the same variables of one step of a run; blocks with NaN do not count.

    Returns:
        The block, or the head if the error of its attention exceeds the limit; None if rounding explains all errors.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=32)
        >>> tokens = torch.arange(16).reshape(2, 8)
        >>> errors = wb.probes.precision_errors(model, lambda model: model(tokens).logsumexp(-1).mean())
        >>> wb.probes.broken_arithmetic(errors) is None
        True

    See Also:
        `workbench.probes.precision_errors`: Computes the errors.
    """
    limit = float(errors["excess_limit"])
    names = ("error_excess", "gradient_error", "query_error_excess", "query_gradient_error")
    block, block_error, heads, head_errors = (np.asarray(errors[name], dtype=np.float64) for name in names)
    most = np.nan_to_num(heads).max(axis=1, initial=0.0)
    known = block[np.isfinite(block)]
    # One of several blocks alone is judged by its own limit.
    is_pooled = known.size >= min(2, max(1, block.size)) and np.log(known.clip(1e-9)).mean() > np.log(limit)
    is_single = (block > _ONE_BLOCK * limit) | (most > _ONE_HEAD * limit)
    if not (is_pooled or is_single.any()):
        return None
    is_short = limit < _LIMITS[4]
    layer = int(np.argmax(np.where(is_single | is_pooled, np.fmax(block, most), 0)))
    if most[layer] > limit:
        head = int(np.nanargmax(heads[layer]))
        return BrokenArithmetic(layer, head, float(head_errors[layer, head]), float(heads[layer, head]), is_short)
    return BrokenArithmetic(layer, -1, float(block_error[layer]), float(block[layer]), is_short)


@dataclass
class _Call:
    """One call of a block: its inputs, and the gradient of the loss with respect to its output."""

    layer: int
    site: Site
    args: tuple
    kwargs: Mapping[str, Any]
    autocast: torch.dtype | None
    output: Tensor | None = None
    gradient: Tensor | None = None


def _inputs_of(model: nn.Module, loss_of: LossOf) -> Any:
    """Return the inputs that a loss passes to its model."""
    seen: list[Any] = []

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen.append(named_arguments(module, args, kwargs))

    with undisturbed(model), watch([(model, note, True)]):
        loss_of(model)
    if not seen:
        raise OptionError("loss_of did not call the model; return a loss of model(inputs).")
    return seen[0]


def _measured(
    model: nn.Module,
    loss_of: LossOf,
    anatomy: Anatomy,
    query_keys: Mapping[int, QueryKey],
    around: Around,
    layers: Sequence[int],
) -> tuple[list[_Block], dict[int, Exception], float]:
    """Return the norms of the given blocks on the device, the exceptions of others, and the limit of the excess."""
    measured, failed = [], dict[int, Exception]()
    with undisturbed(model), torch.enable_grad(), config_options(known_options(model, {"use_cache": False})):
        calls = _own_pass(model, loss_of, anatomy, around, layers) if layers else []
        with _disable_current_modes():  # blocks run on copies, which the modes that guard the model need not protect
            for call in calls:
                try:
                    measured.append(_compared(model, call, query_keys.get(call.layer), around))
                except Exception as error:  # noqa: BLE001  (the others can be measured; the caller is told)
                    failed[call.layer] = error
    return measured, failed, _limit_of(model, calls)


def _own_pass(
    model: nn.Module, loss_of: LossOf, anatomy: Anatomy, around: Around, layers: Sequence[int]
) -> list[_Call]:
    calls: dict[int, _Call] = {}

    def enter(call: BlockCall) -> None:
        device = call.state_in.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        calls[call.layer] = _Call(call.layer, call.site, _detached(call.args), _detached(call.kwargs), autocast)

    def leave(call: BlockCall) -> None:
        calls[call.layer].output = call.state_out

    with around(), BlockHooks(anatomy.sites, enter, leave, layers=layers):
        loss = require_graph(loss_of(model))
        done = [call for call in calls.values() if call.output is not None and call.output.requires_grad]
        gradients = _gradients(loss, [call.output for call in done if call.output is not None])
    for call, gradient in zip(done, gradients, strict=True):
        call.gradient, call.output = gradient, None
    return [call for call in done if call.gradient is not None]


def _gradients(loss: Tensor, states: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of a loss, in float16 at the largest scale without overflow, chosen without a wait."""
    kind = loss.device.type
    is_cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
    scales = _SCALES if is_cast or any(state.dtype == torch.float16 for state in states) else _SCALES[:1]
    found: Sequence[Tensor | None] = ()
    for scale in scales if states else ():
        larger = torch.autograd.grad(loss * scale, states, allow_unused=True, retain_graph=scale != scales[-1])
        sizes = [each.abs().amax().to(loss.device) for each in larger if each is not None and found]
        is_finite = torch.stack(sizes).isfinite().all() if sizes else None
        found = (
            larger
            if is_finite is None
            else [
                None if new is None or old is None else torch.where(is_finite.to(new.device), new, old)
                for new, old in zip(larger, found, strict=True)
            ]
        )
    return found


@dataclass(frozen=True)
class _Block:
    """Norms of a block on the device, and the rounding unit of its number format.

    ``norms`` are of the exact values and the errors of the run, of the plain pass and of rounding at random, shape (4,
    tensor), where the first tensor is the output and the others are gradients. Where the query weights are known, the
    same norms by head follow, (4, head), and the products of the run's errors with the exact values, (head,).
    """

    layer: int
    eps: float
    norms: list[Tensor]


def _compared(model: nn.Module, call: _Call, query_key: QueryKey | None, around: Around) -> _Block:
    """Run a block four times, and compare the results on the device."""
    assert call.gradient is not None
    module = call.site.module
    held = {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    copies = _copied(held)
    # Scaled to about 1 by a power of two, which is exact, so that float16 neither overflows nor underflows.
    size = call.gradient.abs().amax().double().clamp_min(torch.finfo(torch.float32).tiny)
    call.gradient = call.gradient * torch.exp2(-size.log2().floor())
    with around():
        own = _alone(call, copies)
    kinds = [kind for kind in (own[_OUTPUT].dtype, call.autocast) if kind is not None]
    is_by_tf32 = own[_OUTPUT].dtype == torch.float32 and _multiplies_by_tf32(call)
    with _torch_attention(model):
        # A fused kernel may not use tf32, and then has smaller errors than one that does.
        with sdpa_kernel(SDPBackend.MATH) if is_by_tf32 else nullcontext(), _only(call, call.autocast):
            plain = _alone(call, copies)
        with sdpa_kernel(SDPBackend.MATH), config_options(known_options(model, IN_FLOAT64)), _only(call, None):
            exact = _alone(call, _copied(held, torch.float64), torch.float64)
            with _Rounding(eps := max(torch.finfo(kind).eps for kind in kinds)):
                nudged = _alone(call, _copied(held, torch.float64), torch.float64)
    errors = [_copied({name: found[name] for name in exact}, torch.float64) for found in (own, plain, nudged)]
    for each in errors:
        torch._foreach_sub_([*each.values()], [*exact.values()])
    values = [exact, *errors]
    norms = [torch.stack(torch._foreach_norm([value for each in values for value in each.values()])).view(4, -1)]
    if query_key is not None and (name := _query_parameter(call, query_key)) in exact:
        recipe, matrices = query_key.query_recipe, torch.stack([each[name] for each in values])
        rows = (matrices if recipe.axis == 0 else matrices.mT)[:, on_device(recipe.index, matrices.device)].flatten(2)
        norms += [rows.norm(dim=-1), (rows[0] * rows[1]).sum(-1)]
    return _Block(call.layer, max(eps, _TF32_EPS) if is_by_tf32 else eps, norms)


def _errors(norms: Sequence[np.ndarray], eps: float) -> list[np.ndarray]:
    """Return the values of ``schema.PRECISION`` of one block: by layer, and by head where they are known."""
    with np.errstate(all="ignore"):
        size, error, explained, nudged = norms[0]
        output, plain = error[0] / size[0], explained[0] / size[0]
        gradient = np.linalg.norm(error[1:]) / np.linalg.norm(size[1:])
        excess = [
            output / np.maximum(plain, eps / 4),
            *error[1:] / np.maximum(np.maximum(explained, size * eps / 4), _TINY)[1:],
            # The block's own code may be broken, in both passes in the same way.
            output / np.fmax(_MOST_EPS * eps, nudged[0] / size[0]),
            gradient / np.fmax(_MOST_EPS * eps, np.linalg.norm(nudged[1:]) / np.linalg.norm(size[1:])),
        ]
        row = [output, gradient, np.max(excess)]
        if norms[1:]:
            (size, error, explained, _), along = norms[1:]
            row += [
                error / size,
                error / np.maximum(np.maximum(explained, size * eps / 4), _TINY),
                along / np.square(size),
            ]
    return row


def _copied(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return copies of tensors, those of real numbers in one call and in the given format."""
    real = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    copies = {name: torch.empty_like(tensor, dtype=dtype) for name, tensor in real.items()}
    torch._foreach_copy_(list(copies.values()), list(real.values()))
    return copies | {name: tensor.clone() for name, tensor in tensors.items() if name not in copies}


class _Rounding(TorchDispatchMode):
    """Change each result of an operation by a relative eps, up or down at random, as rounding it would."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self._eps, self._begin = eps, 0
        self._factors = torch.zeros(0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **kwargs or {})
        is_new = all(each.alias_info is None for each in func._schema.returns)
        return _mapped(found, self._rounded) if is_new else found

    def _rounded(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        n = tensor.numel()
        if self._factors.device != tensor.device or len(self._factors) <= n + _STRIDE:
            generator = torch.Generator(tensor.device).manual_seed(0)
            factors = torch.empty(n + n // 4 + 2 * _STRIDE, device=tensor.device, dtype=torch.float64)
            # In place: the largest tensor of a block may be a matrix of weights.
            self._factors = factors.random_(0, 2, generator=generator).mul_(2 * self._eps).add_(1 - self._eps)
        # One product for each operation: a further draw for each would be several.
        self._begin = (self._begin + _STRIDE) % (len(self._factors) - n)
        return tensor * self._factors[self._begin : self._begin + n].view(tensor.shape)


def _only(call: _Call, autocast: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return the context of one number format, whatever that of the run is."""
    assert call.gradient is not None
    return torch.autocast(call.gradient.device.type, dtype=autocast, enabled=autocast is not None)


def _alone(call: _Call, copies: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Run a block separately on copies of its tensors; return its output, and its gradients by parameter."""
    assert call.gradient is not None
    module = call.site.module

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    tensors = {name: copy.detach() for name, copy in copies.items()}
    trained = {name: tensors[name].requires_grad_() for name, w in module.named_parameters() if w.requires_grad}
    args, kwargs = _mapped(call.args, cast), _mapped(dict(call.kwargs), cast)
    output = call.site.state_out(functional_call(module, tensors, args, kwargs))
    given = call.gradient.to(output.dtype)
    gradients = torch.autograd.grad(output, list(trained.values()), given, allow_unused=True)
    known = {name: gradient for name, gradient in zip(trained, gradients, strict=True) if gradient is not None}
    return {_OUTPUT: output.detach(), **known}


def _multiplies_by_tf32(call: _Call) -> bool:
    """Return whether float32 products of a block are computed in tf32."""
    assert call.gradient is not None
    if call.gradient.device.type != "cuda":
        return False
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return True
    convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in call.site.module.modules())
    return convolves and attrgetter("conv.fp32_precision")(torch.backends.cudnn) == "tf32"


def _query_parameter(call: _Call, query_key: QueryKey) -> str:
    """Return the name of the query weights within the block; empty if a module computes them."""
    recipe = query_key.query_recipe
    return "" if recipe.is_module else recipe.parameter.removeprefix(call.site.name.split("#")[0] + ".")


@contextmanager
def _torch_attention(model: nn.Module) -> Iterator[None]:
    """Run attention with torch's own kernels, without modes and without replacements of its function."""
    given = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _TORCH_ATTENTION
    try:
        with torch._C.DisableTorchFunction(), config_options(visible_attention(model)):
            yield
    finally:
        functional.scaled_dot_product_attention = given


def _limit_of(model: nn.Module, calls: Sequence[_Call]) -> float:
    """Return the limit for the shortest number format among the parameters and autocast."""
    sizes = [weight.element_size() for weight in model.parameters() if weight.is_floating_point()]
    sizes += [call.autocast.itemsize for call in calls if call.autocast is not None]
    return _LIMITS[2 if min(sizes, default=4) <= 2 else 4]


def _detached(value: Any) -> Any:
    return _mapped(value, Tensor.detach)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(part, change) for name, part in value.items()}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(_mapped(part, change) for part in value)
    return value
