"""An agent asks about runs by the client of the official SDK, and is scored on practice cases."""

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest
from mcp.client.session import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client

import workbench as wb
from workbench import cli
from workbench.course import case_files

pytestmark = [pytest.mark.subprocess, pytest.mark.medium]

AGENT = """
import asyncio, json, sys
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client

async def main(url):
    async with streamable_http_client(url) as streams, ClientSession(streams[0], streams[1]) as session:
        await session.initialize()
        case = json.loads((await session.call_tool("look_at_case", {})).content[0].text)
        assert "nothing" in case["causes"] and case["spent"] == 0
        measured = json.loads((await session.call_tool("measure", {"name": "loss"})).content[0].text)
        assert measured["spent"] == 1 and len(measured["loss"]["values"]) > 10
        refused = await session.call_tool("answer", {"causes": ["nonsense"]})
        assert refused.is_error and "nonsense" in refused.content[0].text
        await session.call_tool("answer", {"causes": ["nothing"]})

if sys.argv[2:] != ["silent"]:
    asyncio.run(main(sys.argv[1]))
"""

WIRING_AGENT = """
import asyncio, json, sys
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client

async def main(url):
    async with streamable_http_client(url) as streams, ClientSession(streams[0], streams[1]) as session:
        await session.initialize()
        case = json.loads((await session.call_tool("look_at_case", {})).content[0].text)
        tested = json.loads((await session.call_tool("test", {"contract": "causal"})).content[0].text)
        assert tested["spent"] == 1 and tested["evidence"]
        await session.call_tool("answer", {"contract": "causal", "step": next(iter(case["steps"]))})

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Answers of the server about two runs, by tool."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "outside.nc").write_bytes(wb.samples.failed_run("healthy").read_bytes())
    runs = folder / "runs"
    for name in ("architecture", "healthy"):
        run = wb.open_run(wb.samples.failed_run(name)).load()
        wb.save(run, runs / f"{name}.zarr")
    before = {path: path.stat().st_mtime_ns for path in runs.glob("*.zarr/**/*")}

    async def ask():
        server = StdioServerParameters(command=sys.executable, args=["-m", "workbench", "mcp", str(runs)])
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            tools = (await session.list_tools()).tools
            assert all(tool.annotations.read_only_hint for tool in tools)
            (of,) = [run for run in json.loads((await session.call_tool("list_runs", {})).content[0].text)
                     if run["name"] == "architecture"]  # fmt: skip
            calls = {
                "list": ("list_runs", {}),
                "wrong": ("what_is_wrong", {"run": of["name"]}),
                "evidence": ("show_evidence", {"run": of["name"], "cause": "architecture"}),
                "variables": ("list_variables", {"run": of["name"]}),
                "values": ("read_values", {"run": "healthy", "part": "monitors", "variable": "loss", "last_step": 5}),
                "figure": ("show_figure", {"run": of["name"]}),
                "next": ("what_to_measure_next", {"run": of["name"]}),
                "outside": ("what_is_wrong", {"run": "../outside"}),
                "absolute": ("what_is_wrong", {"run": str(folder / "outside.nc")}),
                "misspelt": ("read_values", {"run": "healthy", "part": "monitors", "variable": "losss"}),
            }
            return {name: await session.call_tool(tool, given) for name, (tool, given) in calls.items()}

    found = asyncio.run(ask())
    assert {path: path.stat().st_mtime_ns for path in runs.glob("*.zarr/**/*")} == before
    return found


def test_an_agent_learns_what_is_wrong(answers):
    wrong = json.loads(answers["wrong"].content[0].text)
    expected = wb.diagnose(wb.samples.failed_run("architecture"))
    assert wrong["summary"] == expected.attrs["summary"]
    assert [each["cause"] for each in wrong["possible_causes"]] == ["architecture"]
    assert {run["name"] for run in json.loads(answers["list"].content[0].text)} == {"architecture", "healthy"}


def test_an_agent_sees_the_evidence_and_what_to_measure(answers):
    evidence = json.loads(answers["evidence"].content[0].text)
    assert evidence[0]["weight"] > 0
    assert {each["cause"] for each in evidence} == {"architecture"}
    values = json.loads(answers["values"].content[0].text)
    loss = wb.open_run(wb.samples.failed_run("healthy"))["monitors"]["loss"]
    steps = np.array(values["coords"]["step"])
    assert steps.max() <= 5
    assert values["values"] == pytest.approx(loss.sel(step=steps).values)
    assert json.loads(answers["next"].content[0].text)["experiments"][0]["cause"] == "architecture"
    assert json.loads(answers["variables"].content[0].text)["monitors"]["loss"]["units"] == "nat"
    assert answers["figure"].content[0].mime_type == "image/png"


@pytest.mark.parametrize("name", ["outside", "absolute", "misspelt"])
def test_an_agent_is_refused_what_is_not_listed(answers, name):
    assert answers[name].is_error
    assert "must be" in answers[name].content[0].text


def test_an_agent_is_scored_on_practice_cases(tmp_path, capsys):
    (tmp_path / "agent.py").write_text(AGENT)
    agent = [sys.executable, str(tmp_path / "agent.py"), "{url}"]
    command = ["-m", "workbench", "practice", "--level", "3", "--cases", "3", "--json", "--quiet", "--", *agent]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    own = wb.course.play(lambda patient: ("nothing", None), 3, range(3), progress=False)
    assert [case["cause_points"] for case in found["cases"]] == own["cause_points"].values.tolist()
    assert found["players"]["your agent"]["spent"] > 0
    with case_files.opened() as data:
        level = data.isel(patient=np.flatnonzero(data["level"].values == 3)).isel(patient=slice(3))
        recorded = level["board_points"].sel(player="wb.diagnose").mean().item()
    assert found["players"]["wb.diagnose"]["points"] == pytest.approx(recorded)


@pytest.mark.slow
def test_an_agent_is_scored_on_wirings(tmp_path):
    (tmp_path / "agent.py").write_text(WIRING_AGENT)
    agent = [sys.executable, str(tmp_path / "agent.py"), "{url}"]
    command = ["-m", "workbench", "practice", "--level", "wiring", "--cases", "2", "--json", "--quiet", "--", *agent]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = []
    for seed in range(2):
        case = wb.course.wiring_case(seed)
        case.test("causal")
        expected.append(case.finish("causal", next(iter(case.steps))).points)
    assert [case["points"] for case in found["cases"]] == expected
    assert {"your agent", "contracts in order", "always nothing"} == found["players"].keys()


def test_a_level_that_does_not_exist_is_named(capsys):
    assert cli.main(["practice", "--level", "9", "--", "agent"]) == 3
    assert "level must be" in capsys.readouterr().err


def test_an_agent_without_an_answer_has_no_points(tmp_path, capfd):
    (tmp_path / "agent.py").write_text(AGENT)
    agent = [sys.executable, str(tmp_path / "agent.py"), "{url}", "silent"]
    assert cli.main(["practice", "--level", "3", "--cases", "1", "--json", "--quiet", "--", *agent]) == 0
    (case,) = json.loads(capfd.readouterr().out)["cases"]
    assert case["points"] == 0
    assert "without an answer" in case["problem"]
