"""Final answers compared as people read them, as far as that can be done without algebra: quantities and their units,
ratios, times of day, numbers of another base, words."""

import re
from collections import Counter
from fractions import Fraction

from penstock.producers.environments.quantities import (
    MATHEMATICS,
    MOST_WORDS,
    Quantity,
    decimal,
    equal,
    leading_number,
    plain,
    quantities,
)

MOST_COMPARED = 2000
"""Characters of a guess: the time that comparing takes goes with their square, and a producer's loop waits for it."""
_VARIABLE = re.compile(r"^\s*\\?[A-Za-z]\w{0,9}\s*(?:=|\\approx\b|\u2248)")
_RELATION = re.compile(r"\s*(?:\\(?:[lg](?:eq?|t)|neq?)(?:slant)?(?![A-Za-z])|[<>\u2264\u2265\u2260])")
_UNITS_OF_A_LETTER = frozenset("ACFJKLNTVWghms\u03a9")
_SYMBOL = re.compile(r"([A-Za-z\u00b5\u03bc\u03a9]+)(?:\^(-?\d))?")
_BETWEEN_SYMBOLS = re.compile(r"(?:[\s*()/\u00b7]|\\cdot\b|\\times\b)+")
_CONTINENTAL = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:\.\d{3})+,\d+|(?:\.\d{3}){2,})(?![\d.,])")
"""Matches `1.000,5`, which may also be a list, and `1.000.000`."""
_PARTS = re.compile(
    r"(?P<numbers>\d[\d.]*(?:\s*(?::|\u27e8?\bto\b\u27e9?)\s*\d[\d.]*)*)\s*(?:\u27e8\s*)?(?P<half>[ap]m)?\s*\u27e9?"
)
"""Matches a ratio or a time of day."""
_CLOCK = re.compile(r"\d{1,2}(?::\d\d)+")
_OF_A_BASE = re.compile(r"[0-9A-Za-z]+_\d+")
_WORDS = re.compile(r"[^\W\d_](?:[^\W\d_]|[' -])*")


def same_answer(gold: str, guess: str) -> bool | None:
    """Returns whether two answers are the same; None if that takes algebra, or a guess is too long to be compared."""
    if len(guess) > MOST_COMPARED:
        return None
    # `x = 5` is an answer to a question of 5, not of `x = 5`.
    value = _VARIABLE.sub("", guess)
    if bare(guess) == bare(gold) or _of_one_unit(gold, value):
        return True
    if _RELATION.match(guess) and not _RELATION.match(gold):
        return False
    one, other = (_OF_A_BASE.fullmatch(re.sub(r"[{}()]", "", bare(text))) for text in (gold, guess))
    if one and other:
        return one[0] == other[0]
    if (decided := _same_parts(gold, value)) is not None:
        return decided
    if any(_CONTINENTAL.search(text) for text in (gold, value)):
        one_number, other_number = (quantities(_CONTINENTAL.sub(_with_a_point, text)) for text in (gold, value))
        if one_number and other_number and same_quantities(one_number, other_number):
            return True
    written, answered = quantities(gold), quantities(guess) or quantities(value)
    if written and answered:
        return same_quantities(written, answered)
    return words(gold) == words(guess) if words(gold) and words(guess) else None


def same_quantities(gold: tuple[Quantity, ...], guess: tuple[Quantity, ...]) -> bool | None:
    """Returns whether two answers have the same numbers, whatever units are written behind them; None if a percentage
    leaves that open."""
    if len(gold) != len(guess):
        return False
    if all(equal(one.value, other.value) for one, other in zip(gold, guess, strict=True)):
        return True
    return None if len(gold) == 1 and (gold[0].is_percent or guess[0].is_percent) else False


def bare(text: str) -> str:
    """Returns a text without the marks that change nothing, and with spaces between digits alone: `5m` of
    `5\\text{ m}`."""
    return re.sub(r"[\u27e8\u27e9]|(?<!\d)\s+|\s+(?!\d)", "", plain(text))


def words(text: str) -> str:
    """Returns an answer that consists of words alone in lower case; empty if it is anything else, or letters only."""
    joined = " ".join(plain(text).replace("\u27e8", " ").replace("\u27e9", " ").split())
    is_words = _WORDS.fullmatch(joined) and any(len(word) > 3 for word in joined.split())
    return joined.lower() if is_words else ""


def _of_one_unit(gold: str, guess: str) -> bool:
    """Returns whether two answers are one number, at least one of them with symbols behind it, `5e-05 m`, `9.8 m/s^2`,
    that are the other's too, or a unit where the other is the number alone. Letters may be variables: `5 x` is not 5,
    and `5 m^2` is not `5 m^3`."""
    one, other = leading_number(plain(gold)), leading_number(plain(guess))
    if one is None or other is None or not equal(one[0], other[0]):
        return False
    unit, other_unit = _powers(one[1]), _powers(other[1])
    if unit is None or other_unit is None:
        return False
    if unit == other_unit:
        return True
    are_units = all(
        re.match(r"[\s\\]", rest) and all(len(symbol) > 1 or symbol in _UNITS_OF_A_LETTER for symbol in symbols)
        for symbols, rest in ((unit, one[1]), (other_unit, other[1]))
        if symbols
    )
    is_spelled = any(len(symbol) > 1 for symbol in unit | other_unit)
    return are_units and (is_spelled or not (unit and other_unit))


def _powers(unit: str) -> Counter[str] | None:
    """Returns the powers of the symbols of a unit, `m`: 1 and `s`: -2 of `m/s^2`; None if the text is anything else."""
    unit = unit.replace(r"\Omega", "\u03a9").replace(r"\mu ", "\u00b5")
    unit = re.sub(r"\^\s*\{\s*(-?\d)\s*\}", r"^\1", unit.replace("\u27e8", " ").replace("\u27e9", ""))
    above, _, below = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1/\2", unit).partition("/")
    powers: Counter[str] = Counter()
    for part, sign in ((above, 1), (below, -1)):
        for each in filter(None, _BETWEEN_SYMBOLS.split(part)):
            symbol = _SYMBOL.fullmatch(each)
            if symbol is None or symbol[1].lower() in MATHEMATICS:
                return None
            powers[symbol[1]] += sign * int(symbol[2] or 1)
    return powers if len(powers) <= MOST_WORDS else None


def _same_parts(gold: str, guess: str) -> bool | None:
    """Returns whether two ratios, or two times of day, are the same; None if one of them is neither."""
    found = [_PARTS.fullmatch(plain(text)) for text in (gold, guess)]
    if not all(each and (each["half"] or ":" in each["numbers"] or "to" in each["numbers"]) for each in found):
        return None
    try:
        (one, half), (other, other_half) = (_numbers(each) for each in found if each)
    except ValueError:
        return None
    if half != other_half:  # 15:30 is 3:30 pm, 3:30 may be
        return one == other and not 1 <= (other if half else one)[0] < 13
    if one == other or len(one) != len(other) or half or min(*one, *other) == 0:
        return one == other
    if all(each and _CLOCK.fullmatch(each["numbers"]) for each in found):
        return False
    return len({first / second for first, second in zip(one, other, strict=True)}) == 1


def _numbers(parts: re.Match[str]) -> tuple[list[Fraction], str | None]:
    """Returns the numbers of a ratio or a time, with hours from 0 to 23, and its half of the day. Raises ValueError for
    what is no number, as `3.1.4`."""
    numbers = [decimal(number) for number in re.findall(r"\d[\d.]*", parts["numbers"])]
    if parts["half"]:
        numbers = [numbers[0] % 12 + 12 * (parts["half"] == "pm"), *(numbers[1:] or [Fraction(0)])]
    return numbers, parts["half"]


def _with_a_point(number: re.Match[str]) -> str:
    return number[0].replace(".", "").replace(",", ".")
