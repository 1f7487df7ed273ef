"""How Prometheus watches a run: scrape configurations, rules, and the command that fills one in."""
