from . import alarms as alarms
from . import baselines as baselines
from . import faults as faults
from . import kss as kss
from . import recorder as recorder
