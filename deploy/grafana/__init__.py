"""Grafana's dashboards as code: `python -m penstock.deploy.grafana` writes `deploy/grafana/dashboards/`."""
