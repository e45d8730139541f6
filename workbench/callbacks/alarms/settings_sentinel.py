"""Detection of settings of a run that change without a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from numbers import Real
from typing import Any

from workbench.callbacks.alarms.rate_rule import RateRule
from workbench.callbacks.alarms.setting_rules import (
    BatchRule,
    ConstantRule,
    Found,
    GrowingRule,
    LossTermRule,
    Moment,
    PlannedRule,
    TensorRule,
    UnchangedRule,
)
from workbench.callbacks.alarms.settings_change import SettingsChange
from workbench.errors import OptionError
from workbench.formatting import number_in_words

Rule = RateRule | BatchRule | LossTermRule | ConstantRule | GrowingRule | TensorRule | PlannedRule
#: Planned value of a setting, or a fixed multiple of it, as a function of the step; a sequence has one entry per group.
#: None if the setting may have any value at that step.
Plan = Callable[[int], float | Sequence[float] | None]

#: Settings that may change in certain ways; all others are constant.
_RULES: dict[str, type[Rule]] = {
    "learning_rate": RateRule,
    "batch_size": BatchRule,
    "accumulation": BatchRule,
    "auxiliary_loss": LossTermRule,
    "n_trainable": GrowingRule,
    "n_optimized": GrowingRule,
    "n_groups": GrowingRule,
    "tensors_without_gradient": TensorRule,
    "unchanged_tensors": UnchangedRule,
}
_BY_NAME: dict[str, type[Rule]] = {
    rule.__name__: rule
    for rule in (RateRule, BatchRule, LossTermRule, ConstantRule, GrowingRule, TensorRule, UnchangedRule, PlannedRule)
}
#: Learning rates that the scheduler has stored: evidence for `RateRule`, not a setting.
_NOTED = "noted_rates"
#: A value below this fraction of the largest one so far counts as 0: plans may end at the rounding error of a cosine.
_ZERO = 1e-9
#: Ratio of a value to a plan of 0.
_NOT_PLANNED = -1.0


class SettingsSentinel:
    """Comparison of the settings of a run from step to step, which reports changes that no plan explains.

    Allowed changes depend on the name of the setting. ``learning_rate`` follows a schedule, which `RateRule` recognizes
    from its past. ``batch_size`` and ``accumulation`` may differ in single batches, but a new size that persists is a
    change (`BatchRule`, after 2 updates in most runs). ``auxiliary_loss`` may not vanish (`LossTermRule`), and the
    numbers of trained parameters and groups may rise, since parameters are unfrozen on purpose (`GrowingRule`). All
    other settings are constant, apart from numbers that are scheduled from the first step on (`ConstantRule`). None and
    NaN mean that a value is unknown, which is not a change; for ``auxiliary_loss`` alone, NaN means that the term was
    not added.

    Changes that are planned, other than of the learning rate, are returned too, with a factor of 1, since the signals
    of the run may change with them.

    After a report, later values are compared with the new one, so that the change back is reported too. A change that
    continues from step to step is reported once.

    Without a plan, the following changes of the learning rate are not detected: falls by a factor of up to 20, as in
    step schedules; rises to the highest rate so far, as in restarts; after a schedule has come down, rises by less than
    1 % of the highest rate per step up to that rate; and any change before the third observation. With a plan, every
    departure from it is reported. Observe every update: rates at only some of the steps appear less smooth.

    Args:
        planned: Plans of settings that are numbers: functions from the step to the planned value or to a fixed multiple
            of it, such as ``{"learning_rate": plan.rate_factor}`` or, with a scheduler of torch,
            ``{"learning_rate": lambda step: scheduler.get_last_lr()}``; `planned_settings` makes them of simpler plans.

    Raises:
        OptionError: If a plan is not a function.

    Example:
        >>> from workbench.callbacks.alarms.settings_sentinel import SettingsSentinel
        >>> sentinel = SettingsSentinel()
        >>> for step in range(400):
        ...     rate = 0.001 * min(1, (step + 1) / 100) * (40 if step >= 300 else 1)
        ...     for change in sentinel.observe(step, {"learning_rate": rate}):
        ...         print(change.sentence)
        The learning rate rose from 0.001 to 0.04 at step 300; no schedule seen so far explains it.
    """

    def __init__(self, *, planned: Mapping[str, Plan] | None = None) -> None:
        self._planned = dict(planned or {})
        for name, plan in self._planned.items():
            if not callable(plan):
                raise OptionError.of(f"planned['{name}']", plan, "a function from the step to the value")
        self._rules: dict[str, dict[int, Rule]] = {}
        #: Of settings with a plan: the latest values by group, and the largest absolute value and plan so far.
        self._latest: dict[str, dict[int, float]] = {}
        self._largest: dict[str, tuple[float, float]] = {}
        self._resumed: set[str] = set()

    def observe(self, step: int, settings: Mapping[str, Any]) -> list[SettingsChange]:
        """Process the settings of an update.

        Args:
            step: Updates done before.
            settings: Values by name, as returned by `settings_of`: numbers, strings, bools, None, and lists of them
                with one entry per group of the optimizer.

        Returns:
            The changes, usually none.

        Raises:
            OptionError: If a value has another type, or has a plan and is not a number.
        """
        values = {name: self._checked(name, value) for name, value in settings.items()}
        noted = values.pop(_NOTED, [])
        changes = []
        for name, of_groups in values.items():
            if hits := list(self._changes(step, name, of_groups, noted)):
                changes.append(_joined(hits, n_groups=len(of_groups)))
            self._resumed.discard(name)
        return changes

    def _checked(self, name: str, value: Any) -> list[Any]:
        values = [_plain(name, entry) for entry in (value if isinstance(value, list | tuple) else [value])]
        if name in self._planned and any(isinstance(entry, str | bool | list) for entry in values):
            remedy = "leave out its plan, since only numbers have one"
            raise OptionError.of(name, value, "a number if it has a plan", remedy=remedy)
        return values

    def _changes(self, step: int, name: str, values: list[Any], noted: list[Any]) -> Iterator[SettingsChange]:
        """Yield the changes of single groups."""
        rules = self._rules.setdefault(name, {})
        for group, value in enumerate(values):
            if value is None or (_is_nan(value) and self._kind(name) is not LossTermRule):
                continue
            plan = self._plan(step, name, group)
            if plan is None and name in self._planned:  # any value is planned
                rules.pop(group, None)
                continue
            known = 0.0 if _is_nan(value) else value
            followed = known if plan is None else self._ratio(name, known, plan)
            if followed is not None and group not in rules:
                rules[group] = self._kind(name)(followed)
            elif followed is not None:
                rates = noted[group] if name == "learning_rate" and group < len(noted) else []
                moment = Moment(step, name in self._resumed, [rate for rate in rates if rate is not None])
                found = rules[group].update(followed, moment)
                if found is None and self._is_planned_change(step, name, group, plan, followed):
                    before = self._latest.get(name, {}).get(group, value)
                    yield SettingsChange(step, name, before, value, (group,), step, "as planned", is_back=True)
                elif found is not None:
                    yield self._change(step, name, group, value, found, plan)
            if plan is not None:
                self._latest.setdefault(name, {})[group] = known

    def _kind(self, name: str) -> type[Rule]:
        kind = _RULES.get(name, ConstantRule)
        return PlannedRule if name in self._planned and kind in (RateRule, ConstantRule) else kind

    def _plan(self, step: int, name: str, group: int) -> float | None:
        if name not in self._planned:
            return None
        plan = self._planned[name](step)
        plan = plan[group] if isinstance(plan, Sequence) else plan
        return None if plan is None else float(plan)

    def _is_planned_change(self, step: int, name: str, group: int, plan: float | None, ratio: float) -> bool:
        """Return whether a setting changes with its plan; learning rates do so all the time."""
        if plan is None or name == "learning_rate" or not step or self._plan(step - 1, name, group) in (plan, None):
            return False
        rule = self._rules[name][group]
        return math.isclose(ratio, getattr(rule, "usual", ratio), rel_tol=1e-6)

    def _ratio(self, name: str, value: float, plan: float) -> float | None:
        """Return the value over its plan; None if both are 0."""
        of_value, of_plan = self._largest.get(name, (0.0, 0.0))
        of_value, of_plan = self._largest[name] = max(of_value, abs(value)), max(of_plan, abs(plan))
        if abs(plan) > _ZERO * of_plan:
            return value / plan
        return None if abs(value) <= _ZERO * of_value else _NOT_PLANNED

    def _change(self, step: int, name: str, group: int, value: Any, found: Found, plan: float | None) -> SettingsChange:
        rule, before = self._rules[name][group], found.before
        reason = rule.reason
        if isinstance(rule, PlannedRule):
            before = self._latest[name][group]
            follows = "it follows its plan again"
            reason = follows if found.is_back else f"the planned value is {number_in_words(rule.first * (plan or 0.0))}"
        elif plan is not None:
            before = before * plan
        return SettingsChange(step, name, before, value, (group,), found.since, reason, found.is_back)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        rules = {
            name: {str(group): {"kind": type(rule).__name__} | asdict(rule) for group, rule in of_groups.items()}
            for name, of_groups in self._rules.items()
        }
        latest = {name: {str(group): value for group, value in values.items()} for name, values in self._latest.items()}
        largest = {name: list(sizes) for name, sizes in self._largest.items()}
        return {"rules": rules, "latest": latest, "largest": largest, "planned": sorted(self._planned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, so that the next observation is compared with the last one before the checkpoint.

        A setting that has gained or lost its plan since then starts without a past.
        """
        names = [name for name in state["rules"] if (name in state["planned"]) == (name in self._planned)]
        self._rules = {
            name: {int(group): _restored(fields) for group, fields in state["rules"][name].items()} for name in names
        }
        self._latest = {
            name: {int(group): value for group, value in values.items()}
            for name, values in state["latest"].items()
            if name in names
        }
        self._largest = {name: (sizes[0], sizes[1]) for name, sizes in state["largest"].items() if name in names}
        self._resumed = set(names)


def _joined(changes: list[SettingsChange], *, n_groups: int) -> SettingsChange:
    """Combine the changes of several groups into one, with the values of the first."""
    first = changes[0]
    groups = () if len(changes) == n_groups else tuple(change.groups[0] for change in changes)
    return replace(first, groups=groups)


def _restored(fields: Mapping[str, Any]) -> Rule:
    return _BY_NAME[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(name, entry) for entry in value]
    if isinstance(value, str | bool | int | float | None):
        return value
    if isinstance(value, Real):
        return float(value)
    remedy = "pass its plain value, or None if it is unknown"
    raise OptionError.of(name, value, "a number, a string, a bool, or a list of them", remedy=remedy)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
