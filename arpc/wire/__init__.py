"""Bytes in, messages out: no sockets, no threads, no event loop."""
