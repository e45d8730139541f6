"""Settings of a run that change without a plan, and the forms in which loops state a plan."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

from workbench.callbacks.alarms.setting_rules import (
    BatchRule,
    ConstantRule,
    Found,
    LossTermRule,
    Moment,
    OneWayRule,
    PlannedRule,
    RateRule,
)
from workbench.errors import OptionError
from workbench.formatting import counted, listed, number_in_words, title_of

#: Titles of settings whose names are not clear enough.
_TITLES = {
    "accumulation": "number of micro-batches of an update",
    "n_groups": "number of groups of the optimizer",
    "n_optimized": "number of parameters in the optimizer",
    "n_trainable": "number of parameters that require a gradient",
    "is_training": "training mode of the model",
    "n_in_eval": "number of modules in evaluation mode",
    "parameter_dtype": "number format of the parameters",
    "gradient_dtype": "number format of the gradients",
    "default_dtype": "default number format",
    "attention": "implementation of attention",
    "tensors_without_gradient": "list of tensors without a gradient",
    "unchanged_tensors": "list of tensors that no update changes",
}


@dataclass(frozen=True)
class SettingsChange:
    """A setting that has changed without a plan.

    Attributes:
        step: Updates done when it was reported.
        setting: Name of the setting.
        before: Value before the change, in the first group that changed.
        after: Value after the change.
        groups: Groups of the optimizer that changed; empty if all did, or if the setting has no groups.
        since: First step with the new value; earlier than ``step`` for batch sizes, which must persist.
        reason: Why the change is reported, in words.
        is_back: Whether the setting has returned to its value before an earlier change.
    """

    step: int
    setting: str
    before: Any
    after: Any
    groups: tuple[int, ...] = ()
    since: int = -1
    reason: str = ""
    is_back: bool = False

    @property
    def factor(self) -> float:
        """The new value over the previous one; 1 if it has returned, NaN if undefined, as for strings."""
        if self.is_back:
            return 1.0
        before, after = (math.nan if isinstance(v, str | list | None) else float(v) for v in (self.before, self.after))
        return (0.0 if math.isnan(after) else after) / before if before else math.inf

    @property
    def sentence(self) -> str:
        """The change as a sentence."""
        title = _TITLES.get(self.setting, title_of(self.setting))
        of = f" of {'group' if len(self.groups) == 1 else 'groups'} {_named(self.groups)}" if self.groups else ""
        why = f"; {self.reason}" if self.reason else ""
        return f"The {title}{of} {_movement(self.before, self.after)} at step {max(self.since, 0)}{why}."


def _movement(before: Any, after: Any) -> str:
    """Describe a change, such as "rose from 0.001 to 0.04"."""
    if before == after:
        return f"stayed at {_in_words(after)}"
    is_size = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (before, after))
    verb = "changed" if not is_size or math.isnan(after) else "rose" if after > before else "fell"
    texts = _in_words(before), _in_words(after)
    if texts[0] == texts[1]:
        texts = f"{before:.9g}" if is_size else str(before), f"{after:.9g}" if is_size else str(after)
    return f"{verb} from {texts[0]} to {texts[1]}"


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_in_words, value))})"
    if isinstance(value, float) and math.isnan(value):
        return "missing"
    return f"{value:,}" if type(value) is int else number_in_words(value)


def _named(groups: tuple[int, ...]) -> str:
    """List groups, such as "0, 1 and 5" or "0, 1 and 10 others"."""
    if len(groups) <= 4:
        return listed(map(str, groups))
    return f"{groups[0]}, {groups[1]} and {counted(len(groups) - 2, 'other')}"


Rule = RateRule | BatchRule | LossTermRule | ConstantRule | OneWayRule | PlannedRule
#: Planned value of a setting, or a fixed multiple of it, as a function of the step; a sequence has one entry per group.
#: None if the setting may have any value at that step.
Plan = Callable[[int], float | Sequence[float] | None]

#: Settings that may change in certain ways; all others are constant.
_RULES: dict[str, type[Rule]] = {
    "learning_rate": RateRule,
    "batch_size": BatchRule,
    "accumulation": BatchRule,
    "auxiliary_loss": LossTermRule,
    "n_trainable": OneWayRule,
    "n_optimized": OneWayRule,
    "n_groups": OneWayRule,
    "tensors_without_gradient": OneWayRule,
    "unchanged_tensors": OneWayRule,
}
#: Why a change is reported, in words, by the setting.
_REASONS = {
    "learning_rate": "no schedule seen so far explains it",
    "batch_size": "it has stayed at this value",
    "accumulation": "it has stayed at this value",
    "auxiliary_loss": "it was far from 0 in the steps before",
    "tensors_without_gradient": (
        "they require a gradient, and other tensors learn: look for detach(), and for checkpointing of inputs that "
        "require no gradient"
    ),
    "unchanged_tensors": (
        "they have a gradient, and other tensors learn: look whether the number format rounds their updates away, and "
        "whether the optimizer holds them"
    ),
}
_BY_NAME: dict[str, type[Rule]] = {
    rule.__name__: rule for rule in (RateRule, BatchRule, LossTermRule, ConstantRule, OneWayRule, PlannedRule)
} | dict.fromkeys(("GrowingRule", "TensorRule", "UnchangedRule"), OneWayRule)  # in records of earlier versions
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
    numbers of trained parameters and groups may rise, since parameters are unfrozen on purpose (`OneWayRule`). All
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
        """
        values = {name: self._checked(name, value) for name, value in settings.items()}
        noted = values.pop(_NOTED, [])
        changes = []
        for name, of_groups in values.items():
            if hits := list(self._changes(step, name, of_groups, noted)):  # one change, with the values of the first
                groups = () if len(hits) == len(of_groups) else tuple(hit.groups[0] for hit in hits)
                changes.append(replace(hits[0], groups=groups))
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
        rule, before, reason = self._rules[name][group], found.before, _REASONS.get(name, "")
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
            name: {int(group): _BY_NAME[fields.pop("kind")](**fields) for group, fields in of_groups.items()}
            for name, of_groups in copy.deepcopy(state["rules"]).items()
            if name in names
        }
        self._latest = {
            name: {int(group): value for group, value in values.items()}
            for name, values in state["latest"].items()
            if name in names
        }
        self._largest = {name: (sizes[0], sizes[1]) for name, sizes in state["largest"].items() if name in names}
        self._resumed = set(names)


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


#: Forms of the plan of one setting, in words.
_FORMS = "a number, a function of the step, a mapping from first steps to values, or None if any value is planned"


def planned_settings(plan: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None) -> dict[str, Plan]:
    """Return a function from the step to the planned value for each setting with a plan, for `SettingsSentinel`.

    Args:
        plan: Plans by name of the setting, such as ``learning_rate``, ``batch_size`` and ``n_trainable``: a number, a
            function of the step, a mapping from first steps to the values from there on, or None if any value is
            planned. Or one function from the step to the values by name, with the same names at every step. None if
            there is no plan.
    """
    if callable(plan):
        at_start = plan(0)
        if not isinstance(at_start, Mapping):
            raise OptionError.of("plan(0)", at_start, "a mapping from names of settings to values")
        return {name: partial(_value_of, plan, name) for name in at_start}
    if not isinstance(plan, Mapping | None):
        raise OptionError.of("plan", plan, "a mapping from names of settings to plans, or a function of the step")
    return {name: _function(f"plan['{name}']", given) for name, given in (plan or {}).items()}


def _value_of(plan: Callable[[int], Mapping[str, Any]], name: str, step: int) -> Any:
    return plan(step).get(name)


def _function(name: str, given: Any) -> Plan:
    if given is None or (isinstance(given, int | float) and not isinstance(given, bool)):
        return lambda step: given
    if callable(given):
        return given
    if isinstance(given, Mapping) and given and all(isinstance(step, int) for step in given):
        steps = sorted(given)
        return lambda step: given[max((at for at in steps if at <= step), default=steps[0])]
    raise OptionError.of(name, given, _FORMS)
