"""Faults that no record shows, or not this one, each with the contract that tests it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xarray as xr

from workbench.contracts.results import Status
from workbench.diagnosis.failed_run import Record
from workbench.formatting import percent
from workbench.probes.batch import IGNORED

#: Labels, or ends of texts, of the probe that decide about all others, and the fraction of them that must agree.
_LEAST, _NEARLY_ALL = 4, 0.99
#: Number of latest examples among which the watch finds one that comes again.
_REMEMBERED = 1024


def labels_of_probe(record: Record) -> dict[str, str]:
    """Return what the labels among the stored inputs of a model that shifts them itself decide."""
    found: dict[str, str] = {}
    name, config = str(record.setting("model", "name")), record.setting("model", "config", default={})
    ids, labels, mask = (record.probe.get(each) for each in ("input_ids", "labels", "attention_mask"))
    shifts = name.endswith(("ForCausalLM", "LMHeadModel")) and "model_type" in config  # of transformers
    if not shifts or ids is None or labels is None or ids.shape != labels.shape or (labels == IGNORED).all():
        return found
    counts = labels != IGNORED
    if counts[:, :-1].sum() >= _LEAST:
        is_next = (labels[:, :-1] == ids[:, 1:])[counts[:, :-1]].mean() > _NEARLY_ALL
        found["labels shifted twice"] = (
            f"The labels are the next tokens already, and {name} shifts them once more: it learns the token after the "
            "next. Pass the input tokens as labels."
        ) * bool(is_next and (labels == ids)[counts].mean() < 0.5)
    if mask is None or mask.shape != ids.shape:
        return found
    if (is_hidden := mask == 0).sum() >= _LEAST:
        is_padding = (is_hidden & (labels == ids)).sum() / counts.sum()
        found["padding in the loss"] = (
            f"The attention mask hides {percent(is_padding)} of the tokens that count as labels: the loss is that of "
            "padding. Set these labels to -100."
        ) * bool((counts & is_hidden).sum() > is_hidden.sum() / 2 and is_padding)
    is_end = np.isin(ids[:, 1:], config.get("eos_token_id", -1)) & (mask[:, 1:] != 0) & counts[:, :-1]
    if is_end.sum() >= _LEAST:
        found["ends of texts without a label"] = (
            f"None of {is_end.sum()} ends of texts (token {config['eos_token_id']}) counts as a label, although the "
            "tokens before them do: the model cannot learn to stop. Pad with another token than that."
        ) * bool(not counts[:, 1:][is_end].any())
    return found


def _has_tokens(record: Record) -> bool:
    """Return whether inputs may be tokens: if none are, examples were counted without an entropy of tokens."""
    return record.every("batch_size") is None or record.every("token_entropy") is not None


def _is_language_model(record: Record) -> bool:
    """Return whether each token may have a label: if none has, labels are known but not compared with tokens."""
    is_compared = record.every("label_entropy") is None or record.every("label_agreement") is not None
    return _has_tokens(record) and is_compared


def _may_have(record: Record, what: str) -> bool:
    """Return whether the configuration of the model is unknown, or has an option of that name that is not 0."""
    config = record.setting("model", "config", default={})
    return not config or any(what in str(name) and value for name, value in config.items())


def _are_many(record: Record) -> bool:
    size = record.every("batch_size")
    return size is None or float(np.nansum(size)) > _REMEMBERED


def _is_summed(record: Record) -> bool:
    weight = record.every("loss_weight")
    return weight is None or not abs(np.nanmedian(weight) - 1) < 0.01


#: Fault, the contract that tests it (or how to find it by hand), and whether it is possible in a run whose labels do
#: not decide it.
UNSEEN: tuple[tuple[str, str, Callable[[Record], bool]], ...] = (
    ("labels shifted twice", "labels_aligned", _is_language_model),
    ("a missing causal mask", "causal", lambda of: _is_language_model(of) and of.every("lookahead") is None),
    ("padding in the loss", "padding_ignored", _has_tokens),
    ("ends of texts without a label", "labels_present", _is_language_model),
    ("padding that is read", "mask_respected", _has_tokens),
    ("packed texts that see each other", "examples_independent", _is_language_model),
    ("missing positions", "order_matters", _has_tokens),
    ("wrong labels or tokenizer", "Decode ten examples of a batch with their labels, and read them.", lambda of: True),
    (f"data repeated after {_REMEMBERED:,} examples", "batches_differ", _are_many),
    ("means over unequal micro-batches", "accumulation", lambda of: True),
    ("gradients of a scaled or summed loss", "accumulation", _is_summed),
    ("parameters that the optimizer does not hold", "optimizer_covers", lambda of: True),
    ("weight decay on norms and biases", "Print weight_decay and the shapes of the parameters of each group in "
     "optimizer.param_groups.", lambda of: True),
    ("dropout that differs in recomputed activations", "recompute", lambda of: _may_have(of, "drop")),
    ("experts without a balance loss", "balance_loss",
     lambda of: "router" not in of.parts and _may_have(of, "expert")),
    ("a schedule of wrong length or unit", "schedule", lambda of: not of.setting("training")),
    ("a restart without the optimizer's state", "resume", lambda of: bool(of.events_of("resumed"))),
)  # fmt: skip


def contracts_tested(record: Record) -> list[str]:
    """Return the contracts that the watch has tested, or that the training does not have."""
    checks = () if record.contracts is None else record.contracts.checks
    return [each.id for each in checks if each.status is not Status.NOT_TESTED]


def unseen_in(record: Record) -> xr.Dataset:
    """Return the faults that this record does not show, dim ``unseen``, with the contract that tests each."""
    decided, tested = labels_of_probe(record), contracts_tested(record)
    rows = [
        (what, how)
        for what, how, is_possible in UNSEEN
        if is_possible(record) and what not in decided and how not in tested
    ]
    about = {"long_name": "check", "units": "", "meaning": "contract of wb.check that tests it, or how to find it"}
    return xr.Dataset({"check": ("unseen", [how for _, how in rows], about)}, {"unseen": [what for what, _ in rows]})
