"""The dashboard, ``/metrics`` and the JSON API of a group, served by one of its workers."""
