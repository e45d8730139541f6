"""The saved page of the timeline: offline, from a file, it zooms, hides runs, adds signals and shows details."""

import numpy as np
import pytest

import workbench as wb
from tests.browser.conftest import CHROMIUM, CHROMIUM_FLAGS
from tests.browser.driver import colored, pixels, wait
from tests.browser.text_boxes import assert_text_fits, complaints_of, drawn_texts, record_text
from tests.monitored_runs import watched_run
from workbench.plots.style import DEPTH_RAMP

pytestmark = pytest.mark.render
#: Not even this machine's own names resolve.
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"
BLUE, ORANGE = [31, 119, 212], [213, 94, 0]


@pytest.fixture(scope="module")
def chromium(playwright):
    browser = playwright.chromium.launch(executable_path=str(CHROMIUM), headless=True, args=[*CHROMIUM_FLAGS, OFFLINE])
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def runs():
    return {"calm": watched_run(400, seed=1), "training": watched_run(400, fault_at=100, diverges=True, seed=2)}


@pytest.fixture(scope="module")
def many():
    return {f"run {i}, with a name of its own": watched_run(400, fault_at=50 + 50 * i, seed=i) for i in range(6)}


def saved(folder, runs, **options):
    from workbench.widgets import Timeline

    timeline = Timeline(runs, **options)
    path = timeline.save(folder / "timeline.html")
    timeline.close()
    return path.as_uri()


def opened(chromium, address, *, width=1280, height=1000, scheme="light"):
    """Return the page, its requests and its errors."""
    page = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": height}).new_page()
    complaints = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: None if request.url == address else complaints.append(request.url))
    record_text(page)
    page.goto(address)
    page.locator(".workbench-timeline-panel canvas").first.wait_for()
    rest(page)
    return page, complaints


def rest(page):
    """Wait until the answer to the last request is painted."""
    page.wait_for_timeout(150)
    asked = "element => (element.dataset.asked ?? '0') === (element.dataset.answered ?? '0')"
    wait(lambda: page.locator(".workbench-timeline").evaluate(asked), "an answer")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def panel(page, title):
    return page.get_by_role("img", name=f"{title} over steps")


def view(page):
    return [float(end) for end in page.locator(".workbench-timeline").get_attribute("data-view").split()]


def inked(locator, color):
    return int((np.abs(pixels(locator) - color).sum(-1) < 60).sum())


def choose_alarm(page):
    page.get_by_role("button", name="effective_rank D2 layer 1, head 2").first.click()
    rest(page)


def test_a_click_on_the_mark_of_a_probe_shows_what_it_found(chromium, tmp_path):
    page, complaints = opened(chromium, saved(tmp_path, {"failed": wb.samples.failed_run("precision")}))
    assert "Recorded without alarms" in page.locator(".workbench-timeline-alarms").inner_text()
    lane = page.get_by_role("img", name="Events:")
    red = np.argwhere(np.abs(pixels(lane) - [224, 0, 75]).sum(-1) < 40)
    assert len(red) > 10
    y, x = red.mean(0)
    lane.click(position={"x": x, "y": y})
    rest(page)
    assert "the attention kernel is wrong" in page.get_by_role("region", name="details and alarms").inner_text()
    assert not complaints


def test_a_saved_page_works_offline(chromium, runs, tmp_path):
    page, complaints = opened(chromium, saved(tmp_path, runs, signals=["loss", "effective_rank D2"]))
    loss = panel(page, "loss (nat)")
    assert min(inked(loss, color) for color in (BLUE, ORANGE)) > 60
    # Zoom by wheel after a click, by dragging, and by keys; the value axis follows the view.
    box = loss.bounding_box()
    page.mouse.click(box["x"] + 300, box["y"] + 20)
    for _ in range(2):
        page.mouse.wheel(0, -300)
        rest(page)
    first = view(page)
    assert 100 < first[1] - first[0] < 300
    page.mouse.move(box["x"] + 200, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 30, steps=4)
    page.mouse.up()
    rest(page)
    second = view(page)
    assert first[0] < second[0] < second[1] < first[1]
    page.keyboard.press("-")
    rest(page)
    assert view(page)[1] - view(page)[0] > second[1] - second[0]
    # The cursor shows the values of the lines, also when the view changes.
    page.mouse.move(box["x"] + 300, box["y"] + 20)
    flag = page.locator(".workbench-timeline-cursor span")
    before = flag.inner_text()
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    rest(page)
    (start, stop), inset = view(page), (58, 14)
    share = (300 - inset[0]) / (box["width"] - sum(inset))
    now = int(flag.inner_text().removeprefix("step "))
    assert now == pytest.approx(start + share * (stop - start), abs=1)
    assert flag.inner_text() != before
    page.keyboard.press("0")
    rest(page)
    assert view(page) == [-6, 406]

    page.get_by_role("button", name="training").first.click()
    rest(page)
    assert (inked(loss, ORANGE), inked(loss, BLUE) > 60) == (0, True)
    page.get_by_role("button", name="training hidden").click()
    page.locator("summary").click()
    page.get_by_label("routing entropy", exact=True).check()
    page.keyboard.press("Escape")
    rest(page)
    entropy = panel(page, "routing entropy, min over layers (nat)")
    assert min(inked(entropy, color) for color in (BLUE, ORANGE)) > 60
    assert page.get_by_text("over layers and heads: worst").is_visible()

    choose_alarm(page)
    heat = page.get_by_role("img", name="effective_rank D2 of training by layer and head: lowest: 1.")
    assert heat.get_attribute("aria-label").endswith("at layer 1, head 2")
    modes = page.get_by_role("img", name="Eigenvalues of training: step 100")
    assert colored(modes) > 8
    # The alarm's layer is highlighted; another one by the list, by a click on its cell, or on a mode.
    layers = page.get_by_label("layer to highlight")
    assert layers.input_value() == "1"
    pale = colored(modes)
    layers.select_option("all layers")
    rest(page)
    assert colored(modes) > 2 * pale
    heat.click(position={"x": 70, "y": 72})  # the last row
    assert layers.input_value() == "2"
    layers.select_option("all layers")
    rest(page)
    ramp = [int(DEPTH_RAMP[0][i : i + 2], 16) for i in (1, 3, 5)]  # color of the first layer
    y, x = np.argwhere(np.abs(pixels(modes) - ramp).sum(-1) < 60)[0]
    modes.click(position={"x": int(x), "y": int(y)})
    assert layers.input_value() == "0"
    page.keyboard.press("Escape")

    # The stored step nearest to the clicked one is named.
    box = loss.bounding_box()
    page.mouse.click(box["x"] + 0.8 * box["width"], box["y"] + 30)
    rest(page)
    details = page.get_by_role("region", name="details and alarms")
    assert "step 300" in details.inner_text()
    assert "nearest step in this file to step 3" in details.inner_text()
    assert complaints == []
    page.context.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("theme", ["page", "projector"])
def test_a_saved_page_is_accessible(chromium, runs, tmp_path, scheme, theme, artifacts):
    from axe_playwright_python.sync_playwright import Axe

    page, complaints = opened(chromium, saved(tmp_path, runs, theme=theme, healthy=50), scheme=scheme)
    choose_alarm(page)
    page.get_by_role("button", name="calm").first.click()
    page.locator("summary").click()
    page.wait_for_timeout(300)
    page.screenshot(path=artifacts / f"timeline-page-{theme}-{scheme}.png")
    for _ in range(2):  # with the list of signals open, and closed
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        page.locator("summary").click()
    assert len(found.response["passes"]) > 15
    assert complaints == []
    page.context.close()


@pytest.mark.slow
def test_every_control_is_reached_by_keys_and_what_is_shown_is_said(chromium, runs, tmp_path):
    page, _ = opened(chromium, saved(tmp_path, runs, signals=["loss"]))
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        element = page.evaluate_handle("document.activeElement").as_element()
        words = element.evaluate("(one) => one.getAttribute('aria-label') ?? one.textContent")
        if words in reached:
            break
        reached.append(words)
        if words.startswith("Timeline.") and len(reached) < 8:
            assert element.evaluate("(one) => getComputedStyle(one).outlineStyle") == "solid"
            page.keyboard.press("n")  # the first alarm
            rest(page)
            page.keyboard.press("Shift+ArrowRight")
    for name in (
        "calmup to step",
        "signals: 1 of",
        "Timeline.",
        "Remove loss",
        "details and alarms",
        "close the details",
    ):
        assert any(words.replace("calm ", "calm").startswith(name) for words in reached), (name, reached)
    assert page.get_by_role("status").inner_text().startswith("step 20")
    assert "loss (nat) calm " in page.get_by_role("status").inner_text()
    assert page.get_by_role("button", name="arithmetic").get_attribute("aria-pressed") == "true"
    page.context.close()


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["page", "projector"])
def test_no_text_overlaps_or_is_cut(chromium, many, tmp_path, theme, artifacts):
    signals = ["loss", "grad_norm", "effective_rank D2", "routing_entropy", "update_ratio", "attention_logit_max"]
    address = saved(tmp_path, many, theme=theme, signals=[*signals, "accuracy", "expert_load"], healthy=50)
    for width in (1100, 1600, 2560):
        page, complaints = opened(chromium, address, width=width, height=3000)
        sizes = page.locator(".workbench-timeline").evaluate(
            "(one) => [one.offsetWidth, getComputedStyle(one).fontSize]"
        )
        assert sizes == [width - 40, {"page": "13px", "projector": "19.5px"}[theme]]  # as wide as the page
        assert_text_fits(page, at_least=40)
        choose_alarm(page)
        assert_text_fits(page, at_least=100)
        page.screenshot(path=artifacts / f"timeline-page-{theme}-{width}.png")
        page.locator(".workbench-timeline-stack").focus()
        for key in ("+", "+", "+", "+", "ArrowRight", "+", "+"):
            page.keyboard.press(key)
            rest(page)
            assert_text_fits(page, at_least=100)
        assert complaints == []
        page.context.close()


def test_the_record_of_text_finds_what_overlaps_and_what_is_cut(chromium):
    page = chromium.new_page()
    record_text(page)
    page.goto("about:blank")
    page.set_content('<canvas width="200" height="100" aria-label="plot"></canvas>')

    def drawn(script):
        page.evaluate(
            "(script) => { const canvas = document.querySelector('canvas'), c = canvas.getContext('2d'); c.reset();"
            "c.clearRect(0, 0, 200, 100); c.font = '20px sans-serif'; new Function('c', script)(c); }",
            script,
        )
        return [sentence for canvas in drawn_texts(page) for sentence in complaints_of(canvas)]

    assert drawn("c.fillText('one', 20, 30); c.fillText('two', 20, 60)") == []
    assert drawn("c.strokeText('one', 20, 30); c.fillText('one', 20, 30)") == []  # an outline
    assert drawn("c.fillText('one', 20, 30); c.fillText('two', 30, 36)") == ["plot: 'one' and 'two' overlap"]
    (cut,) = drawn("c.translate(190, 0); c.fillText('one', 0, 30)")
    assert cut.startswith("plot: 'one' reaches 2")
    assert cut.endswith("beyond the canvas")
    (turned,) = drawn("c.translate(10, 20); c.rotate(-Math.PI / 2); c.fillText('one', 0, 0)")
    assert "beyond the canvas" in turned
    clip = "c.save(); c.beginPath(); c.rect(0, 0, 40, 100); c.clip(); c.fillText('one', 20, 30);"
    (framed,) = drawn(clip)
    assert framed.endswith("beyond its frame")
    assert drawn(f"{clip} c.restore(); c.clearRect(0, 0, 200, 100); c.fillText('two', 30, 60)") == []
    copied = "const below = document.createElement('canvas'); below.getContext('2d').fillText('one', 4, 30);"
    assert len(drawn(f"{copied} c.drawImage(below, 0, 0); c.fillText('two', 6, 30)")) == 1
    page.close()
