"""Conformance checks of transports, by subject; `arpc.testing.conformance` combines them."""
