"""The counts of rollouts without their environments."""

from penstock.schemas.attrition import Attrition


def totals(attrition: Attrition) -> dict[str, dict[str, tuple[int, int]]]:
    """By outcome and length, rollouts and their tokens."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for _, outcome, length, counts in attrition.counts():
        num, num_tokens = found.setdefault(outcome, {}).get(length, (0, 0))
        found[outcome][length] = num + counts.num, num_tokens + counts.num_tokens
    return found
