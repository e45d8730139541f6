"""Trials of one model in different forms of execution: compiled, sharded, offloaded, quantized, adapted or exported.

The expected states are those of the model before it is changed, because most changes keep the function and thus the
spectra. Where a change alters the function, they are those of a changed copy (`after`).
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from benchmarks.third_party.families import LLAMA, VOCABULARY
from benchmarks.third_party.transformers_models import make
from benchmarks.third_party.trial import Trial, call, hooked

LAYERS = "model.layers.*"


def llama(**options: Any) -> nn.Module:
    return make("AutoModelForCausalLM", "llama", {**LLAMA, **options})


def ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (24, 7))


def with_mesh(partition: Callable[[nn.Module, Any], nn.Module], model: nn.Module) -> nn.Module:
    """Return the model, partitioned over a group of one process."""
    from torch.distributed.device_mesh import init_device_mesh

    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    return partition(model, init_device_mesh("cpu", (1,)))


def fsdp2(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def ddp(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def compiled_blocks(model: nn.Module, *, in_place: bool) -> nn.Module:
    for number, layer in enumerate(model.model.layers):
        if in_place:
            layer.compile(backend="eager")
        else:
            model.model.layers[number] = torch.compile(layer, backend="eager")
    return model


def offloaded(model: nn.Module, *, to_disk: bool) -> nn.Module:
    from accelerate import cpu_offload, disk_offload

    host = torch.device("cpu")
    return disk_offload(model, tempfile.mkdtemp(), host) if to_disk else cpu_offload(model, host)


def adapted(model: nn.Module, kind: str = "LoraConfig", **options: Any) -> nn.Module:
    import peft

    return peft.get_peft_model(model, getattr(peft, kind)(**{"target_modules": ["q_proj", "v_proj"], **options})).eval()


def quantized(model: nn.Module, config: str, **options: Any) -> nn.Module:
    from torchao import quantization

    quantization.quantize_(model, getattr(quantization, config)(**options))
    return model


def torch_quantized(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def checkpointing(model: nn.Module, **options: Any) -> nn.Module:
    model.gradient_checkpointing_enable(**options)
    return model.train()


def weight_norm(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        nn.utils.parametrizations.weight_norm(layer.mlp.up_proj)
        nn.utils.parametrizations.spectral_norm(layer.self_attn.o_proj)
    return model


def traced(model: nn.Module) -> nn.Module:
    model.config.use_cache = False
    return torch.jit.trace(Wrapper(model), ids(), check_trace=False)


def exported(model: nn.Module) -> nn.Module:
    model.config.use_cache = False
    return torch.export.export(model, (ids(),)).module()


class Wrapper(nn.Module):
    """A module that contains the model and has its own ``forward``."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.net, self.loss = model, nn.CrossEntropyLoss()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.net(input_ids).logits


def lightning_module(model: nn.Module, *, has_forward: bool) -> nn.Module:
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

    class Forward(Lit):
        def forward(self, x: Tensor) -> Any:
            return self.net(x)

    return (Forward if has_forward else Lit)()


def run_before(model: nn.Module, **options: Any) -> nn.Module:
    """Return the model after a forward pass with other options."""
    with torch.no_grad():
        call(model, {"input_ids": ids(), **options})
    return model


def generated(model: nn.Module) -> nn.Module:
    model.generate(ids()[:1], max_new_tokens=3, do_sample=False)
    return model


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def in_training(model: nn.Module) -> nn.Module:
    return model.train()


def hooked_by_user(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: None)
    return model


def steered(model: nn.Module) -> nn.Module:
    """Register a user hook that changes the output of a block."""
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.5)
    return model


def execution(
    name: str, change: Callable[[nn.Module], nn.Module] | None = None, *, needs: tuple[str, ...] = (), rejection: str = "",
    inputs: Callable[[], Any] = ids, states: Any = LAYERS, dtype: torch.dtype | None = None, **config: Any,
) -> Trial:  # fmt: skip
    def build() -> tuple[nn.Module, Any]:
        return llama(**config).to(dtype), inputs()

    return Trial(name, build, states, 3, 24, rejection, {}, change, needs)


def after(change: Callable[[nn.Module], nn.Module], pattern: str) -> Callable[[nn.Module, Any], Any]:
    """Return a function that records the states of a changed copy of the model."""

    def states(model: nn.Module, inputs: Any) -> Any:
        torch.manual_seed(1)  # the seed with which the trial applies the change
        return hooked(change(copy.deepcopy(model)), inputs, pattern, 24)

    return states


def masked() -> dict[str, Tensor]:
    return {"input_ids": ids(), "attention_mask": torch.ones(24, 7, dtype=torch.int64), "use_cache": True}


int8_weights = partial(quantized, config="Int8WeightOnlyConfig")
int8_activations = partial(quantized, config="Int8DynamicActivationInt8WeightConfig")

EXECUTION = (
    execution("eager attention", attn_implementation="eager"),
    execution("SDPA", attn_implementation="sdpa"),
    execution("flex_attention", attn_implementation="flex_attention"),
    execution("KV cache", inputs=masked),
    execution("bfloat16", dtype=torch.bfloat16),
    execution("float16", dtype=torch.float16),
    execution("float64", dtype=torch.float64),
    execution("training mode", in_training),
    execution("frozen", frozen),
    execution("user hooks", hooked_by_user),
    execution("user hook that changes a state", steered, states=after(steered, LAYERS)),
    execution("after generate()", generated),
    execution("after output_hidden_states=True", partial(run_before, output_hidden_states=True)),
    execution("gradient checkpointing", checkpointing),
    execution("gradient checkpointing, reentrant", partial(checkpointing, gradient_checkpointing_kwargs={"use_reentrant": True})),
    execution("torch.compile", partial(torch.compile, backend="eager")),
    execution("torch.compile, blocks replaced", partial(compiled_blocks, in_place=False)),
    execution("torch.compile, blocks in place", partial(compiled_blocks, in_place=True)),
    execution("DistributedDataParallel", partial(with_mesh, ddp)),
    execution("DataParallel", nn.DataParallel),
    execution("FSDP2", partial(with_mesh, fsdp2)),
    execution("FSDP1, original parameters", partial(with_mesh, partial(fsdp1, use_orig_params=True))),
    execution("FSDP1, flat parameters", partial(with_mesh, fsdp1), rejection="flat parameters do not show which module a weight belongs to"),
    execution("tensor parallel (DTensor)", partial(with_mesh, tensor_parallel)),
    execution("PEFT LoRA", adapted, needs=("peft",)),
    execution("PEFT DoRA", partial(adapted, use_dora=True), needs=("peft",)),
    execution("PEFT IA3", partial(adapted, kind="IA3Config", feedforward_modules=[]), needs=("peft",)),
    execution("PEFT LoRA, merged", lambda model: adapted(model).merge_and_unload(), needs=("peft",)),
    execution("torchao int8 weights", int8_weights, needs=("torchao",), states=after(int8_weights, LAYERS)),
    execution("torchao int8 activations", int8_activations, needs=("torchao",), states=after(int8_activations, LAYERS)),
    execution("dynamic quantization of torch", torch_quantized, states=after(torch_quantized, LAYERS)),
    execution("offloaded to memory", partial(offloaded, to_disk=False), needs=("accelerate",)),
    execution("offloaded to disk", partial(offloaded, to_disk=True), needs=("accelerate",)),
    execution("weight norm and spectral norm", weight_norm, states=after(weight_norm, LAYERS)),
    execution("inside another module", Wrapper),
    execution("LightningModule with forward", partial(lightning_module, has_forward=True), needs=("lightning",)),
    execution("LightningModule without forward", partial(lightning_module, has_forward=False), needs=("lightning",)),
    execution("torch.jit.trace", traced, rejection="TorchScript has no Python modules to hook"),
    execution("torch.export", exported, rejection="an exported graph has no modules"),
    execution("on the meta device", lambda model: model.to("meta"), rejection="parameters without values"),
)  # fmt: skip
