"""Every page of the documentation, opened from the disk in a browser without a network."""

import os
import re
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.browser.conftest import CHROMIUM, CHROMIUM_FLAGS, OFFLINE
from tests.test_docs import build

pytestmark = [pytest.mark.browser, pytest.mark.slow]

#: Questions of a new user -> page that answers it, two clicks from the home page at most.
QUESTIONS = {
    "how do I watch my own loop": "how_to/watch_my_own_loop.html",
    "what is near-unit mass and when is it trustworthy": "explanation/spectra.html",
    "how do I add a monitor": "how_to/add_a_monitor.html",
    "which rate should I use": "how_to/find_a_rate.html",
    "why did my run fail": "explanation/diagnosis.html",
}
#: Of the pages of source code, which are alike, axe checks only every n-th.
SAMPLED = 8
#: Pages that axe checks with every element. On the others, what is alike in great number takes most of the time, and is
#: left out: the list of pages in the sidebar, the colors of code, and long tables and lists beyond their beginning.
WHOLE = ("index.html", "tutorials/00_start.html", "how_to/add_a_plot.html", "reference/api/workbench.tasks.html")
_THIN = """() => {
  document.querySelector(".sidebar-tree")?.replaceChildren();
  for (const code of document.querySelectorAll("pre")) code.textContent = code.textContent;
  const rest = "tr:nth-child(n+15), article > section > dl:nth-of-type(n+6), li:nth-child(n+15)";
  for (const one of document.querySelectorAll(rest)) one.remove();
}"""
_READ = """() => ({
  links: [...document.querySelectorAll("a[href]")].map((link) => link.href),
  ids: [...document.querySelectorAll("[id], a[name]")].map((one) => one.id || one.name),
  pictures: [...document.images].map((one) => [one.src, one.naturalWidth, one.alt]),
  opened: [...document.querySelectorAll("article details[open]")].length,
})"""
_TOO_WIDE = """() => document.documentElement.scrollWidth <= document.documentElement.clientWidth ? [] :
  [...document.querySelectorAll("article *")].filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
    .filter((one) => !one.parentElement.closest(".table-wrapper, pre, .math-block"))
    .map((one) => one.outerHTML.slice(0, 100)).slice(0, 3).concat("wider than the screen")"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, or one that was built before."""
    built = os.environ.get("WORKBENCH_SITE")
    return Path(built) if built else build(tmp_path_factory.mktemp("docs"))


@pytest.fixture(scope="module")
def screen(playwright):
    """A page of a browser without a network, and what it complains about or requests."""
    browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=[*CHROMIUM_FLAGS, OFFLINE])
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.complaints, page.requested = [], set()

    def hear(message):
        if getattr(message, "type", "error") == "error":
            page.complaints.append(f"{page.url}: {getattr(message, 'text', message)}")

    page.on("console", hear)
    page.on("pageerror", hear)
    page.on("request", lambda request: page.requested.add(request.url))
    yield page
    browser.close()


@pytest.fixture(scope="module")
def visits(site, screen):
    """What each page contains, by its path in the site."""
    from axe_playwright_python.sync_playwright import Axe

    axe, found = Axe(), {}
    pages = sorted(
        path.relative_to(site).as_posix()
        for path in site.rglob("*.html")
        if not {"_static", ".gallery"} & set(path.parts)
    )
    for number, name in enumerate(pages):
        screen.goto((site / name).as_uri(), wait_until="load")
        visit = screen.evaluate(_READ)
        screen.set_viewport_size({"width": 390, "height": 844})
        visit["too_wide"] = screen.evaluate(_TOO_WIDE)
        screen.set_viewport_size({"width": 1280, "height": 900})
        visit["violations"] = []
        if not name.startswith("_modules") or number % SAMPLED == 0:
            if name not in WHOLE:
                screen.evaluate(_THIN)
            visit["violations"] = violations(axe, screen)
            screen.evaluate("document.body.dataset.theme = 'dark'")
            visit["violations"] += violations(axe, screen, runOnly=["color-contrast"])
        found[name] = visit
    return found


def violations(axe, page, **options):
    """What axe finds on a page: rule, and the first elements."""
    options |= {"preload": False}  # preloading would fetch files
    found = axe.run(page, options=options).response["violations"]
    return [(rule["id"], len(rule["nodes"]), [node["html"][:150] for node in rule["nodes"][:3]]) for rule in found]


def test_every_link_within_the_site_leads_to_a_page_and_to_its_anchor(site, visits):
    dead = []
    for name, visit in visits.items():
        for link in visit["links"]:
            if not link.startswith("file:"):
                continue
            address, anchor = urldefrag(link)
            path = Path(unquote(address.removeprefix("file://")).partition("?")[0])
            target = path.relative_to(site).as_posix() if path.is_relative_to(site) else None
            lacks_anchor = anchor and target in visits and unquote(anchor) not in visits[target]["ids"]
            if target is None or not path.exists() or lacks_anchor:
                dead.append((name, link))
    assert not dead


def test_every_picture_is_loaded_and_described(visits):
    pictures = [(name, *picture) for name, visit in visits.items() for picture in visit["pictures"]]
    assert len(pictures) > 60
    assert [each for each in pictures if not (each[2] > 0 and each[3].strip())] == []


def test_every_notebook_shows_its_pictures(visits):
    tutorials = [name for name in visits if re.fullmatch(r"tutorials/\d\d_\w+\.html", name)]
    assert len(tutorials) >= 10
    assert [name for name in tutorials if not visits[name]["pictures"]] == []


def test_solutions_are_collapsed(visits):
    assert {name: visit["opened"] for name, visit in visits.items() if visit["opened"]} == {}


def test_no_page_violates_accessibility(visits):
    assert {name: visit["violations"] for name, visit in visits.items() if visit["violations"]} == {}


def test_no_page_is_wider_than_a_phone(visits):
    assert {name: visit["too_wide"] for name, visit in visits.items() if visit["too_wide"]} == {}


def test_no_page_complains_or_requests_anything_beyond_the_site(visits, screen):
    assert visits
    assert screen.complaints == []
    assert [url for url in screen.requested if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize(("question", "answer"), QUESTIONS.items())
def test_a_question_is_answered_within_two_clicks(visits, site, question, answer):
    def linked(name):
        prefix = f"{site.as_uri()}/"
        links = (urldefrag(link)[0] for link in visits[name]["links"])
        return {link.removeprefix(prefix) for link in links if link.startswith(prefix)}

    first = linked("index.html")
    assert answer in first or any(answer in linked(name) for name in first if name in visits)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("near-unit mass", "explanation/spectra.html"),
        ("watch", "how_to/watch_my_own_loop.html"),
        ("learning rate", "how_to/find_a_rate.html"),
        ("add a monitor", "how_to/add_a_monitor.html"),
    ],
)
def test_search_works_from_the_disk(site, screen, words, expected):
    screen.goto((site / "index.html").as_uri())
    box = screen.get_by_role("textbox", name="Search").first
    box.fill(words)
    box.press("Enter")
    results = screen.locator("#search-results ul.search li a")
    results.first.wait_for()
    screen.wait_for_timeout(500)
    assert any(expected in link for link in results.evaluate_all("links => links.slice(0, 5).map((link) => link.href)"))
    assert screen.complaints == []


def test_the_themes_can_be_switched(site, screen):
    screen.goto((site / "index.html").as_uri())
    grounds = set()
    for _ in range(3):
        screen.get_by_role("button", name="Toggle Light / Dark / Auto color theme").locator("visible=true").click()
        screen.wait_for_timeout(300)
        grounds.add(screen.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2


def test_code_can_be_copied(site, screen):
    screen.context.grant_permissions(["clipboard-read", "clipboard-write"])
    screen.goto((site / "reference/api/workbench.html").as_uri())
    block = screen.locator("div.highlight", has_text=">>> import workbench as wb").first
    block.hover()
    block.locator("button.copybtn").click()
    copied = screen.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("import workbench as wb\n")
    assert ">>>" not in copied
