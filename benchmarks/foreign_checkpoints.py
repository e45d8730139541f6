"""Trials of other people's checkpoints: what is written in each format is opened and compared with its source.

Each trial writes a small checkpoint of known weights, or a damaged one, opens it resident and streamed, and compares
every parameter and the spectra with those of the model that was written. What does not open must be refused with one
sentence, for a reason that the trial states beforehand. Formats made of pickles also hold code that must not run.

Run it as ``python -m benchmarks.foreign_checkpoints [words of a format]``; without words it writes
``docs/foreign_checkpoints.md``.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import workbench as wb
from benchmarks.foreign.checkpoint_trial import CODE_RAN, REASONS, TOKENS, TRIALS, Saved, Trial
from benchmarks.report import table
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.zoo.module_of import module_of

#: Modules that add their trials to `TRIALS`, in the order of the table.
FORMATS = (
    "transformers_folders", "weight_files", "distributed_checkpoints", "cluster_folders", "adapter_folders",
    "gguf_files", "no_checkpoints",
)  # fmt: skip
REPORT = Path(__file__).resolve().parent.parent / "docs" / "foreign_checkpoints.md"
#: Largest difference between a number of the streamed and of the resident profile, relative to the larger.
TOLERANCE = 1e-10
WRONG = ("silently wrong", "raw crash", "code ran", "no refusal", "wrong reason", "refused")


@dataclass(frozen=True)
class Outcome:
    """What became of one way of opening one checkpoint.

    Attributes:
        word: "works", "refused as expected", "not run", or one of `WRONG`.
        detail: The sentence of the refusal, or what is wrong.
    """

    word: str
    detail: str = ""


def main() -> None:
    """Run the trials, print the table and save it."""
    wanted = sys.argv[1:]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    start, rows, counts = time.perf_counter(), [], Counter()
    for trial in all_trials():
        if any(word not in f"{trial.group} {trial.name}" for word in wanted):
            continue
        resident, streamed = run(trial)
        counts.update({word for word in (resident.word, streamed.word) if word in WRONG} or {resident.word})
        note = resident.detail or (streamed.detail if streamed.word != "works" else "")
        rows.append(f"| {trial.group}: {trial.name} | {resident.word} | {streamed.word} | {_cell(note)} |")
        print(rows[-1], flush=True)
    n_wrong = sum(counts[word] for word in WRONG)
    seconds = time.perf_counter() - start
    print(f"{len(rows)} trials in {seconds:.0f} s: {dict(counts)}")
    if not wanted:
        _write(rows, counts)
    sys.exit(n_wrong > 0)


def all_trials() -> list[Trial]:
    """The trials of all formats."""
    for formats in FORMATS:
        importlib.import_module(f"benchmarks.foreign.{formats}")
    return TRIALS


def run(trial: Trial) -> tuple[Outcome, Outcome]:
    """Open one checkpoint, resident and streamed."""
    if trial.needs and importlib.util.find_spec(trial.needs) is None:
        missing = Outcome("not run", f"needs {trial.needs}")
        return missing, missing
    with tempfile.TemporaryDirectory(prefix="trial-") as place:
        folder = Path(place)
        try:
            saved = trial.write(folder)
        except PermissionError as error:  # of a trial that this user cannot make
            missing = Outcome("not run", str(error))
            return missing, missing
        resident, profile = _open(trial, saved, folder, None, streaming=False)
        streamed, _ = _open(trial, saved, folder, profile, streaming=True)
        gc.collect()  # maps of the files are closed before the folder is removed
    return resident, streamed


def _open(trial: Trial, saved: Saved, folder: Path, profile, *, streaming: bool):
    refusal = (trial.not_streamed if streaming else "") or trial.refusal
    options = {**saved.options, **({} if saved.module is None else {"module": saved.module()})}
    CODE_RAN.unlink(missing_ok=True)
    try:
        subject = wb.open_checkpoint(saved.source, streaming=streaming, **options)
        outcome, profile = _compared(saved, subject, profile, streaming=streaming)
    except wb.WorkbenchError as error:
        text = (
            str(error).replace(str(folder) + os.sep, "").replace(str(folder), "folder").replace(folder.name, "folder")
        )
        outcome, profile = _judged(text, refusal), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # whatever escapes is a finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        outcome, profile = Outcome("raw crash", detail), None
    else:
        outcome = Outcome("no refusal", f"expected: {refusal}") if refusal and outcome.word == "works" else outcome
    return (Outcome("code ran") if CODE_RAN.exists() else outcome), profile


def _judged(text: str, refusal: str) -> Outcome:
    """Whether a refusal is the one that was stated beforehand, in one sentence."""
    if not refusal:
        return Outcome("refused", text)
    is_sentence = "\n" not in text and text.endswith(".") and len(text) < 500
    is_expected = any(phrase in text for phrase in REASONS[refusal].phrases)
    return Outcome("refused as expected", text) if is_sentence and is_expected else Outcome("wrong reason", text)


def _compared(saved: Saved, subject, profile, *, streaming: bool):
    """Whether a subject holds the weights that were written and has their spectra; and its profile."""
    if saved.model is None:
        return Outcome("no refusal"), None
    if (subject.streamed is not None) != streaming:
        return Outcome("silently wrong", "it is not streamed" if streaming else "it is streamed"), None
    if subject.unloaded != saved.unloaded:
        return Outcome("silently wrong", f"unloaded: {subject.unloaded}"), None
    model = module_of(subject)
    own, expected = model.state_dict(), saved.model.state_dict()
    if own.keys() != expected.keys():
        return Outcome("silently wrong", f"other names: {sorted(own.keys() ^ expected.keys())[:3]}"), None
    for name, tensor in expected.items():
        if (own[name].shape, own[name].dtype) != (tensor.shape, tensor.dtype):
            return Outcome("silently wrong", f"{name} is {own[name].dtype} {tuple(own[name].shape)}"), None
        if not streaming and not torch.equal(_plain(own[name]), _plain(tensor)):
            return Outcome("silently wrong", f"{name} has other values"), None
    if not saved.has_spectra:
        return Outcome("works"), None
    options = {"n_snapshots": 64, "progress": False}
    found = wb.profile(subject, saved.inputs if saved.inputs is not None else TOKENS, **options)
    if profile is None:
        profile = wb.profile(saved.model.eval(), saved.inputs if saved.inputs is not None else TOKENS, **options)
    for name, variable in profile.data_vars.items():
        values, other = variable.values, found[name].values
        if values.dtype.kind in "fc" and not np.allclose(values, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            return Outcome("silently wrong", f"{name} of the profile differs"), None
    return Outcome("works"), found


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of torchao as it computes."""
    return tensor.dequantize() if type(tensor).__module__.startswith("torchao") else tensor


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _write(rows: list[str], counts: Counter) -> None:
    n_wrong = sum(counts[word] for word in WRONG)
    about = (
        f"{len(rows)} trials: **{counts['works']} open** with the parameters that were written, to the bit and in "
        f"their dtype, and with the spectra of their source; **{counts['refused as expected']} are refused** with one "
        f"sentence, for a reason that was stated beforehand; {counts['not run']} were not run; {n_wrong} went wrong "
        f"(wrong values, a raw error of Python, code that ran, or another answer than stated). Spectra of a streamed "
        f"model agree with those of the resident one to {TOLERANCE:g}. Made by `python -m "
        f"benchmarks.foreign_checkpoints` with {versions()}."
    )
    reasons = [f"| {key} | {reason.why} |" for key, reason in REASONS.items()]
    columns = ("format", "resident", "streamed", "refusal, or remark")
    text = ["# Checkpoints of other programs", "", about, "", "## Why a checkpoint is refused", ""]
    text += [*table(("reason", "meaning"), reasons), "", "## Trials", "", *table(columns, rows), ""]
    with replacing(REPORT) as partial:
        partial.write_text("\n".join(text))


if __name__ == "__main__":
    main()
