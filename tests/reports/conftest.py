"""Reports of constructed trees; tests of texts replace the pictures, which take seconds to draw."""

from types import SimpleNamespace

import pytest

from tests.reports import made_trees
from workbench.reports import formats, pictures
from workbench.reports.make_report import document_of, report

PIXEL = b"<svg xmlns='http://www.w3.org/2000/svg'/>"


@pytest.fixture
def without_pictures(monkeypatch):
    def image(*_, pixels=False):
        return "image/png" if pixels else "image/svg+xml", PIXEL

    for module in (formats, pictures):
        monkeypatch.setattr(module, "image", image)


@pytest.fixture(params=["assessment", "diagnosis", "comparison"])
def written(request, tmp_path, without_pictures):
    """A tree of each kind, the content of its report, and its page."""
    tree = getattr(made_trees, request.param)()
    path = report(tree, tmp_path / f"{request.param}.html")
    return SimpleNamespace(tree=tree, document=document_of(tree), html=path.read_text(encoding="utf-8"))
