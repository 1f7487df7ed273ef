"""From where on a value is bad, for the panels. Where there is an alert it is the alert's number; a test compares."""

from penstock.consumers.stream.commit_schedule import MEMORY_HIGH
from penstock.schemas.config import TrainerConfig

NO_UPDATE_S = 600
BEYOND_BOUND = 0.1
"""Of the sampled tokens, past the lag bound."""
LOW_ESS = 0.3
CHI2_JUMP = 0.1
"""Below it four times as much is no jump."""
CHI2_NOISE = 1.0
"""More noise than signal."""
KL_JUMP, KL_NOISE = 0.05, 0.35
"""In nats: ln(1 + χ²) / 2 of the two above, which it is where ratios are log-normal."""
PAUSE_S = 2
DEAD = 0.01
"""Of the groups settled."""
QUEUE_FULL = 0.95
EARLY_COMMIT = MEMORY_HIGH
"""Of Redis' memory: from there on the trainer commits early."""
MEMORY_NEARLY_FULL = 0.85
PAUSED = 0.3
"""Of a producer's time: from there on weight updates are the bottleneck."""
WAITING = 0.2
"""Of the trainer's time: from there on it is held up."""
CHECKPOINT_S = 120
"""`penstock run` and the containers end a trainer that takes longer to stop, and its last checkpoint with it."""
GRADIENT_NORM = TrainerConfig().max_grad_norm
"""Larger ones are clipped, unless the run file says otherwise."""
