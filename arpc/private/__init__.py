"""Undocumented APIs of other libraries, one module per library, each probed at import and with a public fallback."""
