"""The course: exercises that are checked, and practice cases of failed runs with a hidden cause.

The lessons are the notebooks in ``notebooks/course``.

Example:
    >>> import workbench as wb
    >>> wb.course.check("1.2", 0.8**10).message.split(".")[0]  # a common mistake in lesson 1
    'You used the real part alone'

See Also:
    `workbench.diagnose`: Finds the causes of failed runs.
"""

from workbench.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
