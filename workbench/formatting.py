"""Format numbers, percentages, bands, units and lists for readers.

Sentences and tables use significant digits (`short`, `number_in_words`), columns of numbers a fixed number of decimals
(`fixed`), and narrow spaces the form of `compact`. A dash marks an unknown value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

import numpy as np

#: Text of an unknown number in figures and tables.
DASH = "–"
NOT_MEASURED = "not measured"
NO_BAND = "none known"
#: Percent sign that is not separated from its number at the end of a line.
_PERCENT = "\N{NO-BREAK SPACE}%"
#: Units that have a plural.
_COUNTED = {"step", "token", "row", "example", "block", "update", "measurement"}
_SCALES = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))


# Numbers


def short(value: float, *, digits: int = 3) -> str:
    """Format a number with significant digits, such as "0.0123" or "3,380"; large ones without powers of ten."""
    kept = float(f"{value:.{digits}g}")
    return f"{kept:,.0f}" if 100 <= abs(kept) < 1e7 else f"{kept:.{digits}g}"


def rounded(value: float, *, digits: int = 2) -> str:
    """Format a number with significant digits, such as "0.0012"; a dash if it is not finite."""
    return f"{value:.{digits}g}" if math.isfinite(value) else DASH


def fixed(value: float | None, decimals: int = 3) -> str:
    """Format a number with a fixed number of decimals, for columns; "∞" if infinite, a dash if unknown."""
    if value is None or math.isnan(value):
        return DASH
    return f"{value:.{decimals}f}" if math.isfinite(value) else "∞" if value > 0 else "-∞"


def compact(value: float) -> str:
    """Format a number with about three digits, for narrow spaces; "∞" if infinite, a dash if unknown."""
    if not math.isfinite(value):
        return fixed(value)
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    if abs(value) >= 100 or float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.3g}"


def three_digits(value: float) -> str:
    """Format a number with three digits including trailing zeros, for marks of a chart that are compared."""
    if not math.isfinite(value) or not value:
        return fixed(value, 2)
    size = abs(value)
    if not 1e-3 < size < 1e4:
        return f"{value:.1e}"
    return f"{value:.3g}" if size < 0.1 else f"{value:.{2 if size < 10 else 1 if size < 100 else 0}f}"


def number_in_words(value: object, *, is_fraction: bool = False) -> str:
    """Format a value for a sentence: three digits, percent if ``is_fraction``, "not measured" for NaN."""
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
    if is_fraction:
        return fraction_in_words(float(value))
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


def percent(fraction: float | None) -> str:
    """Format a probability in integer percent, "0 %" and "100 %" only if exact; a dash if unknown."""
    if fraction is None or math.isnan(fraction):
        return DASH
    if 0 < fraction < 0.01:
        return "< 1 %"
    return "> 99 %" if 0.99 < fraction < 1 else f"{100 * fraction:.0f} %"


def fine_percent(fraction: float, *, digits: int = 2) -> str:
    """Format an error, or another fraction that may be small, in percent with significant digits."""
    if not math.isfinite(fraction):
        return "not finite"
    if 0 < abs(fraction) < 1e-4:
        return f"{fraction:.1e}"
    if abs(fraction) >= 10:
        return f"{100 * fraction:,.0f} %"
    return f"{100 * fraction:.{max(digits, 3) if abs(fraction) >= 0.995 else digits}g} %"


def fraction_in_words(fraction: float) -> str:
    """Format a fraction of 1 in percent for a sentence: "37 %", "2.5 %", "below 0.1 %", without line breaks."""
    value = 100 * fraction
    if 0 < value < 0.1:
        return f"below 0.1{_PERCENT}"
    if 99.9 < value < 100:
        return f"above 99.9{_PERCENT}"
    digits = 0 if 9.95 <= value <= 99 or value in (0, 100) else 1
    return f"{value:.{digits}f}".removesuffix(".0") + _PERCENT


# Bands and ranges


def band_in_words(low: float, high: float, *, is_fraction: bool = False) -> str:
    """Format a healthy band such as "0.2 to 1.5", "at most 1.5" or, if both ends are not finite, "none known"."""
    # Ends close to 0 or 1 would be rounded in percent.
    is_fraction = is_fraction and all(1e-3 <= end <= 1 - 1e-3 for end in (low, high) if math.isfinite(end))
    ends = [
        None if not math.isfinite(end) else number_in_words(float(end), is_fraction=is_fraction) for end in (low, high)
    ]
    if ends == [None, None]:
        return NO_BAND
    if ends[0] is None:
        return f"at most {ends[1]}"
    return f"at least {ends[0]}" if ends[1] is None else f"{ends[0]} to {ends[1]}"


def band_in_signs(low: float, high: float) -> str:
    """Format a healthy band for narrow spaces: "0.2 to 1.5", "≤ 1.5", or "no band"."""
    if math.isnan(low) and math.isnan(high):
        return "no band"
    if math.isnan(low):
        return f"≤ {short(high)}"
    return f"≥ {short(low)}" if math.isnan(high) else f"{short(low)} to {short(high)}"


def with_interval(value: float, low: float, high: float, *, write: Callable[[float], str] = fixed) -> str:
    """Format a value and its interval, such as "0.874 [0.801, 0.930]"; without the interval if an end is unknown."""
    return write(value) + ("" if math.isnan(low) or math.isnan(high) else f" [{write(low)}, {write(high)}]")


def percent_range(low: float, high: float) -> str:
    """Format two fractions of 1, such as "5 to 95 %"."""
    return f"{100 * low:g} to {100 * high:g} %"


# Units


def units_in_words(units: str, value: object) -> str:
    """Return the unit of a value, in the plural where needed; empty for dimensionless values and NaN."""
    if units == "1" or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{units}s" if units in _COUNTED and value != 1 else units


def file_size(n_bytes: int) -> str:
    """Format a file size, such as "3 kB" or "1.2 MB"; at least 1 kB."""
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e6 else f"{max(n_bytes, 1000) / 1e3:.0f} kB"


def duration(seconds: float) -> str:
    """Format a duration in integer seconds, minutes, hours or days."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def counted(n: int, noun: str) -> str:
    """Format a count with its noun, such as "1 run" and "3 runs"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


# Words


def listed(words: Iterable[str], last: str = "and") -> str:
    """Join words, such as "a, b and c"."""
    words = list(words)
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def clipped(text: str, n_letters: int, *, keep_end: bool = False) -> str:
    """Shorten a text to at most ``n_letters`` by omitting its end, or its middle with ``keep_end``."""
    if len(text) <= n_letters:
        return text
    if keep_end:
        return f"{text[: n_letters // 2]}…{text[1 - n_letters // 2 :]}"
    return f"{text[: n_letters - 1]}…"


def capitalized(text: str) -> str:
    """Capitalize the first letter of a text and keep the others unchanged."""
    return text[:1].upper() + text[1:]


def lowered(title: str) -> str:
    """Lower the first letter of a title for use within a sentence, except in abbreviations."""
    return title if title[:2].isupper() else title[:1].lower() + title[1:]


def clause(text: str) -> str:
    """Remove the period at the end of a sentence."""
    return text.strip().rstrip(".")


def title_of(name: str) -> str:
    """Convert an identifier to words."""
    return name.replace("_", " ")
