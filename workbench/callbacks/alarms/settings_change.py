"""A setting that has changed without a plan, and its description."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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

    Example:
        >>> from workbench.callbacks.alarms.settings_change import SettingsChange
        >>> SettingsChange(300, "weight_decay", 0.1, 0.0, groups=(1,), since=300).sentence
        'The weight decay of group 1 fell from 0.1 to 0 at step 300.'
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
