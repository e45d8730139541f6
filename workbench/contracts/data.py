"""Contracts of data and labels, read from the gradients of the logits."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math

import torch
from torch import Tensor

from workbench.contracts.lab import Lab, NotTestedError, arguments, contract, failed, not_applicable, passed
from workbench.contracts.observer import Call
from workbench.contracts.results import Result
from workbench.contracts.token_labels import IGNORED
from workbench.formatting import fine_percent
from workbench.models.losses import tensors_in

#: Share of the positions at which labels equal shifted inputs if they are shifted so.
_NEARLY_ALL = 0.98
#: Least number of positions for a statement.
_LEAST = 16


def agreement(tokens: Tensor, labels: Tensor, shift: int) -> float:
    """Return the agreement of labels with the ids some positions later: 1 at all positions, 0 as by chance.

    NaN if too few positions count.
    """
    n = tokens.shape[1]
    if abs(shift) >= n:
        return float("nan")
    here = labels[:, max(0, -shift) : n - max(0, shift)]
    there = tokens[:, max(0, shift) : n + min(0, shift)]
    counts = here != IGNORED
    if int(counts.sum()) < _LEAST:
        return float("nan")
    here, there = here[counts], there.to(here.device)[counts]
    share = float((here == there).double().mean())
    n_ids = int(max(here.max(), there.max())) + 1
    often = [each.bincount(minlength=n_ids).double() / len(each) for each in (here, there)]
    by_chance = float(often[0] @ often[1])
    return 1.0 if share == 1 else max(0.0, (share - by_chance) / (1 - by_chance))


def shift_of_labels(lab: Lab) -> tuple[int | None, dict[int, float]]:
    """Return by how many positions labels are ahead of the inputs, None if it is unclear, and all agreements."""
    labels = lab.labels.labels
    if labels.ndim != 2:
        raise NotTestedError("the loss has one label for each example, not for each token")
    tokens = lab.tokens.cpu()
    found = {shift: agreement(tokens, labels, shift) for shift in range(-2, 5)}
    fitting = [shift for shift, share in found.items() if share >= _NEARLY_ALL]
    if not fitting:  # some tokens of the input may be replaced at random
        best = max(found, key=lambda shift: found[shift] if found[shift] >= 0 else -1.0)
        fitting = [best] if found[best] >= 0.8 and sum(share > 0.5 for share in found.values()) == 1 else []
    # In a periodic text several fit.
    return (1 if 1 in fitting else min(fitting, key=lambda shift: abs(shift - 1), default=None)), found


@contract("labels_aligned")
def labels_aligned(lab: Lab) -> Result:
    """Which token is the label of each output?

    The gradient of the logits at a position is negative at its label alone. In a model of the next token that label is
    the id that the embedding received one position later. Where the loss compares with a tensor of labels of the shape
    (batch, token), it is also compared with that tensor in place.
    """
    if (mixed := _mixed(lab)) is not None:
        return mixed
    if lab.labels.labels.ndim != 2:
        return not_applicable("The loss has one label for each example.")
    shift, found = shift_of_labels(lab)
    if shift == 1:
        return passed(f"Labels are the next tokens (agreement {found[1]:.3g}, where 0 is chance and 1 all positions).")
    # Of tokens that are masked at random, some are kept as they are.
    if found[0] >= max(0.5, found[1]) and lab.labels.n_classes > int(lab.tokens.max()):
        shift = 0
    labels = lab.labels.labels
    turned = labels.flatten().view(labels.shape[::-1]).mT
    if shift is None and agreement(lab.tokens.cpu(), turned, 1) >= _NEARLY_ALL:
        return failed(
            "The labels are those of other examples and positions: the next tokens, transposed.",
            where=lab.seen.place_of_loss,
            remedy="flatten logits and labels in the same order.",
        )
    if shift is None:
        return not_applicable("The labels are no tokens of the input at a fixed distance.")
    words = "the tokens that the model reads at the same position"
    remedy = "shift the labels by one position (logits[:, :-1] with tokens[:, 1:]), or ignore tokens that are shown."
    if shift:
        n, side = abs(shift - 1), "ahead" if shift > 1 else "back"
        remedy = f"shift the labels once: they are {n} position{'s' * (n > 1)} too far {side}."
        words = f"the tokens {abs(shift)} positions {'later' if shift > 0 else 'before'}"
    return failed(
        f"The labels are {words} (agreement {found[shift]:.3g}, where 0 is chance and 1 all positions), not the next "
        f"token (agreement {found[1]:.3g}).",
        where=lab.seen.place_of_loss,
        remedy=remedy,
    )


#: Functions that only move numbers.
_MOVES = (
    "view", "reshape", "flatten", "transpose", "permute", "__getitem__", "contiguous", "float", "to", "squeeze", "dim",
    "unsqueeze", "mT", "T", "movedim", "swapaxes", "t", "type_as", "__get__", "detach", "size",
)  # fmt: skip


def _mixed(lab: Lab) -> Result | None:
    """Return a failure if classes, positions or examples are mixed between logits and labels."""
    tape = next(iter(lab.tapes), None)
    if tape is None or len(tape.calls) != 1:
        return None
    call, where = tape.calls[0], lab.seen.place_of_loss
    axes = [axis for each in call.class_axes.values() for axis in each]
    is_alone = next((name for name in tape.functions if name not in _MOVES), "") == "cross_entropy"
    if is_alone and call.class_axes and not any(axes):
        return failed(
            "The loss is a cross entropy of the logits alone, but their gradient sums to 0 over none of their axes: "
            "classes and positions are mixed.",
            where=where,
            remedy="move the axis of classes by transpose or permute, not by reshape or view.",
        )
    found = call.token_labels
    for given in [] if found is None else [each.cpu() for each in tape.targets if each.ndim == 2]:
        if given.shape != found.labels.shape or min(given.shape) < 2:
            continue
        turned = given.flatten().view(given.shape[::-1]).mT
        here, there = (float((found.labels == each)[found.counts].double().mean()) for each in (given, turned))
        if there >= _NEARLY_ALL and here < 0.9:
            return failed(
                f"The label of {fine_percent(there)} of the outputs belongs to another example and position, as if "
                f"logits or labels were transposed; {fine_percent(here)} have their own.",
                where=where,
                remedy="flatten logits and labels in the same order.",
            )
    return None


@contract("labels_present")
def labels_present(lab: Lab) -> Result:
    """What share of the positions counts, in each batch, and are there different labels?

    A position counts if the gradient of its logits is not zero.
    """
    seen, where = [], lab.seen.place_of_loss
    for call in lab.seen.main_calls():  # a batch without labels has a gradient of zeros
        found = call.token_labels or next((each for each in call.labels.values() if not each.counts.any()), None)
        seen += [] if found is None else [(call.update, found)]
    has_loss = any(act.kind == "cross entropy" for act in lab.seen.acts)
    has_labels = any(found.counts.any() for _, found in seen) or any(math.isfinite(p.loss) for p in lab.seen.passes)
    empty = [update for update, found in seen if not found.counts.any()]
    words = ""
    if len(seen) > 1 and has_loss and not has_labels:
        words = f"None of {len(seen)} batches has a label that counts."
    elif not any(found.is_cross_entropy for _, found in seen):
        raise NotTestedError("the loss is no cross entropy of an output of the model, or its gradient was not seen")
    elif empty:
        words = f"{len(empty)} of {len(seen)} batches have no label that counts, first before update {empty[0] + 1}."
    if words:
        return failed(words, where=where, remedy="mask fewer labels, or leave out batches without any.")
    known = torch.cat([found.labels[found.counts] for _, found in seen])
    values, counts = known.unique(return_counts=True)
    if len(known) >= 4 * _LEAST and len(values) == 1:
        words = f"All {len(known):,} labels are the class {int(values)}."
        return failed(words, where=where, remedy="pass the labels of the data.")
    if (missing := _missing_end(lab)) is not None:
        return missing
    shares = [float(found.counts.double().mean()) for _, found in seen]
    span = " to ".join(dict.fromkeys(fine_percent(each) for each in (min(shares), max(shares))))
    share = fine_percent(float(counts.max()) / len(known))
    return passed(f"{span} of the positions count; the most frequent of {len(values):,} labels has {share} of them.")


def _missing_end(lab: Lab) -> Result | None:
    """Return a failure if the model reads ends of sequences that are never labels."""
    end = getattr(getattr(lab.model, "config", None), "eos_token_id", None)
    ends = torch.tensor([end] if isinstance(end, int) else [*end] if isinstance(end, list | tuple) else [])
    if not len(ends) or lab.labels.labels.ndim != 2 or shift_of_labels(lab)[0] != 1:
        return None
    n_read = n_labels = 0
    for call in lab.calls:
        if (found := call.token_labels) is not None:
            is_end = torch.isin(lab.tokens_of(call).cpu(), ends)
            is_first = is_end[:, 1:] & ~is_end[:, :-1]  # not padding with the same id
            n_read += int(is_first.sum())
            n_labels += int((is_first & found.counts[:, :-1]).sum())
    if n_labels or n_read < 4:
        return None
    return failed(
        f"None of {n_read} ends of a sequence (id {int(ends[0])}) is a label: the model does not learn to stop.",
        where=lab.seen.place_of_loss,
        remedy="use another id for padding, or mask labels by the attention mask instead of by the id.",
    )


def _padding_id(lab: Lab, tokens: Tensor) -> tuple[int | None, str]:
    """Return the id of padding, and how it is known; None if there is none.

    It is that of the configuration or of the embedding; otherwise one id that fills the ends, or the beginnings, of
    several examples for different lengths and occurs nowhere else in any batch.
    """
    if isinstance(given := getattr(getattr(lab.model, "config", None), "pad_token_id", None), int):
        return given, "pad_token_id"
    for module in lab.model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            return int(module.padding_idx), "padding_idx"
    every = [ids for call in lab.calls for each in call.tokens.values() for ids in each]
    tokens = torch.cat([tokens, *(ids.cpu() for ids in every if ids.ndim == 2 and ids.shape[1] == tokens.shape[1])])
    for side in (tokens.flip(1), tokens):
        for value in side[:, 0].unique().tolist():
            run = _run_of(value, side)
            lengths = run.sum(1)
            is_only = torch.equal(run, side == value) and len(lengths.unique()) >= 2
            if is_only and int((lengths >= 2).sum()) >= 2:
                return int(value), "an id that only fills the ends of examples"
    return None, ""


def _run_of(value: int, tokens: Tensor) -> Tensor:
    """Return which tokens are in the run of an id that an example begins with."""
    return (tokens == value).long().cumprod(1).bool()


def padding_mask(lab: Lab, ids: Tensor | None = None) -> tuple[Tensor, str]:
    """Return where ids of the first call are padding, shape (batch, token), and how it is known; False without padding.

    They are those at the positions of the labels, unless others are given.
    """
    tokens, mask = (lab.tokens if ids is None else ids).cpu(), lab.call.kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == tokens.shape and (mask == 0).any():
        return (mask == 0).cpu(), "attention_mask"
    value, how = _padding_id(lab, tokens)
    if value is None:
        return torch.zeros_like(tokens, dtype=torch.bool), ""
    right, left = _run_of(value, tokens.flip(1)).flip(1), _run_of(value, tokens)
    if how == "pad_token_id":  # the one beside the text may be its end, or begin it for a decoder
        right, left = right & right.roll(1, 1), left & left.roll(-1, 1)
    return right | left, how


@contract("padding_ignored")
def padding_ignored(lab: Lab) -> Result:
    """Do positions whose label is padding count in the loss?

    The first padding after a sequence may be its end, which is learned; from the second one on it is padding.
    """
    if lab.labels.labels.ndim != 2:
        return not_applicable("The loss has one label for each example.")
    if "labels_aligned" in lab.failed:
        raise NotTestedError("the labels belong to other positions")
    is_padding, how = padding_mask(lab)
    if not is_padding.any():
        return not_applicable("The batch has no padding.")
    shift, found = shift_of_labels(lab)[0], lab.labels
    of_padding = is_padding
    if shift == 1 or (shift is None and found.n_classes > int(lab.tokens.max())):  # the label is the next token
        of_padding = torch.zeros_like(is_padding)
        of_padding[:, :-1] = is_padding[:, 1:] & is_padding[:, :-1]
    wrong = of_padding & found.counts
    n, n_counting = int(wrong.sum()), int(found.counts.sum())
    if not n:
        return passed(f"None of {int(of_padding.sum()):,} positions of padding ({how}) counts in the loss.")
    right, all_of_them = (float(found.losses[each].mean()) for each in (found.counts & ~wrong, found.counts))
    return failed(
        f"{n:,} of {n_counting:,} positions that count in the loss are padding ({how}), with "
        f"{fine_percent(float(found.weights[wrong].sum() / found.weights.sum()))} of its weight.",
        where=lab.seen.place_of_loss,
        remedy="set the labels of padding to -100, or to the ignore_index of the loss.",
        proof=f"Without them, the loss of this batch is {right:.4g} instead of {all_of_them:.4g}.",
    )


@contract("batches_differ")
def batches_differ(lab: Lab) -> Result:
    """Do different batches hold different examples, and different ids?

    The same examples may come again in the next epoch, and random draws may meet. A failure is a batch that comes twice
    before the others, or is one of several in a larger dataset, or ids of which nearly all are one.
    """
    firsts = [(call.update, first) for call in lab.calls if (first := _first(call)) is not None]
    batches = [(update, b"".join(sorted(_examples(first)))) for update, first in firsts]
    n_updates = len({update for update, _ in batches})
    if n_updates < 2:
        raise NotTestedError("fewer than two batches were kept")
    with contextlib.suppress(NotTestedError):
        ids = torch.cat([lab.tokens_of(call).flatten().cpu() for call in lab.calls])
        values, counts = ids.unique(return_counts=True)
        share = float(counts.max()) / len(ids)
        if len(ids) >= 4 * _LEAST and share > 0.9:
            return failed(
                f"{fine_percent(share)} of {len(ids):,} ids are {int(values[counts.argmax()])}.",
                where="ids of the batches",
                remedy="look at the decoded tokens; the vocabulary of the tokenizer may not fit the text.",
            )
    n, size = len(firsts[0][1]), _size_of_dataset(lab)
    different = len({content for _, content in batches})
    if different == 1:
        if size is None or size <= n:
            raise NotTestedError(f"all {n_updates} updates have the same {n} examples; are these all the data")
        words = f"All {n_updates} updates have the same {n} of {size} examples."
        return failed(words, where="the data loader", remedy="draw a new batch for each update.")
    if (copies := _copies(lab, size)) is not None:
        return copies
    # Within an update some methods use a batch twice on purpose, but streams that several workers read may repeat it.
    is_streamed = any(a[1] == b[1] for a, b in itertools.pairwise(batches)) and _is_read_by_workers()
    steps = [[content] for _, content in batches]
    if not is_streamed:
        steps = [[content for update, content in batches if update == each] for each in dict(batches)]
    pairs = [*itertools.pairwise(steps)]
    repeats = sum(a == b for a, b in pairs)
    if n > 1 and repeats >= 2 and 3 * repeats >= len(pairs):  # a single example may be a state that comes again
        return failed(
            f"In {repeats} of {len(pairs)} cases a batch comes twice in a row.",
            where="the data loader",
            remedy="give each worker its own part of the data, by get_worker_info() in an IterableDataset.",
        )
    return passed(f"{different} of {len(batches)} batches in {n_updates} updates are different.")


def _first(call: Call) -> Tensor | None:
    return next((each for each in arguments(call) if each.ndim), None)


def _examples(batch: Tensor) -> list[bytes]:
    batch = batch.detach().cpu()
    return [each.contiguous().numpy().tobytes() for each in (batch.float() if batch.is_floating_point() else batch)]


def _is_read_by_workers() -> bool:
    """Return whether several workers of a loader read a stream of examples."""
    kind, stream = torch.utils.data.dataloader._MultiProcessingDataLoaderIter, torch.utils.data.IterableDataset
    readers = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    return any(each._num_workers > 1 and isinstance(each._dataset, stream) for each in readers)


def _copies(lab: Lab, size: int | None) -> Result | None:
    """Return a failure if a pass computes the same twice, or a large dataset has few different examples."""
    twins = []
    for each in lab.seen.passes:
        made = [call for call in each.calls if call.is_kept and not _is_random(call)]
        pairs = [(a, b) for a, b in itertools.combinations(made, 2) if a.module is b.module]
        twins += [any(_equal(a, b) for a, b in pairs)] if pairs else []
    if len(twins) >= 2 and all(twins):
        return failed(
            f"In each of {len(twins)} passes the model is called twice with the same inputs, to the same outputs.",
            where=f"the inputs of the model ({lab.call.line})",
            remedy="draw each view, or each member of a pair, by itself.",
        )
    inputs = [t for call in lab.calls for t in arguments(call) if t.is_floating_point() and t.ndim > 1]
    images = [image for t in inputs if t[0].numel() >= 4 * _LEAST for image in _examples(t)]
    n = len({*images})
    if size is not None and 4 * _LEAST <= len(images) <= size and 4 * n <= len(images):
        words = f"{len(images)} examples of a dataset of {size} are {n} different ones"
        if n > len(images) // 25:  # simple data may repeat
            raise NotTestedError(f"{words}; are those of the data")
        return failed(f"{words}.", where="the dataset", remedy="let the index of an example determine what it is.")
    return None


def _is_random(call: Call) -> bool:
    """Return whether a call of the training draws random numbers, such as dropout."""
    modules = [each for each in call.module.modules() if each not in call.in_eval]
    return any(getattr(each, "p", 0) or getattr(each, "dropout", 0) for each in modules)


def _equal(a: Call, b: Call) -> bool:
    pairs = zip(tensors_in([a.args, a.kwargs]), tensors_in([b.args, b.kwargs]), strict=False)
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in pairs)


def _size_of_dataset(lab: Lab) -> int | None:
    """Return the largest number of examples of a dataset from which batches of the size of the first call are read."""
    first, sizes = _first(lab.call), []
    fitting = (None if first is None else len(first), None)
    for each in lab.seen.loaders:
        if getattr(each, "batch_size", None) in fitting:
            with contextlib.suppress(TypeError):  # streams have no length
                sizes.append(len(each.dataset))
    return max(sizes, default=None)
