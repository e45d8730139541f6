"""All visible views as one page, and as one picture."""

from __future__ import annotations

import html
import io
from typing import TYPE_CHECKING

from PIL import Image

from workbench.errors import WorkbenchError
from workbench.plots.figure_files import small_png
from workbench.widgets.text_picture import text_picture

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workbench.widgets.base import WorkbenchWidget

#: Each view is a page of its own in a frame, so that their scripts and styles do not affect each other.
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 12px 16px; }}
h1 {{ font-size: 1.3em; margin: 0 0 .5em; }}
h2 {{ font-size: 1.1em; margin: .8em 0 .3em; }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(620px, 100%), 1fr)); gap: 12px; }}
section {{ min-width: 0; }}
iframe {{ width: 100%; height: 640px; border: 1px solid #8888; border-radius: 4px; background: Canvas; }}
pre {{ overflow: auto; padding: 8px 10px; border: 1px solid #8888; border-radius: 4px; }}
</style></head>
<body><h1>{title}</h1><main>{views}</main><h2>The same in Python</h2><pre tabindex="0">{code}</pre>
<script>
for (const frame of document.querySelectorAll("iframe")) {{
  const fit = () => {{
    const {{ scrollHeight }} = frame.contentDocument.documentElement;
    if (scrollHeight > frame.clientHeight) frame.style.height = `${{Math.min(scrollHeight + 4, 1600)}}px`;
  }};
  frame.addEventListener("load", () => {{ fit(); setTimeout(fit, 1500); }});
}}
</script></body></html>
"""


def page_of(title: str, views: Mapping[str, WorkbenchWidget], code: str) -> str:
    """Return one HTML page of several widgets, each interactive, and the code that makes them."""
    parts = []
    for name, widget in views.items():
        try:
            content = widget.page()
        except WorkbenchError as error:  # nothing to save yet
            content = f"<p>{html.escape(str(error))}</p>"
        parts.append(
            f'<section><h2>{html.escape(name)}</h2><iframe title="{html.escape(name)}" '
            f'srcdoc="{html.escape(content, quote=True)}"></iframe></section>'
        )
    return _PAGE.format(title=html.escape(title), views="".join(parts), code=html.escape(code))


def picture_with(title: str, lines: list[str], views: Mapping[str, WorkbenchWidget]) -> bytes:
    """Return a PNG of a title, lines of text, and the pictures of several widgets from top to bottom."""
    pictures = []
    for name, widget in views.items():
        try:
            pictures.append(Image.open(io.BytesIO(widget.picture())).convert("RGB"))
        except WorkbenchError as error:  # there is no figure yet
            lines = [*lines, f"{name}: {error}"]
    head = Image.open(io.BytesIO(text_picture(title, lines))).convert("RGB")
    scaled = [_narrowed(picture, head.width) for picture in pictures]
    whole = Image.new("RGB", (head.width, head.height + sum(picture.height for picture in scaled)), "white")
    place = 0
    for picture in (head, *scaled):
        whole.paste(picture, (0, place))
        place += picture.height
    return small_png(whole)


def _narrowed(picture: Image.Image, width: int) -> Image.Image:
    if picture.width <= width:
        return picture
    return picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)
