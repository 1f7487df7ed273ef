"""One part of a run on a core of its own: `python -m bench.pipeline.pinned CORE ARGUMENTS...` with the arguments of the
`penstock` command. Every process that the part starts stays on the same core. CORE -1 pins nothing.
"""

import os
import sys

if __name__ == "__main__":
    if (core := int(sys.argv[1])) >= 0:
        os.sched_setaffinity(0, {core})
    from penstock.deploy.cli import main

    sys.exit(main(sys.argv[2:]))
