"""Folders of PyTorch's distributed checkpoint, written by torch, and of Megatron, which have the same format."""

import importlib
import json
import pickle
import shutil
from contextlib import suppress

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from tests.about import about, says
from tests.models.weight_models import Bomb, assert_opens, rejection, small
from workbench.models import distributed_folders
from workbench.models.distributed_folders import are_tiles
from workbench.models.lazy_state import lazy_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_tensors_of_every_dtype_and_shape_are_read(dtype, tmp_path):
    state = {"scalar": torch.tensor(1.0), "empty": torch.zeros(0, 3), "view": torch.arange(12.0).reshape(3, 4).T}
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    dcp.save(dict(state), checkpoint_id=tmp_path)
    lazy = lazy_state(tmp_path)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in lazy.items()} == {
        name: (tuple(tensor.shape), dtype) for name, tensor in state.items()
    }
    for name, tensor in state.items():
        assert torch.equal(lazy[name].read().double(), tensor.double())


def change_metadata(folder, change):
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def split(folder, tensor, boxes):
    """Split a saved tensor into several chunks, as several ranks would have saved it.

    Args:
        folder: A DCP folder.
        tensor: Name and values of the tensor.
        boxes: Offsets and sizes of its chunks.
    """
    name, values = tensor

    def change(metadata):
        old = metadata.storage_data.pop(MetadataIndex(name, [0] * values.ndim))
        entry = metadata.state_dict_metadata[name]
        entry.chunks = []
        for i, (offsets, sizes) in enumerate(boxes):
            part = values[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].clone()
            file = folder / f"__{i + 1}_0.distcp"
            start = file.stat().st_size if file.exists() else 0
            with file.open("ab") as out:
                torch.save(part, out)
            info = type(old)(file.name, start, file.stat().st_size - start)
            metadata.storage_data[MetadataIndex(name, offsets)] = info
            entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))

    change_metadata(folder, change)


def test_chunks_of_several_ranks_are_assembled(tmp_path):
    model = small()
    dcp.save({"model": model}, checkpoint_id=tmp_path)
    head = ("model.head.weight", model.head.weight.detach())
    split(tmp_path, head, [((0, 0), (10, 16)), ((10, 0), (22, 7)), ((10, 7), (22, 9))])
    assert_opens(tmp_path, model)
    for wrong in ([((0, 0), (10, 16))], [((0, 0), (10, 16)), ((20, 0), (22, 16))], []):
        change_metadata(tmp_path, lambda m: m.storage_data.update({MetadataIndex(head[0], (0, 0)): _info(m)}))
        split(tmp_path, head, wrong)
        assert says("does not hold all parts of model.head.weight; download the")(rejection(tmp_path, small(9)))


def _info(metadata):
    return next(iter(metadata.storage_data.values()))


@pytest.mark.parametrize("place", ["alone", "planner_data", "storage_data", "state_dict_metadata"])
def test_code_in_the_metadata_is_not_run(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dcp.save({"model": small()}, checkpoint_id=tmp_path)
    if place == "alone":
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb()))
    else:
        change_metadata(tmp_path, lambda metadata: getattr(metadata, place).update({"x": Bomb()}))
    assert about(".metadata", "io.open is not allowed")(rejection(tmp_path, small(9)))
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["eval", "torch.hub", "torch.load", "posix.system", "collections.Counter"])
def test_no_other_name_is_looked_up(name, tmp_path):
    module, _, name = f"builtins.{name}".rpartition(".") if "." not in name else name.rpartition(".")
    dcp.save({"model": small()}, checkpoint_id=tmp_path)
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{name}\n.".encode())
    assert about(".metadata", f"{module}.{name} is not allowed")(rejection(tmp_path, small(9)))


def looked_up():
    """Return every name that a metadata file may hold, as text and as the object of that name."""
    tables = [*distributed_folders._ALLOWED_CLASSES.items(), *distributed_folders._IMMUTABLE.items()]
    names = [(module, name) for module, names in tables for name in names]
    names += [("torch", "float32"), ("torch", "strided"), ("pathlib", "PurePosixPath"), ("pathlib", "PosixPath")]
    return {pair: getattr(importlib.import_module(pair[0]), pair[1]) for pair in names}


def state_of(found):
    """Return the attributes of an object, of its class, and of the members of an enumeration."""
    owners = [found, type(found), *getattr(found, "__members__", {}).values()]
    return [(id(owner), {k: id(v) for k, v in vars(owner).items()}) for owner in owners if hasattr(owner, "__dict__")]


NAMES = st.sampled_from(
    ["name", "fqn", "offset", "__eq__", "__init__", "__setstate__", "dtype", "_value_", "__class__"]
)
GLOBALS = st.sampled_from(sorted(looked_up())).map(lambda pair: f"c{pair[0]}\n{pair[1]}\n".encode())
PLAIN = st.integers(0, 3).map(lambda n: f"I{n}\n".encode()) | NAMES.map(lambda n: f"V{n}\n".encode()) | st.just(b"N")
OPCODES = st.recursive(
    GLOBALS | PLAIN,
    lambda one: st.one_of(
        st.lists(one, max_size=3).map(lambda parts: b"(" + b"".join(parts) + b"t"),
        st.lists(st.tuples(PLAIN, one), max_size=2).map(lambda pairs: b"(" + b"".join(sum(pairs, ())) + b"d"),
        st.tuples(one, one, st.sampled_from([b"R", b"\x81", b"b"])).map(b"".join),
        st.tuples(one, PLAIN, one).map(lambda three: three[0] + b"N}" + three[1] + three[2] + b"s\x86b"),
        st.tuples(one, one).map(lambda two: two[0] + two[1] + b"a"),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(opcodes=OPCODES)
@example(opcodes=b"cpathlib\nPurePosixPath\nN}Vname\nV../a\ns\x86b")
@example(opcodes=b"ctorch.distributed._shard.sharded_tensor.metadata\nMEM_FORMAT_ENCODING\n(I0\ntR}V_value_\nI9\nsb")
@example(opcodes=b"ctorch.serialization\n_get_layout\nN}V__defaults__\n(I9\nts\x86b")
@example(opcodes=b"ctorch.distributed.checkpoint.metadata\nMetadata\n}V__init__\nN\nsb")
def test_no_pickle_changes_what_it_may_name(opcodes):
    known = looked_up()
    before = {pair: state_of(found) for pair, found in known.items()}
    with suppress(Exception):
        distributed_folders._Unpickler(b"\x80\x02" + opcodes + b".").load()
    assert {pair: state_of(found) for pair, found in looked_up().items()} == before


def test_damaged_folders_are_rejected(tmp_path):
    intact = tmp_path / "intact"
    dcp.save({"model": small()}, checkpoint_id=intact)

    def damaged(change):
        folder = shutil.copytree(intact, tmp_path / "damaged", dirs_exist_ok=True)
        change(folder)
        return rejection(folder, small(9))

    data = (intact / "__0_0.distcp").read_bytes()
    noise = bytes(len(data))
    error = damaged(lambda f: (f / "__0_0.distcp").write_bytes(noise))
    assert says("__0_0.distcp")(error)

    def outside(metadata):
        _info(metadata).relative_path = "../intact/__0_0.distcp"

    assert about("relative_path", "../intact/__0_0.distcp")(damaged(lambda f: change_metadata(f, outside)))

    def compressed(metadata):
        _info(metadata).transform_descriptors = ["zstd"]

    assert about("transform_descriptors", ("zstd",))(damaged(lambda f: change_metadata(f, compressed)))

    names = [n for n in lazy_state(intact) if n.endswith("norm.weight")]

    def swapped_places(metadata):
        a, b = MetadataIndex("model.head.weight", (0, 0)), MetadataIndex(f"model.{names[0]}", (0,))
        places = metadata.storage_data
        places[a], places[b] = places[b], places[a]

    error = damaged(lambda f: change_metadata(f, swapped_places))
    assert "model.head.weight" in str(error) or f"model.{names[0]}" in str(error)


def test_safetensors_of_several_ranks_are_assembled(tmp_path):
    model = small()
    for rank, rows in enumerate((slice(0, 10), slice(10, 32))):
        state = {name: tensor for i, (name, tensor) in enumerate(model.state_dict().items()) if i % 2 == rank}
        state["head.weight"] = model.head.weight.detach()[rows].clone()
        places = {"head.weight": {"saved_offsets": [rows.start, 0]}}
        file = tmp_path / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        save_file(state, file, metadata={"DCP_SHARDING_INFO": json.dumps(places)})
        assert about(file.name, None, "a file of complete tensors")(rejection(file, small(9)))
    assert_opens(tmp_path, model)
    tensor = lazy_state(tmp_path)["head.weight"]
    assert (tensor.shape, tensor.dtype, tensor.n_bytes) == ((32, 16), torch.float32, 32 * 16 * 4)
    for wrong in ("{", '{"head.weight": 3}', '{"head.weight": {"saved_offsets": "x"}}', "[]"):
        save_file(state, file, metadata={"DCP_SHARDING_INFO": wrong})
        assert says("is damaged at DCP_SHARDING_INFO; download the checkpoint")(rejection(tmp_path, small(9)))
    save_file(state, file, metadata={"DCP_SHARDING_INFO": '{"head.weight": {"saved_offsets": [10]}}'})
    assert says("is damaged at head.weight; download the checkpoint again.")(rejection(tmp_path, small(9)))
    for first in (0, 9, 11):  # repeated, overlapping, or with a gap
        places = {"head.weight": {"saved_offsets": [first, 0]}}
        save_file(state, file, metadata={"DCP_SHARDING_INFO": json.dumps(places)})
        found = (tmp_path, "complete") if first else (file, "undamaged")
        assert about("head.weight", *found)(rejection(tmp_path, small(9)))


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ((4, 3), [((0, 0), (4, 3))], True),
        ((4, 3), [((0, 0), (1, 3)), ((1, 0), (3, 2)), ((1, 2), (3, 1))], True),
        ((4, 3), [((0, 0), (4, 3)), ((4, 0), (0, 3))], True),  # a rank that holds nothing
        ((), [((), ())], True),
        ((4,), [((0,), (2,)), ((1,), (1,)), ((3,), (1,))], False),  # 4 elements, one of them twice and one missing
        ((4,), [((0,), (3,))], False),
        ((4,), [((1,), (4,))], False),
        ((4,), [((-1,), (4,))], False),
        ((4,), [((4,), (-4,)), ((0,), (4,)), ((0,), (4,))], False),
        ((4,), [((0, 0), (2, 2))], False),
        ((), [], False),
    ],
)
def test_parts_must_fill_a_tensor_and_not_overlap(shape, boxes, expected):
    assert are_tiles(shape, boxes) is expected
