"""Other people's models and inputs: which are measured, checked against states found by hand, and which are refused.

Call: python -m benchmarks.foreign_models [group ...]; writes docs/foreign_models.md, unless groups are named. Models of
libraries that are not installed are left out.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.foreign import executed_models, given, library_models, transformers_models, trial, written_models
from benchmarks.foreign.trial import OUTCOMES, Result, Trial
from benchmarks.report import table
from workbench.io.atomic import replacing
from workbench.io.provenance import versions

PAGE = Path(__file__).resolve().parent.parent / "docs" / "foreign_models.md"
GROUPS: dict[str, Sequence[Trial]] = {
    "Families of transformers": transformers_models.KNOWN,
    "Further families of transformers": transformers_models.FURTHER,
    "x-transformers": library_models.X_TRANSFORMERS,
    "vit-pytorch": library_models.VIT_PYTORCH,
    "diffusers": library_models.DIFFUSERS,
    "Written by hand": written_models.WRITTEN,
    "One model as people run it": executed_models.EXECUTION,
}
INPUTS = "Inputs"
ABOUT = (
    "Tiny models with random weights, each profiled with `wb.profile`. *Works* means: the number of blocks and the "
    "width are those that the trial states beforehand; the number of states, the energy gain, the update norm and, "
    "where the states are well conditioned, every eigenvalue are those of states found by hooks placed by hand, or "
    "returned by the model itself; and hooks, weights, modes, random state and outputs of the model are as before, "
    "also with `output_hidden_states=True`. *Refused as listed* means: an error of the workbench for a model that "
    "the trials list as one to refuse; the table gives the reason in the list and the words of the error, which "
    "only a reader compares. Squeezebert, nViT, convolutions over series and a few of the models written by hand "
    "were listed after the first run, and so were the outcomes of five inputs. Inputs work where they give the "
    "spectra of the same inputs in plain form."
)


def main() -> None:
    """Run the trials, show progress, and write the tables."""
    quiet()
    names = sys.argv[1:]
    unknown = [name for name in names if name not in (*GROUPS, INPUTS)]
    if unknown:
        sys.exit(f"There is no group {unknown[0]!r}; expected some of: {', '.join((*GROUPS, INPUTS))}.")
    models: dict[str, list[tuple[Trial, Result]]] = {}
    for group, trials in GROUPS.items():
        if not names or group in names:
            models[group] = [(t, shown(t.name, trial.run(t))) for t in trials]
    inputs = [(g, shown(g.name, given.run(g))) for g in given.INPUTS] if not names or INPUTS in names else []
    everything = [result for rows in models.values() for _, result in rows]
    summary = [counted(group, [result for _, result in rows]) for group, rows in models.items()]
    summary += [counted("**All models**", everything), counted(INPUTS, [result for _, result in inputs])]
    overview = table(("", *OUTCOMES, "all"), summary)
    made = f"Made by `python -m benchmarks.foreign_models` with {versions()}."
    page = ["# Other people's models and inputs", "", ABOUT, "", made, "", *overview]
    for group, rows in models.items():
        lines = [f"| {t.name} | {r.found} | {r.outcome} | {reason(t, r)} |" for t, r in rows]
        page += ["", f"## {group}", "", *table(("model", "blocks x width", "outcome", "reason"), lines)]
    lines = [f"| {g.name} | {r.outcome} | {cell(r.note)} |" for g, r in inputs]
    page += ["", f"## {INPUTS}", "", *table(("inputs", "outcome", "reason"), lines), ""]
    print("\n".join(overview))
    if not names:
        with replacing(PAGE) as partial:
            partial.write_text("\n".join(page))


def quiet() -> None:
    """Only the progress is shown."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    logging.disable(logging.WARNING)


def shown(name: str, result: Result) -> Result:
    """The result, and a line of progress."""
    print(f"{result.outcome:<21} {result.seconds:5.1f} s  {name}  {result.note[:200]}", flush=True)
    return result


def reason(of: Trial, result: Result) -> str:
    """Why a model is refused, by the trial and by the workbench; or what is wrong."""
    return cell(f"{of.refusal}: {result.note}" if result.outcome == "refused as listed" else result.note)


def counted(name: str, results: Sequence[Result]) -> str:
    """A row with the number of each outcome."""
    counts = Counter(result.outcome for result in results)
    return "| " + " | ".join([name, *(str(counts[outcome]) for outcome in OUTCOMES), str(len(results))]) + " |"


def cell(text: str) -> str:
    """Text that a cell of a table can hold."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
