"""How a report writes numbers, bands and lists."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import numpy as np

from workbench.schema.statuses import CriterionState

NO_BAND = "none known"
#: The sign stays beside its number at the end of a line.
_PERCENT = "\N{NO-BREAK SPACE}%"
#: Units that are words, counted.
_COUNTED = {"step", "token", "row", "block", "update"}

_SCALES = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))


def number_in_words(value: object, *, is_share: bool = False) -> str:
    """A value as people read it: three digits, percent for shares, "not measured" for NaN.

    Args:
        value: A number, a truth value or a text.
        is_share: Whether it is a probability or another share of 1.
    """
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, complex | np.complexfloating):
        return f"{number_in_words(value.real)} {'-' if value.imag < 0 else '+'} {number_in_words(abs(value.imag))}i"
    if isinstance(value, int | np.integer):
        return _whole(int(value))
    if not isinstance(value, float | np.floating):
        return str(value)
    if math.isnan(value):
        return CriterionState.NOT_MEASURED.value
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if is_share:
        return _percent(float(value))
    rounded = float(f"{float(value):.3g}")
    if 1e3 <= abs(rounded) < 1e15:
        return _whole(round(rounded))
    return re.sub(r"e([+-])0*", lambda sign: "e-" if sign[1] == "-" else "e", f"{float(value):.3g}")


def band_in_words(low: float, high: float, *, is_share: bool = False) -> str:
    """A healthy band such as "0.2 to 1.5", "at most 1.5" or "none known" where both ends are NaN or infinite."""
    # Percent of what is nearly none or all says little.
    is_share = is_share and all(1e-3 <= end <= 1 - 1e-3 for end in (low, high) if math.isfinite(end))
    ends = [None if not math.isfinite(end) else number_in_words(float(end), is_share=is_share) for end in (low, high)]
    if ends == [None, None]:
        return NO_BAND
    if ends[0] is None:
        return f"at most {ends[1]}"
    return f"at least {ends[0]}" if ends[1] is None else f"{ends[0]} to {ends[1]}"


def units_in_words(units: str, value: object) -> str:
    """The unit of a value: none for dimensionless ones and what was not measured, "steps" for several."""
    if units == "1" or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{units}s" if units in _COUNTED and value != 1 else units


def listed(words: Iterable[str]) -> str:
    """Such as "a, b and c"."""
    words = list(words)
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def capitalized(text: str) -> str:
    """The text with a capital first letter, and the rest as it is."""
    return text[:1].upper() + text[1:]


def lowered(title: str) -> str:
    """A title inside of a sentence; abbreviations stay."""
    return title if title[:2].isupper() else title[:1].lower() + title[1:]


def clause(text: str) -> str:
    """A text without the full stop at its end, to go on from."""
    return text.strip().rstrip(".")


def title_of(name: str) -> str:
    """A name of code in words."""
    return name.replace("_", " ")


def _whole(value: int) -> str:
    for scale, word in _SCALES:
        if abs(value) >= scale:
            return f"{value / scale:.3g} {word}"
    return f"{value:,}"


def _percent(share: float) -> str:
    percent = 100 * share
    if 0 < percent < 0.1:
        return f"below 0.1{_PERCENT}"
    if 99.9 < percent < 100:
        return f"above 99.9{_PERCENT}"
    digits = 0 if 9.95 <= percent <= 99 or percent in (0, 100) else 1
    return f"{percent:.{digits}f}".removesuffix(".0") + _PERCENT
