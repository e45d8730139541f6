"""The documentation builds without a warning or network, and describes what exists."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import workbench as wb
from tests.test_docstrings import public

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(wb.__file__).parent

pytestmark = [pytest.mark.subprocess, pytest.mark.medium]


def build(top, *options):
    """Build the site from a copy of the sources, so that no file of the checkout changes; return its folder."""
    ignored = shutil.ignore_patterns("_build", "reference", "tutorials", "files.md", "contributing.md", "data.md")
    shutil.copytree(ROOT / "docs", top / "docs", ignore=ignored)
    for name in ("workbench", "widgets", "notebooks", "data", "pyproject.toml", "CONTRIBUTING.md"):
        (top / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", *options, "docs", "site"]
    built = subprocess.run(command, cwd=top, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return top / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages, without the pictures of the gallery and the source code."""
    return build(tmp_path_factory.mktemp("docs"), "-t", "quick")


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site):
    pages = {path.stem: path.read_text() for path in (site / "reference" / "api").glob("*.html")}
    lacking = [
        name for name in public()
        if f'id="{full_name(name)}"' not in pages[page_of(name, pages)]
        and f'id="module-{full_name(name)}"' not in pages[page_of(name, pages)]
    ]  # fmt: skip
    assert lacking == ["wb.errors.WorkbenchError"]  # documented with the package


def full_name(name):
    return re.sub("^wb", "workbench", name).replace("widgets.", "workbench.widgets.")


def page_of(name, pages):
    full = full_name(name)
    return full if full in pages else full.rpartition(".")[0]


@pytest.mark.slow
def test_every_file_of_the_library_is_listed_with_what_it_is_for(site):
    text = (site / "files.html").read_text()
    listed = dict(re.findall(r"<span class=\"pre\">([\w/]+\.py)</span></code></p></td>\s*<td><p>(.*?)</p>", text))
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if "data" not in path.parts}
    files |= {f"widgets/{path.relative_to(ROOT / 'widgets').as_posix()}" for path in (ROOT / "widgets").rglob("*.py")}
    files -= {path for path in files if path.startswith("data/")} | {"__init__.py", "__main__.py"}
    assert listed.keys() == files
    assert not [path for path, summary in listed.items() if len(summary) < 10]


@pytest.mark.slow
def test_the_architecture_lists_every_layer(site):
    text = (site / "architecture.html").read_text()
    for folder in PACKAGE.iterdir():
        if (folder / "__init__.py").exists() and folder.name != "data":
            assert f'<span class="pre">{folder.name}</span></code></p></td>' in text, folder.name


@pytest.mark.slow
def test_a_page_needs_no_network(site):
    for page in site.rglob("*.html"):
        assert not re.findall(r"""(?:src|<link[^>]*href)=["']https?://""", page.read_text()), page.name


@pytest.mark.slow
def test_no_link_within_the_documentation_is_dead(site):
    for page in site.rglob("*.html"):
        for link in re.findall(r'<a [^>]*href="([^"#:]+)(?:#[^"]*)?"', page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.slow
def test_every_figure_and_widget_has_an_example(site):
    from workbench import widgets

    shown = {name for name in wb.plots.__all__ if name != "save"} | set(dir(widgets))
    pages = {path.stem: path.read_text() for path in (site / "gallery").glob("*/*.html")}
    assert pages.keys() == shown
    for name, page in pages.items():
        assert re.search(rf'href="[^"]*#workbench\.(plots|widgets)\.{name}"', page), name
        assert f'<span class="n">{name}</span>' in page, name


@pytest.mark.slow
def test_every_notebook_has_a_page_with_its_pictures(site):
    import nbformat

    for path in (ROOT / "notebooks").rglob("*.ipynb"):
        if ".ipynb_checkpoints" in path.parts:
            continue
        page = site / "tutorials" / path.relative_to(ROOT / "notebooks").with_suffix(".html")
        outputs = [output for cell in nbformat.read(path, 4).cells for output in cell.get("outputs", ())]
        n_pictures = sum("image/png" in output.get("data", {}) for output in outputs)
        sources = re.findall(r'<img alt="[^"]+" src="([^"]+)"', page.read_text())
        assert len(sources) == n_pictures, page.name
        assert all((page.parent / source).exists() for source in sources), page.name
