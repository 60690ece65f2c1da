"""Trace context over transports that carry no HTTP headers, and OpenTelemetry's instrumentations of those that do."""
