"""Runs other checkers of trainings on the own loops of the open part, and tabulates what they find.

Model, batch, loss and optimizer are those of the first update of the script, captured by hooks. Where a peer needs more
than the script has there, it is not applicable. The peers are no dependencies: what is not installed is left out.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import multiprocessing
import os
import runpy
import statistics
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.report import write_report
from benchmarks.wiring.judge import ROOT, cases_of, text_of

UPDATES = 20
LOSSES = {name: getattr(functional, name) for name in ("cross_entropy", "nll_loss", "mse_loss", "smooth_l1_loss")}
REACH = "gradients_reach_all modules_used optimizer_covers update_as_predicted"
#: The contracts that a finding may speak of, read generously.
HINTS = {
    **dict.fromkeys(("optimizer_coverage", "any optimizer", "gradient_flow", "params_change", "gradient_check"), REACH),
    **dict.fromkeys(("should change", "frozen_params", "TA103", "TA104", "TA500", "TA501"), REACH),
    **dict.fromkeys(("TA100", "NaN", "inf.", "output_finite", "gradient_magnitude", "nan_inf_detection"), "finite"),
    **dict.fromkeys(("initial_loss", "TA102", "range"), "initial_loss"),
    "duplicate_samples": "batches_differ",
    "batch_independence": "examples_independent",
    "eval_determinism": "eval_deterministic",
    "input_dependency": "mask_respected order_matters",
    "overfit_batch": "descends rate_in_range initial_loss overfits_one_batch",
}
Found = list[tuple[str, bool]]


def simple(seen: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return input, targets and loss of a model of one tensor, whose output goes into a known loss as a whole."""
    (name, given, target, options), out = seen["loss"], seen["out"]
    if seen["kwargs"] or len(seen["args"]) != 1 or not torch.is_tensor(out) or out.numel() != given.numel():
        raise ValueError("the model has not one input and a loss of all of its output")
    folded = target.numel() * out.shape[-1] == out.numel()

    def loss(output: Any, y: Any) -> Any:
        return LOSSES[name](output.reshape(-1, *given.shape[1:]), y.flatten() if folded else y, **options)

    return seen["args"][0], target.reshape(out.shape[:-1]) if folded else target, loss


def torchtest2(seen: dict[str, Any]) -> Found:
    """Apply its one call; a loss that is unknown becomes its projection of the outputs."""
    import torchtest2 as peer

    inputs, targets, loss = seen["kwargs"] or seen["args"], None, None
    with contextlib.suppress(ValueError, KeyError):
        inputs, targets, loss = simple(seen)
    report = peer.check_model(seen["model"], inputs, targets, loss_fn=loss, optimizer=seen["optimizer"])
    return [(c.name, c.status.value == "FAIL") for c in report.results if c.status.value in ("FAIL", "WARN")]


def preflight(seen: dict[str, Any]) -> Found:
    """Run its checks of a loader, a model and a loss."""
    from preflight.runner import run_checks

    x, y, loss = simple(seen)
    found = run_checks([(x, y)], model=seen["model"], loss_fn=loss)
    return [(each.name, each.severity.value == "fatal") for each in found if not each.passed]


def torch_audit(seen: dict[str, Any]) -> Found:
    """Audit every update of the loop."""
    import torch_audit as peer

    if "audit" not in seen:
        options = {"every_n_steps": 1, "reporters": [], "suppress_internal_errors": True}
        seen["audit"] = peer.autopatch(seen["model"], optimizer=seen["optimizer"], **options)
        return []
    found = {(each.rule_id, each.severity.value) for each in seen["audit"].finish(report=False).findings}
    return sorted((name, level == "ERROR") for name, level in found if level != "INFO")


def torcheck(seen: dict[str, Any]) -> Found:
    """Require that trainable parameters change and stay finite, and that logits are no probabilities."""
    import torcheck as peer

    if seen["n"] == 1:
        peer.register(seen["optimizer"])
        for name, p in seen["model"].named_parameters():
            if p.requires_grad:
                peer.add_tensor(p, tensor_name=name, changing=True, check_nan=True, check_inf=True)
        if torch.is_tensor(seen["out"]) and seen.get("loss", ("",))[0] == "cross_entropy":
            peer.add_module_output_range_check(seen["model"], output_range=(0, 1), negate_range=True)
    return []


PEERS = {"torchtest2": torchtest2, "torch-audit": torch_audit, "torcheck": torcheck, "preflight-ml": preflight}


def inside(peer: str, script: Path, out: Path) -> None:
    """Run a script with a peer, and write what it found."""
    seen, found, calls, said = {"n": 0}, [], [], ""

    def left(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        calls.pop()
        size = sum(p.numel() for p in module.parameters())
        if not calls and not seen["n"] and size >= seen.get("size", 1):
            seen.pop("loss", None)
            seen.update(model=module, args=args, kwargs=kwargs, out=output, size=size)

    def noted(name: str) -> Any:
        def loss(given: Any, target: Any, *args: Any, **options: Any) -> Any:
            if not calls and not args and not seen["n"]:
                seen.setdefault("loss", (name, given.detach(), target, options))
            return LOSSES[name](given, target, *args, **options)

        return loss

    def stepped(optimizer: Any, *_: Any) -> None:
        if "model" in seen and seen.setdefault("optimizer", optimizer) is optimizer and not seen.get("is_busy"):
            seen["n"] += 1
            if sum(isinstance(each, torch.optim.Optimizer) for each in gc.get_objects()) > 1:
                raise ValueError("several optimizers")
            if seen["n"] in (1, UPDATES):
                seen["is_busy"] = True
                found.extend(PEERS[peer](seen))
                seen["is_busy"] = False
            if seen["n"] == UPDATES or peer not in ("torch-audit", "torcheck"):
                raise SystemExit

    register_module_forward_pre_hook(lambda module, _: calls.append(module))
    register_module_forward_hook(left, with_kwargs=True, always_call=True)
    register_optimizer_step_pre_hook(stepped)
    for name in LOSSES:
        setattr(functional, name, noted(name))
    sys.argv, start = [str(script)], time.perf_counter()
    os.chdir(script.parent)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit:
        pass
    except Exception as error:  # noqa: BLE001 - a peer may raise anything on a script that it is not made for
        said = f"{type(error).__name__}: {error}"
        if peer == "torcheck" and ("detected while" in said or "any optimizer" in said):
            found.append((said, True))
            said = ""
    said = said or ("" if seen["n"] else "no model or no optimizer was seen")
    out.write_text(json.dumps({"found": found, "said": said, "seconds": time.perf_counter() - start}))


def result_of(peer: str, case: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a peer on a case, found in a process of its own and kept in a file."""
    kept = ROOT / "artifacts" / "peers" / f"{peer}-{case['name']}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, Path(case["script"]).name)
            script.write_text(text_of(case), encoding="utf-8")
            child = multiprocessing.get_context("fork").Process(target=inside, args=(peer, script, kept))
            child.start()
            child.join(120)
            child.kill()
    return json.loads(kept.read_text()) if kept.exists() else {"found": [], "said": "no result in time"}


def hinted(found: Found) -> set[str]:
    """Return the contracts that findings may speak of."""
    return {id for text, _ in found for key in HINTS if key in text for id in HINTS[key].split()}


def main() -> None:
    """Run the peers that are installed, and write the table."""
    with contextlib.suppress(ImportError):  # once for all
        importlib.import_module("transformers")
    loops, rows = [case for case in cases_of("open") if case["style"] == "loop"], []
    firsts = {case["ids"][0]: case for case in reversed(loops) if case["faulty"]}  # one for each contract
    cases = [*(case for case in loops if not case["faulty"]), *firsts.values()]
    for peer in PEERS:
        try:
            name = f"{peer} {version(peer)}"
        except PackageNotFoundError:
            print(f"{peer} is not installed and left out; pip install {peer}.", file=sys.stderr)
            continue
        results = [(case, each) for case in cases if not (each := result_of(peer, case))["said"]]
        cells = [sum(bool(hinted(each["found"]) & {*case.get("ids", ())}) for case, each in results)]
        for kind in (True, False):
            mine = [each["found"] for case, each in results if case["faulty"] is kind]
            cells += [sum(any(fails for _, fails in found) for found in mine), sum(map(bool, mine)), len(mine)]
        seconds = statistics.median([each["seconds"] for _, each in results] or [math.nan])
        rows.append(f"| {name} | {' | '.join(map(str, cells))} | {seconds:.1f} |")
        print(rows[-1], flush=True)
    if not rows:
        return
    about = (
        f"Other checkers on the {len(cases) - len(firsts)} sound own loops of the open part, and on {len(firsts)} "
        "faulty ones, the first of each contract, where they apply: each takes one model and one optimizer. A right "
        "hint is a failure or warning that may speak of the broken contract, read generously, wherever it points "
        "(`HINTS` in `peers.py`). traincheck, which needs a healthy run to compare with, and neural-net-checklist, "
        "which needs a model without its data, are left out. Generated by `python -m benchmarks.wiring.peers`."
    )
    parts = [f"{kind}: {part}" for kind in ("faulty", "sound") for part in ("failed", "failed or warned", "of")]
    columns = ["peer", "faulty: right hint", *parts, "seconds (median)"]
    write_report("peers", "Other checkers of trainings", about, columns, rows, folder=Path(__file__).parent)


if __name__ == "__main__":
    main()
