"""Trials of inputs in many forms: each yields the spectra of the same inputs in standard form, or one error."""

from __future__ import annotations

import tempfile
import warnings
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import workbench as wb
from benchmarks.third_party.families import BERT, GPT2, LLAMA, VIT, VOCABULARY
from benchmarks.third_party.transformers_models import DECODER_LAYERS, make
from benchmarks.third_party.trial import Result, note_of
from workbench.errors import WorkbenchError

IDS = torch.randint(3, VOCABULARY, (12, 10), generator=torch.Generator().manual_seed(0))
BYTES = torch.randint(256, (12, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[:4, 6:] = 0


@dataclass(frozen=True)
class InputTrial:
    """One form of inputs and the expected outcome.

    Attributes:
        name: Description of the form.
        inputs: Function that creates the inputs.
        same: Inputs, or a function that creates them, whose spectra must be the same. If both ``same`` and
            ``n_states`` are None, the inputs must be rejected.
        model: Name of the model, an argument of `model_of`.
        options: Further options of ``wb.profile``.
        n_states: Number of states that must be used; None requires the same number as of ``same``.
    """

    name: str
    inputs: Callable[[], Any]
    same: Any = None
    model: str = "gpt2"
    options: tuple[tuple[str, Any], ...] = ()
    n_states: int | None = None


@cache
def model_of(name: str) -> nn.Module:
    """Return the model of a trial; repeated calls return the same object."""
    torch.manual_seed(0)
    if name == "t5":
        return make("AutoModelForSeq2SeqLM", "bart", DECODER_LAYERS)
    if name == "zoo":
        return wb.zoo.transformer(d_model=24, n_layers=3, n_heads=4)
    if name == "torch":
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0, batch_first=True), 3).eval()
    auto, kind, config = {
        "gpt2": ("AutoModelForCausalLM", "gpt2", GPT2),
        "llama": ("AutoModelForCausalLM", "llama", LLAMA),
        "bert": ("AutoModel", "bert", BERT),
        "vit": ("AutoModel", "vit", VIT),
    }[name]
    return make(auto, kind, config)


class Stream(IterableDataset):
    """Dataset that yields single rows and has no length."""

    def __iter__(self) -> Any:
        return iter(IDS)


class DictDataset(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": IDS[number], "labels": IDS[number]}


def encoding() -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})


def nested_tensor() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([IDS[0], IDS[1][:5]], layout=torch.jagged)


def of_vectors(name: str) -> Tensor:
    return model_of(name).get_input_embeddings()(IDS).detach()


def read_only() -> np.ndarray:
    array = IDS.numpy().copy()
    array.flags.writeable = False
    return array


def with_nan() -> Tensor:
    vectors = of_vectors("llama").clone()
    vectors[0, 0, 0] = float("nan")
    return vectors


def memory_mapped() -> np.ndarray:
    with tempfile.NamedTemporaryFile() as file:
        IDS.numpy().tofile(file.name)
        return np.memmap(file.name, dtype=np.int64, mode="r", shape=tuple(IDS.shape))


ALL = IDS
same = partial(InputTrial, same=ALL)
INPUTS = (
    # forms that must yield the spectra of the same inputs in standard form
    same("int64 tensor", lambda: IDS),
    same("int32 tensor", lambda: IDS.int()),
    same("int16 tensor", lambda: IDS.short()),
    same("uint8 tensor", lambda: IDS.to(torch.uint8)),
    same("uint16 tensor", lambda: IDS.to(torch.uint16)),
    same("uint32 tensor", lambda: IDS.to(torch.uint32)),
    same("numpy int64", IDS.numpy),
    same("numpy int32", lambda: IDS.numpy().astype(np.int32)),
    same("numpy uint16, as nanoGPT's files", lambda: IDS.numpy().astype(np.uint16)),
    same("numpy big endian", lambda: IDS.numpy().astype(">i8")),
    same("numpy with negative strides", lambda: IDS.numpy()[::-1][::-1]),
    same("numpy read-only", read_only),
    same("list of lists", IDS.tolist),
    same("tuple of a tensor", lambda: (IDS,)),
    same("dict", lambda: {"input_ids": IDS}),
    same("dict of lists", lambda: {"input_ids": IDS.tolist()}),
    same("dict of numpy", lambda: {"input_ids": IDS.numpy()}),
    same("dict with labels", lambda: {"input_ids": IDS, "labels": IDS}),
    same("dict with a mask of ones", lambda: {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}),
    same("dict with a boolean mask", lambda: {"input_ids": IDS, "attention_mask": IDS >= 0}),
    same("dict with a mask of floats", lambda: {"input_ids": IDS, "attention_mask": torch.ones(IDS.shape)}),
    same("dict with positions", lambda: {"input_ids": IDS, "position_ids": torch.arange(10).expand(12, 10)}),
    same("dict with None", lambda: {"input_ids": IDS, "attention_mask": None}),
    same("dict with a keyword that the model ignores", lambda: {"input_ids": IDS, "wings": IDS}),
    same("three axes of ids, which GPT-2 flattens", lambda: IDS[None]),
    same("OrderedDict", lambda: OrderedDict(input_ids=IDS)),
    same("UserDict", lambda: UserDict(input_ids=IDS)),
    same("BatchEncoding of transformers", encoding),
    same("list of batches", lambda: [IDS[:5], IDS[5:]]),
    same("list of rows", lambda: list(IDS)),
    same("list of numpy rows", lambda: list(IDS.numpy())),
    same("list of dicts", lambda: [{"input_ids": IDS[:5]}, {"input_ids": IDS[5:]}]),
    same("list of tuples", lambda: [(IDS[:5],), (IDS[5:],)]),
    same("generator", lambda: (row[None] for row in IDS)),
    same("generator of rows", lambda: iter(IDS)),
    same("DataLoader", lambda: DataLoader(IDS, batch_size=5)),
    same("DataLoader of a TensorDataset", lambda: DataLoader(TensorDataset(IDS), batch_size=5)),
    same("DataLoader of dicts", lambda: DataLoader(DictDataset(), batch_size=5)),
    same("DataLoader of a stream", lambda: DataLoader(Stream(), batch_size=5)),
    same("not contiguous", lambda: IDS.T.contiguous().T),
    same("a copy without gradients", lambda: IDS.clone().detach()),
    same("parameter", lambda: nn.Parameter(IDS, requires_grad=False)),
    same("memory-mapped file", memory_mapped),
    same("range of rows", lambda: {"input_ids": IDS[range(12)]}),
    InputTrial("one sequence, 1-D", lambda: IDS[0], IDS[:1]),
    InputTrial("one sequence, list", IDS[0].tolist, IDS[:1]),
    InputTrial("one sequence, numpy", IDS[0].numpy, IDS[:1]),
    InputTrial("lists of different lengths", lambda: [IDS[0].tolist(), IDS[1, :6].tolist()], [IDS[:1], IDS[1:2, :6]]),
    InputTrial("a task", lambda: wb.tasks.associative_recall(), wb.tasks.associative_recall(), "zoo"),
    InputTrial("vectors by keyword", lambda: {"inputs_embeds": of_vectors("llama")}, ALL, "llama"),
    InputTrial("vectors of a module", lambda: of_vectors("llama"), of_vectors, "torch"),
    InputTrial("images", lambda: IMAGES, IMAGES, "vit"),
    InputTrial("images as numpy", IMAGES.numpy, IMAGES, "vit"),
    InputTrial("images of bytes, which ViT converts", lambda: BYTES, BYTES.float(), "vit"),
    InputTrial("images by keyword", lambda: {"pixel_values": IMAGES}, IMAGES, "vit"),
    InputTrial("images, channels last in memory", lambda: IMAGES.to(memory_format=torch.channels_last), IMAGES, "vit"),
    InputTrial("padded on the right", lambda: {"input_ids": IDS, "attention_mask": MASK}, None, "bert", n_states=104),
    InputTrial("padded on the left", lambda: {"input_ids": IDS, "attention_mask": MASK.flip(1)}, n_states=104),
    InputTrial("encoder and decoder tokens", lambda: {"input_ids": IDS, "decoder_input_ids": IDS}, ALL, "t5"),
    InputTrial("the first token excluded", lambda: IDS, None, options=(("skip_first", 1),), n_states=108),
    # forms that must be rejected
    InputTrial("text without a tokenizer", lambda: "some text"),
    InputTrial("texts without a tokenizer", lambda: ["some text", "more text"]),
    InputTrial("numpy of strings", lambda: np.array(["a", "b"])),
    InputTrial("numpy of objects", lambda: IDS.numpy().astype(object)),
    InputTrial("bytes", lambda: b"text"),
    InputTrial("None", lambda: None),
    InputTrial("a number", lambda: 3.5),
    InputTrial("0-D tensor", lambda: torch.tensor(3)),
    InputTrial("empty list", list),
    InputTrial("empty generator", lambda: iter(())),
    InputTrial("empty dict", dict),
    InputTrial("no rows", lambda: IDS[:0]),
    InputTrial("no tokens, shape (8, 0)", lambda: IDS[:8, :0]),
    InputTrial("float ids", lambda: IDS.float()),
    InputTrial("bool ids", lambda: IDS > 9),
    InputTrial("complex ids", lambda: IDS.to(torch.complex64)),
    InputTrial("ids out of range", lambda: IDS + 60),
    InputTrial("negative ids", lambda: IDS - 60),
    InputTrial("too long for the positions", lambda: IDS.repeat(1, 7)),
    InputTrial("meta tensor", lambda: IDS.to("meta")),
    InputTrial("sparse tensor", lambda: IDS.to_sparse()),
    InputTrial("nested tensor", nested_tensor),
    InputTrial("quantized tensor", lambda: torch.quantize_per_tensor(IDS.float(), 1.0, 0, torch.quint8)),
    InputTrial("ragged rows in a dict", lambda: {"input_ids": [[1, 2, 3], [1, 2]]}),
    InputTrial("dict without ids", lambda: {"tokens": IDS}),
    InputTrial("dict of text", lambda: {"input_ids": "text"}),
    InputTrial("dict with a mask alone", lambda: {"attention_mask": MASK}),
    InputTrial("mask of the wrong shape", lambda: {"input_ids": IDS, "attention_mask": MASK[:, 3:8]}),
    InputTrial("mask that hides everything", lambda: {"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}),
    InputTrial("too many positional arguments", lambda: (IDS,) * 30),
    InputTrial("images for a language model", lambda: IMAGES),
    InputTrial("vectors for a language model", lambda: of_vectors("llama")),
    InputTrial("vectors of the wrong width", lambda: torch.randn(12, 10, 23), None, "torch"),
    InputTrial("vectors with NaN", lambda: {"inputs_embeds": with_nan()}, None, "llama"),
    InputTrial("one image alone", lambda: IMAGES[0], None, "vit"),
    InputTrial("images of the wrong size", lambda: torch.randn(4, 3, 20, 20), None, "vit"),
    InputTrial("images with one channel", lambda: torch.randn(4, 1, 16, 16), None, "vit"),
    InputTrial("images with channels last", lambda: torch.randn(4, 16, 16, 3), None, "vit"),
    InputTrial("tokens for an image model", lambda: IDS, None, "vit"),
    InputTrial("a module", lambda: nn.Linear(2, 2)),
    InputTrial("a function", lambda: len),
    InputTrial("a set", lambda: {1, 2, 3}),
    InputTrial("list with None", lambda: [IDS, None]),
    InputTrial("list of numbers and rows", lambda: [1, [2, 3]]),
    InputTrial("list of floats", lambda: [0.5, 1.5]),
    InputTrial("one token", lambda: IDS[:1, :1]),
    InputTrial("the same token everywhere", lambda: torch.full((12, 1), 5)),
)  # fmt: skip


def run(trial: InputTrial) -> Result:
    """Profile the inputs and the same inputs in standard form, and compare the spectra."""
    model = model_of(trial.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = wb.profile(model, trial.inputs(), n_snapshots=None, progress=False, **dict(trial.options))
        except WorkbenchError as error:
            is_expected = trial.same is None and trial.n_states is None
            if is_expected and "\n" in str(error):
                return Result("wrong", note=f"not one sentence: {error}")
            return Result("rejected as listed" if is_expected else "rejected unexpectedly", note=str(error))
        except Exception as error:  # noqa: BLE001  (any other exception is a defect)
            return Result("crash", note=note_of(error))
        n_states = found.attrs["n_snapshots"]
        if trial.n_states is not None:
            is_equal = n_states == trial.n_states
            return Result("works" if is_equal else "wrong", note="" if is_equal else f"{n_states} states")
        if trial.same is None:
            return Result("wrong", note=f"measured {n_states} states, expected a rejection")
        standard = trial.same("llama") if callable(trial.same) else trial.same
        expected = wb.profile(model, standard, n_snapshots=None, progress=False)
    is_same = n_states == expected.attrs["n_snapshots"] and np.allclose(
        found["spectral_radius"], expected["spectral_radius"], rtol=1e-3
    )
    return Result(
        "works" if is_same else "wrong",
        note="" if is_same else "spectra differ from those of the same inputs in standard form",
    )
