"""What operators see: Prometheus metrics, log lines, traces."""
