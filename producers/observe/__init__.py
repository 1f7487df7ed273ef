"""The reports of a producer: `metrics` for Prometheus, `event_log` in the run folder, `running_loop` on what blocks."""
