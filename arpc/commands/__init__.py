"""The commands of ``arpc``: each module declares the arguments of one, and imports what runs it when it is run.

So ``arpc --help`` and shell completion import neither torch nor the runtime.
"""
