"""Numerical effects of the hardware of a plan: reductions and number formats are emulated on a model.

Example:
    >>> import workbench as wb
    >>> plan = wb.hardware.read_plan({"hardware": {"data_parallel": 8, "gradient_dtype": "bfloat16"}})
    >>> plan.hardware.gradient_dtype, plan.n_shares
    ('bfloat16', 8)

See Also:
    `workbench.hardware.assess_hardware`: Measures the hazards of a plan.
    `workbench.assess`: Includes the hardware in an assessment.
"""

from workbench.hardware.hardware_assessment import assess_hardware
from workbench.hardware.plan import read_plan
from workbench.option_checks import publish

__all__ = ["assess_hardware", "read_plan"]

__dir__ = publish(__name__)
