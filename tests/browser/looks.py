"""Checks of a widget's appearance: accessibility in both themes, and text that is cut off."""

from tests.browser.driver import wait

#: Elements with text inside that hide a part of it; figures scroll in boxes of their own.
_CLIPPED = """element => [...element.querySelectorAll("*")]
  .filter((one) => one.checkVisibility() && one.clientWidth > 1 && one.clientHeight > 1)
  .filter((one) => !one.closest(".bk-Figure, svg"))
  .filter((one) => {
    const style = getComputedStyle(one);
    return (style.overflowX === "hidden" && one.scrollWidth > one.clientWidth + 1)
      || (style.overflowY === "hidden" && one.scrollHeight > one.clientHeight + 1)
      || (one.matches("input[type=text], input[type=number]") && one.scrollWidth > one.clientWidth + 1);
  })
  .map((one) => [one.outerHTML.slice(0, 120), one.scrollWidth, one.clientWidth, one.scrollHeight, one.clientHeight])"""
_FITS = "element => element.scrollWidth <= element.clientWidth + 1"


def check_widths(page, widget, *, widths=(1100, 1600, 2560), height=1300):
    """Assert that at each page width nothing is cut off, and the widget is as wide as its cell."""
    for width in widths:
        page.set_viewport_size({"width": width, "height": height})
        wait(lambda: widget.evaluate(_FITS), f"a widget that fits a page of {width} px")
        page.wait_for_timeout(500)
        clipped = widget.evaluate(_CLIPPED)
        assert not clipped, f"at {width} px: {clipped}"
        cell = widget.locator("xpath=ancestor::*[contains(@class, 'jp-OutputArea-output')]").last
        assert widget.bounding_box()["width"] > cell.bounding_box()["width"] - 30


def check_accessible(page, selector):
    """Assert that axe finds no violation in a part of a page, in the light and in the dark theme."""
    from axe_playwright_python.sync_playwright import Axe

    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        page.evaluate("(name) => jupyterapp.commands.execute('apputils:change-theme', {theme: name})", theme)
        is_light = str(theme.endswith("Light")).lower()
        page.wait_for_selector(f"body[data-jp-theme-light={is_light}]", state="attached")
        page.wait_for_timeout(500)
        found = Axe().run(page, context=selector)
        assert found.violations_count == 0, found.generate_report()
        assert len(found.response["passes"]) > 5
