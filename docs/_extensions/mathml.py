"""Formulas as MathML, which browsers draw without a script and without a network."""

import re

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

_log = logging.getLogger(__name__)


def mathml(node, *, as_block):
    """Return a formula as MathML; one that cannot be converted is a warning and shows its source."""
    text = re.sub(r"\\([bB]igg?)(?![a-zA-Z])", r"\\\1l", node.astext())  # the converter knows only \bigl and \bigr
    try:
        return tex2mathml(text, as_block=as_block)
    except MathError as error:
        _log.warning("%s", error, location=node)
        return f"<code>{node.astext()}</code>"


def visit_math(self, node):
    """Write an inline formula."""
    self.body.append(mathml(node, as_block=False))
    raise nodes.SkipNode


def visit_math_block(self, node):
    """Write a formula on a line of its own, which can be scrolled if it is wider than the page."""
    self.body.append(f'<div class="math-block">{mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app):
    """Register the renderer of formulas."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.config.html_math_renderer = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
