"""Other systems, each used as its own documentation recommends: see `arpc.bench.systems.PEERS`.

A peer has `PeerCaller`'s three measurements, or those of `BlockingCaller`. It must need no packages but its own and
arpc's, and the processes that it starts must be in its session, or descend from it, so that they can be ended.
"""
