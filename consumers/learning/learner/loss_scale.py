"""The factor on the loss that keeps small gradients of a float16 body above the smallest float16 number.

Below 6e-5 float16 loses digits and below 6e-8 everything. With a mean over a batch's tokens, gradients of activations
are of the order of advantage / tokens, 1e-5 and less. So the loss is multiplied by a power of two and the masters'
float32 gradients are divided by it, exactly, before they are measured and clipped (Micikevicius et al., "Mixed
precision training", 2018, section 3.2; torch.amp.GradScaler).

Departure from torch: a step whose gradients overflow is not lost. Its gradients are computed again at half the scale,
from the same rows, until they are finite: rollouts cost more than a backward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

START = 2.0**16
LARGEST = 2.0**40
"""Above it the float32 sums of squares of scaled gradients would overflow before float16 does."""
GROW_AFTER = 50
"""Optimizer steps in a row without an overflow after which the scale doubles."""


class LossScale:
    """The current scale. With several ranks each has its own, and all are equal: what changes them is summed over the
    ranks. enabled: False keeps it at 1, as for bodies of other types."""

    def __init__(self, enabled: bool) -> None:
        self.value = START if enabled else 1.0
        self._enabled = enabled
        self._num_steps = 0
        """Steps in a row without an overflow."""

    def halve(self) -> None:
        """After an overflow. The caller stops at 1: gradients that overflow there do so by themselves."""
        self.value, self._num_steps = self.value / 2, 0

    def count_step(self) -> None:
        """After an optimizer step."""
        self._num_steps += 1
        if self._enabled and self._num_steps >= GROW_AFTER:
            self.value, self._num_steps = min(2 * self.value, LARGEST), 0

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within the context the scale is 1."""
        value, self.value = self.value, 1.0
        try:
            yield
        finally:
            self.value = value

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON types."""
        return {"value": self.value, "num_steps": self._num_steps}

    def load(self, state: dict[str, Any]) -> None:
        """Resumes from a `state`; a checkpoint of another `model.dtype` has none that counts."""
        if self._enabled:
            self.value, self._num_steps = state["value"], state["num_steps"]
