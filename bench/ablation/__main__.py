"""`python -m bench.ablation ABLATION.toml`."""

import sys

from bench.ablation.command import main

sys.exit(main())
