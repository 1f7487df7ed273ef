"""Prometheus: scrape configurations, rules, and `penstock prometheus`. Imported through `command`, and for the units of
metrics `metrics_reference`."""
