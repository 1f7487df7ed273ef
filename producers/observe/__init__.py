"""What a producer reports: `metrics` for Prometheus, `event_log` in the run folder."""
