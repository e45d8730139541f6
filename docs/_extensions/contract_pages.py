"""The page of broken contracts: for each one a training with one line wrong, its curve, and what the check says.

Curves and reports are computed by the page, and again if the library has changed.
"""

import io
import json

from generated_files import write
from notebook_pages import fenced

_N_UPDATES, _N_LAST, _N_COLUMNS = 100, 10, 5
_INTRODUCTION = """# Broken contracts

Each contract of `wb.check`, broken by one line. The trainings are small, of the [course](../course.md): a decoder on texts, unless
another kind is named. `wb.course.miswired("no causal mask").check()` repeats one. {ranks} need several processes and
are not shown.
"""
_PICTURE = """## What the curve shows

The loss over {n} updates of each training (orange) and of the sound one (gray). In {n_like} of {n_all}, the mean loss
of the last {last} updates is within 10 % of the sound one or below it: without the gray curve beside it, nothing is to be seen.

![Small panels of the loss with and without the wrong line, one for each contract]({picture})
"""


def reports(state, folder):
    """Return contract -> what the training that breaks it shows, computed unless the library is the same."""
    path = folder / "contracts.json"
    if path.exists() and (held := json.loads(path.read_text(encoding="utf-8")))["state"] == state:
        return held["contracts"]
    from workbench import course
    from workbench.contracts.lab import CONTRACTS
    from workbench.contracts.results import CheckReport
    from workbench.course.miswirings import KINDS

    names = {kind: name for name, kind in KINDS.items()}
    sound, found = {}, {}
    for contract in CONTRACTS:
        faults = [fault for fault in course.MISWIRED.values() if fault.contract == contract]
        for fault in faults[:1]:
            kind = names[fault.kinds[0]]
            if kind not in sound:
                sound[kind] = course.miswired(kind=kind).train(_N_UPDATES)
            report = course.miswired(fault.name).check()
            shown = CheckReport([report[contract]], report.n_updates, report.seconds)
            found[contract] = {
                "name": fault.name,
                "kind": kind,
                "step": fault.where,
                "lines": fault.lines,
                "others": [(each.where, each.lines[1]) for each in faults[1:]],
                "losses": course.miswired(fault.name).train(_N_UPDATES),
                "sound": sound[kind],
                "report": str(shown).partition("\n")[2],
                "also": [each.id for each in report.failed if each.id != contract],
            }
    write(path, json.dumps({"state": state, "contracts": found}))
    return found


def picture(found):
    """Return small panels of all curves."""
    from matplotlib.figure import Figure

    from workbench.plots.figure_files import small_png

    n_rows = -(-len(found) // _N_COLUMNS)
    figure = Figure(figsize=(11, 1.55 * n_rows), layout="constrained")
    for place, (contract, one) in zip(figure.subplots(n_rows, _N_COLUMNS).flat, found.items(), strict=False):
        place.plot(one["sound"], color="#7a7a7a", linewidth=2.5)
        place.plot(one["losses"], color="#d55e00", linewidth=1)
        place.set_title(contract, fontsize=8.5, color="#333333")
        place.tick_params(labelsize=6.5, colors="#333333")
        place.set_ylim(0, 2 * max(one["sound"]))
        place.spines[["top", "right"]].set_visible(False)
    for place in figure.axes[len(found) :]:
        place.set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    from PIL import Image

    return small_png(Image.open(file))


def section(contract, one):
    """Return the Markdown of one contract."""
    last, usual = (sum(one[name][-_N_LAST:]) / _N_LAST for name in ("losses", "sound"))
    title = one["name"] if one["kind"] == "decoder" else f"{one['name']} ({one['kind']})"
    sound, wrong = one["lines"]
    parts = [
        f"## `{contract}`",
        f"{title[0].upper()}{title[1:]}. In the step `{one['step']}`:",
        fenced(f"{wrong}    # wrong\n{sound}    # sound", "python"),
        f"The last loss is {last:.3g}, without the fault {usual:.3g}. The check:",
        fenced(one["report"], "text"),
    ]
    if one["also"]:
        parts.append(f"As a consequence, `{'`, `'.join(one['also'])}` fails as well.")
    if one["others"]:
        lines = "\n".join(f"- in `{step}`: `{line}`" for step, line in one["others"])
        parts.append(f"Other lines that break it:\n\n{lines}")
    return "\n\n".join(parts)


def write_contracts(page, state, folder):
    """Write the page and its picture; return the page."""
    import os

    from workbench.contracts import check as check
    from workbench.contracts.lab import CONTRACTS

    found = reports(state, folder)
    shown = write(folder / "contracts.png", picture(found))
    last = {name: [sum(one[key][-_N_LAST:]) for key in ("losses", "sound")] for name, one in found.items()}
    words = _PICTURE.format(
        n=_N_UPDATES,
        last=_N_LAST,
        n_all=len(found),
        n_like=sum(broken <= 1.1 * sound for broken, sound in last.values()),
        picture=os.path.relpath(shown, page.parent),
    )
    ranks = ", ".join(f"`{each}`" for each in CONTRACTS if each not in found)
    parts = [_INTRODUCTION.format(ranks=ranks), words, *(section(*each) for each in found.items())]
    return write(page, "\n\n".join(parts) + "\n")
