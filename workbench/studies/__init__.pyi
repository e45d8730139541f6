from . import comparison as comparison
from . import early_warning as early_warning
from . import outcomes as outcomes
from . import published as published
from . import samples as samples
from . import signals as signals
