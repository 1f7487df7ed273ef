"""Writes generated files: the rules as objects of the Prometheus operator, and the metrics reference.

Tests compare both with their sources.
"""

from pathlib import Path
from textwrap import indent

from penstock.deploy.prometheus.command import HERE, RULES
from penstock.deploy.prometheus.metrics_reference import PAGE, with_reference

FILE = HERE.parent / "kubernetes" / "base" / "rules.yaml"


def as_objects(folder: Path) -> str:
    """Returns a PrometheusRule per rule file, with the file's text as its `spec`."""
    objects = [
        "# Made of deploy/prometheus/rules by `python -m penstock.deploy.prometheus`.\n",
        *(
            "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\n"
            f"metadata:\n  name: penstock-{file.stem}\nspec:\n{indent(file.read_text(encoding='utf-8'), '  ')}"
            for file in sorted(folder.glob("*.yml"))
        ),
    ]
    return objects[0] + "---\n".join(objects[1:])


def main() -> None:
    FILE.write_text(as_objects(RULES), encoding="utf-8")
    PAGE.write_text(with_reference(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
