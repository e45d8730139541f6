"""Program that runs the small sweep and is killed by a test: ``python interrupted_sweep.py STORE``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import workbench as wb
    from tests.sweeps.small_sweeps import small_grid

    wb.sweeps.run(small_grid(), sys.argv[1], n_workers=1, progress=False)
