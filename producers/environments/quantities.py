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
_UNIT = re.compile(
    r"(?:\s|\^\s*\{?\s*\u27e8(?:st|nd|rd|th)\u27e9\s*\}?"
    r"|\u27e8[^\u27e8\u27e9\d]*\u27e9|(?<![A-Za-z])[A-Za-z]{2,}\.?|(?<=[\u27e9A-Za-z])\s*\^\s*\{?-?\d\}?"
    r"|(?<=\s)h(?=\s*\d)|(?<=[a-z]),(?=\s+\d)|[%/$\u20ac\u00a3\u00a5\u20b9\u00a2-])*"
)
"""Matches what may follow a number as its unit: text, words, powers of these, and signs."""
MATHEMATICS = frozenset("pi sqrt ln log sin cos tan exp mod or to inf infinity is are am pm".split())  # noqa: SIM905
"""Words that are no unit."""
_MAGNITUDES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MAGNITUDE = re.compile(
    rf"(?<![\w.,/^])(\d[\d,]*(?:\.\d+)?)((?:\s|\\(?:text\w*|mathrm|mbox)\s*\{{)*)({'|'.join(_MAGNITUDES)})s?(?![a-z])",
    re.IGNORECASE,
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}")
_MINUS = re.compile(r"^\s*\u27e8?\s*(?:minus|negative)\b\s*\u27e9?\s*(?=[\d.$\\])", re.IGNORECASE)
_ROOT = re.compile(r"([\u221a\u221b])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")
_ROOTS = {"\u221a": r"\sqrt", "\u221b": r"\sqrt[3]"}
_AS_LATEX = {
    "\u221e": r"\infty ", "\u2205": r"\emptyset ", r"\varnothing": r"\emptyset ", "\u222a": r"\cup ",
    "\u2229": r"\cap ", "\u00b7": r"\cdot ", "\u2208": r"\in ", "\u2216": r"\setminus ", "\u211d": r"\mathbb{R}",
}  # fmt: skip
"""What math-verify does not read, and what it does."""
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,3})(?![\d.])")
_INVISIBLE = re.compile(
    r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:[hv]?phantom|[hv]space\*?)\s*\{[^{}]*\}|\\rule\s*\{[^{}]*\}\s*\{[^{}]*\}"
)
_HALF_OF_THE_DAY = re.compile(r"(?<=[\d \u27e8])([ap])\.?\s?m(?![A-Za-z])\.?", re.IGNORECASE)


class Quantity(NamedTuple):
    """A number with what is written behind it. is_percent: the number is in hundredths."""

    value: Fraction
    unit: str
    is_percent: bool


def quantities(text: str) -> tuple[Quantity, ...]:
    """Returns the quantities that a text consists of, with nothing else in it; empty if it is anything else."""
    if len(text) > MOST_CHARACTERS:
        return ()
    rest, found = plain(text), []
    while rest:
        number = leading_number(rest)
        if number is None:
            return ()
        value, rest = number
        unit = _UNIT.match(rest)
        assert unit is not None  # it may be empty
        words = re.findall(r"[A-Za-z%]+", unit[0])
        if len(words) > MOST_WORDS or MATHEMATICS & {word.lower() for word in words}:
            return ()
        if not words and unit.end() < len(rest):  # two numbers in a row are no quantity
            return ()
        found.append(Quantity(value, unit[0].strip(), bool(words) and words[0].lower() in ("%", "percent", "pct")))
        rest = rest[unit.end() :]
    return tuple(found)


def leading_number(text: str) -> tuple[Fraction, str] | None:
    """Returns the number that a `plain` text begins with, and what follows it."""
    number = _NUMBER.match(text)
    value = None if number is None else _value(number)
    return None if number is None or value is None else (value, text[number.end() :])


def visible(text: str) -> str:
    """Returns a text without the LaTeX that takes room and shows nothing."""
    return _INVISIBLE.sub(" ", text)


def as_latex(text: str) -> str:
    """Returns a single quantity as a number that math-verify reads, any other text with its numbers as in `5e-05`
    written out."""
    found = quantities(text)
    if len(found) != 1:
        infinity = re.fullmatch(r"\s*([+-]?)\s*(?:inf|infinity|\u221e)\s*", text.replace("\u2212", "-"), re.IGNORECASE)
        return _SCIENTIFIC.sub(_written_out, _signs_as_latex(text)) if infinity is None else f"{infinity[1]}\\infty"
    value, _, is_percent = found[0]
    sign, size = "-" if value < 0 else "", abs(value)
    number = str(size) if size.denominator == 1 else f"\\frac{{{size.numerator}}}{{{size.denominator}}}"
    return f"{sign}{number}" + ("\\%" if is_percent else "")


def _signs_as_latex(text: str) -> str:
    text = _ROOT.sub(lambda root: f"{_ROOTS[root[1]]}{{{root[2] or root[3] or root[4]}}}", text)
    for sign, latex in _AS_LATEX.items():
        text = text.replace(sign, latex)
    return _lowered(text)


def _lowered(text: str) -> str:
    """Returns a text with `^{2}` for the character of a small 2 above the line."""
    return _SUPERSCRIPTS.sub(
        lambda power: "^{" + unicodedata.normalize("NFKC", power[0]).replace("\u2212", "-") + "}", text
    )


def _as_ratio(number: re.Match[str]) -> str:
    """Returns `1/6` of `0.1\\overline{6}`; one of very many digits as it is."""
    if len(number[0]) > MOST_CHARACTERS:
        return number[0]
    whole, before, repeated = number[1], number[2], number[3]
    rest = int(whole + before + repeated) - int(whole + before or "0")
    return f"{rest}/{(10 ** len(repeated) - 1) * 10 ** len(before)}"


def _written_out(number: re.Match[str]) -> str:
    return format(Decimal(number[1]).scaleb(int(number[2])), "f")


def plain(text: str) -> str:
    """Returns a text without the marks of LaTeX and Unicode that change nothing; its `\\text{}` in angle brackets."""
    text = "".join(map(_character, visible(text)))
    text = _lowered(text)
    text = text.replace("{,}", ",").replace(r"\$", "$").replace(r"\%", "%").replace("\\\n", " ")
    text = _DEGREES.sub(" degrees ", _SPACES.sub(" ", _DROPPED.sub("", text)))
    text = re.sub(r"(?<!\})\{10\}(?=\s*\^)", "10", text)
    text = _MAGNITUDE.sub(lambda number: f"{number[1]}e{_MAGNITUDES[number[3].lower()]}{number[2]}", text)
    text = _REPEATING.sub(_as_ratio, text)
    for _ in range(4):  # one in another
        text = _TEXT.sub(_unwrapped, text)
    text = _MINUS.sub("-", _HALF_OF_THE_DAY.sub(lambda half: half[1].lower() + "m", text))
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
            value = decimal(part["decimal"])
            if part["nb"] or part["n1b"]:
                value += _ratio(part["nb"] or part["n1b"], part["db"] or part["d1b"])
            elif part["over"]:
                value += _ratio(part["over"], part["under"])
            elif part["by"]:
                value /= decimal(part["by"])
            elif power := part["e"] or part["p"]:
                if abs(int(power)) > MOST_DIGITS:
                    return None
                value *= Fraction(10) ** int(power)
    except (ValueError, ZeroDivisionError):
        return None
    return -value if (part["sign"] == "-") != (part["sign2"] == "-") else value


def _ratio(numerator: str, denominator: str) -> Fraction:
    return decimal(numerator) / decimal(denominator)


def decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip(".") or "x")


def equal(one: Fraction, other: Fraction) -> bool:
    if one == other or (one.denominator == 1 and other.denominator == 1):
        return one == other
    return abs(one - other) <= TOLERANCE * min(Fraction(1), max(abs(one), abs(other)))
