"""The promises of a transport, by subject; `arpc.testing.conformance` puts them together."""
