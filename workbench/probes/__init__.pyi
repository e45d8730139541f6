from .failed_pass import first_bad_tensor as first_bad_tensor
from .gradient_comparison import compare_gradients as compare_gradients
from .gradient_projections import GradientProjections as GradientProjections
from .precision import broken_arithmetic as broken_arithmetic
from .precision import precision_errors as precision_errors
