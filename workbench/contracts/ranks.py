"""Contracts of several processes: their data, gradients, parameters and random states, compared once by messages."""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from traceback import walk_stack
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from workbench.contracts.between_ranks import PATIENCE, of_all_ranks
from workbench.contracts.lab import Contract, Lab, NotTestedError, contract, failed, not_applicable, passed
from workbench.contracts.observer import digest, fingerprint
from workbench.contracts.results import Result
from workbench.formatting import number_in_words
from workbench.models.calling import bare, is_shared
from workbench.models.losses import tensors_in
from workbench.models.readable_weights import parameters_of_shards

#: Relative difference of norms that are the same number, computed on two ranks.
_SAME = 1e-5
#: What a rank has seen, as JSON values; see `_own`.
_Rank = dict[str, Any]


def _own(lab: Lab) -> _Rank:
    """Return what this rank has seen, as JSON values; NaN is the norm of no gradient."""
    seen, parameters, names = lab.seen, dict[str, Any](), list[str]()
    for i, (name, p) in enumerate(seen.parameters.values()):
        names.append(name if name not in parameters else f"{name} ({i})")
        if id(p) in seen.at_first:  # held by an optimizer, unlike the whole tensors that FSDP gathers for a pass
            kinds = getattr(p, "placements", None)
            placements = None if kinds is None else [type(each).__name__ for each in kinds]
            parameters[names[-1]] = {"placements": placements, "first": seen.at_first[id(p)], "now": fingerprint(p)}
    local = []  # gradients of passes that are the only ones of their update
    place = {id(event): i for i, event in enumerate(seen.events)}
    for each in seen.updates:
        # Of several optimizers, all but the first have their first update after the step has been counted.
        of_update = [one for one in seen.passes if one.update == each.index and place[id(one)] < place[id(each)]]
        is_single = len(of_update) == 1 and bool(np.isnan(of_update[0].before).all() | (of_update[0].before == 0).all())
        local.append(dict(zip(names, of_update[0].after.tolist(), strict=False)) if is_single else {})
    calls = [call for call in seen.calls if call.reached]
    drops = {
        name
        for call in calls
        for name, module in bare(call.module).named_modules()
        if module not in call.in_eval and _drop_rate(module)
    }
    return {
        "parameters": parameters,
        "updates": [dict(zip(names, each.norms.tolist(), strict=False)) for each in seen.updates],
        "local": local,
        "inputs": [digest(tensors_in([call.args, call.kwargs])) for call in calls if call.is_kept],
        "random": [digest([call.rng]) for call in calls],
        "draws": sorted(drops),
        "reads": _place_of_data(seen.roots[0]) if seen.roots else None,
    }


def _place_of_data(model: nn.Module) -> list[int] | None:
    """Return a rank's place among those that read other data, the same for ranks of one pass; None if it is unknown."""
    split: list[Any] = [p for p in model.parameters() if hasattr(p, "device_mesh")]
    shards, size = parameters_of_shards(model), max((p.device_mesh.size() for p in split), default=0)
    meshes = [shards[id(p)].mesh_info.mesh for p in split if id(p) in shards]
    if not split or size != distributed.get_world_size():
        return None
    return [*meshes[0].get_coordinate()] if meshes else []


def _drop_rate(module: nn.Module) -> float:
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout
    return module.p if isinstance(module, nn.modules.dropout._DropoutNd) else 0.0


def _of_ranks(id: str) -> Callable[[Callable[[Lab, list[_Rank]], Result]], Contract]:
    """Register a contract of several ranks, which receives what they have seen."""

    def register(function: Callable[[Lab, list[_Rank]], Result]) -> Contract:
        @wraps(function)
        def test(lab: Lab) -> Result:
            if is_shared():
                lab.require_acts()
                if "of_ranks" not in vars(lab):
                    vars(lab)["of_ranks"] = of_all_ranks(_own(lab), "contracts")
                if len(vars(lab)["of_ranks"]) < 2:
                    raise NotTestedError(f"the ranks could not exchange messages within {PATIENCE} seconds")
                return function(lab, vars(lab)["of_ranks"])
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise NotTestedError("the script has ended its process group before the experiments")
            return not_applicable("There is one process.")

        return contract(id)(test)

    return register


# What the ranks are to each other


def _differ(norms: Iterable[float]) -> bool:
    """Return whether norms differ between ranks; NaN stands for no gradient."""
    first, *others = norms
    return not np.allclose(others, first, rtol=_SAME, atol=0, equal_nan=True)


def _apart(ranks: list[_Rank], name: str, when: str) -> float:
    """Return the largest relative difference of a parameter between the first rank and others; NaN if unknown."""
    each = [rank["parameters"][name][when] for rank in ranks if name in rank["parameters"]]
    if len(each) < len(ranks):
        return math.nan
    return float(np.abs(np.subtract(each[1:], each[0])).max() / max(each[0][0], 1e-30))


def _replicated(ranks: list[_Rank]) -> list[str]:
    """Return the parameters that each rank held with equal values before the first update."""
    known = ranks[0]["parameters"].items()
    return [name for name, each in known if each["placements"] is None and _apart(ranks, name, "first") <= _SAME]


def _plain(ranks: list[_Rank]) -> list[str]:
    """Return the parameters that are no tensors of several ranks."""
    return [name for name, each in ranks[0]["parameters"].items() if each["placements"] is None]


def _in_one_pass(ranks: list[_Rank]) -> bool:
    """Return whether all ranks are known to compute parts of one pass, as in tensor parallelism."""
    return all(rank.get("reads") == [] for rank in ranks)


def _sharded(ranks: list[_Rank]) -> list[str]:
    """Return the parameters of which each rank has another part: other values and other gradients from the first on."""
    first = [(rank["updates"] or [{}])[0] for rank in ranks]
    return [
        name
        for name, each in ranks[0]["parameters"].items()
        if (_apart(ranks, name, "first") > _SAME and _differ(one.get(name, math.nan) for one in first))
        or (each["placements"] is not None and "Replicate" not in each["placements"])
    ]


def _gradients_apart(ranks: list[_Rank], names: Iterable[str]) -> list[tuple[int, str, list[float]]]:
    """Return update, parameter and norms where gradients of parameters differ between ranks.

    Replicas may reduce their gradients until the update; parts of one model have theirs after the first backward pass,
    and may scale them by a wrong norm afterwards, which is another fault.
    """
    when, most = ("local", 1) if _sharded(ranks) else ("updates", None)
    updates = [*zip(*(rank[when] for rank in ranks), strict=False)][:most]
    found = [(i, name, [one.get(name, math.nan) for one in each]) for i, each in enumerate(updates) for name in names]
    return [each for each in found if _differ(each[2])]


def _wrapper_of(model: nn.Module) -> nn.Module | None:
    """Return the DDP wrapper of a module, whether or not it is called."""
    kind = nn.parallel.DistributedDataParallel
    # Every object is looked at, since nothing refers from a module to its wrapper.
    return next((o for o in gc.get_objects() if type(o) is kind and bare(o) is model), None)


def _are_replicas(lab: Lab, ranks: list[_Rank]) -> bool:
    """Return whether the ranks train one model on parts of the data: DDP, FSDP alone, or replicas by hand."""
    model = lab.seen.roots[0]
    if _wrapper_of(model) is not None:
        return True
    if all(rank.get("reads") is not None for rank in ranks):
        return len({tuple(rank["reads"]) for rank in ranks}) == len(ranks)
    return not _sharded(ranks)


@_of_ranks("ranks_see_different_data")
def ranks_see_different_data(lab: Lab, ranks: list[_Rank]) -> Result:
    """Are the inputs of a pass other ones on each rank?

    Hashes of the inputs are compared. Ranks that compute parts of one pass (tensor parallelism) read the same data.
    """
    inputs = [each for each in zip(*(rank["inputs"] for rank in ranks), strict=False) if all(each)]
    if not inputs:
        raise NotTestedError("no inputs of the passes were kept")
    places = [rank.get("reads") for rank in ranks]
    if None in places and not _are_replicas(lab, ranks):
        return not_applicable("The ranks hold parts of one model.")
    line = next(call.line for call in lab.seen.calls if call.reached and call.is_kept)
    for b in range(len(ranks)):
        for a in range(b):
            if places[a] is not None and places[a] == places[b]:
                if all(each[a] != each[b] for each in inputs):
                    words = f"Ranks {a} and {b} compute parts of one pass with other inputs in {len(inputs)} passes."
                    remedy = "give the ranks of a tensor-parallel group the same data: shard it by the other mesh axis."
                    return failed(words, where=f"the data of the ranks ({line})", remedy=remedy)
            elif all(each[a] == each[b] for each in inputs):
                words = f"Ranks {a} and {b} have the same inputs in all {len(inputs)} passes."
                remedy = "give each rank its own part: a DistributedSampler, or data[rank::n_ranks] and a seed by rank."
                return failed(words, where=f"the data of the ranks ({line})", remedy=remedy)
    if not _are_replicas(lab, ranks):
        return passed(f"Ranks of one pass have the same inputs, and others have other ones, in {len(inputs)} passes.")
    return passed(f"All {len(ranks)} ranks have other inputs in {len(inputs)} passes.")


@_of_ranks("gradients_reduced")
def gradients_reduced(lab: Lab, ranks: list[_Rank]) -> Result:
    """Are gradients of parameters that all ranks hold equal on all ranks when the optimizer reads them?

    Their norms are compared before each update. A sum over ranks of gradients of means is told by its norm: that of a
    mean is at most the mean of the norms.
    """
    seen, line = lab.seen, next((one.line for one in lab.seen.passes), "")
    if not seen.updates:
        raise NotTestedError("no update was seen")
    n_held = sum(not np.isnan(each.norms).all() for each in seen.updates)
    shards = [name for name, each in ranks[0]["parameters"].items() if each["placements"] is not None]
    if shards and not n_held:
        words = f"No shard has a gradient in {len(seen.updates)} updates, after {seen.n_passes} backward passes."
        remedy = "synchronize gradients in the last micro-batch: set_requires_gradient_sync(True)."
        return failed(words, where=f"{shards[0]} and {len(shards) - 1} others ({line})", remedy=remedy)
    names = _replicated(ranks)
    if _in_one_pass(ranks):
        if "ranks_see_different_data" in lab.failed:
            raise NotTestedError("ranks of one pass read other data")
        if any(_apart(ranks, name, "first") > _SAME for name in _plain(ranks)):
            raise NotTestedError("parameters that are not split differ between ranks before the first update")
    if not names and shards:
        return passed(f"Shards of {len(shards)} parameters have gradients in {n_held} updates.")
    if not names:
        return not_applicable("No parameter is the same on all ranks.")
    wrapped = [call for call in seen.main_calls() if isinstance(call.module, nn.parallel.DistributedDataParallel)]
    n = len({id(call.module) for call in wrapped})
    if n > 2 and n >= 0.9 * len(wrapped):
        return failed(
            f"{n} calls of the model are of as many new wrappers, which take their hooks with them before the backward "
            "pass, and set the parameters of all ranks to those of the first.",
            where=f"the wrapper ({seen.calls[-1].line})",
            remedy="wrap the model once, before the loop.",
        )
    if apart := _gradients_apart(ranks, names):
        other, model = {name for _, name, _ in apart}, seen.roots[0]
        known = [ranks[0]["parameters"][each] for each in other]
        is_equal = all(_apart(ranks, each, "now") <= _SAME for each in other)
        if is_equal and any(each["first"] != each["now"] for each in known):
            return passed(
                f"Gradients of {len(other)} of {len(names)} parameters differ between ranks before an update and the "
                "parameters are equal after the updates: they are reduced within step()."
            )
        update, name, norms = apart[0]
        where, remedy = f"{name} ({line})", "average gradients over ranks before each update."
        if _wrapper_of(model) is not None and any(call.module is model for call in lab.calls):
            where, remedy = f"model.module, called at {lab.calls[0].line}", "call the wrapped model itself."
        elif _wrapper_of(model) is not None:
            remedy = "leave no_sync() in the last micro-batch of an update."
        here, *others = (0.0 if math.isnan(each) else each for each in norms)
        there = max(others, key=lambda each: abs(each - here))
        sizes = [number_in_words(each) for each in (here, there)]
        return failed(
            f"Before update {update + 1}, the gradient of {name} has the norm {sizes[0]} on one rank and {sizes[1]} on "
            f"another; {len(other)} of {len(names)} parameters differ.",
            where=where,
            remedy=remedy,
        )
    if not _in_one_pass(ranks) and (ratio := _sum_of_means(lab, ranks, names)) > 1 + 1e-3:
        return failed(
            f"A reduced gradient is {ratio:.3g} times as large as the mean of the ranks' norms, which no mean of them "
            "can be: gradients of losses that are means are summed over ranks.",
            where=f"the reduction of gradients ({line})",
            remedy=f"divide by the number of ranks, {len(ranks)}.",
        )
    return passed(f"Gradients of {len(names)} parameters are equal on {len(ranks)} ranks before each update.")


def _sum_of_means(lab: Lab, ranks: list[_Rank], names: list[str]) -> float:
    """Return the largest ratio of a reduced gradient to the mean of the ranks' gradients; 0 if no loss is a mean."""
    tape = next((one.tape for one in lab.seen.passes if one.tape is not None and one.tape.is_complete), None)
    if tape is None or not tape.is_mean:
        return 0.0
    largest = 0.0
    for update in zip(ranks[0]["updates"], *(rank["local"] for rank in ranks), strict=False):
        norms = np.array([[each.get(name, np.nan) for name in names] for each in update])
        reduced, *local = np.sqrt(np.nansum(norms**2, axis=1))
        largest = max(largest, float(reduced / np.mean(local))) if any(local) else largest
    return largest


def _equality(lab: Lab, ranks: list[_Rank], names: list[str], what: str, remedy: str) -> Result:
    """Return whether parameters are equal on all ranks after the updates."""
    apart = {name: size for name in names if (size := _apart(ranks, name, "now")) > _SAME}
    whole, after = f"{len(names)} parameters{what}", f"after {lab.seen.n_done} updates"
    if not apart:
        return passed(f"{whole} are equal on {len(ranks)} ranks {after}.")
    n_began = sum(_apart(ranks, name, "first") > _SAME for name in apart)
    since = f"; {n_began} did before the first update" if n_began else ", although none did before the first one"
    name = max(apart, key=lambda each: apart[each])
    worst = f"{name} by {number_in_words(100 * apart[name])} %"
    words = f"{len(apart)} of {whole} differ between ranks {after}, {worst}{since}."
    remedy = "broadcast the parameters of rank 0 before the first update." if n_began else remedy
    return failed(words, where=name, remedy=remedy)


@_of_ranks("replicas_equal")
def replicas_equal(lab: Lab, ranks: list[_Rank]) -> Result:
    """Are parameters that all ranks train by the same gradients equal on all ranks after the updates?"""
    if not _are_replicas(lab, ranks):
        return not_applicable("The ranks hold parts of one model.")
    names = _plain(ranks)
    if not names:
        return not_applicable("The ranks hold shards of the parameters.")
    return _equality(lab, ranks, names, "", "reduce all gradients over ranks, and clip and update alike on each.")


@_of_ranks("shards_equal")
def shards_equal(lab: Lab, ranks: list[_Rank]) -> Result:
    """Under tensor parallelism, are parameters that are not split equal on all ranks after the updates?"""
    if _in_one_pass(ranks) and "ranks_see_different_data" in lab.failed:
        raise NotTestedError("ranks of one pass read other data")
    known = ranks[0]["parameters"].items()
    whole = [name for name, each in known if {*(each["placements"] or ())} == {"Replicate"}]
    whole += _plain(ranks) if _in_one_pass(ranks) else _replicated(ranks)
    if not whole or not _sharded(ranks):
        return not_applicable("No parameters are split over ranks beside others that are not.")
    remedy = "reduce their gradients over ranks, and clip by the norm of the whole model."
    return _equality(lab, ranks, whole, " that are not split", remedy)


@_of_ranks("random_states")
def random_states(lab: Lab, ranks: list[_Rank]) -> Result:
    """Do ranks that train on other data draw other random numbers for dropout?

    Hashes of the states of the generator before each pass are compared where dropout acts. A Trainer gives each rank
    the same seed on purpose.
    """
    callers = [frame.f_globals.get("__name__", "") for frame, _ in walk_stack(sys._getframe())]
    if any(each.startswith(("transformers.trainer", "lightning.", "pytorch_lightning.")) for each in callers):
        raise NotTestedError("the library of the loop gives all ranks one seed")
    if not all(rank["draws"] for rank in ranks):
        return not_applicable("No dropout acts.")
    if torch.cuda.is_available() and any(p.is_cuda for p in lab.seen.roots[0].parameters()):
        raise NotTestedError("the states of generators on a GPU were not recorded")
    if not _are_replicas(lab, ranks):
        return not_applicable("The ranks hold parts of one model.")
    states = [*zip(*(rank["random"] for rank in ranks), strict=False)]
    n_same = sum(len({*each}) == 1 for each in states)
    if states and n_same == len(states):
        words = f"All {len(ranks)} ranks have the same random state before each of {n_same} passes"
        where = f"the seed of the ranks; {ranks[0]['draws'][0]} draws from it"
        remedy = "add the rank to the seed after the parameters are made: torch.manual_seed(seed + rank)."
        return failed(f"{words}, so that they drop the same units.", where=where, remedy=remedy)
    return passed(f"Random states of the ranks differ before {len(states) - n_same} of {len(states)} passes.")
