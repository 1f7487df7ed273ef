"""Prometheus: scrape configurations, rules, and `penstock prometheus`. Imported through `command`."""
