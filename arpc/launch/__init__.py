"""Groups of workers in processes: on this machine with `local`, over a Ray cluster with `ray`.

``arpc launch`` does this from a shell. Under torchrun, Slurm and Kubernetes none of this is needed: workers read their
name and rank from the environment, see `arpc.init_rpc`.
"""

from arpc.launch.local_group import local
from arpc.launch.programs import Module
from arpc.launch.ray_cluster import ray
from arpc.launch.result import Launched

__all__ = ["Launched", "Module", "local", "ray"]
