"""A run folder read back: telemetry, summary, and the HTML report with its figures.

Imported through `report.write_report` and `summary`; by whoever reads a run's lines through `telemetry`, by whoever
shows what was sampled and what was trained through `attrition`, and by whoever draws in the report's style through
`drawing` and `figures`.
"""
