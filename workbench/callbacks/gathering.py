"""The arguments of `workbench.train` -> the callbacks of one run, in the order in which they act."""

from __future__ import annotations

from collections.abc import Sequence
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
    callbacks: Sequence[Any],
    *,
    kss: KSS | None = None,
    faults: Sequence[Fault] = (),
    penalties: Sequence[Penalty] = (),
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
        callbacks: The user's own callbacks, or any of those below.
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
    if isinstance(callbacks, Callback | KSS | Fault | Penalty | Recorder):
        raise OptionError(f"callbacks is one {type(callbacks).__name__}, expected a sequence; pass [it].")
    found: dict[type, list[Any]] = {kind: [] for kind in (KSS, Fault, Penalty, Recorder, Alarms, Actions)}
    own: list[Callback] = []
    for callback in callbacks:
        kind = next((kind for kind in found if isinstance(callback, kind)), None)
        (own if kind is None else found[kind]).append(callback)
    for kind, given in ((KSS, kss), (Recorder, recorder), (Alarms, alarms), (Actions, actions)):
        found[kind] = [*([] if given is None else [given]), *found[kind]]
        if len(found[kind]) > 1:
            raise OptionError(f"There are {len(found[kind])} {kind.__name__}, expected one in a run; drop the others.")
    kss, recorder, alarms, actions = (next(iter(found[kind]), None) for kind in (KSS, Recorder, Alarms, Actions))
    injection = Injection(faults if isinstance(faults, Fault) else [*faults, *found[Fault]], seed=seed)
    terms = PenaltyTerms(
        penalties if isinstance(penalties, Penalty) else [*penalties, *found[Penalty]], seed=seed, stack=stack
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
