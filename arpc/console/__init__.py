"""Tools that attach to a running group: ``arpc top``, ``arpc stack`` and ``arpc trace``."""
