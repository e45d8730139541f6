"""Reports of constructed trees; tests of texts replace the pictures, which take seconds to draw."""

from types import SimpleNamespace

import pytest

from tests.reports import made_trees
from workbench.reports import html, notebook, pictures
from workbench.reports.make_report import document_of, report

PIXEL = b"<svg xmlns='http://www.w3.org/2000/svg'/>"


@pytest.fixture
def without_pictures(monkeypatch):
    for module in (html, pictures):
        monkeypatch.setattr(module, "image", lambda *_, **__: ("image/svg+xml", PIXEL))
    monkeypatch.setattr(notebook, "image", lambda *_, **__: ("image/png", PIXEL))


@pytest.fixture(params=["assessment", "diagnosis", "comparison"])
def written(request, tmp_path, without_pictures):
    """A tree of each kind, the content of its report, and its page."""
    tree = getattr(made_trees, request.param)()
    path = report(tree, tmp_path / f"{request.param}.html")
    return SimpleNamespace(tree=tree, document=document_of(tree), html=path.read_text(encoding="utf-8"))
