"""A damaged checkpoint is refused before anything of the run is changed."""

import pytest
import torch

import workbench as wb


@pytest.mark.parametrize(
    ("name", "value"),
    [("optimizer", {}), ("optimizer", {"state": {}, "param_groups": []}), ("random", {}), ("step", None)],
)
def test_a_damaged_state_changes_no_parameter(name, value, make_model, task, tmp_path):
    options = {"n_steps": 4, "store": tmp_path / "a.zarr", "checkpoint_every": 2}
    list(wb.train(make_model(), task, **options))
    for file in (tmp_path / "a.checkpoints").glob("*/training.pt"):
        kept = torch.load(file, weights_only=True)
        kept[name] = value
        if value is None:
            del kept[name]
        torch.save(kept, file)
    model = make_model()
    before = [weight.detach().clone() for weight in model.parameters()]
    with pytest.raises(wb.errors.CheckpointError, match="is damaged"):
        list(wb.train(model, task, **options, resume=True))
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
