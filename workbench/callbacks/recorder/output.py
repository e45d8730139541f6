"""Where observations go: the run's store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.callbacks.recorder.options import Observation, say
from workbench.errors import StoreError
from workbench.io.run_parts import Part
from workbench.schema.runs import MONITORS, PARTS

if TYPE_CHECKING:
    import xarray as xr

    from workbench.io.background_writer import BackgroundWriter

_ALONG = {"layer_name": "layer", "module_name": "module"}


class Output:
    """Takes observations and events of one attachment.

    Args:
        writer: Of the run's store; None: nothing is written.
        is_hosted: Whether the store is another's, who writes the numbers of each update and closes it.
    """

    def __init__(self, writer: BackgroundWriter | None, *, is_hosted: bool = False) -> None:
        self.writer, self.is_hosted = writer, is_hosted
        self._names: dict[str, frozenset[str]] = {}
        self._late: set[str] = set()
        self._lost: set[str] = set()

    @property
    def path(self) -> Path | None:
        """Of the store."""
        return None if self.writer is None else self.writer.path

    def add(self, observation: Observation) -> None:
        """Write an observation; trouble with it never stops the training."""
        part = observation.part
        if self.writer is None or (part == "monitors" and self.is_hosted):
            return
        try:
            if part in self._lost:
                return
            if part not in self._names:
                self.writer.declare(_declared(observation))
                self._names[part] = frozenset(observation.values)
            values = {name: value for name, value in observation.values.items() if name in self._names[part]}
            self._tell_late(observation, values)
            self.writer.add(part, observation.step, values)
        except StoreError as error:
            self._give_up(part, observation.step, error)

    def add_dataset(self, part: str, dataset: xr.Dataset) -> None:
        """Write a row that is a dataset; trouble with it never stops the training."""
        if self.writer is None:
            return
        try:
            self.writer.add_dataset(part, dataset)
        except StoreError as error:
            self._give_up(part, int(dataset["step"].item()), error)

    def event(self, step: int, kind: str, **what: Any) -> None:
        """Write an event."""
        if self.writer is not None:
            self.writer.event(step, kind, **what)

    def commit(self, **attrs: str) -> None:
        """Set attributes of the run, where it is the recorder's own."""
        if self.writer is not None and not self.is_hosted:
            self.writer.commit(**attrs)

    def flush(self) -> None:
        """Wait until everything is on disk."""
        if self.writer is not None:
            self.writer.flush()

    def end(self, step: int, *, is_broken: bool) -> None:
        """Write what there is."""
        if self.writer is None or self.is_hosted:
            return
        word = "stopped" if is_broken else "finished"
        self.event(step, word, message=f"{word.capitalize()} after {step} steps.")
        self.writer.close(state=word)

    def _tell_late(self, observation: Observation, kept: Mapping[str, Any]) -> None:
        for name in observation.values.keys() - kept.keys() - self._late:
            self._late.add(name)
            message = (
                f"'{name}' was first logged at step {observation.step}, when the table had begun without it; log it "
                "from the first step on, as NaN where there is none."
            )
            self.event(observation.step, "not recorded", source=name, message=message)
            say(message)

    def _give_up(self, part: str, step: int, error: StoreError) -> None:
        message = f"Part '{part}' is not written from step {step} on: {error}"
        self._lost.add(part)
        self.event(step, "not recorded", source=part, message=message)
        say(f"{message} Training goes on.")


def _declared(observation: Observation) -> Part:
    """What the rows of a part hold, for its store."""
    rules = MONITORS if observation.part == "monitors" else PARTS[observation.part]
    dims = {name: rules[name].dims[1:] if name in rules else () for name in observation.values}
    used = {dim for of_variable in dims.values() for dim in of_variable}
    coords: dict[str, Any] = {}
    for name, values in observation.coords.items():
        along = _ALONG.get(name, "module" if observation.part == "optimizer" and name == "layer" else name)
        if along in used:
            coords[name] = values.tolist() if along == name else (along, values.tolist())
    attrs = {name: rules[name].attrs for name in observation.values if name in rules}
    return Part(observation.part, dims, coords=coords, attrs=attrs)
