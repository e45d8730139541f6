"""Collection of the callbacks of one run, in the order in which they act."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.callbacks.actions import Actions
from workbench.callbacks.alarms import Alarms
from workbench.callbacks.baselines import Penalty
from workbench.callbacks.baselines.penalties import PenaltyTerms
from workbench.callbacks.faults import Fault, Injection
from workbench.callbacks.guard import Guard
from workbench.callbacks.kss import KSS, Shaper
from workbench.callbacks.recorder import Recorder
from workbench.errors import OptionError
from workbench.training.callback import Callback, checked

AnyCallback = Callback | KSS | Fault | Penalty | Recorder | Alarms | Actions


def gather(
    callbacks: Sequence[AnyCallback] | None,
    *,
    kss: KSS | None = None,
    faults: Sequence[Fault] | None = (),
    penalties: Sequence[Penalty] | None = (),
    recorder: Recorder | None = None,
    alarms: Alarms | None = None,
    actions: Actions | None = None,
    seed: int = 0,
    stack: str | None = None,
) -> list[Callback]:
    """Return the callbacks of one run, from the arguments of `workbench.train`.

    KSS acts first, as it measures the state before the step. Faults and penalties follow, which change the loss, then
    the user's callbacks, in their order. The recorder with its alarms and actions is last, so that it receives the
    output of all others.
    """
    found: dict[type, list[Any]] = {kind: [] for kind in (KSS, Fault, Penalty, Recorder, Alarms, Actions)}
    of_user: list[Any] = []
    for callback in callbacks or ():
        kind = next((kind for kind in found if isinstance(callback, kind)), None)
        (of_user if kind is None else found[kind]).append(callback)
    for kind, given in ((KSS, kss), (Recorder, recorder), (Alarms, alarms), (Actions, actions)):
        name = kind.__name__
        found[kind] = [*([] if given is None else [given]), *found[kind]]
        if (n_found := len(found[kind])) > 1:
            raise OptionError(f"A run takes at most one wb.{name}, got {n_found}; remove the others.")
    kss, recorder, alarms, actions = (next(iter(found[kind]), None) for kind in (KSS, Recorder, Alarms, Actions))
    injection = Injection([*(faults or ()), *found[Fault]], seed=seed)
    terms = PenaltyTerms([*(penalties or ()), *found[Penalty]], seed=seed, stack=stack)
    if recorder is not None and recorder.alarms is not None:
        if alarms is not None:
            raise OptionError("alarms was passed, but the recorder has alarms already; pass one of them.")
        alarms = recorder.alarms
    if alarms is not None and recorder is None:
        raise OptionError("alarms observe what a recorder measures, but there is none; add wb.Recorder().")
    if actions is not None and alarms is None:
        raise OptionError("actions respond to alarms, but there are none; add wb.Alarms().")
    gathered = [
        Shaper(kss) if kss is not None else None,
        injection if injection.describe() else None,
        terms if terms.penalties else None,
        *of_user,
        None if recorder is None else Guard(recorder, alarms, actions, injection),
    ]
    return checked([callback for callback in gathered if callback is not None])
