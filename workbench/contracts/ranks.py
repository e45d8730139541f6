"""Contracts of several processes: their data, gradients, parameters and random states, compared once by messages."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import distributed, nn

from workbench.contracts.lab import Contract, Lab, NotTestedError, contract, failed, not_applicable, passed
from workbench.contracts.observer import Call, digest, fingerprint
from workbench.contracts.results import Result
from workbench.formatting import number_in_words
from workbench.models.calling import bare, is_shared
from workbench.models.losses import tensors_in

#: Seconds for which a rank waits for the others.
_PATIENCE = 30
#: Relative difference of norms that are the same number, computed on two ranks.
_SAME = 1e-5
_FOUND: WeakKeyDictionary[Lab, list[dict[str, Any]] | str] = WeakKeyDictionary()


def _ranks(lab: Lab) -> list[dict[str, Any]]:
    """Return what each rank has seen; the messages of all ranks are exchanged once.

    They go through the store of the process group instead of a collective operation, so that no rank waits for ever.
    """
    if lab not in _FOUND:
        try:
            _FOUND[lab] = _exchanged(_own(lab))
        except Exception as error:  # noqa: BLE001  (a store may fail in any way; the contracts are then unknown)
            _FOUND[lab] = f"the ranks could not exchange messages within {_PATIENCE} seconds ({type(error).__name__})"
    found = _FOUND[lab]
    if isinstance(found, str):
        raise NotTestedError(found)
    return found


def _exchanged(own: Any, what: str = "contracts") -> list[Any]:
    store, rank = distributed.distributed_c10d._get_default_store(), distributed.get_rank()
    n, limit = distributed.get_world_size(), timedelta(seconds=_PATIENCE)
    number = store.add(f"workbench/{what} of {rank}", 1)
    keys = [f"workbench/{what} {number} of {each}" for each in range(n)]
    store.set(keys[rank], json.dumps(own))
    store.wait(keys, limit)
    found = [json.loads(store.get(key)) for key in keys]
    # The rank that holds the store stays until all have read.
    if store.add(f"workbench/{what} {number} were read", 1) == n:
        store.set(f"workbench/{what} {number} are done", "")
    store.wait([f"workbench/{what} {number} are done"], limit)
    return found


def of_all_ranks(own: Any, what: str) -> list[Any]:
    """Return the values of all ranks; alone, after a while, if others have none to send."""
    if not is_shared():
        return [own]
    try:
        return _exchanged(own, what)
    except Exception:  # noqa: BLE001  (a store may fail in any way; the others are then unknown)
        return [own]


def _own(lab: Lab) -> dict[str, Any]:
    """Return what this rank has seen, as JSON values."""
    seen = lab.seen
    parameters, names = {}, dict[int, str]()
    for i, (name, p) in enumerate(seen.parameters.values()):
        names[i] = key = name if name not in parameters else f"{name} ({i})"
        if id(p) not in seen.at_first:  # not held by an optimizer, as the whole tensors that FSDP gathers for a pass
            continue
        placements = getattr(p, "placements", None)
        parameters[key] = {
            "placements": None if placements is None else [type(each).__name__ for each in placements],
            "first": seen.at_first.get(id(p)),
            "now": fingerprint(p),
        }
    updates = [
        {names[i]: None if np.isnan(norm) else float(norm) for i, norm in enumerate(each.norms)}
        for each in seen.updates
    ]
    calls = [call for call in seen.calls if call.reached]
    return {
        "parameters": parameters,
        "updates": updates,
        "local": _local_norms(lab, names),
        "inputs": [digest(tensors_in([call.args, call.kwargs])) for call in calls if call.is_kept],
        "random": [digest([call.rng]) for call in calls],
        "draws": sorted({name for call in calls for name in _dropouts(call)}),
    }


def _local_norms(lab: Lab, names: dict[int, str]) -> list[dict[str, float]]:
    """Return norms of the gradient of a mean after each backward pass that is the only one of its update."""
    found = []
    for each in lab.seen.updates:
        of_update = [one for one in lab.seen.passes if one.update == each.index]
        is_single = len(of_update) == 1 and bool(np.isnan(of_update[0].before).all() | (of_update[0].before == 0).all())
        norms = of_update[0].after if is_single else np.full(0, np.nan)
        found.append({names[i]: float(norm) for i, norm in enumerate(norms) if not np.isnan(norm)})
    return found


def _dropouts(call: Call) -> list[str]:
    """Return the names of modules with dropout that act in a call."""
    found = []
    for name, module in bare(call.module).named_modules():
        p = getattr(module, "p", None) if isinstance(module, nn.modules.dropout._DropoutNd) else None
        p = getattr(module, "dropout", 0.0) if isinstance(module, nn.MultiheadAttention) else p
        if p and module not in call.in_eval:
            found.append(name)
    return found


def _of_ranks(id: str) -> Callable[[Callable[[Lab, list[dict[str, Any]]], Result]], Contract]:
    """Register a contract of several ranks, which receives what they have seen."""

    def register(function: Callable[[Lab, list[dict[str, Any]]], Result]) -> Contract:
        @wraps(function)
        def test(lab: Lab) -> Result:
            if is_shared():
                return function(lab, _ranks(lab))
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise NotTestedError("the script has ended its process group before the experiments")
            return not_applicable("There is one process.")

        return contract(id)(test)

    return register


# What the ranks are to each other


def _differ(a: float | None, b: float | None) -> bool:
    """Return whether two norms of ranks differ; None stands for no gradient."""
    return (a is None) != (b is None) or (a is not None and b is not None and abs(a - b) > _SAME * max(abs(a), abs(b)))


def _apart(ranks: list[dict[str, Any]], name: str, when: str) -> float:
    """Return the largest relative difference of a parameter between the first rank and others; NaN if unknown."""
    each = [rank["parameters"].get(name, {}).get(when) for rank in ranks]
    if any(one is None for one in each):
        return float("nan")
    (norm, along), others = each[0], each[1:]
    size = max(norm, 1e-30)
    return float(max(max(abs(a - norm), abs(b - along)) / size for a, b in others))


def _moved(ranks: list[dict[str, Any]], name: str) -> bool:
    """Return whether the updates moved a parameter on the first rank."""
    each = ranks[0]["parameters"].get(name, {})
    return each.get("first") is not None and each["first"] != each["now"]


def _replicated(ranks: list[dict[str, Any]]) -> list[str]:
    """Return the parameters that each rank held with equal values before the first update."""
    return [
        name
        for name, each in ranks[0]["parameters"].items()
        if each["placements"] is None and _apart(ranks, name, "first") <= _SAME
    ]


def _sharded(ranks: list[dict[str, Any]]) -> list[str]:
    """Return the parameters of which each rank has another part: other values and other gradients from the first on."""
    found = []
    for name, each in ranks[0]["parameters"].items():
        first = [rank["updates"][0].get(name) if rank["updates"] else None for rank in ranks]
        is_other = _apart(ranks, name, "first") > _SAME and any(_differ(first[0], norm) for norm in first[1:])
        if is_other or (each["placements"] is not None and "Replicate" not in each["placements"]):
            found.append(name)
    return found


def _gradients_apart(ranks: list[dict[str, Any]], names: Iterable[str]) -> list[tuple[int, str, float, float]]:
    """Return update, parameter and two norms where gradients of parameters differ between ranks.

    Replicas may reduce their gradients until the update; parts of one model have theirs after the first backward pass,
    and may scale them by a wrong norm afterwards, which is another fault.
    """
    when, most = ("local", 1) if _sharded(ranks) else ("updates", 1 << 30)
    n = min(most, *(len(rank[when]) for rank in ranks))
    return [
        (i, name, here or 0.0, next(v for v in there if _differ(here, v)) or 0.0)
        for i in range(n)
        for name in names
        for here, *there in [[rank[when][i].get(name) for rank in ranks]]
        if any(_differ(here, v) for v in there)
    ]


def _wrapper_of(model: nn.Module) -> nn.Module | None:
    """Return the DDP wrapper of a module, whether or not it is called."""
    kind = nn.parallel.DistributedDataParallel
    # Every object is looked at, since nothing refers from a module to its wrapper.
    return next((o for o in gc.get_objects() if type(o) is kind and bare(o) is model), None)


def _n_wrappers(lab: Lab) -> int:
    """Return the number of DDP wrappers of the model that were called, if nearly each call has one of its own."""
    calls = [call for call in lab.seen.main_calls() if isinstance(call.module, nn.parallel.DistributedDataParallel)]
    n = len({id(call.module) for call in calls})
    return n if n > 2 and n >= 0.9 * len(calls) else 0


def _are_replicas(lab: Lab, ranks: list[dict[str, Any]]) -> bool:
    """Return whether the ranks train one model on parts of the data: DDP, FSDP alone, or replicas by hand."""
    model = lab.seen.roots[0]
    if _wrapper_of(model) is not None:
        return True
    if "FSDPModule" in {cls.__name__ for cls in type(model).__mro__}:
        meshes = [getattr(p, "device_mesh", None) for p in model.parameters()]
        return all(mesh is None or mesh.ndim == 1 for mesh in meshes)
    return not _sharded(ranks)


@_of_ranks("ranks_see_different_data")
def ranks_see_different_data(lab: Lab, ranks: list[dict[str, Any]]) -> Result:
    """Are the inputs of a pass other ones on each rank?

    Hashes of the inputs are compared. Ranks that hold parts of one model (tensor parallelism) read the same data.
    """
    n = min(len(rank["inputs"]) for rank in ranks)
    known = [i for i in range(n) if all(rank["inputs"][i] for rank in ranks)]
    if not known:
        raise NotTestedError("no inputs of the passes were kept")
    if not _are_replicas(lab, ranks):
        return not_applicable("The ranks hold parts of one model.")
    pairs = [(a, b) for b in range(len(ranks)) for a in range(b)]
    for a, b in pairs:
        same = sum(ranks[a]["inputs"][i] == ranks[b]["inputs"][i] for i in known)
        if same == len(known):
            call = next(call for call in lab.seen.calls if call.reached and call.is_kept)
            return failed(
                f"Ranks {a} and {b} have the same inputs in all {len(known)} passes.",
                where=f"the data of the ranks ({call.line})",
                remedy="give each rank its own part: a DistributedSampler, or data[rank::n_ranks] and a seed by rank.",
            )
    return passed(f"All {len(ranks)} ranks have other inputs in {len(known)} passes.")


@_of_ranks("gradients_reduced")
def gradients_reduced(lab: Lab, ranks: list[dict[str, Any]]) -> Result:
    """Are gradients of parameters that all ranks hold equal on all ranks when the optimizer reads them?

    Their norms are compared before each update. A sum over ranks of gradients of means is told by its norm: that of a
    mean is at most the mean of the norms.
    """
    line = next((one.line for one in lab.seen.passes), "")
    if not lab.seen.updates:
        raise NotTestedError("no update was seen")
    held = [each for each in lab.seen.updates if not np.isnan(each.norms).all()]
    shards = [name for name, each in ranks[0]["parameters"].items() if each["placements"] is not None]
    if shards and not held:
        return failed(
            f"No shard has a gradient in {len(lab.seen.updates)} updates, after {lab.seen.n_passes} backward passes.",
            where=f"{shards[0]} and {len(shards) - 1} others ({line})",
            remedy="synchronize gradients in the last micro-batch: set_requires_gradient_sync(True).",
        )
    names = _replicated(ranks)
    if not names and shards:
        return passed(f"Shards of {len(shards)} parameters have gradients in {len(held)} updates.")
    if not names:
        return not_applicable("No parameter is the same on all ranks.")
    if n := _n_wrappers(lab):
        return failed(
            f"{n} calls of the model are of as many new wrappers, which take their hooks with them before the backward "
            "pass, and set the parameters of all ranks to those of the first.",
            where=f"the wrapper ({lab.seen.calls[-1].line})",
            remedy="wrap the model once, before the loop.",
        )
    if apart := _gradients_apart(ranks, names):
        update, name, here, there = apart[0]
        other = {one[1] for one in apart}
        n = len(other)
        if all(_apart(ranks, each, "now") <= _SAME for each in other) and any(_moved(ranks, each) for each in other):
            return passed(
                f"Gradients of {n} of {len(names)} parameters differ between ranks before an update and the parameters "
                "are equal after the updates: they are reduced within step()."
            )
        where, remedy = f"{name} ({line})", "average gradients over ranks before each update."
        model = lab.seen.roots[0]
        if _wrapper_of(model) is not None:
            if any(bare(call.module) is model and call.module is model for call in lab.calls):
                where, remedy = f"model.module, called at {lab.calls[0].line}", "call the wrapped model itself."
            else:
                remedy = "leave no_sync() in the last micro-batch of an update."
        return failed(
            f"Before update {update + 1}, the gradient of {name} has the norm {number_in_words(here)} on one rank and "
            f"{number_in_words(there)} on another; {n} of {len(names)} parameters differ.",
            where=where,
            remedy=remedy,
        )
    if (ratio := _sum_of_means(lab, ranks, names)) > 1 + 1e-3:
        return failed(
            f"A reduced gradient is {ratio:.3g} times as large as the mean of the ranks' norms, which no mean of them "
            "can be: gradients of losses that are means are summed over ranks.",
            where=f"the reduction of gradients ({line})",
            remedy=f"divide by the number of ranks, {len(ranks)}.",
        )
    return passed(f"Gradients of {len(names)} parameters are equal on {len(ranks)} ranks before each update.")


def _sum_of_means(lab: Lab, ranks: list[dict[str, Any]], names: list[str]) -> float:
    """Return the largest ratio of a reduced gradient to the mean of the ranks' gradients; 0 if no loss is a mean."""
    taped = next((one for one in lab.seen.passes if one.tape is not None and one.tape.is_complete), None)
    if taped is None or taped.tape is None or not taped.tape.is_mean:
        return 0.0
    largest = 0.0
    for i in range(min(len(rank["local"]) for rank in ranks)):
        local = [np.array([rank["local"][i].get(name, np.nan) for name in names], dtype=np.float64) for rank in ranks]
        reduced = np.array([ranks[0]["updates"][i].get(name) or np.nan for name in names], dtype=np.float64)
        bound = np.mean([np.sqrt(np.nansum(each**2)) for each in local])
        if bound > 0:
            largest = max(largest, float(np.sqrt(np.nansum(reduced**2)) / bound))
    return largest


@_of_ranks("replicas_equal")
def replicas_equal(lab: Lab, ranks: list[dict[str, Any]]) -> Result:
    """Are parameters that all ranks train by the same gradients equal on all ranks after the updates?"""
    if not _are_replicas(lab, ranks):
        return not_applicable("The ranks hold parts of one model.")
    names = [name for name, each in ranks[0]["parameters"].items() if each["placements"] is None]
    if not names:
        return not_applicable("The ranks hold shards of the parameters.")
    apart = {name: size for name in names if (size := _apart(ranks, name, "now")) > _SAME}
    if not apart:
        return passed(f"{len(names)} parameters are equal on {len(ranks)} ranks after {lab.seen.n_done} updates.")
    began = [name for name in apart if _apart(ranks, name, "first") > _SAME]
    name = max(apart, key=lambda each: apart[each])
    since = f"; {len(began)} did before the first update" if began else ", although none did before the first one"
    return failed(
        f"{len(apart)} of {len(names)} parameters differ between ranks after {lab.seen.n_done} updates, {name} by "
        f"{number_in_words(100 * apart[name])} %{since}.",
        where=name,
        remedy="broadcast the parameters of rank 0 before the first update."
        if began
        else "reduce all gradients over ranks, and clip and update alike on each.",
    )


@_of_ranks("shards_equal")
def shards_equal(lab: Lab, ranks: list[dict[str, Any]]) -> Result:
    """Under tensor parallelism, are parameters that are not split equal on all ranks after the updates?"""
    parameters, split = ranks[0]["parameters"], _sharded(ranks)
    whole = [name for name, each in parameters.items() if {*(each["placements"] or ())} == {"Replicate"}]
    whole += _replicated(ranks)
    if not split or not whole:
        return not_applicable("No parameters are split over ranks beside others that are not.")
    apart = {name: size for name in whole if (size := _apart(ranks, name, "now")) > _SAME}
    if not apart:
        return passed(f"{len(whole)} parameters that are not split are equal on {len(ranks)} ranks.")
    name = max(apart, key=lambda each: apart[each])
    return failed(
        f"{len(apart)} of {len(whole)} parameters that are not split differ between ranks after {lab.seen.n_done} "
        f"updates, {name} by {number_in_words(100 * apart[name])} %.",
        where=name,
        remedy="reduce their gradients over ranks, and clip by the norm of the whole model.",
    )


def _is_seeded_by_library() -> bool:
    """Return whether a Trainer runs the loop, which gives each rank the same seed on purpose."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("transformers.trainer", "lightning.", "pytorch_lightning.")):
            return True
        frame = frame.f_back
    return False


@_of_ranks("random_states")
def random_states(lab: Lab, ranks: list[dict[str, Any]]) -> Result:
    """Do ranks that train on other data draw other random numbers for dropout?

    Hashes of the states of the generator before each pass are compared where dropout acts.
    """
    if _is_seeded_by_library():
        raise NotTestedError("the library of the loop gives all ranks one seed")
    if not all(rank["draws"] for rank in ranks):
        return not_applicable("No dropout acts.")
    if torch.cuda.is_available() and any(p.is_cuda for p in lab.seen.roots[0].parameters()):
        raise NotTestedError("the states of generators on a GPU were not recorded")
    if not _are_replicas(lab, ranks):
        return not_applicable("The ranks hold parts of one model.")
    n = min(len(rank["random"]) for rank in ranks)
    same = sum(len({rank["random"][i] for rank in ranks}) == 1 for i in range(n))
    if n and same == n:
        first = ranks[0]["draws"][0]
        return failed(
            f"All {len(ranks)} ranks have the same random state before each of {n} passes, so that they drop the same "
            "units.",
            where=f"the seed of the ranks; {first} draws from it",
            remedy="add the rank to the seed after the parameters are made: torch.manual_seed(seed + rank).",
        )
    return passed(f"Random states of the ranks differ before {n - same} of {n} passes.")
