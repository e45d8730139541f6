"""Controls of KSS on the page, synchronized with a `workbench.KSS` in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.widgets.live.latest_state import LatestState, script

if TYPE_CHECKING:
    from collections.abc import Callable

    from workbench.callbacks.kss import KSS


class KSSPanel(LatestState):
    """Controls of switch, strength and interval.

    The page sends only the user's actions and shows the state of the kernel, so it can never restore an old value.

    Args:
        kss: The KSS to control.
        guarded: Wraps the requests of the page, so that errors are shown to the user.
    """

    _esm = script("latest_state.js", "kss_panel.js")
    _css = script("kss_panel.css")

    def __init__(self, kss: KSS, guarded: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        self.kss = kss
        self._set = guarded(self._set_as_asked)
        super().__init__()
        self._stop_observing = kss.observe(lambda name, before, after: self.refresh())

    def state(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return the state of the controls."""
        control = self.kss.control
        return {"enabled": control.enabled, "strength": control.strength, "interval": control.interval}, []

    def close(self) -> None:
        """Remove the panel; KSS stays unchanged."""
        if hasattr(self, "_stop_observing"):
            self._stop_observing()
        super().close()

    def _receive(self, _: Any, content: dict[str, Any], buffers: list[Any]) -> None:
        if "set" in content:
            self._set(content["set"])
        super()._receive(_, content, buffers)

    def _set_as_asked(self, controls: dict[str, Any]) -> None:
        try:
            self.kss.set(**controls)
        finally:  # the page must also drop a rejected value
            self.refresh()
