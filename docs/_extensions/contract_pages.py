"""The page of broken contracts: for each one a training with one line wrong, its curve, and what the check says.

Curves and reports are computed by the page, and again if the library has changed.
"""

import io
import json
import math
import os

from generated_files import write
from notebook_pages import fenced

_N_UPDATES, _N_LAST, _N_COLUMNS = 100, 10, 5
_INTRODUCTION = """# Broken contracts

Each contract of `wb.check`, broken by one line. The trainings are small, those of the [course](../course.md): a
decoder on texts, unless another kind is named. `wb.course.miswired("no causal mask").check()` repeats one, and
[this page](../how_to/check_my_training.md) says how to check your own. Not shown are contracts of several processes:
{ranks}.
"""
_PICTURE = """## What the curve shows

The loss over {n} updates of each training (orange) and of the sound one (gray). In {n_like} of {n_all}, the mean loss
of the last {n_last} updates is within 10 % of the sound one; in {n_better} others it is lower, which
looks like success.

![Small panels of the loss with and without the wrong line, one for each contract]({picture})
"""


def faults_by_contract():
    """Return contract -> its faults, for the contracts that one process can break."""
    from workbench import course

    found = {}
    for fault in course.MISWIRED.values():
        found.setdefault(fault.contract, []).append(fault)
    return found


def results(state, folder):
    """Return contract -> report and curves of the training that breaks it, computed unless the library is the same."""
    path = folder / "contracts.json"
    if path.exists() and (held := json.loads(path.read_text(encoding="utf-8")))["state"] == state:
        return held["contracts"]
    from workbench import course
    from workbench.contracts.results import CheckReport
    from workbench.course.miswirings import KINDS

    names = {kind: name for name, kind in KINDS.items()}
    sound, found = {}, {}
    for contract, (fault, *_) in faults_by_contract().items():
        kind = names[fault.kinds[0]]
        if kind not in sound:
            sound[kind] = course.miswired(kind=kind).train(_N_UPDATES)
        report = course.miswired(fault.name).check()
        shown = CheckReport([report[contract]], report.n_updates, report.seconds)
        found[contract] = {
            "kind": kind,
            "losses": [each if math.isfinite(each) else None for each in course.miswired(fault.name).train(_N_UPDATES)],
            "sound": sound[kind],
            "table": shown._repr_html_().partition("</p>")[2].removesuffix("</div>"),
            "also": [each.id for each in report.failed if each.id != contract],
        }
    write(path, json.dumps({"state": state, "contracts": found}))
    return found


def last(losses):
    """Return the mean of the last losses; NaN if one is not finite."""
    return sum(math.nan if each is None else each for each in losses[-_N_LAST:]) / _N_LAST


def picture(found):
    """Return small panels of all curves."""
    from matplotlib.figure import Figure
    from PIL import Image

    from workbench.plots.figure_files import small_png

    n_rows = -(-len(found) // _N_COLUMNS)
    figure = Figure(figsize=(11, 1.55 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, _N_COLUMNS).flat
    for panel, (contract, one) in zip(panels, found.items(), strict=False):
        panel.plot(one["sound"], color="#b5b5b5", linewidth=2.5)
        panel.plot([math.nan if each is None else each for each in one["losses"]], color="#d55e00", linewidth=1)
        panel.set_title(contract, fontsize=8.5, color="#333333")
        panel.tick_params(labelsize=6.5, colors="#333333")
        panel.set_ylim(0, 1.5 * max(one["sound"]))
        panel.spines[["top", "right"]].set_visible(False)
    for panel in figure.axes[len(found) :]:
        panel.set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return small_png(Image.open(file))


def section(contract, faults, one):
    """Return the Markdown of one contract, without a result if there is none."""
    fault = faults[0]
    sound, wrong = fault.lines
    kind = f" ({one['kind']})" if one and one["kind"] != "decoder" else ""
    parts = [
        f"## {contract}",
        f"{fault.name[0].upper()}{fault.name[1:]}{kind}. In the step `{fault.where}`:",
        fenced(f"# wrong\n{wrong}\n# sound\n{sound}", "python"),
    ]
    if one:
        value = last(one["losses"])
        end = f"The last loss is {value:.3g}" if math.isfinite(value) else "The loss is not finite"
        parts.append(f"{end}; that of the sound training is {last(one['sound']):.3g}. The check says:")
        parts.append(f"```{{raw}} html\n{one['table']}\n```")
        if one["also"]:
            parts.append(f"Another consequence that fails: `{'`, `'.join(one['also'])}`.")
    if others := [f"- {each.name}, in `{each.where}`: `{each.lines[1]}`" for each in faults[1:]]:
        parts.append("Other lines that break it:\n\n" + "\n".join(others))
    return "\n\n".join(parts)


def write_contracts(page, state, folder, *, with_results):
    """Write the page and its picture; return the page."""
    from workbench.contracts import check as check
    from workbench.contracts.lab import CONTRACTS

    every = faults_by_contract()
    found = results(state, folder) if with_results else {}
    ranks = ", ".join(f"`{each}`" for each in CONTRACTS if each not in every)
    parts = [_INTRODUCTION.format(ranks=ranks)]
    if found:
        ratios = [last(one["losses"]) / last(one["sound"]) for one in found.values()]
        words = {
            "n_all": len(ratios),
            "n_like": sum(abs(each - 1) <= 0.1 for each in ratios),
            "n_better": sum(each < 0.9 for each in ratios),
            "picture": os.path.relpath(write(folder / "contracts.png", picture(found)), page.parent),
        }
        parts.append(_PICTURE.format(n=_N_UPDATES, n_last=_N_LAST, **words))
    parts += [section(contract, every[contract], found.get(contract)) for contract in CONTRACTS if contract in every]
    return write(page, "\n\n".join(parts) + "\n")
