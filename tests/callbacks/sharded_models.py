"""Models as torchtitan and nanoGPT write them, and how they are split over ranks by FSDP2 and tensor parallelism."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

VOCAB, DIM, LENGTH, N_HEADS, N_KV_HEADS, N_LAYERS = 32, 16, 16, 4, 2, 2


def rotate(x, freqs):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs[None, : x.shape[1], None]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = DIM // N_HEADS
        self.wq = nn.Linear(DIM, N_HEADS * self.head_dim, bias=False)
        self.wk = nn.Linear(DIM, N_KV_HEADS * self.head_dim, bias=False)
        self.wv = nn.Linear(DIM, N_KV_HEADS * self.head_dim, bias=False)
        self.wo = nn.Linear(N_HEADS * self.head_dim, DIM, bias=False)

    def forward(self, x, freqs):
        b, t, _ = x.shape
        # -1 instead of the number of heads, as tensor parallelism leaves some of them on each rank
        q, k, v = (w(x).view(b, t, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, freqs), rotate(k, freqs)
        k, v = (each.repeat_interleave(N_HEADS // N_KV_HEADS, dim=2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(output.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(DIM, 3 * DIM, bias=False)
        self.w2 = nn.Linear(3 * DIM, DIM, bias=False)
        self.w3 = nn.Linear(DIM, 3 * DIM, bias=False)

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x, freqs):
        h = x + self.attention(self.attention_norm(x), freqs)
        return h + self.feed_forward(self.ffn_norm(h))


class Titan(nn.Module):
    """A model as in torchtitan."""

    def __init__(self, n_layers=N_LAYERS):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        angles = torch.outer(torch.arange(LENGTH), 100.0 ** -torch.linspace(0, 1, DIM // N_HEADS // 2))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(n_layers)})
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, targets=None):
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        h = self.norm(h) if self.norm is not None else h
        h = self.output(h) if self.output is not None else h
        if targets is None:
            return h
        return h, functional.cross_entropy(h.flatten(0, 1).double(), targets.flatten())  # as nanoGPT does


def titan(dtype=torch.float64, n_layers=N_LAYERS):
    torch.manual_seed(7)
    model = Titan(n_layers)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def stage_of_titan(model, index, n_stages):
    """Return a stage of a model as torchtitan makes it: names of parameters stay, other parts are removed."""
    names = [*model.layers]
    size = len(names) // n_stages
    for name in set(names) - set(names[index * size : (index + 1) * size]):
        del model.layers[name]
    if index > 0:
        model.tok_embeddings = None
    if index < n_stages - 1:
        model.norm = model.output = None
    return model


def split_by_tensors(model, mesh):
    """Split a model as torchtitan's ``apply_tp`` does, with sequence parallelism."""
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    for block in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(block, mesh, plan)


def split(model, kind, *, param_dtype=None, reshards=True):
    """Split a model over all ranks; return it and the number of ranks with other data, and which this one is."""
    n_ranks = torch.distributed.get_world_size()
    n_tensor = {"fsdp": 1, "tp": n_ranks, "2d": 2}[kind]
    mesh = init_device_mesh("cpu", (n_ranks // n_tensor, n_tensor), mesh_dim_names=("dp", "tp"))
    if n_tensor > 1:
        split_by_tensors(model, mesh["tp"])
    if n_tensor < n_ranks:
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32 if param_dtype else None)
        options = {"mesh": mesh["dp"], "mp_policy": policy, "reshard_after_forward": reshards}
        for block in model.layers.values():
            fully_shard(block, **options)
        fully_shard(model, **options)
    return model, n_ranks // n_tensor, mesh.get_local_rank("dp")
