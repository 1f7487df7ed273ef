"""A run folder read back: telemetry, summary, and the HTML report with its figures.

Imported through `report.write_report` and `summary`; through `lines`, `telemetry` and `means` to read a run's lines and
their numbers, through `attrition` and `summary_table` to show them as text, through `drawing` and `figures` to draw in
the report's style, and through `tokens` for the text of each token.
"""
