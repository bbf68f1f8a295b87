"""Records of HTTP requests: the access log and OpenTelemetry traces. Both are off by default."""
