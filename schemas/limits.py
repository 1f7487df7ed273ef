"""The limits beyond which a number is bad, each said here alone.

The table of metrics, the alerts and recording rules (`python -m penstock.deploy.prometheus` writes them), the
dashboards and the live view have them from here.
"""

LOW_ESS = 0.3
"""Tokens of a lag whose effective sample size is a smaller share of their number have all but stopped to count."""
CHI2_JUMP = 0.1
"""Below this a fourfold increase of the median is no jump."""
CHI2_NOISE = 1.0
"""Above this there is more noise than signal."""
KL_JUMP = 0.05
"""In nats: ln(1 + χ²) / 2 of the jump of χ², as for log-normal ratios."""
KL_NOISE = 0.35
"""In nats: the same of χ²'s noise."""
BEYOND_BOUND = 0.1
"""Share of the sampled tokens that are masked for their lag."""
WAITING = 0.2
"""A trainer that waits for this share of its time is held up."""
PAUSED = 0.3
"""Producers that are paused for this share of their time are held up by weight updates."""
QUEUE_FILLED = 0.8
"""A queue filled to this share of the credit keeps producers waiting."""
QUEUE_FULL = 0.95
"""A queue filled to this share of the credit is at its bound."""
NO_UPDATE_S = 600
"""The trainer has consumed no batch for so long."""
DEAD = 0.01
"""Share of the groups settled that are dead."""
PAUSE_S = 2
"""The longest of a hundred pauses of a producer."""
COPIES_REBUILT = 3
"""Copies of the weights that a producer's host has rebuilt in 15 minutes."""
DENSE = 0.3
"""Share of elements changed above which a delta is hardly smaller than the whole policy."""
HELD_UP_S = 1
"""Time for which publications hold up the training."""
WEIGHTS_FILL = 0.9
"""Share of `weights.redis_mb` that chunks of weights take."""
MEMORY_NEARLY_FULL = 0.85
"""Share of Redis' memory that is used."""
CHECKPOINT_S = 120
"""`penstock run` and the containers end a trainer that takes longer to stop, and its last checkpoint with it."""
