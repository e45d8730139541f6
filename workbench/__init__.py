"""Stability Workbench: Koopman spectra of transformers, and what they say about training stability.

The public names load when first used, so that ``import workbench`` is quick and stays headless.
"""

from __future__ import annotations

import importlib
from typing import Any

#: Public name -> the module that it is, or module:attribute.
_PUBLIC = {
    "spectral": "workbench.spectral",
    "plots": "workbench.plots",
    "zoo": "workbench.subjects.zoo",
    "tasks": "workbench.training.tasks",
    "samples": "workbench.subjects.samples",
    "published": "workbench.published",
    "outcomes": "workbench.outcomes",
    "early_warning": "workbench.early_warning",
    "risk": "workbench.assessment.risk",
    "monitors": "workbench.monitors",
    "flow": "workbench.flow",
    "hardware": "workbench.hardware",
    "scaling": "workbench.scaling",
    "design": "workbench.scaling.design:design",
    "scaling_study": "workbench.scaling:scaling_study",
    "diagnosis": "workbench.diagnosis",
    "diagnose": "workbench.diagnosis:diagnose",
    "report": "workbench.reports:report",
    "assess": "workbench.assessment.assess:assess",
    "compare_designs": "workbench.assessment.design_comparison:compare_designs",
    "schema": "workbench.schema",
    "signals": "workbench.signals",
    "errors": "workbench.errors",
    "open_checkpoint": "workbench.subjects.checkpoint:open_checkpoint",
    "save_checkpoint": "workbench.subjects.checkpoint:save_checkpoint",
    "Subject": "workbench.subjects.checkpoint:Subject",
    "read_anatomy": "workbench.subjects.anatomy:read_anatomy",
    "query_key_weights": "workbench.subjects.attention_weights:query_key_weights",
    "router_weights": "workbench.subjects.routers:router_weights",
    "profile": "workbench.spectral.profile:profile",
    "summarize": "workbench.spectral.measures:summarize",
    "depth_thirds": "workbench.spectral.measures:depth_thirds",
    "remeasure": "workbench.spectral.measures:remeasure",
    "compare": "workbench.comparison:compare",
    "Thresholds": "workbench.spectral.measures:Thresholds",
    "DmdOptions": "workbench.spectral.dmd:DmdOptions",
    "train": "workbench.training.loop:train",
    "kss": "workbench.training.kss",
    "KSS": "workbench.training.kss:KSS",
    "KSSOptions": "workbench.training.kss:KSSOptions",
    "sweeps": "workbench.training.sweeps",
    "sweep": "workbench.training.sweeps:sweep",
    "open_sweep": "workbench.training.sweeps:open_sweep",
    "TrainingPlan": "workbench.training.plan:TrainingPlan",
    "Recording": "workbench.training.recording:Recording",
    "baselines": "workbench.training.baselines",
    "faults": "workbench.training.faults",
    "Alarms": "workbench.monitors.alarms:Alarms",
    "Actions": "workbench.training.actions:Actions",
    "Recorder": "workbench.monitors.recorder:Recorder",
    "save": "workbench.store:save",
    "open_run": "workbench.store:open_run",
    "export_netcdf": "workbench.store:export_netcdf",
    "WorkbenchError": "workbench.errors:WorkbenchError",
}

__all__ = sorted(_PUBLIC)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'workbench' has no attribute '{name}'")
    module_name, _, attribute = _PUBLIC[name].partition(":")
    module = importlib.import_module(module_name)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
