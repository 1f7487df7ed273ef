"""Sums the counts of rollouts over environments."""

from penstock.schemas.attrition import Attrition


def totals(attrition: Attrition) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns the number of rollouts and of their tokens, by outcome and length."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for _, outcome, length, counts in attrition.counts():
        num, num_tokens = found.setdefault(outcome, {}).get(length, (0, 0))
        found[outcome][length] = num + counts.num, num_tokens + counts.num_tokens
    return found
