"""Designs that can be built at any size, and narrow models with the gains of wide ones.

Example:
    >>> import workbench as wb
    >>> wb.design("gpt2").build(width=64, depth=2, vocabulary=100).config.hidden_size
    64

See Also:
    `workbench.design`: Creates a design.
    `workbench.assess`: Assesses a design.
"""

from workbench.option_checks import publish
from workbench.scaling.designs import Design, matched_width

__all__ = ["Design", "matched_width"]

__dir__ = publish(__name__)
