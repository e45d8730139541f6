"""How people read what was measured: numbers, percentages, bands, units, lists. The one place that formats them.

Sentences and tables round to significant digits (`short`, `number_in_words`); what stands under another number in a
column has as many decimals (`fixed`); where there is little room, a number is `compact`. A dash says that nothing is
known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

import numpy as np

#: Stands for a number that is not known, in figures and tables.
DASH = "–"
NOT_MEASURED = "not measured"
NO_BAND = "none known"
#: The sign stays beside its number at the end of a line.
_PERCENT = "\N{NO-BREAK SPACE}%"
#: Units that are words, counted.
_COUNTED = {"step", "token", "row", "block", "update"}
_SCALES = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))


# Numbers


def short(value: float, *, digits: int = 3) -> str:
    """A number in so many digits, such as "0.0123" or "3,380"; no powers of ten where it is large."""
    kept = float(f"{value:.{digits}g}")
    return f"{kept:,.0f}" if 100 <= abs(kept) < 1e7 else f"{kept:.{digits}g}"


def rounded(value: float, *, digits: int = 2) -> str:
    """So many significant digits, such as "0.0012"; a dash if it is not finite."""
    return f"{value:.{digits}g}" if math.isfinite(value) else DASH


def fixed(value: float | None, decimals: int = 3) -> str:
    """So many decimals, for columns; "∞" if it is infinite, a dash if nothing is known."""
    if value is None or math.isnan(value):
        return DASH
    return f"{value:.{decimals}f}" if math.isfinite(value) else "∞" if value > 0 else "-∞"


def compact(value: float) -> str:
    """About three digits, where there is little room; "∞" if it is infinite, a dash if nothing is known."""
    if not math.isfinite(value):
        return fixed(value)
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    if abs(value) >= 100 or float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.3g}"


def three_digits(value: float) -> str:
    """Three digits, the zeros at the end too, for marks of a chart that are compared with each other."""
    if not math.isfinite(value) or not value:
        return fixed(value, 2)
    size = abs(value)
    if not 1e-3 < size < 1e4:
        return f"{value:.1e}"
    return f"{value:.3g}" if size < 0.1 else f"{value:.{2 if size < 10 else 1 if size < 100 else 0}f}"


def number_in_words(value: object, *, is_share: bool = False) -> str:
    """A value as people read it: three digits, percent for shares, "not measured" for NaN.

    Args:
        value: A number, a truth value or a text.
        is_share: Whether it is a probability or another share of 1.

    Example:
        >>> from workbench.formatting import number_in_words
        >>> number_in_words(3376.2), number_in_words(1.2e-7), number_in_words(2_500_000)
        ('3,380', '1.2e-7', '2.5 million')
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
        return NOT_MEASURED
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if is_share:
        return share_in_words(float(value))
    kept = float(f"{float(value):.3g}")
    if 1e3 <= abs(kept) < 1e15:
        return _whole(round(kept))
    return re.sub(r"e([+-])0*", lambda sign: "e-" if sign[1] == "-" else "e", f"{float(value):.3g}")


def _whole(value: int) -> str:
    for scale, word in _SCALES:
        if abs(value) >= scale:
            return f"{value / scale:.3g} {word}"
    return f"{value:,}"


# Percentages


def percent(share: float | None) -> str:
    """A probability in whole percents; what is neither 0 nor 1 is never "0 %" or "100 %"; a dash if it is not known.

    Example:
        >>> from workbench.formatting import percent
        >>> percent(0.374), percent(0.004), percent(0.996)
        ('37 %', '< 1 %', '> 99 %')
    """
    if share is None or math.isnan(share):
        return DASH
    if 0 < share < 0.01:
        return "< 1 %"
    return "> 99 %" if 0.99 < share < 1 else f"{100 * share:.0f} %"


def fine_percent(share: float, *, digits: int = 2) -> str:
    """An error, or another share that may be small, in percent with so many significant digits.

    Example:
        >>> from workbench.formatting import fine_percent
        >>> fine_percent(0.00123), fine_percent(1.1), fine_percent(2e-6)
        ('0.12 %', '110 %', '2.0e-06')
    """
    if not math.isfinite(share):
        return "not finite"
    if 0 < abs(share) < 1e-4:
        return f"{share:.1e}"
    return f"{100 * share:.{max(digits, 3) if abs(share) >= 0.995 else digits}g} %"


def share_in_words(share: float) -> str:
    """A share of 1 in percent, as sentences have it: "37 %", "2.5 %", "below 0.1 %"; the sign never stands alone."""
    value = 100 * share
    if 0 < value < 0.1:
        return f"below 0.1{_PERCENT}"
    if 99.9 < value < 100:
        return f"above 99.9{_PERCENT}"
    digits = 0 if 9.95 <= value <= 99 or value in (0, 100) else 1
    return f"{value:.{digits}f}".removesuffix(".0") + _PERCENT


# Bands and ranges


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


def band_in_signs(low: float, high: float) -> str:
    """A healthy band where there is little room: "0.2 to 1.5", "≤ 1.5", or "no band"."""
    if math.isnan(low) and math.isnan(high):
        return "no band"
    if math.isnan(low):
        return f"≤ {short(high)}"
    return f"≥ {short(low)}" if math.isnan(high) else f"{short(low)} to {short(high)}"


def with_interval(value: float, low: float, high: float, *, write: Callable[[float], str] = fixed) -> str:
    """A value and its interval, such as "0.874 [0.801, 0.930]"; without one where an end is not known."""
    return write(value) + ("" if math.isnan(low) or math.isnan(high) else f" [{write(low)}, {write(high)}]")


def percent_range(low: float, high: float) -> str:
    """Two shares of 1, such as "5 to 95 %"."""
    return f"{100 * low:g} to {100 * high:g} %"


# Units


def units_in_words(units: str, value: object) -> str:
    """The unit of a value: none for dimensionless ones and what was not measured, "steps" for several."""
    if units == "1" or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{units}s" if units in _COUNTED and value != 1 else units


def file_size(n_bytes: int) -> str:
    """Such as "3 kB" or "1.2 MB"; at least 1 kB."""
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e6 else f"{max(n_bytes, 1000) / 1e3:.0f} kB"


def duration(seconds: float) -> str:
    """Seconds, minutes, hours or days, whole ones."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def counted(n: int, noun: str) -> str:
    """Such as "1 run" and "3 runs"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


# Words


def listed(words: Iterable[str], last: str = "and") -> str:
    """Such as "a, b and c"."""
    words = list(words)
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def clipped(text: str, n_letters: int, *, keep_end: bool = False) -> str:
    """A text of at most so many letters, its end (or middle, where the end tells it from others) left out."""
    if len(text) <= n_letters:
        return text
    if keep_end:
        return f"{text[: n_letters // 2]}…{text[1 - n_letters // 2 :]}"
    return f"{text[: n_letters - 1]}…"


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
