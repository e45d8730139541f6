"""Plans of settings, in the forms in which a loop knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workbench.callbacks.alarms.settings_sentinel import Plan
from workbench.errors import OptionError

#: Forms of the plan of one setting, in words.
_FORMS = "a number, a function of the step, a mapping from first steps to values, or None if any value is planned"


def planned_settings(plan: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None) -> dict[str, Plan]:
    """Return a function from the step to the planned value for each setting with a plan, for `SettingsSentinel`.

    Args:
        plan: Plans by name of the setting, such as ``learning_rate``, ``batch_size`` and ``n_trainable``: a number, a
            function of the step, a mapping from first steps to the values from there on, or None if any value is
            planned. Or one function from the step to the values by name, with the same names at every step. None if
            there is no plan.

    Raises:
        OptionError: If the plan has another form.

    Example:
        >>> from workbench.callbacks.alarms.plans import planned_settings
        >>> planned = planned_settings({"learning_rate": lambda step: 0.1 / (step + 1), "batch_size": {0: 8, 500: 16}})
        >>> planned["learning_rate"](4), planned["batch_size"](499), planned["batch_size"](500)
        (0.02, 8, 16)
    """
    if callable(plan):
        at_start = plan(0)
        if not isinstance(at_start, Mapping):
            raise OptionError.of("plan(0)", at_start, "a mapping from names of settings to values")
        return {name: _entry(plan, name) for name in at_start}
    if not isinstance(plan, Mapping | None):
        raise OptionError.of("plan", plan, "a mapping from names of settings to plans, or a function of the step")
    return {name: _function(f"plan['{name}']", given) for name, given in (plan or {}).items()}


def _entry(plan: Callable[[int], Mapping[str, Any]], name: str) -> Plan:
    return lambda step: plan(step).get(name)


def _function(name: str, given: Any) -> Plan:
    if given is None or (isinstance(given, int | float) and not isinstance(given, bool)):
        return lambda step: given
    if callable(given):
        return given
    if isinstance(given, Mapping) and given and all(isinstance(step, int) for step in given):
        steps = sorted(given)
        return lambda step: given[max((at for at in steps if at <= step), default=steps[0])]
    raise OptionError.of(name, given, _FORMS)
