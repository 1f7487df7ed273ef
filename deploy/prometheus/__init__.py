"""Prometheus: scrape configurations, rules, and `penstock prometheus`. Imported through `command`, and for units `metrics_reference`."""
