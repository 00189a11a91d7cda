"""Metrics, dashboards, health, reports, the model card."""
