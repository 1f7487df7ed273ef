"""Grafana's dashboards as code: `python -m penstock.deploy.grafana` writes `deploy/grafana/dashboards/`.

For development only: needs grafana-foundation-sdk. Imported by nothing.
"""
