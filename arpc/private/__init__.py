"""Undocumented APIs of other libraries, one module per library. Those with a public fallback are probed at import."""
