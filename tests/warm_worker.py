"""Be a worker of pytest-xdist that is forked from the server of warm.py.

xdist starts `warm_worker.py -u -c CODE` where it would start Python.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # which it is in the forked process no more
    sys.path[0] = str(Path(__file__).parent.parent)
    from tests import warm

    sys.exit(warm.run_worker(sys.argv[-1]))
