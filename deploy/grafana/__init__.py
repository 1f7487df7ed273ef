"""Grafana's dashboards as code: `python -m deploy.grafana` writes `deploy/grafana/dashboards/`."""
