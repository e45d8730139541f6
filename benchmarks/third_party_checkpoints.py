"""Open third-party checkpoints of many formats and compare the parameters and spectra with those of their source.

Each trial writes a small checkpoint of known parameters, or a damaged one, opens it resident and streamed, and compares
every parameter and the spectra with those of the model that was written. A checkpoint that does not open must be
rejected with one sentence, for a reason that the trial states in advance. Some pickles contain code, which must not be
executed.

Call: python -m benchmarks.third_party_checkpoints [words in the name of a trial ...]. Without words it writes
docs/results/third_party_checkpoints.md.
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
import xarray as xr

import workbench as wb
from benchmarks.report import cell, table
from benchmarks.third_party.checkpoint_trial import CODE_RAN, REASONS, TOKENS, TRIALS, Saved, Trial
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.zoo.module_of import module_of

#: Modules that add their trials to `TRIALS`, in the order of the table.
FORMATS = (
    "transformers_folders", "weight_files", "distributed_checkpoints", "cluster_folders", "adapter_folders",
    "gguf_files", "no_checkpoints",
)  # fmt: skip
REPORT = Path(__file__).resolve().parent.parent / "docs" / "results" / "third_party_checkpoints.md"
#: Tolerance, relative and absolute, of the numbers of the streamed profile, compared with those of the resident one.
TOLERANCE = 1e-10
#: Outcomes that count as failures.
WRONG = ("silently wrong", "raw crash", "code ran", "not rejected", "wrong reason", "rejected")


@dataclass(frozen=True)
class Outcome:
    """The outcome of opening one checkpoint in one way, resident or streamed.

    Attributes:
        word: "works", "rejected as expected", "not run", or one of `WRONG`.
        detail: The sentence of the exception, or what is wrong.
    """

    word: str
    detail: str = ""


def main() -> None:
    """Run the trials, print the table and write the page."""
    words = sys.argv[1:]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    start, rows, counts = time.perf_counter(), [], Counter()
    for trial in all_trials():
        if any(word not in f"{trial.group} {trial.name}" for word in words):
            continue
        resident, streamed = run(trial)
        counts.update({word for word in (resident.word, streamed.word) if word in WRONG} or {resident.word})
        note = resident.detail or (streamed.detail if streamed.word != "works" else "")
        rows.append(f"| {trial.group}: {trial.name} | {resident.word} | {streamed.word} | {cell(note)} |")
        print(rows[-1], flush=True)
    n_wrong = sum(counts[word] for word in WRONG)
    seconds = time.perf_counter() - start
    print(f"{len(rows)} trials in {seconds:.0f} s: {dict(counts)}")
    if not words:
        _write(rows, counts)
    sys.exit(n_wrong > 0)


def all_trials() -> list[Trial]:
    """Return the trials of all formats."""
    for formats in FORMATS:
        importlib.import_module(f"benchmarks.third_party.{formats}")
    return TRIALS


def run(trial: Trial) -> tuple[Outcome, Outcome]:
    """Open one checkpoint resident and streamed and return both outcomes."""
    if trial.needs and importlib.util.find_spec(trial.needs) is None:
        missing = Outcome("not run", f"needs {trial.needs}")
        return missing, missing
    with tempfile.TemporaryDirectory(prefix="trial-") as place:
        folder = Path(place)
        try:
            saved = trial.write(folder)
        except PermissionError as error:  # this user cannot write the checkpoint of the trial
            missing = Outcome("not run", str(error))
            return missing, missing
        resident, profile = _open(trial, saved, folder, None, streaming=False)
        streamed, _ = _open(trial, saved, folder, profile, streaming=True)
        gc.collect()  # close the memory maps of the files before the folder is removed
    return resident, streamed


def _open(
    trial: Trial, saved: Saved, folder: Path, profile: xr.Dataset | None, *, streaming: bool
) -> tuple[Outcome, xr.Dataset | None]:
    """Open a checkpoint in one way; return the outcome, and the profile if the checkpoint opens.

    Args:
        trial: The trial.
        saved: The checkpoint that was written.
        folder: Folder of the checkpoint, whose path is removed from sentences.
        profile: Expected profile; None computes it from the model that was written.
        streaming: Whether the checkpoint is streamed.
    """
    rejection = (trial.not_streamed if streaming else "") or trial.rejection
    options = {**saved.options, **({} if saved.module is None else {"module": saved.module()})}
    CODE_RAN.unlink(missing_ok=True)
    try:
        subject = wb.open_checkpoint(saved.source, streaming=streaming, **options)
        outcome, profile = _compare(saved, subject, profile, streaming=streaming)
    except wb.WorkbenchError as error:
        text = (
            str(error).replace(str(folder) + os.sep, "").replace(str(folder), "folder").replace(folder.name, "folder")
        )
        outcome, profile = _rejection_outcome(text, rejection), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # any other exception is a defect
        last = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        outcome, profile = Outcome("raw crash", detail), None
    else:
        outcome = (
            Outcome("not rejected", f"expected: {rejection}") if rejection and outcome.word == "works" else outcome
        )
    return (Outcome("code ran") if CODE_RAN.exists() else outcome), profile


def _rejection_outcome(text: str, rejection: str) -> Outcome:
    """Check whether the text of an exception is one sentence that gives the expected reason."""
    if not rejection:
        return Outcome("rejected", text)
    is_sentence = "\n" not in text and text.endswith(".") and len(text) < 500
    is_expected = any(phrase in text for phrase in REASONS[rejection].phrases)
    return Outcome("rejected as expected", text) if is_sentence and is_expected else Outcome("wrong reason", text)


def _compare(
    saved: Saved, subject: wb.Subject, profile: xr.Dataset | None, *, streaming: bool
) -> tuple[Outcome, xr.Dataset | None]:
    """Compare the parameters and the spectra of a subject with the expected ones; also return its profile."""
    if saved.model is None:
        return Outcome("not rejected"), None
    if (subject.streamed is not None) != streaming:
        return Outcome("silently wrong", "it is not streamed" if streaming else "it is streamed"), None
    if subject.unloaded != saved.unloaded:
        return Outcome("silently wrong", f"unloaded: {subject.unloaded}"), None
    model = module_of(subject)
    own, expected = model.state_dict(), saved.model.state_dict()
    if own.keys() != expected.keys():
        return Outcome("silently wrong", f"different names: {sorted(own.keys() ^ expected.keys())[:3]}"), None
    for name, tensor in expected.items():
        if (own[name].shape, own[name].dtype) != (tensor.shape, tensor.dtype):
            return Outcome("silently wrong", f"{name} is {own[name].dtype} {tuple(own[name].shape)}"), None
        if not streaming and not torch.equal(_dequantized(own[name]), _dequantized(tensor)):
            return Outcome("silently wrong", f"{name} has different values"), None
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


def _dequantized(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values with which a quantized tensor of torchao computes; other tensors are returned unchanged."""
    return tensor.dequantize() if type(tensor).__module__.startswith("torchao") else tensor


def _write(rows: list[str], counts: Counter[str]) -> None:
    """Write the page.

    Args:
        rows: Rows of the table of trials.
        counts: Number of trials by outcome.
    """
    n_wrong = sum(counts[word] for word in WRONG)
    about = (
        f"**Which checkpoints can be opened?** Of {len(rows)} trials {counts['works']} open with the parameters, "
        f"dtypes and spectra of their source, and {counts['rejected as expected']} are rejected with one sentence, for "
        f"a reason that was stated in advance; {counts['not run']} were not run and {n_wrong} failed.\n\n"
        "Parameters are compared bit for bit. The spectra of a streamed model agree with those of the resident model "
        f"to {TOLERANCE:g}. A trial fails by wrong values, a Python error other than those of the workbench, executed "
        "code, or an outcome other than the expected one. Generated by `python -m benchmarks.third_party_checkpoints` "
        f"with {versions()}."
    )
    reasons = [f"| {key} | {reason.why} |" for key, reason in REASONS.items()]
    columns = ("format", "resident", "streamed", "reason of a rejection, or remark")
    text = ["# Third-party checkpoints", "", about, "", "## Reasons for rejection", ""]
    text += [*table(("reason", "meaning"), reasons), "", "## Trials", "", *table(columns, rows), ""]
    with replacing(REPORT) as partial:
        partial.write_text("\n".join(text))


if __name__ == "__main__":
    main()
