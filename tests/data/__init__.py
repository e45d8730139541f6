"""Tests of what makes and judges the recorded studies; they import it from data/."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "data"))
