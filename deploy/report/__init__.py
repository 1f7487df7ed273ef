"""A run folder read back: telemetry, summary, and the HTML report with its figures.

Imported through `report.write_report` and `summary`; through `telemetry` to read a run's lines, through `attrition` to
show what was sampled and what was trained, and through `drawing` and `figures` to draw in the report's style.
"""
