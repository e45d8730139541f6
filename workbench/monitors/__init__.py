"""Monitors: numbers that say early whether a run will stay stable. The pure functions take and give torch tensors."""

from __future__ import annotations

import importlib
from typing import Any

#: Module -> its public names; loaded when first used.
_PUBLIC = {
    "matrices": (
        "effective_rank",
        "frobenius_norm",
        "product_singular_values",
        "singular_values",
        "spectral_entropy",
        "stable_rank",
    ),
    "attention": (
        "AttentionLook",
        "attention_entropy",
        "attention_logit_max",
        "look_at_attention",
        "qk_update_spectrum",
    ),
    "router": (
        "dead_experts",
        "expert_load",
        "max_violation",
        "router_conditioning",
        "router_similarity",
        "routing_change",
        "routing_entropy",
        "routing_entropy_share",
    ),
    "optimizer": ("adam_staleness", "gradient_rms", "update_ratio"),
    "activations": ("activation_max", "kurtosis", "massive_activations", "outlier_ratio", "state_norm"),
    "scalars": ("SpikeScore", "log_z", "spike_score"),
    "curvature": ("preconditioned_sharpness", "sharpness"),
    "look": ("ProbeLook",),
    "mirrors": ("mirror_to",),
    "recorder": ("Observation", "Recorder"),
    "alarms": (
        "Alarm",
        "Alarms",
        "Attribution",
        "Attributor",
        "Calibration",
        "DetectorOptions",
        "LeadTime",
        "calibrate",
        "calibrate_paired",
        "lead_time",
        "observations",
        "recorded_alarms",
        "replay",
    ),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'workbench.monitors' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"workbench.monitors.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
