"""The face of the workbench: widgets for JupyterLab. The public names load when first used."""

from __future__ import annotations

import importlib
from typing import Any

#: Public name -> module:attribute.
_PUBLIC = {
    "ArchitectureComparison": "widgets.architecture_comparison:ArchitectureComparison",
    "AssessmentReport": "widgets.assessment_report:AssessmentReport",
    "LiveTraining": "widgets.live_training:LiveTraining",
    "RiskExplorer": "widgets.risk_explorer:RiskExplorer",
    "SpectrumExplorer": "widgets.spectrum_explorer:SpectrumExplorer",
    "Timeline": "widgets.timeline:Timeline",
    "show": "widgets.figure:show",
}

__all__ = sorted(_PUBLIC)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'widgets' has no attribute '{name}'")
    module, attribute = _PUBLIC[name].split(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
