"""Contents of training batches: entropy of tokens and labels, and repeated examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeInt

#: Label that losses ignore, by PyTorch's convention.
IGNORED = -100
#: Seed of the factors of the hash, so that equal examples have equal hashes in every run.
_SEED = 20240917
#: Number of latest batches with which a batch is compared as a whole.
_N_BATCHES = 8
#: Maximum number of examples, tokens and classes of a batch that `lookahead` compares.
_N_COMPARED, _N_TOKENS, _N_CLASSES = 32, 64, 256


class BatchProbe:
    """Measures the contents of successive batches, without waiting for the device; remembers ``n_recent`` examples.

    Broken data loaders repeat examples, feed constants or lose labels. The loss shows this late, and repeated examples
    even as progress. Cost: one sort of the batch's tokens and of its labels, and a search among the hashes of recent
    examples. Two different examples have equal hashes with probability 2^-64.
    """

    @checked
    def __init__(self, n_recent: NonNegativeInt = 1024) -> None:
        self._n_recent = n_recent
        self._hashes: Tensor | None = None
        self._batches: Tensor | None = None
        self._factors: dict[int, Tensor] = {}

    @torch.no_grad()
    def take(self, inputs: Any, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Measure one batch and remember its examples.

        Args:
            inputs: Inputs of the model: a tensor, shape (example, ...), or a mapping with ``input_ids``, in which an
                ``attention_mask`` of the same shape hides tokens and ``labels`` are the labels.
            labels: Labels, integers of any shape; -100 is ignored. None for those of the mapping.

        Returns:
            0-dim tensors on the device of the inputs:

            - ``token_entropy``: Entropy of the distribution of the token ids, in nat; absent if inputs are not ids.
            - ``label_entropy``: Entropy of the distribution of the labels, in nat; absent without integer labels.
            - ``ignored_labels``: Fraction of the labels that are ignored; absent without integer labels.
            - ``label_agreement``: Fraction of the labels that equal the tokens of their inputs at the same or at the
              next position, whichever is larger: 1 in language modeling; absent if labels and ids differ in shape.
            - ``repeated_examples``: Fraction of the examples that equal an earlier one, of this batch or a recent one;
              absent if the inputs contain no tensor.
            - ``repeated_batch``: 1 if the batch equals one of the last eight, in the same order of examples, else 0.
        """
        first, mask = _first(inputs), None
        if isinstance(inputs, Mapping):
            mask = inputs.get("attention_mask")
            labels = inputs.get("labels") if labels is None else labels
        found: dict[str, Tensor] = {}
        if first is None:
            return found
        if _are_ids(first):
            is_seen = mask if isinstance(mask, Tensor) and mask.shape == first.shape else None
            found["token_entropy"] = _entropy(first, None if is_seen is None else is_seen != 0)
        if isinstance(labels, Tensor) and _are_ids(labels):
            found |= self.of_labels(first, labels)
        hashes = self._hashed(first)
        is_repeated = self._is_repeated(hashes)  # before the hashes are remembered
        found["repeated_examples"], found["repeated_batch"] = self._repeated(hashes), is_repeated
        return found

    def of_labels(self, inputs: Any, labels: Tensor) -> dict[str, Tensor]:
        """Measure the labels of one batch, integers of any shape, as `take` does."""
        first, is_counted = _first(inputs), labels != IGNORED
        found = {"label_entropy": _entropy(labels, is_counted), "ignored_labels": 1 - is_counted.double().mean()}
        if first is not None and _are_ids(first) and first.ndim == 2 and labels.shape == first.shape:
            found["label_agreement"] = _agreement(first, labels)
        return found

    def state_dict(self) -> list[int]:
        """Return the hashes of the recent examples, as JSON values."""
        return [] if self._hashes is None else self._hashes.tolist()

    def load_state_dict(self, hashes: Sequence[int]) -> None:
        """Restore the recent examples from `state_dict`."""
        self._hashes = torch.tensor(list(hashes), dtype=torch.int64) if hashes else None

    def _is_repeated(self, hashes: Tensor) -> Tensor:
        n = len(hashes)
        factors = 2 * torch.arange(n, device=hashes.device) + 1
        whole = (hashes * factors).sum().reshape(1)
        if self._batches is None and self._hashes is not None:  # restored: earlier batches had the same size
            k = min(_N_BATCHES, len(self._hashes) // n)
            earlier = self._hashes[len(self._hashes) - k * n :].to(hashes.device)
            self._batches = (earlier.reshape(k, n) * factors).sum(1)
        known = whole[:0] if self._batches is None else self._batches.to(whole.device)
        self._batches = torch.cat([known, whole])[-_N_BATCHES:]
        return (known == whole).any().double()

    def _repeated(self, hashes: Tensor) -> Tensor:
        n = len(hashes)
        known = hashes if self._hashes is None else torch.cat([self._hashes.to(hashes.device), hashes])
        # The sort is stable, so that among equal hashes the earlier one comes first.
        ordered, order = known.sort(stable=True)
        is_repeated = torch.zeros(len(known), dtype=torch.bool, device=known.device)
        is_repeated[order[1:]] = ordered[1:] == ordered[:-1]
        self._hashes = known[max(0, len(known) - self._n_recent) :] if self._n_recent else None
        return is_repeated[-n:].double().mean()

    def _hashed(self, examples: Tensor) -> Tensor:
        """Return a hash of each example, int64: a sum of products modulo 2^64."""
        rows = examples.flatten(1) if examples.ndim > 1 else examples[:, None]
        if rows.is_floating_point():  # the bits of the numbers
            rows = rows.double().view(torch.int64)
        width = rows.shape[1]
        if width not in self._factors:
            limits = torch.iinfo(torch.int64)
            drawn = torch.randint(
                limits.min, limits.max, (width,), generator=torch.Generator().manual_seed(_SEED), dtype=torch.int64
            )
            self._factors = {width: drawn | 1}  # odd, so that no bit is lost
        factors = self._factors[width] = self._factors[width].to(rows.device)
        return (rows.to(torch.int64) * factors).sum(1)


@torch.no_grad()
def lookahead(inputs: Any, outputs: Any) -> Tensor | None:
    """Return how much outputs depend on tokens that follow, without another pass and without waiting for the device.

    If positions depend on no later ones, examples that begin with the same token have the same output there, whatever
    follows. A missing causal mask, a norm over time and random numbers such as those of dropout make them differ. The
    result is the mean difference between the first outputs (example, token, feature) of such examples, over that
    between the first and the second output of an example: 0 without lookahead, about 1 if outputs depend on their own
    token as little as on later ones. Examples whose first token is masked are omitted. NaN if no two examples begin
    alike and go on differently; None if inputs are not ids, or shapes differ.
    """
    ids = _first(inputs)
    if ids is None or not _are_ids(ids) or ids.ndim != 2 or type(outputs) is not Tensor or outputs.ndim != 3:
        return None
    if outputs.shape[:2] != ids.shape or min(ids.shape) < 2:
        return None
    ids = ids[:_N_COMPARED, :_N_TOKENS]
    few = outputs.detach()[:_N_COMPARED, :2, :: max(1, outputs.shape[2] // _N_CLASSES)].float()
    is_pair = (ids[:, None, 0] == ids[None, :, 0]) & (ids[:, None] != ids[None]).any(-1)
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if isinstance(mask, Tensor) and mask.ndim == 2:
        is_seen = mask[:_N_COMPARED, 0] != 0
        is_pair &= is_seen[:, None] & is_seen
    is_pair = is_pair.to(few.device)
    difference = (few[:, None, 0] - few[None, :, 0]).abs().mean(-1).where(is_pair, 0.0).sum() / is_pair.sum()
    return difference / (few[:, 0] - few[:, 1]).abs().mean()


def _first(inputs: Any) -> Tensor | None:
    """Return the tensor that contains the examples."""
    if isinstance(inputs, Mapping):
        given = inputs.get("input_ids")
        values = [given] if isinstance(given, Tensor) else list(inputs.values())
    else:
        values = list(inputs) if isinstance(inputs, tuple | list) else [inputs]
    return next((value for value in values if isinstance(value, Tensor) and value.ndim and len(value)), None)


def _are_ids(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def _agreement(ids: Tensor, labels: Tensor) -> Tensor:
    """Return the fraction of labels that equal the tokens; NaN if all labels are ignored."""
    fractions = []
    for tokens, compared in ((ids, labels), (ids[:, 1:], labels[:, :-1])):
        counts = compared != IGNORED
        fractions.append(((tokens == compared) & counts).sum().double() / counts.sum())
    return torch.fmax(*fractions)


def _entropy(ids: Tensor, is_counted: Tensor | None) -> Tensor:
    """Compute log n - sum_i log c(id_i) / n, where c is the count of an id, without waiting for the device."""
    values = ids.flatten().to(torch.int64)
    if is_counted is None:
        is_counted = torch.ones_like(values, dtype=torch.bool)
    # Excluded elements are set to one value, and have weight 0.
    values = torch.where(is_counted.flatten(), values, torch.iinfo(torch.int64).max)
    ordered = values.sort().values
    counts = torch.searchsorted(ordered, values, right=True) - torch.searchsorted(ordered, values)
    weights = is_counted.flatten().double()
    n = weights.sum()
    return n.log() - (weights * counts.double().log()).sum() / n
