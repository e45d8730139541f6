"""Switches of faults on the page, each synchronized with its fault in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.widgets.live.latest_state import LatestState, script

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workbench.callbacks.faults import Fault


class FaultPanel(LatestState):
    """One switch for each fault, with a description of its effect.

    As in `KSSPanel`, the page sends the user's actions and shows the state of the kernel. A switch follows its fault
    when code or a schedule changes it.
    """

    _esm = script("latest_state.js", "fault_panel.js")
    _css = script("fault_panel.css")

    def __init__(self, faults: Sequence[Fault], guarded: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        self.faults = {fault.name: fault for fault in faults}
        self._turn = guarded(self._turn_as_asked)
        super().__init__()
        self._undo = [fault.observe(lambda name, before, after: self.refresh()) for fault in faults]

    def state(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return the state of the switches."""
        faults = [
            {"name": fault.name, "effect": fault.effect, "enabled": fault.enabled} for fault in self.faults.values()
        ]
        return {"faults": faults}, []

    def close(self) -> None:
        """Remove the panel; the faults stay unchanged."""
        while getattr(self, "_undo", None):
            self._undo.pop()()
        super().close()

    def _receive(self, _: Any, content: dict[str, Any], buffers: list[Any]) -> None:
        if "turn" in content:
            self._turn(content["turn"])
        super()._receive(_, content, buffers)

    def _turn_as_asked(self, asked: dict[str, bool]) -> None:
        for name, is_on in asked.items():
            self.faults[name].enabled = is_on
