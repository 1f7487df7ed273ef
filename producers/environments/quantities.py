"""Numbers and quantities as people and models write them, compared exactly: `1,200.50`, `5e-05`, `5\\times10^{-5}`,
`1\\frac{1}{2}`, `\\$18`, `60\\text{ miles per hour}`, `5 hours 30 minutes`.

math-verify reads the first two letters of `5e-05` as Euler's number and bare words as products of letters. What this
module can read is decided here; the rest (roots, sets, intervals, algebra) is math-verify's.
"""

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

MOST_CHARACTERS = 300
"""Of a text that is read as quantities."""
MOST_WORDS = 4
"""Of a unit."""
MOST_DIGITS = 400
"""Of an exponent's power of ten."""
TOLERANCE = Fraction(1, 10**6)
"""Relative and absolute, of two numbers that are not both whole: `1/3` against `0.333333`."""

_TEXT = re.compile(r"\\(?:text\w*|mbox|math(?:rm|bf|it|sf|tt)|operatorname|rm|bf)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[ ,;:]|\\q?quad\b|\\thinspace\b|~|[\u00a0\u2000-\u200a\u202f\u205f]")
_DROPPED = re.compile(r"\\!|\\left\b|\\right\b|\\displaystyle\b|[\u200b\u2060\ufeff]|\\\\$")
_DEGREES = re.compile(r"(?:\^\s*\{?\s*(?:\\circ|\u2218)\s*\}?|\u00b0|\\degrees?\b|\\circ\b)(?:\s*[CFK]\b)?")
_MATH = (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("{", "}"), ("**", "**"))
"""What may stand around a whole answer."""
_SUPERSCRIPTS = re.compile("[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_CURRENCY = r"(?:(?:US|USD|EUR|GBP|Rs\.?)?\s*[$\u20ac\u00a3\u00a5\u20b9]|USD|EUR|GBP|Rs\.?)"
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+(?! ?\d)|\d{1,2}(?:,\d{2})+,\d{3}|\d+)(?:\.\d*)?|\.\d+"
_FRACTION = (
    r"\\[dtc]?frac\s*(?:\{\s*(?P<n%s>[+-]?[\d.,]+)\s*\}|(?P<n1%s>\d))"
    r"\s*(?:\{\s*(?P<d%s>[+-]?[\d.,]+)\s*\}|(?P<d1%s>\d))"
)
_POWER = (
    r"(?:[eE](?P<e>[+-]?\d+)|\s*(?:\\times|\\cdot|[\u00d7\u00b7*x])\s*10\s*(?:\^|\*\*)\s*\{?\s*(?P<p>[+-]?\d+)\s*\}?)"
)
_NUMBER = re.compile(
    rf"\s*(?P<sign>[+-]?)\s*(?:{_CURRENCY}\s*)?(?P<sign2>[+-]?)\s*(?:{_FRACTION % (('a',) * 4)}"
    rf"|(?P<decimal>{_DECIMAL})(?:\s*{_FRACTION % (('b',) * 4)}|\s+(?P<over>\d+)\s*/\s*(?P<under>\d+)"
    rf"|{_POWER}|\s*/\s*(?P<by>[+-]?(?:{_DECIMAL})))?)"
)
_RATE = r"(?:[ck]?m|[km]?g|L|J|W|N)\s*/\s*(?:s|h|L|m|kg)\b(?:\s*\^\s*\{?\d\}?)?"
_UNIT = re.compile(
    r"(?:\s|(?<=\s)"
    + _RATE
    + r"|\u27e8[^\u27e8\u27e9\d]*\u27e9|(?<![A-Za-z])[A-Za-z]{2,}\.?|(?<=[\u27e9A-Za-z])\s*\^\s*\{?-?\d\}?"
    r"|(?<=[a-z]),(?=\s+\d)|[%/$\u20ac\u00a3\u00a5\u20b9\u00a2-])*"
)
"""Matches what may follow a number as its unit: text, words, powers of these, and signs."""
_MATHEMATICS = frozenset("pi sqrt ln log sin cos tan exp mod or to inf infinity is are am pm".split())  # noqa: SIM905
"""Words that are no unit."""
_LETTER = re.compile(r"(?P<space>\s*)\u27e8?\s*(?P<letter>[A-Za-z])\s*\u27e9?")
_UNITS_OF_A_LETTER = frozenset("ACFJKLNTVWghms")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,3})(?![\d.])")
_INVISIBLE = re.compile(r"\\(?:[hv]?phantom|[hv]space\*?)\s*\{[^{}]*\}|\\rule\s*\{[^{}]*\}\s*\{[^{}]*\}")
_HALF_OF_THE_DAY = re.compile(r"(?<=[\d \u27e8])([ap])\.?\s?m(?![A-Za-z])\.?", re.IGNORECASE)
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")


class Quantity(NamedTuple):
    """A number with what is written behind it. is_percent: the number is in hundredths."""

    value: Fraction
    unit: str
    is_percent: bool


def quantities(text: str) -> tuple[Quantity, ...]:
    """Returns the quantities that a text consists of, with nothing else in it; empty if it is anything else."""
    if len(text) > MOST_CHARACTERS:
        return ()
    rest, found = _plain(text), []
    while rest:
        number = _NUMBER.match(rest)
        value = None if number is None else _value(number)
        if number is None or value is None:
            return ()
        unit = _UNIT.match(rest, number.end())
        assert unit is not None  # it may be empty
        words = re.findall(r"[A-Za-z%]+", unit[0])
        if len(words) > MOST_WORDS or _MATHEMATICS & {word.lower() for word in words}:
            return ()
        if not words and unit.end() < len(rest):  # two numbers in a row are no quantity
            return ()
        found.append(Quantity(value, unit[0].strip(), bool(words) and words[0].lower() in ("%", "percent", "pct")))
        rest = rest[unit.end() :]
    return tuple(found)


def same(gold: tuple[Quantity, ...], guess: tuple[Quantity, ...]) -> bool | None:
    """Returns whether two answers have the same numbers, whatever units are written behind them; None if a percentage
    or a sum of several quantities leaves that open."""
    if len(gold) == len(guess) and all(_equal(one.value, other.value) for one, other in zip(gold, guess, strict=True)):
        return True
    is_open = len(gold) > 1 or len(guess) > 1 or gold[0].is_percent or guess[0].is_percent
    return None if is_open else False


def of_a_letter(gold: str, guess: str) -> bool:
    """Returns whether two answers are one number, at least one of them with a letter behind it, `5e-05 m`, that is the
    other's too, or a unit where the other is the number alone. A letter may be a variable: `5 x` is not 5."""
    one, other = (_lettered(_plain(text)) for text in (gold, guess))
    if one is None or other is None or not _equal(one[0], other[0]):
        return False
    return one[1] == other[1] or (not (one[1] and other[1]) and one[2] and other[2])


def _lettered(plain: str) -> tuple[Fraction, str, bool] | None:
    """Returns number, letter (or none) and whether the letter can be a unit; None if the text is anything else."""
    number = _NUMBER.match(plain)
    value = None if number is None else _value(number)
    if number is None or value is None:
        return None
    rest = plain[number.end() :]
    letter = _LETTER.fullmatch(rest)
    if letter is None:
        return None if rest.strip() else (value, "", True)
    return value, letter["letter"], bool(letter["space"]) and letter["letter"] in _UNITS_OF_A_LETTER


def visible(text: str) -> str:
    """Returns a text without the LaTeX that takes room and shows nothing."""
    return _INVISIBLE.sub(" ", text)


def as_latex(text: str) -> str:
    """Returns a single quantity as a number that math-verify reads, any other text with its numbers as in `5e-05`
    written out."""
    found = quantities(text)
    if len(found) != 1:
        infinity = re.fullmatch(r"\s*([+-]?)\s*(?:inf|infinity|\u221e)\s*", text.replace("\u2212", "-"), re.IGNORECASE)
        return _SCIENTIFIC.sub(_written_out, text) if infinity is None else f"{infinity[1]}\\infty"
    value, _, is_percent = found[0]
    sign, size = "-" if value < 0 else "", abs(value)
    number = str(size) if size.denominator == 1 else f"\\frac{{{size.numerator}}}{{{size.denominator}}}"
    return f"{sign}{number}" + ("\\%" if is_percent else "")


def _written_out(number: re.Match[str]) -> str:
    return format(Decimal(number[1]).scaleb(int(number[2])), "f")


def bare(text: str) -> str:
    """Returns a text without the marks that change nothing, and with spaces between digits alone: `5m` of
    `5\\text{ m}`."""
    return re.sub(r"[\u27e8\u27e9]|(?<!\d)\s+|\s+(?!\d)", "", _plain(text))


def words(text: str) -> str:
    """Returns an answer that consists of words alone in lower case; empty if it is anything else, or letters only."""
    plain = " ".join(_plain(text).replace("\u27e8", " ").replace("\u27e9", " ").split())
    is_words = _WORDS.fullmatch(plain) and any(len(word) > 3 for word in plain.split())
    return plain.lower() if is_words else ""


def _plain(text: str) -> str:
    """Returns a text without the marks of LaTeX and Unicode that change nothing; its `\\text{}` in angle brackets."""
    text = "".join(map(_character, visible(text)))
    text = _SUPERSCRIPTS.sub(
        lambda power: "^{" + unicodedata.normalize("NFKC", power[0]).replace("\u2212", "-") + "}", text
    )
    text = text.replace("{,}", ",").replace(r"\$", "$").replace(r"\%", "%").replace("\\\n", " ")
    text = _DEGREES.sub(" degrees ", _SPACES.sub(" ", _DROPPED.sub("", text)))
    for _ in range(4):  # one in another
        text = _TEXT.sub(_unwrapped, text)
    text = _HALF_OF_THE_DAY.sub(lambda half: half[1].lower() + "m", text)
    text = re.sub(r"(?<=\d)_(?=\d{3}(?!\d))", "", text).strip()
    for begin, end in _MATH * 2:
        if text.startswith(begin) and text.endswith(end) and len(text) > len(begin) + len(end):
            inside = text[len(begin) : -len(end)].strip()
            text = text if begin in inside or end in inside else inside
    return text.rstrip(" .,;:\\")


def _character(character: str) -> str:
    if character in "\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d":
        return "-"
    if character in "\u2044\u2215":
        return "/"
    if character.isascii():
        return character
    if unicodedata.category(character) == "Nd":
        return str(unicodedata.digit(character))
    if unicodedata.decomposition(character).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    return character


def _unwrapped(text: re.Match[str]) -> str:
    inside = text[1]
    is_words = re.search(r"[A-Za-z%]", inside) and not re.search(r"[\d\u27e8]", inside)
    return f" \u27e8{inside.strip()}\u27e9" if is_words and "(" not in inside else f" {inside} "


def _value(number: re.Match[str]) -> Fraction | None:
    """Returns the value of a matched number; None if it has none, or is too large to be an answer."""
    part = number.groupdict()
    try:
        if part["decimal"] is None:
            value = _ratio(part["na"] or part["n1a"], part["da"] or part["d1a"])
        else:
            value = _decimal(part["decimal"])
            if part["nb"] or part["n1b"]:
                value += _ratio(part["nb"] or part["n1b"], part["db"] or part["d1b"])
            elif part["over"]:
                value += _ratio(part["over"], part["under"])
            elif part["by"]:
                value /= _decimal(part["by"])
            elif power := part["e"] or part["p"]:
                if abs(int(power)) > MOST_DIGITS:
                    return None
                value *= Fraction(10) ** int(power)
    except (ValueError, ZeroDivisionError):
        return None
    return -value if (part["sign"] == "-") != (part["sign2"] == "-") else value


def _ratio(numerator: str, denominator: str) -> Fraction:
    return _decimal(numerator) / _decimal(denominator)


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip(".") or "x")


def _equal(one: Fraction, other: Fraction) -> bool:
    if one == other or (one.denominator == 1 and other.denominator == 1):
        return one == other
    return abs(one - other) <= TOLERANCE * min(Fraction(1), max(abs(one), abs(other)))
