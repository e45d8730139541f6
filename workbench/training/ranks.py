"""Several processes that train one model, by DDP or FSDP2; alone, every operation leaves its value as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from workbench.errors import OptionError, WorkbenchError
from workbench.models.batches import count_examples, take_examples
from workbench.models.calling import is_shared, message_device
from workbench.models.checkpoint import is_sharded


class Ranks:
    """The ranks that train a model; one alone if it is neither wrapped by DDP nor sharded.

    Args:
        model: Model that the loop calls.
    """

    def __init__(self, model: nn.Module) -> None:
        is_wrapped = any(isinstance(each, nn.parallel.DistributedDataParallel) for each in model.modules())
        self.are_several = is_shared() and (is_wrapped or any(map(is_sharded, model.parameters())))
        self.rank = distributed.get_rank() if self.are_several else 0
        self.n = distributed.get_world_size() if self.are_several else 1

    def own_rows(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return every n-th example of a batch, those of this rank.

        Raises:
            OptionError: If the examples cannot be divided equally, which would weight them differently.
        """
        if not self.are_several:
            return batch
        if (n_examples := count_examples(batch[0])) % self.n:
            raise OptionError(
                f"A batch of {n_examples} examples cannot be divided among {self.n} ranks; choose a batch size that is "
                f"a multiple of {self.n}."
            )
        inputs, targets = (take_examples(part, slice(self.rank, None, self.n)) for part in batch)
        return inputs, targets

    def means(self, numbers: Sequence[float]) -> list[float]:
        """Return the means of numbers over ranks."""
        if not self.are_several:
            return [*numbers]
        message = torch.tensor(numbers, dtype=torch.float64, device=message_device())
        distributed.all_reduce(message)
        return (message / self.n).tolist()

    def each(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        found: list[Any] = [value] * self.n
        if self.are_several:
            distributed.all_gather_object(found, value)
        return found

    def on_first(self, function: Callable[[], Any]) -> Any:
        """Call a function on the first rank alone; its errors are raised on all ranks. Others receive None."""
        found, problem = None, None
        if self.rank == 0:
            try:
                found = function()
            except WorkbenchError as error:
                problem = error
        if (problem := self.each(problem)[0]) is not None:
            raise problem
        return found


def whole(value: Any, _gathered: dict[int, Tensor] | None = None) -> Any:
    """Return a state in which tensors that are sharded over ranks are complete; to be called on every rank."""
    gathered = {} if _gathered is None else _gathered
    if is_sharded(value):
        place = value.to_local().data_ptr()  # tied parameters remain one
        if place not in gathered or gathered[place].shape != value.shape:
            gathered[place] = value.full_tensor()
        return gathered[place]
    if isinstance(value, Mapping):
        return type(value)((key, whole(each, gathered)) for key, each in value.items())  # type: ignore[call-arg]
    return [whole(each, gathered) for each in value] if isinstance(value, list) else value


def replicated(value: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that every rank has, in a form that can be multiplied with another one."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
