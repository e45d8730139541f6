"""Draws which scripts are locked: a third of each style, once.

Scripts that were drawn stay where they are. New ones of a style are ordered by a hash of the seed and their names, and
the first are locked until a third of the style is.
"""

import hashlib
import json
from pathlib import Path

HERE = Path(__file__).parent
SEED = 20261127


def draw(cases: list[dict], split: dict[str, list[str]]) -> dict[str, list[str]]:
    """Add the scripts that are not yet in `split`, and list the names of all cases."""
    script_of = {c["name"]: c["script"] for c in cases}
    locked = {script_of[n] for n in split["locked"] if n in script_of}
    drawn = locked | {script_of[n] for n in split["open"] if n in script_of}
    sound = [c for c in cases if not c["faulty"]]
    for style in sorted({c["style"] for c in sound}):
        scripts = {c["script"]: c["name"] for c in sound if c["style"] == style}
        missing = round(len(scripts) / 3) - len(locked & set(scripts))
        new = sorted(set(scripts) - drawn, key=lambda s: hashlib.sha256(f"{SEED}:{scripts[s]}".encode()).hexdigest())
        locked |= set(new[: max(missing, 0)])
    return {
        "open": [c["name"] for c in cases if c["script"] not in locked],
        "locked": [c["name"] for c in cases if c["script"] in locked],
    }


if __name__ == "__main__":
    path = HERE / "split.json"
    split = json.loads(path.read_text()) if path.exists() else {"open": [], "locked": []}
    split = draw(json.loads((HERE / "cases.json").read_text()), split)
    path.write_text(json.dumps(split, indent=1) + "\n")
