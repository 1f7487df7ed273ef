"""A run folder read back: telemetry, summary, and the HTML report with its figures. Imported by module; `telemetry` is
used by whoever reads a run's lines."""
