"""Signs that are made of others: what several of them say together, which a sum of each alone cannot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from workbench.diagnosis.signs.sign import Sign, in_steps

#: Any one of these is enough to suspect a block, or the router.
_OF_BLOCKS = ("block_blows_up", "odd_weights", "stream_jumps_at_a_block", "block_forgets")
_OF_ROUTERS = ("experts_die", "auxiliary_loss_is_gone", "auxiliary_loss_rules", "router_is_sure_at_once")


def joint_signs(signs: Mapping[str, Sign]) -> Iterator[Sign]:
    """What the signs read so far say together; of those that are not there nothing is assumed."""
    for name, members in (("a_block_stands_out", _OF_BLOCKS), ("routing_is_off", _OF_ROUTERS)):
        found = [signs[member] for member in members if member in signs]
        if found:
            yield replace(max(found, key=lambda sign: sign.strength), name=name)
    yield from _burst(signs)


def _burst(signs: Mapping[str, Sign]) -> Iterator[Sign]:
    """A rise of the loss that is made good, while neither rate nor rows nor gradients had moved before."""
    if "spike_recovers" not in signs or "abrupt" not in signs:
        return
    excuses = ("rate_jumps", "gradients_build_up", "few_rows", "batches_shrink")
    innocence = math.prod(1 - min(max(signs[name].strength, 0.0), 1.0) for name in excuses if name in signs)
    strength = min(signs["abrupt"].strength, 1.0) * min(signs["spike_recovers"].strength, 1.0) * innocence
    yield replace(
        signs["spike_recovers"],
        name="rise_out_of_nothing",
        strength=strength,
        sentence=f"The loss rose within {in_steps(max(int(signs['abrupt'].value), 1))} and "
        f"{100 * signs['spike_recovers'].value:.0f} % of it was made good, "
        + (
            "while rate, rows and gradients before it were as ever."
            if innocence > 0.5
            else "but rate, rows or gradients had moved before."
        ),
    )
