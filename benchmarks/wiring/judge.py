"""Judges `workbench check` on the corpus: every case is run as its author would run it, under the command.

Results are kept by case in a folder, so that an interrupted run continues. ``--part locked`` is for the end, and
``--part threads`` judges public reports that were rebuilt.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
#: Most seconds of one case.
LIMIT = 240


def text_of(case: dict[str, Any]) -> str:
    """Return the script of a case with its replacements."""
    text = (HERE / case["script"]).read_text(encoding="utf-8")
    for old, new in case.get("replace", ()):
        assert text.count(old) == 1, (case["name"], old)
        text = text.replace(old, new)
    return text


def run_case(case: dict[str, Any], updates: int) -> dict[str, Any]:
    """Run one case under the command, and return what it reports."""
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder, Path(case["script"]).name), Path(folder, "out.json")
        script.write_text(text_of(case), encoding="utf-8")
        command = [sys.executable, "-m", "workbench", "check", "--updates", str(updates), "--out", str(out), "--"]
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [*command, *case["launch"], str(script)], cwd=folder, timeout=LIMIT, capture_output=True, text=True
            )
            status, tail = done.returncode, (done.stdout + done.stderr)[-1500:]
        except subprocess.TimeoutExpired:
            status, tail = -1, "time is over"
        report = json.loads(out.read_text()) if out.exists() else {"checks": [], "seconds": None}
        return {
            "status": status,
            "wall": time.perf_counter() - start,
            "seconds": report["seconds"],
            "checks": report["checks"],
            "losses": report.get("losses", []),
            "tail": "" if report["checks"] else tail,
        }


def changed_lines(case: dict[str, Any]) -> range:
    """Return the lines of the faulty script that the replacement concerns."""
    text, old = text_of(case), (HERE / case["script"]).read_text(encoding="utf-8")
    ours, theirs = text.splitlines(), old.splitlines()
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
    last = next((i for i, (a, b) in enumerate(zip(ours[::-1], theirs[::-1], strict=False)) if a != b), 0)
    return range(first + 1 - 2, max(len(ours) - last, first + 1) + 3)


def has_place(case: dict[str, Any], check: dict[str, Any]) -> bool:
    """Return whether a result names the place: the parameter or module, or a line near the change."""
    said = f"{check['where']} {check['evidence']} {check['remedy']}"
    name = Path(case["script"]).name
    lines = [int(line) for line in re.findall(rf"{re.escape(name)}:(\d+)", said)]
    if any(line in changed_lines(case) for line in lines):
        return True
    words = [word for word in re.split(r"[\s,;()]+", case["where"]) if len(word) > 1 and word != "line"]
    return any(word.lower() in said.lower() for word in words)


def verdict_of(case: dict[str, Any], found: dict[str, Any]) -> str:
    """Return right, partly right, wrong, silent or crash for a faulty case; clean, false or crash for a sound one."""
    failed = {check["id"] for check in found["checks"] if check["status"] == "failed"}
    if not found["checks"]:
        return "crash"
    if not case["faulty"]:
        return "false" if failed else "clean"
    kinds = (("right", {*case["ids"]}), ("partly right", {*case["also"]}), ("wrong", failed))
    return next((kind for kind, ids in kinds if failed & ids), "silent")


def curve_shows(losses: list[float | None]) -> bool:
    """Return whether the loss alone looks wrong: it is not finite, or no lower at the end than at the beginning."""
    if not losses or any(each is None for each in losses):
        return bool(losses)
    n = max(1, len(losses) // 4)
    return sum(losses[-n:]) >= sum(losses[:n])


def write_table(judged: list[tuple[dict[str, Any], dict[str, Any]]], part: str) -> None:
    """Write ``benchmarks/wiring.md``, of other parts ``wiring_PART.md``: by contract, beside the loss curve alone."""
    from benchmarks.report import write_report

    sound = [found for case, found in judged if not case["faulty"]]
    faulty = [(case, found, verdict_of(case, found)) for case, found in judged if case["faulty"]]
    rows = []
    for id in sorted({case["ids"][0] for case, _, _ in faulty}):
        mine = [each for each in faulty if each[0]["ids"][0] == id]
        counts = Counter(verdict for _, _, verdict in mine)
        curve = sum(curve_shows(found["losses"]) for _, found, _ in mine)
        names = ("right", "partly right", "wrong", "silent", "crash")
        rows.append(f"| `{id}` | {len(mine)} | {' | '.join(str(counts[name]) for name in names)} | {curve} |")
    total = Counter(verdict for _, _, verdict in faulty)
    extra = sum(
        any(c["status"] == "failed" and c["id"] not in {*case["ids"], *case["also"]} for c in found["checks"])
        for case, found, _ in faulty
    )
    placed = sum(
        any(has_place(case, c) for c in found["checks"] if c["status"] == "failed" and c["id"] in case["ids"])
        for case, found, verdict in faulty
        if verdict == "right"
    )
    false = sum(any(c["status"] == "failed" for c in found["checks"]) for found in sound)
    curve = [sum(curve_shows(found["losses"]) for found in of) for of in (sound, [found for _, found, _ in faulty])]
    seconds = sorted(found["seconds"] for _, found in judged if found["seconds"] is not None)
    about = (
        f"`workbench check` with 20 updates on the {part} part of the corpus in `benchmarks/wiring`: {len(sound)} "
        f"sound scripts and {len(faulty)} faulty ones, each with one small replacement. Contracts fail in {false} of "
        f"{len(sound)} sound scripts. Of the faulty ones, {total['right']} are right (a broken contract is the one of "
        f"the fault), {total['partly right']} partly (one that is broken as a consequence), {total['wrong']} wrong, "
        f"{total['silent']} silent; {extra} have a failure beside that is neither. The place is named in {placed} of "
        f"the {total['right']} (the module, the parameter, or a line within two of the change). The loss curve alone, "
        f"not falling over the observed updates or not finite, flags {curve[1]} of {len(faulty)} faulty and {curve[0]} "
        f"of {len(sound)} sound scripts. The experiments take {seconds[len(seconds) // 2]:.1f} s (median) and at most "
        f"{seconds[-1]:.0f} s. Generated by `python -m benchmarks.wiring.judge --part {part} --write`."
    )
    columns = ("contract", "cases", "right", "partly", "wrong", "silent", "crash", "loss curve alone")
    name = "wiring" if part == "open" else f"wiring_{part}"
    write_report(name, f"Broken contracts of training scripts: the {part} part", about, columns, rows)


def cases_of(part: str) -> list[dict[str, Any]]:
    """Return the cases of a part."""
    if part == "threads":
        rebuilt = [each for each in json.loads((HERE / "threads.json").read_text()) if "script" in each]
        launch = {each["script"]: each["launch"] for each in rebuilt if each["script"].startswith("threads/")}
        sound = [{"name": Path(n).stem, "script": n, "launch": launch[n], "faulty": False} for n in sorted(launch)]
        return [*sound, *({**each, "faulty": True} for each in rebuilt)]
    names = {*json.loads((HERE / "split.json").read_text())[part]}
    known = json.loads((HERE / "cases.json").read_text())
    of = {
        case["script"]: {name: case[name] for name in ("launch", "needs", "style")}
        for case in known
        if not case["faulty"]
    }
    return [{**of[case["script"]], **case} for case in known if case["name"] in names]


def print_yardsticks(verdicts: dict[str, str]) -> None:
    """Print how many of each list of public reports are rebuilt, judged, found and left out."""
    entries = json.loads((HERE / "threads.json").read_text())
    for yardstick in dict.fromkeys(name for each in entries for name in each["yardstick"]):
        mine = [each for each in entries if yardstick in each["yardstick"]]
        judged = [verdicts[each["name"]] for each in mine if each["name"] in verdicts]
        print(
            f"{yardstick}: {sum('script' in each for each in mine)} rebuilt, {len(judged)} judged, "
            f"{judged.count('right')} found, {judged.count('partly right')} partly, "
            f"{sum('left_out' in each for each in mine)} left out"
        )


def main() -> None:
    """Run the cases, print one line for each, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("open", "locked", "threads"), default="open")
    parser.add_argument("--folder", type=Path, default=ROOT / "artifacts" / "wiring")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases or ids")
    parser.add_argument("--kind", choices=("sound", "faulty", "all"), default="all")
    parser.add_argument("--again", action="store_true", help="run cases again whose results are kept")
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/")
    args = parser.parse_args()
    cases = cases_of(args.part)
    cases = [case for case in cases if args.kind == "all" or case["faulty"] == (args.kind == "faulty")]
    if args.only:
        cases = [case for case in cases if {case["name"], *case.get("ids", ())} & {*args.only}]
    args.folder.mkdir(parents=True, exist_ok=True)
    sums, by_id, places = Counter[str](), Counter[tuple[str, str]](), 0
    verdicts: dict[str, str] = {}
    judged = []
    for case in cases:
        if missing := [name for name in case.get("needs", []) if find_spec(name) is None]:
            sums[f"left out, without {', '.join(missing)}"] += 1
            continue
        path = args.folder / f"{case['name']}.json"
        if args.again or not path.exists():
            path.write_text(json.dumps(run_case(case, args.updates), indent=1))
        found = json.loads(path.read_text())
        judged.append((case, found))
        verdict = verdicts[case["name"]] = verdict_of(case, found)
        failed = [check for check in found["checks"] if check["status"] == "failed"]
        expected = {*case.get("ids", ()), *case.get("also", ())}
        extra = [check["id"] for check in failed if check["id"] not in expected]
        is_placed = any(has_place(case, check) for check in failed if check["id"] in expected)
        places += is_placed
        sums[("faulty: " if case["faulty"] else "sound: ") + verdict] += 1
        if case["faulty"]:
            by_id[case["ids"][0], verdict] += 1
            sums["faulty: with a false failure beside"] += bool(extra)
        print(
            f"{verdict:<12} {case['name']:<60} {found['wall']:5.1f} s  "
            f"expected {','.join(case.get('ids', [])) or '-'}; "
            f"failed {','.join(check['id'] for check in failed) or '-'}{'' if is_placed else ' (no place)'}",
            flush=True,
        )
        if verdict == "crash":
            print("   ", found["tail"][-300:].replace("\n", "\n    "))
    for name, n in sorted(sums.items()):
        print(f"{name}: {n}")
    print(f"faulty: with its place: {places}")
    for (id, verdict), n in sorted(by_id.items()):
        print(f"  {id}: {verdict} {n}")
    if args.part == "threads":
        print_yardsticks(verdicts)
    if args.write:
        write_table(judged, args.part)


if __name__ == "__main__":
    main()
