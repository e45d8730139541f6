"""Contents of training batches: entropy of tokens and labels, and repeated examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.models.losses import tensors_in
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeInt

#: Label that losses ignore, by PyTorch's convention.
IGNORED = -100
#: Seed of the factors of the hash, so that equal examples have equal hashes in every run.
_SEED = 20240917
#: Number of latest batches with which a batch is compared as a whole.
_N_BATCHES = 8
#: Inputs that say what a token is, in addition to its id.
_KINDS = ("position_ids", "token_type_ids")
#: Maximum number of examples, tokens and classes of a batch that `lookahead` compares.
_N_COMPARED, _N_TOKENS, _N_CLASSES = 32, 64, 256
_LARGEST = torch.iinfo(torch.int64).max


#: Ids, in which those that do not count are numbers that occur once, and how many count, float64.
_Counted = tuple[Tensor, Tensor]


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
        self._factors = self._places = self._terms = self._once = torch.zeros(0, dtype=torch.int64)

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
        if first is None:
            return {}
        is_seen = mask != 0 if isinstance(mask, Tensor) and mask.shape == first.shape else None
        of_tokens = self._counted(first, is_seen) if _are_ids(first) else None
        has_labels = isinstance(labels, Tensor) and _are_ids(labels)
        found = self._contents(first, of_tokens, labels if has_labels else None)
        hashes = self._hashed(first)
        is_repeated = self._is_repeated(hashes)  # before the hashes are remembered
        found["repeated_examples"], found["repeated_batch"] = self._repeated(hashes), is_repeated
        return found

    def of_labels(self, inputs: Any, labels: Tensor) -> dict[str, Tensor]:
        """Measure the labels of one batch, integers of any shape, as `take` does."""
        return self._contents(_first(inputs), None, labels)

    def _contents(self, first: Tensor | None, of_tokens: _Counted | None, labels: Tensor | None) -> dict[str, Tensor]:
        """Return the measures of tokens and labels; if both are equally many, their entropies take one sort."""
        is_counted = None if labels is None else labels != IGNORED
        of_labels = None if labels is None else self._counted(labels, is_counted)
        both = [each for each in (of_tokens, of_labels) if each is not None]
        are_alike = len({(ids.numel(), ids.device) for ids, _ in both}) == 1
        entropies = self._entropies(both) if are_alike else [self._entropies([each])[0] for each in both]
        found = {} if of_tokens is None else {"token_entropy": entropies[0]}
        if of_labels is not None and is_counted is not None:
            ids, n = of_labels
            found |= {"label_entropy": entropies[-1], "ignored_labels": 1 - n / ids.numel()}
            if first is not None and _are_ids(first) and first.ndim == 2 and ids.shape == first.shape:
                same, later = first == ids, first[:, 1:] == ids[:, :-1]  # ignored labels equal no token
                fractions = same.sum(dtype=torch.float64) / n, later.sum(dtype=torch.float64) / is_counted[:, :-1].sum()
                found["label_agreement"] = torch.fmax(*fractions)
        return found

    def _counted(self, ids: Tensor, is_counted: Tensor | None) -> _Counted:
        if self._places.device != ids.device or len(self._places) <= ids.numel():
            self._places = torch.arange(ids.numel() + 1, device=ids.device)
            self._terms = torch.xlogy(self._places.double(), self._places).diff()
            self._once = _LARGEST - self._places
        ids = ids.to(torch.int64)
        if is_counted is None:
            return ids, torch.full((), ids.numel(), dtype=torch.float64, device=ids.device)
        once = self._once[: ids.numel()].view(ids.shape)
        return ids.where(is_counted, once), is_counted.sum(dtype=torch.float64)

    def _entropies(self, lists: Sequence[_Counted]) -> Sequence[Tensor]:
        """Compute log n - sum_c c log(c) / n for each list, where c is the count of an id."""
        ordered = torch.stack([ids.flatten() for ids, _ in lists]).sort(1).values
        places = self._places[1 : max(1, ordered.shape[1])]
        # The k-th of equal ids adds k log(k) - (k - 1) log(k - 1), which is 0 for the first.
        first = ((ordered[:, 1:] != ordered[:, :-1]) * places).cummax(1).values
        n = torch.stack([n for _, n in lists])
        return (n.log() - self._terms.take(places - first).sum(1) / n).unbind()

    def state_dict(self) -> list[int]:
        """Return the hashes of the recent examples, as JSON values."""
        return [] if self._hashes is None else self._hashes.tolist()

    def load_state_dict(self, hashes: Sequence[int]) -> None:
        """Restore the recent examples from `state_dict`."""
        self._hashes = torch.tensor(list(hashes), dtype=torch.int64) if hashes else None

    def _is_repeated(self, hashes: Tensor) -> Tensor:
        n, whole = len(hashes), self._hashed(hashes[None])
        if self._batches is None and self._hashes is not None:  # restored: earlier batches had the same size
            k = min(_N_BATCHES, len(self._hashes) // n)
            earlier = self._hashes[len(self._hashes) - k * n :].to(hashes.device)
            self._batches = self._hashed(earlier.reshape(k, n))
        known = whole[:0] if self._batches is None else self._batches.to(whole.device)
        self._batches = torch.cat([known, whole])[-_N_BATCHES:]
        return (known == whole).any().double()

    def _repeated(self, hashes: Tensor) -> Tensor:
        n = len(hashes)
        known = hashes if self._hashes is None else torch.cat([self._hashes.to(hashes.device), hashes])
        # The sort is stable, so that among equal hashes the earlier one comes first.
        ordered, order = known.sort(stable=True)
        is_repeated = (ordered[1:] == ordered[:-1]) & (order[1:] >= len(known) - n)
        self._hashes = known[max(0, len(known) - self._n_recent) :] if self._n_recent else None
        return is_repeated.sum(dtype=torch.float64) / n

    def _hashed(self, examples: Tensor) -> Tensor:
        """Return a hash of each example, int64: a sum of products modulo 2^64."""
        rows = examples.flatten(1) if examples.ndim > 1 else examples[:, None]
        if rows.is_floating_point():  # the bits of the numbers
            rows = rows.double().view(torch.int64)
        width = rows.shape[1]
        if self._factors.device != rows.device or len(self._factors) < width:
            generator, least = torch.Generator().manual_seed(_SEED), torch.iinfo(torch.int64).min
            # Fewer factors are the first of more.
            drawn = torch.randint(least, _LARGEST, (width,), generator=generator, dtype=torch.int64)
            self._factors = (drawn | 1).to(rows.device)  # odd, so that no bit is lost
        return (rows.to(torch.int64) * self._factors[:width]).sum(1)


@torch.no_grad()
def lookahead(inputs: Any, outputs: Any) -> Tensor | None:
    """Return how much outputs depend on tokens that follow, without another pass and without waiting for the device.

    If positions depend on no later ones, examples that begin with the same token have the same output there, whatever
    follows. A missing causal mask, a norm over time and random numbers such as those of dropout make them differ. The
    result is the mean difference between the first outputs (example, token, feature) of such examples, over that
    between the first and the second output of an example: 0 without lookahead, about 1 if outputs depend on their own
    token as little as on later ones. Examples whose first token is masked, or has another position or type, are
    omitted. NaN if no two examples begin alike and go on differently; None if inputs are not ids alone, such as ids and
    the state of the batch before, or shapes differ.
    """
    ids = _first(inputs)
    if ids is None or not _are_ids(ids) or ids.ndim != 2 or type(outputs) is not Tensor or outputs.ndim != 3:
        return None
    if outputs.shape[:2] != ids.shape or min(ids.shape) < 2:
        return None
    named = inputs if isinstance(inputs, Mapping) else {}
    mask = named.get("attention_mask")
    if any(each.is_floating_point() and each is not mask for each in tensors_in(inputs)):
        return None
    kinds = [named[name][:_N_COMPARED, 0] for name in _KINDS if getattr(named.get(name), "shape", None) == ids.shape]
    ids = ids[:_N_COMPARED, :_N_TOKENS]
    few = outputs.detach()[:_N_COMPARED, :2, :: max(1, outputs.shape[2] // _N_CLASSES)].float()
    is_pair = (ids[:, None, 0] == ids[None, :, 0]) & (ids[:, None] != ids[None]).any(-1)
    for kind in kinds:
        is_pair &= kind[:, None] == kind
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
