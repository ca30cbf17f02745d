"""Calls of threads that block: the thread writes its request and reads the reply by itself, see `calls`.

On one CPU a blocking call takes half to two thirds of the time that the way over the loop takes, which costs two
switches of threads. The callee's half is in `arpc.agent.peers.connector`.
"""
