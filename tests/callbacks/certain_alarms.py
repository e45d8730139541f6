"""Alarms that attribute every change to one cause."""

from __future__ import annotations

import numpy as np

import workbench as wb
from workbench.callbacks.alarms import Attributor


def with_attributor(attributor, **options):
    alarms = wb.Alarms(**options)
    alarms.attributor = attributor
    return alarms


def certain_alarms(cause="large_rate", **options):
    return with_attributor(Attributor(("other", cause), (), np.zeros((2, 0)), np.array([0.0, 9.0])), **options)
