"""Scripts written for ``torch.distributed.rpc``, on arpc: torch's names and signatures, blocking, in any thread.

::

    import arpc.compat.rpc as rpc                   # instead of torch.distributed.rpc

    rpc.init_rpc("worker0", rank=0, world_size=2)
    rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
    rpc.shutdown()

``python -m arpc.compat script.py`` runs a script that was not changed at all. This is a thin layer: the event loop runs
in a thread of its own, the calling thread waits for the result from there, and a future that is handed out is a
``torch.futures.Future``, completed in a thread where its callbacks may block.
"""
