"""Reports of made trees. Pictures cost seconds, so that tests of texts do without."""

from types import SimpleNamespace

import pytest

from tests.reports import made_trees
from workbench.reports import html, notebook, pictures
from workbench.reports.make_report import document_of, report

PIXEL = b"<svg xmlns='http://www.w3.org/2000/svg'/>"


@pytest.fixture
def without_pictures(monkeypatch):
    for room in (html, pictures):
        monkeypatch.setattr(room, "image", lambda *_, **__: ("image/svg+xml", PIXEL))
    monkeypatch.setattr(notebook, "image", lambda *_, **__: ("image/png", PIXEL))


@pytest.fixture(params=["assessment", "diagnosis", "comparison"])
def written(request, tmp_path, without_pictures):
    """A tree of each kind, what is said of it, and its page."""
    tree = getattr(made_trees, request.param)()
    path = report(tree, tmp_path / f"{request.param}.html")
    return SimpleNamespace(tree=tree, document=document_of(tree), html=path.read_text(encoding="utf-8"))
