"""A program for torch.distributed.rpc: feature stores of PyTorch Geometric that ask each other for what they lack."""

import os

import torch
from torch_geometric.distributed import LocalFeatureStore, LocalGraphStore
from torch_geometric.distributed.dist_context import DistContext
from torch_geometric.distributed.rpc import (
    RPCRouter,
    global_barrier,
    init_rpc,
    rpc_partition_to_workers,
    shutdown_rpc,
)

NODES, EDGES, WIDTH, LOOKUPS = 3000, 6000, 16, 10


def features_of(rank, world_size):
    """A third of the nodes and of the edges of a graph, and where to find the others."""
    nodes, edges = torch.arange(rank, NODES, world_size), torch.arange(rank, EDGES, world_size)
    x = nodes.unsqueeze(1) + torch.arange(WIDTH) / WIDTH
    store = LocalFeatureStore.from_data(nodes, x, nodes % 7, edges, -edges.unsqueeze(1).float())
    store.num_partitions, store.partition_idx = world_size, rank
    store.node_feat_pb, store.edge_feat_pb = torch.arange(NODES) % world_size, torch.arange(EDGES) % world_size
    store.meta = {"is_hetero": False}
    return store


def typed_features_of(rank, world_size):
    """Nodes of two types."""
    ids = {"author": torch.arange(rank, NODES, world_size), "paper": torch.arange(rank, EDGES, world_size)}
    store = LocalFeatureStore.from_hetero_data(ids, {name: each.unsqueeze(1).float() for name, each in ids.items()})
    store.num_partitions, store.partition_idx = world_size, rank
    store.node_feat_pb = {"author": torch.arange(NODES) % world_size, "paper": torch.arange(EDGES) % world_size}
    store.meta = {"is_hetero": True}
    return store


def graph_of(rank, world_size):
    edges = torch.arange(rank, EDGES, world_size)
    return LocalGraphStore.from_data(edges, torch.stack([edges % NODES, (edges * 7) % NODES]), NODES, is_sorted=False)


def run(rank, world_size):
    """Every worker looks up nodes and edges that are anywhere; sums of what it found."""
    context = DistContext(rank, rank, world_size, world_size, group_name="stores")
    init_rpc(context, "localhost", int(os.environ["MASTER_PORT"]), num_rpc_threads=4, rpc_timeout=60)
    router = RPCRouter(rpc_partition_to_workers(context, world_size, rank))
    store, typed = features_of(rank, world_size), typed_features_of(rank, world_size)
    for each in (store, typed):
        each.set_rpc_router(router)
    global_barrier(timeout=60)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(LOOKUPS):
        nodes = torch.randperm(NODES, generator=generator)[:500]
        edges = torch.randperm(EDGES, generator=generator)[:500]
        lookups = [
            store.lookup_features(nodes),
            store.lookup_features(edges, is_node_feat=False),
            typed.lookup_features(nodes, input_type="author"),
            typed.lookup_features(edges, input_type="paper"),
        ]
        results = [lookup.wait() for lookup in lookups]
        assert torch.equal(results[0][:, 0].long(), nodes)
        found.append([result.double().sum().item() for result in results])
    (edge_attr,) = graph_of(rank, world_size).get_all_edge_attrs()
    global_barrier(timeout=60)
    shutdown_rpc(f"worker {rank}", graceful=True)
    return {"found": found, "layout": str(edge_attr.layout), "router": router.partition_to_workers}
