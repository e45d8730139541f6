import json
import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.about import about
from workbench.errors import OptionError, StoreError
from workbench.io.files import FileKind

KIND = FileKind("a plan", "pass another", most_bytes=4096)
SPOILED = {
    "missing": lambda path: None,
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a loop of links": lambda path: path.symlink_to(path),
    "too large": lambda path: path.write_bytes(b" " * 4097),
    "no text": lambda path: path.write_bytes(b'{"a": "\xff"}'),
    "empty": lambda path: path.write_bytes(b""),
    "no syntax": lambda path: path.write_text("{ = "),
    "deep": lambda path: path.write_text("[" * 4000),
}


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("read", [KIND.json, KIND.toml])
def test_a_file_that_is_none_is_rejected_in_one_sentence_without_waiting(tmp_path, how, read):
    SPOILED[how](tmp_path / "plan")
    if how == "empty" and read == KIND.toml:
        assert read(tmp_path / "plan") == {}
        return
    with pytest.raises(StoreError, check=about("path", tmp_path / "plan", "a plan")) as caught:
        read(tmp_path / "plan")
    assert str(caught.value).endswith("; pass another.")
    assert "\n" not in str(caught.value)


def test_a_file_that_this_user_may_not_read_is_rejected(tmp_path, monkeypatch):
    def forbidden(*_, **__):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "plan").write_text("{}")
    monkeypatch.setattr(type(tmp_path), "open", forbidden)
    with pytest.raises(StoreError, match="this user may not read it", check=about("path", tmp_path / "plan")):
        KIND.json(tmp_path / "plan")


@pytest.mark.parametrize("path", [None, 5, b"bytes", "a\0b", ["a"]])
def test_what_is_no_path_is_rejected(path):
    with pytest.raises(OptionError, check=about("path", expected="a path")):
        KIND.text(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda one: st.lists(one) | st.dictionaries(st.text(), one)
)


@given(content=VALUES)
@example(content=None)
@example(content=[])
@example(content={"\ud800\n\0": 1})
def test_only_an_object_is_read(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("read") / "a.json"
    path.write_text(json.dumps(content), encoding="utf-8-sig")
    kind = FileKind("a plan", "pass another")
    if isinstance(content, dict):
        assert kind.json(path) == content
        return
    with pytest.raises(StoreError, check=about("path", path)):
        kind.json(path)


@pytest.mark.parametrize("n_levels", [99, 101])
def test_the_depth_of_an_object_is_bounded(tmp_path, n_levels):
    dotted, nested = tmp_path / "a.toml", tmp_path / "a.json"
    dotted.write_text(".".join("a" * n_levels) + " = 1")
    nested.write_text('{"a":' * n_levels + "1" + "}" * n_levels)
    for read, path in ((KIND.toml, dotted), (KIND.json, nested)):
        if n_levels < 100:
            assert list(read(path)) == ["a"]
        else:
            with pytest.raises(StoreError, match="nested more than 100 levels deep"):
                read(path)
