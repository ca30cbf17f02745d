"""Group membership: workers find each other through a torch store.

`open_store` returns a `GroupStore`, `create_rendezvous` the `Rendezvous` for its kind of group: of fixed size
(`static_group`), or elastic (`elastic_group`).

    store = await open_store(init_method="tcp://10.0.0.1:29500", rank=0, world_size=2)
    rendezvous = create_rendezvous(store)
    record = await rendezvous.join("trainer", make_record, timeout_s=60)
    peer = await rendezvous.resolve("server")
    ...
    await rendezvous.gather("shutdown", b"", timeout_s=60)
    await rendezvous.leave()
    await rendezvous.aclose()

Workers write msgpack to the store, never pickle: otherwise any process that reaches the store could run code here.
"""

from __future__ import annotations

from arpc.group.elastic_group import ElasticRendezvous
from arpc.group.group_store import GroupStore
from arpc.group.membership import Joined, Left, MakeRecord, Probe, Rendezvous, WorkerRecord
from arpc.group.static_group import StaticRendezvous
from arpc.group.stores import open_store

__all__ = [
    "GroupStore",
    "Joined",
    "Left",
    "MakeRecord",
    "Probe",
    "Rendezvous",
    "WorkerRecord",
    "create_rendezvous",
    "open_store",
]


def create_rendezvous(store: GroupStore) -> Rendezvous:
    """Return the rendezvous of the worker that has this store. Closing it closes the store."""
    return ElasticRendezvous(store) if store.world_size is None else StaticRendezvous(store)
