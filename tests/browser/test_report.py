"""The report as a page: no network, no accessibility violation in either theme, links that lead to rows, paper."""

import pytest

from tests.browser.conftest import CHROMIUM, CHROMIUM_FLAGS
from tests.reports import made_trees
from workbench.reports.make_report import report

pytestmark = pytest.mark.slow

#: Not even this machine's own names resolve.
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"


@pytest.fixture(scope="module")
def chromium(playwright):
    browser = playwright.chromium.launch(executable_path=str(CHROMIUM), headless=True, args=[*CHROMIUM_FLAGS, OFFLINE])
    yield browser
    browser.close()


@pytest.fixture(scope="module", params=["assessment", "diagnosis", "comparison"])
def address(request, tmp_path_factory):
    path = report(getattr(made_trees, request.param)(), tmp_path_factory.mktemp("report") / f"{request.param}.html")
    return path.as_uri()


def opened(chromium, address, **options):
    """Return the page, its requests and its errors."""
    page = chromium.new_context(**options).new_page()
    complaints = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith(("file:", "data:")) else complaints.append(request.url),
    )
    page.goto(address)
    return page, complaints


def test_it_is_accessible_and_asks_for_nothing(chromium, address, artifacts):
    from axe_playwright_python.sync_playwright import Axe

    for scheme in ("light", "dark"):
        page, complaints = opened(chromium, address, color_scheme=scheme, viewport={"width": 1200, "height": 900})
        page.screenshot(path=artifacts / f"report-{scheme}.png", full_page=True)
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert len(found.response["passes"]) > 15
        assert complaints == []
        page.context.close()


def test_it_fits_a_phone_and_its_pictures_are_drawn(chromium, address):
    page, _ = opened(chromium, address, viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 100)")
    assert page.evaluate("getComputedStyle(document.querySelector('h1')).fontSize") != ""
    page.context.close()


def test_a_number_leads_to_its_row(chromium, address):
    page, _ = opened(chromium, address, viewport={"width": 1200, "height": 900})
    link = page.locator("#v1 a.n").first
    text = link.inner_text()
    link.click()
    row = page.locator("tr:has(:target)")
    assert row.locator(":target .v").inner_text() == text
    box = row.bounding_box()
    assert 0 <= box["y"] <= 900
    assert row.evaluate("(row) => getComputedStyle(row).backgroundColor") != "rgba(0, 0, 0, 0)"
    page.context.close()


def test_a_link_to_a_folded_row_opens_its_table(chromium, tmp_path):
    path = report(made_trees.with_weak_symptoms(60), tmp_path / "folded.html")
    page, _ = opened(chromium, path.as_uri(), viewport={"width": 1200, "height": 900})
    anchor = page.locator("details td[id]").last.get_attribute("id")
    assert not page.locator(f"[id='{anchor}']").is_visible()
    page.context.close()
    page, _ = opened(chromium, f"{path.as_uri()}#{anchor}", viewport={"width": 1200, "height": 900})
    page.locator("tr:has(:target)").wait_for(state="visible")
    assert 0 <= page.locator("tr:has(:target)").bounding_box()["y"] <= 900
    page.context.close()


def test_it_prints_without_clipping(chromium, address, tmp_path):
    page, _ = opened(chromium, address, viewport={"width": 680, "height": 960})  # about A4 without margins
    page.emulate_media(media="print")
    width = page.evaluate("document.documentElement.clientWidth")
    wide = page.evaluate(
        """(width) => [...document.querySelectorAll('table, img, p, li')]
             .filter((part) => part.offsetParent && part.getBoundingClientRect().right > width + 1)
             .map((part) => part.outerHTML.slice(0, 120))""",
        width,
    )
    assert wide == []
    numbers = page.evaluate("getComputedStyle(document.querySelector('#v1 a.n'), '::after').content")
    assert "[" in numbers  # a printed page has the number of the row in place of a link
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
    page.context.close()
