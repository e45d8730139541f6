from .batch import BatchProbe as BatchProbe
from .precision import BrokenArithmetic as BrokenArithmetic
from .precision import broken_arithmetic as broken_arithmetic
from .precision import precision_errors as precision_errors
from .update import UpdateEffect as UpdateEffect
from .update import update_effect as update_effect
