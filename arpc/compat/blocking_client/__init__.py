"""Blocking calls in which the calling thread itself writes the request and reads the reply, see `calls`.

On one CPU such a call takes half to two thirds of the time of a call through the event loop, which costs two thread
switches. The callee's half is in `arpc.agent.peers.connector`.
"""
