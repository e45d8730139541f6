"""The code of the how-to pages for users runs as written."""

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how_to"
#: Page -> whether its code takes more than five seconds.
RUN = {
    "watch_my_own_loop": True,
    "log_and_alert": True,
    "check_my_training": False,
    "read_the_log_of_another_tool": False,
    "profile_my_checkpoint": False,
    "find_a_rate": True,
    "sweep_on_a_cluster": True,
    "calibrate_alarms": True,
    "assess_in_ci": True,
    "use_the_command_line": True,
    "follow_from_far_away": False,
}


def blocks(name):
    """Python blocks of a page in order, except those after a comment ``not run``, which need a cluster or a trainer."""
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    text = re.sub(r"<!-- not run -->\s*```python.*?```", "", text, flags=re.DOTALL)
    found = re.findall(r"^( *)```python\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    return ["".join(line[len(indent) :] for line in code.splitlines(True)) for indent, code in found]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if slow else pytest.mark.medium)
                                  for name, slow in RUN.items()])  # fmt: skip
def test_the_code_of_a_page_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    names = {"__name__": f"how_to_{name}"}
    for code in blocks(name):
        exec(compile(code, f"{name}.md", "exec"), names)


def test_every_page_for_users_is_run():
    """A page that shows a call of the library is listed above, except those that extend the code of the library."""
    users = {path.stem for path in PAGES.glob("*.md") if not re.match("add_|write_|index", path.stem)}
    assert users == set(RUN)
    assert all(blocks(name) for name in RUN)
