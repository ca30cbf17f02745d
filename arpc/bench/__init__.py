"""``arpc bench``: arpc, torch.distributed.rpc and the bare floor in one run, by rules that make a ratio mean something.

::

    command         the command line; one session after another
    row, rows/      what a row is; the table of what is compared, a file a subject
    rounds          measures every cell once a round, the systems of one row one after another; medians
    pairs           the two processes of one system, seen from outside: start, pin, freeze, measure, reap
    placement       which CPUs, and how a process is put on them
    processes       which processes belong to a system
    machine         what it all ran on, and how steady that was
    report, plots   table, rules, JSON; pictures
    targets         the bars to pass, as data

    serve           what runs inside each of those processes
    systems         the `System` contract and the registry
    floor, raw_sockets, torch_rpc, arpc_peer, peers/     the systems
    asyncio_caller, blocking_caller     how anything awaitable is measured, and anything that blocks
    crowd, meeting  more callees than one; how caller and callee find each other
    functions       what is called
    payloads        what is sent
    memory          resident memory and loop stalls

A new row is one more `Row` that a module of ``rows/`` yields. A new thing to measure is a method of the callers that
can do it, named by `Workload.measure`. A new peer is a module with a ``system(**settings)`` and an entry in
`systems.REGISTRY`; the columns of the table follow from the rows. `docs/benchmarks.md` tells the rest.
"""
