"""Which numbers a page of the documentation contains, and whether each is one that a test has recomputed."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Numbers in any page that are no measurements: names of models, versions, papers, formats.
NAMES = ("Python 3.11", "Apache-2.0", "SmolLM2-135M", "float16", "float32", "float64", "bfloat16", "int8",
         "GLM-4", "DeepSeek-V3", "OLMo 2", "GPT-2", "LFM2", "D2", "D3")  # fmt: skip
#: What a reader does not see as a number in the text: code, link targets, images, anchors, directives, arXiv numbers.
_HIDDEN = re.compile(
    r"```.*?```|~~~.*?~~~|:::.*?\n|!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)|`[^`]*`|arXiv:[\d.]+"
    r"|notebooks?\s\d\d(?:(?:,| and) \d\d)*|<!--.*?-->",
    re.DOTALL,
)


def text_of(page):
    """The text of a page with single spaces."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def visible(page):
    """The text of a page without code, link targets and the like."""
    return " ".join(_HIDDEN.sub(" ", (ROOT / page).read_text(encoding="utf-8")).split())


def check_page(page, claims, *, settings=()):
    """Assert that a page makes every claim, and has no number outside of claims, settings and names.

    Args:
        page: Path below the top of the repository.
        claims: Pieces of the page's text with the numbers that a test recomputed.
        settings: Pieces of text whose numbers were chosen and not measured, such as "200 updates".
    """
    text, left = text_of(page), visible(page)
    missing = [claim for claim in (*claims, *settings) if claim not in text and claim not in left]
    assert not missing, missing
    for known in sorted((*claims, *settings, *NAMES), key=len, reverse=True):
        left = left.replace(known, " ")
    numbers = re.findall(r"\S*\d\S*", left)
    assert not numbers, numbers


def page_module(page):
    """The module beside a page of results, whose functions make its tables."""
    spec = importlib.util.spec_from_file_location(f"page_{Path(page).stem}", (ROOT / page).with_suffix(".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
