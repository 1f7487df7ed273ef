"""Writes generated files: the rules with their limits, the same as objects of the Prometheus operator, and the metrics
reference.

Tests compare all three with their sources.
"""

import re
from pathlib import Path
from textwrap import indent

from penstock.deploy.prometheus.command import HERE, RULES
from penstock.deploy.prometheus.metrics_reference import PAGE, with_reference
from penstock.schemas import limits

TEMPLATES = HERE / "templates"
FILE = HERE.parent / "kubernetes" / "base" / "rules.yaml"


def with_limits(template: Path) -> str:
    """Returns the rules of a template, with the limits of `penstock.schemas.limits` in place of their names.

    Raises:
        AttributeError: there is no such limit.
    """
    text = re.sub(r"<([A-Z][A-Z0-9_]+)>", lambda found: f"{getattr(limits, found[1]):g}", template.read_text("utf-8"))
    head = f"# Made of templates/{template.name} by `python -m penstock.deploy.prometheus`: edit that.\n"
    return head + re.sub(r"\A(#.*\n)*", "", text)


def as_objects(rules: dict[str, str]) -> str:
    """Returns a PrometheusRule per rule file, with the file's text as its `spec`. rules: texts by the files' stems."""
    objects = [
        "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\n"
        f"metadata:\n  name: penstock-{name}\nspec:\n{indent(text, '  ')}"
        for name, text in rules.items()
    ]
    return "# Made of deploy/prometheus/rules by `python -m penstock.deploy.prometheus`.\n" + "---\n".join(objects)


def generated() -> dict[Path, str]:
    """Returns the text of every file that is generated."""
    rules = {template.stem: with_limits(template) for template in sorted(TEMPLATES.glob("*.yml"))}
    return {
        **{RULES / f"{name}.yml": text for name, text in rules.items()},
        FILE: as_objects(rules),
        PAGE: with_reference(PAGE.read_text(encoding="utf-8")),
    }


def main() -> None:
    for file, text in generated().items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
