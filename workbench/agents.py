"""What agents may ask, by the Model Context Protocol: servers of recorded runs and of practice cases.

No run is changed, and none outside of the folder is read. The official SDK speaks the protocol.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import MissingPackageError, OptionError, WorkbenchError, require_listed
from workbench.reports.facts import facts, plain

if TYPE_CHECKING:
    import xarray as xr
    from mcp.server.mcpserver import MCPServer

    from workbench.course.patients import Patient
    from workbench.course.wiring_cases import WiringCase

#: Most values that one answer holds.
_MOST_VALUES = 400
#: Seconds that an agent has for one practice case.
_PATIENCE = 900.0


def _server(name: str, instructions: str) -> tuple[MCPServer, Any]:
    """Return a server, and the decorator of its tools, whose errors are sentences."""
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp_types import ToolAnnotations
    except ImportError as error:
        raise MissingPackageError("The Model Context Protocol needs the package mcp; run pip install mcp.") from error
    server = MCPServer(name, instructions=instructions, log_level="ERROR")

    def tool(reads_only: bool) -> Any:
        def add(function: Callable[..., Any]) -> None:
            @wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                try:
                    found = function(*args, **kwargs)
                    return json.dumps(plain(found), allow_nan=False) if isinstance(found, dict | list) else found
                except WorkbenchError as error:  # other errors are not told to the agent
                    raise ToolError(str(error)) from error

            annotations = ToolAnnotations(read_only_hint=reads_only, open_world_hint=False)
            server.tool(annotations=annotations, structured_output=False)(call)

        return add

    return server, tool


def store_server(folder: str) -> MCPServer:
    """Return a server that answers questions about the runs in a folder or below its URL, read-only.

    Args:
        folder: Folder of stores, or its fsspec URL.

    Raises:
        MissingPackageError: If the package mcp is not installed.
    """
    from mcp.server.mcpserver import Image

    import workbench as wb
    from workbench.io.run_index import status_of

    server, tool = _server(
        "workbench",
        "Records of trainings of neural networks. Begin with list_runs, then what_is_wrong. A record may not show the "
        "cause: what_to_measure_next names what was not tested.",
    )

    def place(run: str) -> str:
        """Return the path of a run; only listed ones are read."""
        paths = wb.list_runs(folder)["path"].to_dict()
        if run not in paths:
            raise OptionError.of("run", run, "a name from list_runs")
        return str(paths[run])

    def diagnosed(run: str) -> xr.DataTree:
        return wb.diagnose(place(run))

    @tool(True)
    def list_runs() -> Any:
        """List the runs: name, state, step, loss, first alarm, cause that it points to."""
        return wb.list_runs(folder).drop(columns="path").reset_index().to_dict("records")

    @tool(True)
    def what_is_wrong(run: str) -> dict[str, Any]:
        """Say what is wrong with a run: its state, alarms, broken contracts, and the diagnosis with its causes."""
        tree = facts(diagnosed(run))
        causes = [each for each in tree["causes"] if each["is_possible"]]
        kept = ("summary", "failure_kind", "failure_step", "found", "established", "recorded", "not_recorded", "notes")
        status = {name: value for name, value in status_of(place(run)).items() if name != "path"}
        return {"status": status, **{name: tree.get(name) for name in kept}, "possible_causes": causes}

    @tool(True)
    def show_evidence(run: str, cause: str = "") -> list[dict[str, Any]]:
        """List the measurements for (weight above 0) and against the causes of a run, or one of them."""
        rows = facts(diagnosed(run))["evidence"]
        rows = [each for each in rows if each["weight"] and (not cause or each["cause"] == cause)]
        return sorted(rows, key=lambda each: -abs(each["weight"]))[: _MOST_VALUES // 10]

    @tool(True)
    def list_variables(run: str) -> dict[str, Any]:
        """List the recorded variables of a run by part, each with its dimensions, meaning and units."""
        tree = wb.open_run(place(run))
        return {
            part: {
                str(name): {"dims": dict(each.sizes), **{k: str(v) for k, v in each.attrs.items() if k != "dtype"}}
                for name, each in node.to_dataset().data_vars.items()
            }
            for part, node in tree.children.items()
        }

    @tool(True)
    def read_values(run: str, part: str, variable: str, first_step: int = 0, last_step: int = -1) -> dict[str, Any]:
        """Read a variable of a run between two steps (-1: the last one); long series are thinned evenly."""
        tree = wb.open_run(place(run))
        if part not in tree.children or variable not in tree[part].to_dataset():
            raise OptionError.of("variable", f"{part}/{variable}", "one from list_variables")
        values = tree[part].to_dataset()[variable]
        if "step" in values.coords:
            steps = values["step"].values
            kept = np.flatnonzero((steps >= first_step) & ((steps <= last_step) | (last_step < 0)))
            most = max(2, _MOST_VALUES * values.sizes["step"] // max(1, values.size))
            chosen = np.unique(np.linspace(0, max(0, len(kept) - 1), min(len(kept), most)).astype(int))
            values = values.isel({str(values["step"].dims[0]): kept[chosen]})
        if values.size > 10 * _MOST_VALUES:
            raise OptionError(f"{part}/{variable} has {values.size:,} values in one step, too many for an answer.")
        coords = {str(name): each.values for name, each in values.coords.items()}
        return {"dims": list(values.dims), "coords": coords, "values": values.values}

    @tool(True)
    def show_figure(run: str) -> Any:
        """Draw the loss and the monitors of a run over its steps, with alarms, as an image."""
        from workbench.plots.figure_files import picture_of

        return Image(data=picture_of(wb.plots.timeline(wb.open_run(place(run)), backend="matplotlib")), format="png")

    @tool(True)
    def what_to_measure_next(run: str) -> dict[str, Any]:
        """Name experiments that tell the causes of a run apart, and the faults that its record cannot show."""
        tree = facts(diagnosed(run))
        kept = ("title", "change", "cost", "n_steps", "from_step", "expected_if_right", "expected_if_wrong", "cause")
        experiments = [{name: each[name] for name in kept} for each in tree.get("experiments", [])]
        return {
            "experiments": experiments,
            "faults_that_the_record_cannot_show": tree.get("unseen", []),
            "not_recorded": tree.get("not_recorded"),
        }

    return server


def case_server(case: list[Patient]) -> MCPServer:
    """Return a server with the tools of a practice case, the first of a list, which the caller may replace."""
    server, tool = _server(
        "workbench-practice",
        "A run with a hidden cause, or a healthy one, and a budget of measurements. Look at the case, measure, and "
        "answer once.",
    )

    @tool(True)
    def look_at_case() -> dict[str, Any]:
        """Show the complaint, the budget, the measurements with their costs, and the causes that may be named."""
        one = case[0]
        measurements = one.measurements.reset_index().to_dict("records")
        return {
            "complaint": one.complaint,
            "budget": one.budget,
            "spent": one.spent,
            "measurements": measurements,
            "causes": {**one.cures, "nothing": "The run is healthy."},
            "cost_of_a_cure": one.cure_cost,
        }

    @tool(False)
    def measure(name: str) -> dict[str, Any]:
        """Take a measurement of the case; it costs what look_at_case says, once."""
        data = case[0].measure(name)
        every = 1 + data.sizes.get("step", 0) // 60
        thin = data.isel(step=slice(None, None, every)) if "step" in data.dims else data
        values = {str(key): {"dims": each.dims, "values": each.values} for key, each in thin.variables.items()}
        return {"spent": case[0].spent, "every_steps": every, **values}

    @tool(False)
    def try_cure(cause: str) -> dict[str, Any]:
        """Replay the run with the change for a cause; it costs what look_at_case says, once."""
        tried = case[0].try_cure(cause, progress=False)
        return {"spent": case[0].spent, **{name: tried.attrs[name] for name in ("sentence", "change")}}

    @tool(False)
    def answer(causes: list[str], cure: str = "") -> str:
        """End the case: name its causes (["nothing"] if it is healthy) and the cause whose cure is to be applied."""
        case[0].finish(causes, cure or None, progress=False)
        return "The case is closed."

    return server


def wiring_server(case: list[WiringCase]) -> MCPServer:
    """Return a server with the tools of a practice case of wiring; otherwise as `case_server`."""
    server, tool = _server(
        "workbench-practice",
        "A small training of which a line may be wrong, and a budget of contracts to test. Look at the case, test, and "
        "answer once.",
    )

    @tool(True)
    def look_at_case() -> dict[str, Any]:
        """Show what is trained, its steps, of which one may be wrong, the contracts, and the budget of tests."""
        one = case[0]
        kept = ("kind", "steps", "contracts", "budget", "spent")
        return {**{name: getattr(one, name) for name in kept}, "losses": one.curve()}

    @tool(False)
    def test(contract: str) -> dict[str, Any]:
        """Test one contract, by an experiment; it costs 1."""
        found = case[0].test(contract)
        return {"spent": case[0].spent, "status": str(found.status), "evidence": found.evidence}

    @tool(False)
    def answer(contract: str, step: str = "") -> str:
        """End the case: name the broken contract ("nothing" if all hold) and the step whose line is wrong."""
        case[0].finish(contract, step)
        return "The case is closed."

    return server


@contextmanager
def _served(server: MCPServer) -> Iterator[str]:
    """Serve on a free port of this machine, and return the address."""
    import uvicorn

    application = server.streamable_http_app(stateless_http=True, json_response=True)
    web = uvicorn.Server(uvicorn.Config(application, host="127.0.0.1", port=0, log_level="error", lifespan="on"))
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    try:
        while not web.started:
            if not thread.is_alive():
                raise OptionError("The server of the cases could not be started on 127.0.0.1.")
            time.sleep(0.02)
        yield f"http://127.0.0.1:{web.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        web.should_exit = True
        thread.join(timeout=10)


def practice(
    command: Sequence[str], level: str, seeds: Sequence[int], *, progress: bool = True
) -> tuple[dict[str, Any], str]:
    """Score an agent on practice cases, beside other players on the same cases.

    Args:
        command: Command line of the agent, run once for each case; ``{url}`` stands for the address of the MCP server
            of the case, which is also in the environment, as WORKBENCH_CASE_URL.
        level: "1" to "5" for runs, as in `workbench.course.patient`; "wiring" for trainings with a wrong line.
        seeds: Seeds of the cases.
        progress: Whether to show the progress.

    Returns:
        Mean points (0 to 100), share of right causes and places or working cures, and share of the budget of each
        player, with each case of the agent; and a table of them.

    Raises:
        OptionError: If there is no such level, or the command cannot be started.
    """
    import pandas as pd

    from workbench.course import case_files
    from workbench.course.patients import _COLUMNS, BUDGETS, play

    require_listed("level", [level], [*map(str, BUDGETS), "wiring"])
    case: list[Any] = [None]

    def let_play(one: Any) -> None:
        case[0] = one
        words = [word.replace("{url}", url) for word in command]
        try:  # what the agent prints is not a result
            environment = os.environ | {"WORKBENCH_CASE_URL": url}
            subprocess.run(words, check=False, timeout=_PATIENCE, stdout=sys.stderr.fileno(), env=environment)
        except OSError as error:
            raise OptionError.of("command", words[0], "a program that can be started") from error
        if one.score is None:
            raise RuntimeError("the agent ended without an answer")

    def player(patient: Patient) -> tuple[tuple[str], None]:
        let_play(patient)
        return ("nothing",), None  # the score exists already

    if level == "wiring":
        with _served(wiring_server(case)) as url:
            cases, players = _wiring_scores(let_play, seeds, progress=progress)
    else:
        with _served(case_server(case)) as url:
            scores = play(player, int(level), seeds, progress=progress)
        with case_files.opened() as data:
            of_level = data.isel(patient=np.flatnonzero(data["level"].values == int(level)))
            recorded = of_level.isel(patient=[seed % of_level.sizes["patient"] for seed in seeds])
            players = {"your agent": {column: float(scores[name].mean()) for column, name in _COLUMNS.items()}} | {
                str(name): {to: float(recorded[f"board_{of}"].sel(player=name).mean()) for to, of in _COLUMNS.items()}
                for name in recorded["player"].values
            }
        cases = scores.to_dataframe().reset_index().to_dict("records")
    table = pd.DataFrame(players).T.to_string(float_format=lambda value: f"{value:.3g}")
    n_failed = sum(bool(each["problem"]) for each in cases)
    text = f"{len(cases)} cases of level {level}\n\n{table}"
    text += f"\n\n{n_failed} of them ended without a valid answer." if n_failed else ""
    return {"level": level, "players": players, "cases": cases}, text


def _wiring_scores(
    let_play: Callable[[Any], None], seeds: Sequence[int], *, progress: bool
) -> tuple[list[dict[Any, Any]], dict[str, dict[str, float]]]:
    """Return the scores of the agent by case, and the means of it and of two simple players."""
    from workbench.course.wiring_cases import wiring_case
    from workbench.io.progress import Progress

    def in_order(one: WiringCase) -> None:
        tried = [one.test(id) for id in one.contracts[: one.budget]]
        one.finish(next((each.id for each in tried if each.status == "failed"), "nothing"))

    others = {"contracts in order": in_order, "always nothing": lambda one: one.finish("nothing")}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ("your agent", *others)}
    with Progress(progress, "played", unit="case", total=len(seeds)) as bar:
        for seed in seeds:
            for name, plays in {"your agent": let_play, **others}.items():
                one, problem = wiring_case(seed), ""
                try:
                    plays(one)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    problem = f"{type(error).__name__}: {error}"
                score = one.score
                rows[name].append(
                    {
                        "seed": seed,
                        "points": 0.0 if score is None else score.points,
                        "causes_right": score is not None and score.are_causes_right,
                        "places_right": score is not None and score.does_cure_work,
                        "spent": one.spent / one.budget,
                        "problem": problem,
                    }
                )
            bar.update()
    columns = ("points", "causes_right", "places_right", "spent")
    means = {name: {key: float(np.mean([row[key] for row in of])) for key in columns} for name, of in rows.items()}
    return rows["your agent"], means
