"""``arpc bench``: arpc, torch.distributed.rpc and the bare floor in one run, by rules that make ratios meaningful.

::

    command         the command line; one session after another
    row, rows/      the type of a row; the table of all rows, one file per subject
    rounds          measures every cell once a round, the systems of one row one after another; medians
    pairs           the two processes of one system, seen from outside: start, pin, freeze, measure, reap
    placement       the CPUs of a pair, and how processes are pinned
    processes       finds the processes that belong to a system
    machine         describes the machine, and how steady it was
    report, plots   table, rules, JSON; pictures
    targets         the bars to pass, as data

    serve           the program of each of those processes
    systems         the `System` contract and the registry
    floor, raw_sockets, torch_rpc, arpc_peer, peers/     the systems
    asyncio_caller, blocking_caller     measure calls that are awaited, and calls that block
    crowd, meeting  further callees; how caller and callee find each other
    functions       the functions that are called
    payloads        the arguments that are sent
    memory          resident memory and loop stalls

The main process is the one that starts the systems and compares them. A new row is one more `Row` that a module of
``rows/`` yields. A new measurement is a method of those callers that support it, named by `Workload.measure`. A new
peer is a module with a ``system(**settings)`` and an entry in `systems.REGISTRY`; the columns of the table follow from
the rows. `docs/benchmarks.md` explains the rest.
"""
