"""Other systems, each used as its own documentation would have it: see `arpc.bench.systems.PEERS`.

A peer has `PeerCaller`'s three measurements, or those of `BlockingCaller`. It must run with the packages of its own and
arpc's alone, and whatever processes it starts must be of its session, or descend from it, so that they are ended.
"""
