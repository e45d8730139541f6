"""The arguments of `workbench.train` -> the callbacks of one run, in the order in which they act."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from workbench.callbacks.actions import Actions
from workbench.callbacks.alarms import Alarms
from workbench.callbacks.baselines import Penalty, PenaltyTerms
from workbench.callbacks.faults import Fault, Injection
from workbench.callbacks.guard import Guard
from workbench.callbacks.kss import KSS, KSSCallback
from workbench.callbacks.recorder import Recorder
from workbench.errors import OptionError
from workbench.training.callback import Callback, checked


def gather(
    callbacks: Sequence[Any] | None,
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
    """The callbacks of one run.

    KSS first, which measures the state before the step; then faults and penalties, which change the loss; then those of
    the user, in their order; the recorder with its alarms and actions last, as it receives the output of all others.

    Args:
        callbacks: The user's own callbacks, or any of those below; None, here and below: none.
        kss: Koopman Spectral Shaping, at most one.
        faults: Faults, at most one of a kind.
        penalties: Terms of the loss.
        recorder: Recorder, at most one.
        alarms: Alarms that receive what the recorder measures.
        actions: Actions that alarms may trigger.
        seed: Seed of the random draws of faults and penalties.
        stack: Stack of the blocks that penalties act on; see `workbench.read_anatomy`.

    Raises:
        OptionError: If an argument is no callback, or two exclude each other.
    """
    if isinstance(callbacks, Callback | KSS | Fault | Penalty | Recorder | Alarms | Actions):
        raise OptionError(f"callbacks is one {type(callbacks).__name__}, expected a sequence; pass [it].")
    found: dict[type, list[Any]] = {kind: [] for kind in (KSS, Fault, Penalty, Recorder, Alarms, Actions)}
    own: list[Callback] = []
    for callback in _listed("callbacks", callbacks):
        kind = next((kind for kind in found if isinstance(callback, kind)), None)
        (own if kind is None else found[kind]).append(callback)
    for kind, given in ((KSS, kss), (Recorder, recorder), (Alarms, alarms), (Actions, actions)):
        if given is not None and not isinstance(given, kind):
            name, is_path = kind.__name__, kind is Recorder and isinstance(given, str | os.PathLike)
            raise OptionError(
                f"{name.lower()} is {_shown(given)}, expected a wb.{name} or None; pass {name.lower()}=wb.{name}()"
                f"{', and the path as store=' * is_path}."
            )
        found[kind] = [*([] if given is None else [given]), *found[kind]]
        if len(found[kind]) > 1:
            raise OptionError(f"There are {len(found[kind])} {kind.__name__}, expected one in a run; drop the others.")
    kss, recorder, alarms, actions = (next(iter(found[kind]), None) for kind in (KSS, Recorder, Alarms, Actions))
    injection = Injection(
        faults if isinstance(faults, Fault) else [*_listed("faults", faults), *found[Fault]], seed=seed
    )
    terms = PenaltyTerms(
        penalties if isinstance(penalties, Penalty) else [*_listed("penalties", penalties), *found[Penalty]],
        seed=seed,
        stack=stack,
    )
    guard = Guard(recorder, alarms, actions, injection)
    gathered = [
        KSSCallback(kss) if kss is not None else None,
        injection if injection.describe() else None,
        terms if terms.penalties else None,
        *own,
        guard if recorder is not None else None,
    ]
    return checked([callback for callback in gathered if callback is not None])


def _listed(name: str, given: Any) -> list[Any]:
    """What was passed as a sequence of callbacks, faults or penalties; None: nothing.

    Raises:
        OptionError: If it is no sequence, or holds a class or another sequence.
    """
    if given is None:
        return []
    if isinstance(given, type) or not isinstance(given, Iterable):
        raise OptionError(f"{name} is {_shown(given)}, expected a sequence of {name}; pass {name}=[...].")
    listed = list(given)
    for item in listed:
        if isinstance(item, type):
            raise OptionError(
                f"{name} holds the class {item.__name__}, expected {name}; pass an instance: {item.__name__}()."
            )
        if isinstance(item, list | tuple):
            raise OptionError(f"{name} holds a {type(item).__name__}, expected {name}; pass them one by one.")
    return listed


def _shown(value: Any) -> str:
    """A value of a wrong type, as an error shows it: itself if it is short, otherwise its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"of type {type(value).__name__}"
