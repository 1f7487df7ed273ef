"""Numbers and quantities in every form in which data sets and models write them."""
# ruff: noqa: RUF001

from penstock.producers.environments.answers import same_quantities
from penstock.producers.environments.quantities import as_latex, quantities

EQUAL = {
    "5e-05": r"0.00005 | 5E-5 | 5\times10^{-5} | 5 \cdot 10^{-5} | 5×10⁻⁵ | 5 * 10^-5 | \frac{5}{100000} | .00005",
    "1e3": r"1000 | 1,000 | 1{,}000 | 1\,000 | 1 000 | 1000.0 | +1000 | 1.0e3 | 1000. | \textbf{1000} | {1000}",
    "1072.0": r"1072 | 1,072 | $1072$ | \(1,072\) | 1072\ | 1072 \\ | 1072\quad | **1,072.** | １０７２",
    "1,000,000": r"1000000 | 1,\!000,\!000 | 1e6 | 10,00,000 | 1 000 000",
    "-5": "−5 | – 5 | -\\$5 | \\$-5 | -5.0 | - 5",
    "1 1/2": r"1.5 | 1\frac12 | 1 \frac{1}{2} | 1½ | 3/2 | \dfrac{3}{2} | \frac{3}{2} cups | \tfrac32",
    "-3/4": r"-0.75 | -\frac{3}{4} | \frac{-3}{4} | \frac{3}{-4} | −¾",
    "1/3": "0.333333 | \\frac{1}{3}",
    "18 dollars": r"18 | \$18 | $18 | $18.00$ | 18\text{ dollars} | \mathrm{18~dollars} | 18 USD | USD 18 | 18$ | €18",
    "60 miles per hour": r"60\text{ miles per hour} | 60 | 60 mph | 60 \text{ mi}/\text{h}",
    "90^\\circ": r"90 | 90° | 90^{\circ} | 90 degrees | 90\,\text{degrees} | 90 \degree | 90 °C",
    "10\\text{ square inches}": r"10 | 10 \text{ in}^2 | 10\text{ in.}^{2} | 10 in² | 10 square inches",
    "5 hours 30 minutes": r"5\text{ hours }30\text{ minutes} | 5 hours and 30 minutes | 5 hours, 30 minutes",
    "3.0\\times10^8": r"3e8 | 300000000 | 3 \times 10^{8} \text{ m/s} | 3.0 × 10⁸ | 300 million",
    "0.1\\overline{6}": r"1/6 | \frac16",
    "20\\%": r"20% | 20 percent | 20\text{ percent} | 20 \%",
}
DIFFERENT = {
    "5e-05": "8.59 | 0 | 5 | 0.0005",
    "0.00000005": "0",
    "1e3": "1 | 3 | 100",
    "1000000": "1000001",
    "1000.5": "1000",
    "0.333": "1/3",
    "5": "-5 | 6 dollars | 50",
    "18 dollars": "19 dollars | 1.8",
}
NO_QUANTITY = (
    "", "-", "5e", "3x", "2i", "5π", r"2\pi", "x=5", "1,2", "(1,2)", "12_7", "11:30", "3:4", r"\sqrt{2}", "5!",
    "10^2", "2+3", "5-6", "1 2", "1.2.3", "1,23", r"3\sqrt{2}", "5 is the answer", "1 or 2", "1e99999", r"\frac{1}{0}",
    "2 pi", r"5 \pm 2", "5 x", r"\frac{x}{2}", "about 5", "5" * 400,
)  # fmt: skip


def test_a_number_is_the_same_however_it_is_written() -> None:
    for table, expected in ((EQUAL, True), (DIFFERENT, False)):
        for gold, forms in table.items():
            for form in forms.split(" | "):
                assert same_quantities(quantities(gold), quantities(form)) is expected, (gold, form, quantities(form))
    assert same_quantities(quantities("20%"), quantities("0.2")) is None
    assert same_quantities(quantities("5 hours 30 minutes"), quantities("5.5 hours")) is False


def test_what_is_no_quantity_is_left_as_it_is() -> None:
    for text in NO_QUANTITY:
        assert quantities(text) == () and as_latex(text) == text, text
    latex = {
        "5e-05": r"\frac{1}{20000}", "60 miles per hour": "60", "-1.5": r"-\frac{3}{2}", "5 percent": r"5\%",
        "-inf": r"-\infty", "∞": r"\infty", "√2 ∪ 5²": r"\sqrt{2} \cup  5^{2}",
    }  # fmt: skip
    assert {text: as_latex(text) for text in latex} == latex
