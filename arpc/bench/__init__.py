"""``make bench``: arpc, torch.distributed.rpc and the bare floor in one run, by rules that make a ratio mean something.

::

    __main__        the command line
    rows            the table of what is compared: one `Row` a line, one `Cell` a figure
    rounds          measures every cell once a round, the systems of one row one after another; medians
    pairs           the two processes of one system, seen from outside: start, pin, freeze, measure, reap
    placement       which CPUs, and how a process is put on them
    machine         what it all ran on, and how steady that was
    report          table, rules, JSON
    targets         the bars to pass, as data

    serve           what runs inside each of those processes
    systems         the `System` contract and the registry
    floor, torch_rpc, arpc_peer      the systems
    asyncio_caller  how anything awaitable is measured
    functions       what is called
    payloads        what is sent
    memory          resident memory and loop stalls

A new row is an entry in `rows.ROWS`. A new thing to measure is a method of the callers that can do it, named by
`Workload.measure`. A new peer is a module with a ``system(**settings)`` and an entry in `systems.REGISTRY`; the columns
of the table follow from the rows.
"""
