"""Schema of the data that the workbench writes: dimensions, coordinates, variables and units.

Example:
    >>> import workbench as wb
    >>> wb.schema.MONITORS["grad_norm"].meaning
    'norm of all gradients together, before clipping'
    >>> sorted(wb.schema.PARTS)[:3]
    ['activations', 'attention', 'curvature']

See Also:
    `workbench.open_run`: Opens a run that follows the schema.
    `workbench.schema.Variable`: Describes one variable.
"""

from workbench.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
