"""Prometheus metrics, log lines and OpenTelemetry traces."""
