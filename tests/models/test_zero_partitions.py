"""Weights partitioned by ZeRO-3, in the layout that DeepSpeed's zero_to_fp32.py reads."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from tests.about import about, says
from tests.models.weight_models import assert_opens, rejection, small
from workbench.models.lazy_state import lazy_state
from workbench.models.weight_folders import is_partitioned


class _LossScaler:
    """An object of DeepSpeed in the state of the optimizer."""


def write(folder, model, n_ranks=2, *, n_groups=2, frozen=(), shared=None, prefix="", **others):
    """Write the files of DeepSpeed's save_checkpoint with ZeRO-3, and return their folder.

    Args:
        folder: Folder with ``latest``.
        model: The model.
        n_ranks: Number of ranks.
        n_groups: Number of groups of parameters.
        frozen: Names of parameters that are not trained.
        shared: Other name -> name of a parameter that is stored once.
        prefix: Prefix of the names of the optimizer's files.
        others: Further entries of the model's files.
    """
    place = folder / "global_step5"
    place.mkdir(parents=True)
    (folder / "latest").write_text("global_step5")
    shared = shared or {}
    parameters = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False) if n not in shared}
    trained = [(name, p) for name, p in parameters.items() if name not in frozen]
    groups = [trained[i * len(trained) // n_groups : (i + 1) * len(trained) // n_groups] for i in range(n_groups)]
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}

    def part(tensor, rank):
        length = -(-tensor.numel() // n_ranks)
        padded = torch.zeros(length * n_ranks)
        padded[: tensor.numel()] = tensor.flatten()
        return padded[rank * length : (rank + 1) * length].clone()

    for rank in range(n_ranks):
        content = {
            "module": {**{name: torch.empty(0) for name in parameters}, **buffers},
            "buffer_names": list(buffers),
            "param_shapes": [OrderedDict((name, p.shape) for name, p in group) for group in groups],
            "shared_params": shared,
            "frozen_param_shapes": OrderedDict((name, parameters[name].shape) for name in frozen) or None,
            "frozen_param_fragments": OrderedDict((name, part(parameters[name], rank)) for name in frozen) or None,
            "ds_version": "0.16.0",
            **others,
        }
        torch.save(content, place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        optimizer = {
            "zero_stage": 3,
            "partition_count": n_ranks,
            "loss_scaler": _LossScaler(),
            "fp32_flat_groups": [torch.cat([part(p, rank) for _, p in group]) for group in groups],
        }
        file = place / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_config": {}}, file)
    return place


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 12])
@pytest.mark.parametrize("n_groups", [1, 2])
def test_the_parts_of_all_ranks_are_merged(n_ranks, n_groups, tmp_path):
    model = small()
    place = write(tmp_path, model, n_ranks, n_groups=n_groups, prefix="bf16_" if n_ranks == 3 else "")
    assert is_partitioned(place)
    assert_opens(tmp_path, model)
    assert_opens(place, model)


class _Mixed(nn.Module):
    """A module with a buffer, and with one parameter under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(3, 5)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(5)


def test_frozen_and_shared_parameters_and_buffers(tmp_path):
    torch.manual_seed(0)
    model = _Mixed()
    model.norm.running_mean += 3
    write(tmp_path, model, 4, frozen=["norm.weight", "first.bias"], shared={"second.weight": "first.weight"})
    state = lazy_state(tmp_path)
    assert state.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name].read(), tensor)
        assert (state[name].shape, state[name].dtype) == (tuple(tensor.shape), tensor.dtype)


def test_incomplete_folders_are_rejected(tmp_path):
    place = write(tmp_path / "a", small(), 3)
    for file in place.glob("zero_pp_rank_2_*"):
        file.unlink()
    assert says("does not contain all parts of its weights: there are files")(rejection(tmp_path / "a", small(9)))
    for i, wrong in enumerate(({"param_shapes": []}, {"param_shapes": None}, {"buffer_names": ["x"]})):
        place = write(tmp_path / str(i), small(), 2, **wrong)
        assert about(str(place))(rejection(tmp_path / str(i), small(9)))
    place = write(tmp_path / "b", small())
    file = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (place / file).write_bytes(b"PK")
    assert says("is damaged or incomplete; download it again.")(rejection(tmp_path / "b", small(9)))
    torch.save([1], place / file)
    assert says("contains no dict of tensors; download it again.")(rejection(tmp_path / "b", small(9)))
