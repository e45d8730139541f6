"""Watching of an unmodified training script: model and optimizers are found at the first forward pass that trains."""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from workbench.callbacks.watch import Watch, trainer_kind, watch
from workbench.contracts.script import run_main, within
from workbench.errors import WorkbenchError
from workbench.schema.statuses import ExitStatus


def watch_script(
    command: Sequence[str],
    store: str,
    *,
    log: Sequence[str] = (),
    notify: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    output: Any = None,
) -> int:
    """Run the command of a training while it is watched, and return its exit status.

    Args:
        command: Command line, such as ``["python", "train.py", "--its", "args"]`` or ``["torchrun", ...]``.
        store: Path or URL of the store.
        log: Loggers, as in `workbench.watch`.
        notify: Receivers of the alarms, as in `workbench.watch`.
        resume: Whether to continue the run in the store.
        overwrite: Whether to replace it.
        output: Stream for what the script prints; None for standard output.

    Raises:
        OptionError: If the command is none of Python or torchrun.
    """
    own = ["-m", "workbench.callbacks.watched_script", "--store", store]
    own += [f"--log={each}" for each in log] + [f"--notify={each}" for each in notify]
    own += ["--resume"] * resume + ["--overwrite"] * overwrite + ["--"]
    return subprocess.run(within(list(command), own), check=False, stdout=output).returncode


#: Callers of an optimizer among which a trainer is looked for.
_N_CALLERS = 12


class _Finder:
    """Watches a trainer that creates its optimizer, or the first module that trains and holds all of an optimizer."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.watched: Watch | None = None
        self.problem = ""
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._refused: set[tuple[int, int]] = set()
        self._parts: list[nn.Module] = []
        self._own_init, self._own_call = torch.optim.Optimizer.__init__, nn.Module.__call__

    def __enter__(self) -> _Finder:
        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            self._own_init(optimizer, *args, **kwargs)
            self._optimizers.append(weakref.ref(optimizer))
            if self.watched is None:
                self._find_trainer()

        # Not a global hook, of which the compiler warns, and after which the module's own hooks miss this pass.
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.watched is None and module.training and torch.is_grad_enabled():
                self._find(module)
            return self._own_call(module, *args, **kwargs)

        self._set(init, call)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self._leave()
        if self.watched is not None:
            is_broken = kind is not None and not (isinstance(error, SystemExit) and not error.code)
            self.watched.close(is_broken=is_broken)

    @staticmethod
    def _set(init: Any, call: Any) -> None:
        kinds: tuple[Any, Any] = (torch.optim.Optimizer, nn.Module)
        kinds[0].__init__, kinds[1].__call__ = init, call

    def _leave(self) -> None:
        self._set(self._own_init, self._own_call)

    def _find_trainer(self) -> None:
        """Watch the trainer of transformers or Lightning that has just created its optimizer, if one has."""
        caller, n_callers = inspect.currentframe(), 0
        while caller is not None and n_callers < _N_CALLERS:
            one, caller, n_callers = caller.f_locals.get("self"), caller.f_back, n_callers + 1
            if hasattr(one, "training_step") and not getattr(one, "automatic_optimization", True):
                return  # a module of Lightning that makes its updates itself
            if one is not None and trainer_kind(one) is not None:
                self._watch(one)
                return

    def _watch(self, *what: Any) -> None:
        """Watch a training; if that cannot be, the script goes on without."""
        self._leave()
        try:
            self.watched = watch(*what, **self.options)
        except WorkbenchError as error:
            self.problem = str(error)
            print(f"workbench: The training is not watched: {error}", file=sys.stderr)

    def _find(self, module: nn.Module) -> None:
        if (key := (id(module), len(self._optimizers))) in self._refused:
            return
        self._refused.add(key)  # until another optimizer is created
        created = [each for ref in self._optimizers if (each := ref()) is not None]
        groups = {id(o): {id(p) for group in o.param_groups for p in group["params"]} for o in created}
        held = {id(parameter) for parameter in module.parameters()}
        if not any(group & held for group in groups.values()):
            return
        # The outermost module is called first; others that follow, such as a decoder, hold further parameters.
        inside = {id(parameter) for part in self._parts for parameter in part.parameters()}
        self._parts += [] if held <= inside else [module]
        if own := [each for each in created if groups[id(each)] <= held | inside]:
            self._watch(
                self._parts[0] if len(self._parts) == 1 else nn.ModuleList(self._parts), own if len(own) > 1 else own[0]
            )


def main() -> None:
    """Run a script in this process and watch its training."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store")
    parser.add_argument("--log", action="append", default=[])
    parser.add_argument("--notify", action="append", default=[])
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--overwrite", action="store_true")
    cut = sys.argv.index("--")
    given, script = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    options = {name: value for name, value in vars(given).items() if value}
    with _Finder(options) as finder:
        run_main(script)
    if finder.watched is None and not finder.problem and not int(os.environ.get("RANK", "0")):
        print(
            "workbench: No training was found to watch: no module was called in training mode whose parameters an "
            "optimizer of torch holds; call wb.watch(model, optimizer) in the script.",
            file=sys.stderr,
        )
        sys.exit(ExitStatus.BAD_INPUT)


if __name__ == "__main__":
    main()
