"""Limits of the panels, beyond which a value is bad. A limit that has an alert equals it; a test compares them."""

from penstock.consumers.stream.commit_schedule import MEMORY_HIGH
from penstock.schemas.config import TrainerConfig

NO_UPDATE_S = 600
BEYOND_BOUND = 0.1
"""Share of the sampled tokens past the lag bound."""
LOW_ESS = 0.3
CHI2_JUMP = 0.1
"""Below this a fourfold increase is no jump."""
CHI2_NOISE = 1.0
"""More noise than signal."""
KL_JUMP, KL_NOISE = 0.05, 0.35
"""In nats: ln(1 + χ²) / 2 of the two above, as for log-normal ratios."""
PAUSE_S = 2
DEAD = 0.01
"""Share of the groups settled."""
QUEUE_FULL = 0.95
EARLY_COMMIT = MEMORY_HIGH
"""Share of Redis' memory above which the trainer commits early."""
MEMORY_NEARLY_FULL = 0.85
DENSE = 0.3
"""Share of elements changed above which a delta is hardly smaller than the whole policy."""
HELD_UP_S = 1
COPIES_REBUILT = 3
"""Within `penstock:weight_copies_rebuilt:increase15m`."""
PAUSED = 0.3
"""Share of a producer's time above which weight updates are the bottleneck."""
WAITING = 0.2
"""Share of the trainer's time spent waiting above which it is held up."""
CHECKPOINT_S = 120
"""`penstock run` and the containers end a trainer that takes longer to stop, and its last checkpoint with it."""
GRADIENT_NORM = TrainerConfig().max_grad_norm
"""Larger ones are clipped, unless the run file says otherwise."""
