"""Names under which metrics of any name are stored; a name in a store is also one of a folder."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable

from workbench.schema.runs import MONITORS

_FREE = re.compile(r"(?!__)\w(?:[\w .+-]*[\w+-])?")
#: Names of dimensions and of files of a store; longest name that is stored unchanged.
_RESERVED, _LONGEST = frozenset(("step", "event", "layer", "head", "term", "module", "c", "zarr.json")), 120


def stored_names(names: Iterable[str], stored: Collection[str] = ()) -> dict[str, str]:
    """Return a name for each metric: its own, or one without characters of paths that no other metric has.

    Args:
        names: Names of metrics.
        stored: Names in the store that is continued.
    """
    names = list(names)
    own = {n for n in names if _FREE.fullmatch(n) and len(n.encode()) <= _LONGEST and n not in _RESERVED}
    plain = {name: re.sub(r"[^\w.+-]+", "_", name).strip("_.+-")[:40] or "metric" for name in {*names} - own}
    plain = {name: f"logged_{base}" if base in _RESERVED else base for name, base in plain.items()}
    # Some file systems do not distinguish capital letters.
    n_equal = Counter(name.lower() for name in [*own, *plain.values(), *MONITORS.keys() - own])
    found = dict.fromkeys(names, "")
    for name in names:
        base = plain.get(name, name)
        apart = f"{base}_{hashlib.sha256(as_text(name).encode()).hexdigest()[:8]}"
        equal = [other for other in own if other.lower() == base.lower()]
        is_first = name in own and name == min(equal, key=lambda other: (other not in MONITORS, other))
        found[name] = base if is_first or (n_equal[base.lower()] == 1 and apart not in stored) else apart
    return found


def as_text(name: str) -> str:
    """Return a name that can be stored as text; only lone surrogates are replaced."""
    return name.encode(errors="backslashreplace").decode()
