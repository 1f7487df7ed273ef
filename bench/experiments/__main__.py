"""`python -m bench.experiments study|ablation|ablation-prefix|ABLATION.toml`."""

import os
import sys

# Before torch is imported: equal thread counts make equal sums, in the warm start of a model too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.experiments.command import main

sys.exit(main())
