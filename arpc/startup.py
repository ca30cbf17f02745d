"""The start of a worker: it is composed of its parts, and joins its group."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from contextvars import copy_context
from functools import partial, wraps
from typing import Any, Final, ParamSpec

import msgspec

from arpc.agent.agent import Agent
from arpc.agent.hooks.context_propagation import ContextPropagation
from arpc.agent.hooks.device_placement import Placement, find_backends
from arpc.agent.loop_watch import watch_loop
from arpc.agent.membership_watch import MembershipWatch
from arpc.agent.scope import WorkerScope, current_scope, worker_began
from arpc.autograd.service import AutogradService
from arpc.devices import check_device_maps
from arpc.errors import (
    AlreadyInitializedError,
    ConfigurationError,
    RendezvousError,
)
from arpc.garbage import BACKOFF, FREEZER
from arpc.group.addresses import check_guarded, default_addresses, reachable_address
from arpc.group.membership import WorkerRecord, host_fingerprint, main_fingerprint
from arpc.group.rendezvous import Rendezvous, create_rendezvous, open_store
from arpc.http.address import HttpServing, refuse_open_page
from arpc.ids import WorkerInfo, check_worker_name
from arpc.log import configure_from_environment, get_logger
from arpc.metrics.attach import AttachFile
from arpc.metrics.inspector import Inspector
from arpc.metrics.service import MetricsService
from arpc.options import RpcOptions, Unset
from arpc.profiler.group_profile import record_group
from arpc.profiler.service import ProfilerService
from arpc.rref.context import HandleClass, RRefContext
from arpc.rref.handle import RRef
from arpc.rref.reducer import reduce_rref
from arpc.runtime import Worker
from arpc.torchscript import kinds
from arpc.transport.contract import Transport
from arpc.transport.in_process import MemoryNetwork
from arpc.transport.shm import FEATURE
from arpc.wire.handshake import Identity
from arpc.wire.values.device_staging import DeviceBackend
from arpc.wire.values.pickler import Reducer
from arpc.wire.values.policy import UNRESTRICTED, AllowList, Policy

__all__ = ["start_worker"]

logger = get_logger("arpc.runtime")


P = ParamSpec("P")

_LEAVE_S: Final = 5.0


def _freezing(start: Callable[P, Coroutine[Any, Any, Worker]]) -> Callable[P, Coroutine[Any, Any, Worker]]:
    """Freeze all existing objects before a worker is built, if its ``options`` say so; undo it if the start fails."""

    @wraps(start)
    async def freeze_and_start(*args: P.args, **kwargs: P.kwargs) -> Worker:
        options = kwargs["options"]
        assert isinstance(options, RpcOptions)
        if not options.gc_freeze:
            return await start(*args, **kwargs)
        loop = asyncio.get_running_loop()
        FREEZER.begin(loop)
        try:
            return await start(*args, **kwargs)
        except BaseException:
            FREEZER.end(loop)
            raise

    return freeze_and_start


@_freezing
async def start_worker(  # noqa: PLR0915 - one worker is made in one place, out of many parts
    name: str,
    *,
    rank: int | None,
    world_size: int | Unset | None,
    init_method: str,
    store: Any,
    options: RpcOptions,
    network: MemoryNetwork | None = None,
    transports: Mapping[str, Transport] | None = None,
    backends: Mapping[str, DeviceBackend] | None = None,
    handle_class: HandleClass | None = None,
) -> Worker:
    """Build a worker, join the group and make it current. If a step fails, the steps before it are undone.

    ``backends`` are the devices besides the CPU, by type; by default those that torch finds. The worker's code sees
    RRefs as objects of ``handle_class``.
    """
    scope = current_scope.get()
    if scope is not None and scope.worker is not None and not scope.worker.is_shut_down:
        raise AlreadyInitializedError(
            f"this context has the worker {scope.worker.name!r} already. Shut it down first, or start the second "
            f"one in a task of its own"
        )
    check_worker_name(name)
    configure_from_environment()
    refuse_open_page(options)
    group = await open_store(
        init_method=init_method, store=store, rank=rank, world_size=world_size, timeout_s=options.init_timeout
    )
    try:
        rendezvous = create_rendezvous(group)
    except BaseException:
        await group.aclose()
        raise
    worker = Worker(WorkerInfo(name, -1), options)
    placement = Placement(asyncio.get_running_loop(), name, options, find_backends() if backends is None else backends)
    context = copy_context()
    context.run(current_scope.set, WorkerScope(worker))
    ways: dict[str, Transport] = {"memory": network} if network is not None else worker.open_transports()
    ways.update(transports or {})
    known = (FEATURE,) if worker.arena is not None else ()
    identity = Identity(name, 0, secrets.randbits(63), main_fingerprint(), known)
    policy: Policy = UNRESTRICTED if options.allow is None else AllowList(name, options.roles)
    rrefs = worker.rref_context = RRefContext(options, context, name)
    rrefs.handle_class = handle_class
    rrefs.get_method = policy.get_method
    reducers: dict[type, Reducer] = {**kinds.REDUCERS, RRef: partial(reduce_rref, rrefs)}
    if handle_class is not None:
        unwrap = handle_class.unwrap
        reducers[handle_class.cls] = lambda handle, pickling: reduce_rref(rrefs, unwrap(handle), pickling)
    autograd = worker.autograd = AutogradService(options, context, rrefs, policy)
    profiler = worker.profiler = ProfilerService()
    variables = ContextPropagation(policy)
    membership_watch = worker.membership_watch = MembershipWatch(rendezvous, options, context)
    metrics = worker.metrics = MetricsService(
        options,
        Inspector(rrefs, autograd, worker.arena, worker.receive_memory),
        rendezvous.members if rendezvous.is_elastic else None,
        partial(_record_trace, worker),
    )
    agent = worker.agent = context.run(
        lambda: Agent(
            worker=worker,
            identity=identity,
            options=options,
            context=context,
            transports=ways,
            resolve=partial(_resolve, rendezvous, name, placement),
            handlers={**rrefs.service.handlers, **autograd.handlers, **profiler.handlers, **metrics.handlers},
            creations=rrefs.service.creations,
            reducers=reducers,
            families=kinds.FAMILIES,
            preparations=kinds.PREPARATIONS,
            interceptors=(variables, autograd.recorder, placement.results),
            observers=profiler.observers,
            is_elastic=rendezvous.is_elastic,
            watchers=(rrefs, autograd, profiler.tracer, membership_watch),
            placement=placement if placement.is_needed else None,
            policy=policy,
        )
    )
    features: tuple[RRefContext | AutogradService | ProfilerService | MembershipWatch | MetricsService, ...] = (
        rrefs,
        autograd,
        profiler,
        membership_watch,
        metrics,
    )
    for feature in features:
        feature.attach(agent)
    if worker.busy_poll is not None:
        worker.busy_poll.call_at = agent.call_at
        worker.busy_poll.pools = agent.dispatcher.threads, autograd.threads
    worker.rendezvous = rendezvous
    host = host_fingerprint()
    try:
        listening = await _listen(agent, options, host, group.access.host, is_in_process=network is not None)

        def make_record(worker_id: int) -> WorkerRecord:
            worker.info = WorkerInfo(name, worker_id)
            agent.identify(worker_id)
            for feature in features:
                feature.identify(worker.info)
            return WorkerRecord(name, worker_id, identity.incarnation, listening, host, identity.main, placement.claims)

        record = await rendezvous.join(
            name, make_record, timeout_s=options.init_timeout, probe=agent.connector.dialer.is_alive
        )
        await _meet_members(rendezvous, record, agent)
        membership_watch.start()
        if options.http:
            worker.http = await context.run(_serve_http, options, metrics)
        place = _meeting_place(init_method, is_given=store is not None)
        worker.attach_file = AttachFile.write(worker.info, listening, worker.http_address, options, time.time(), place)
    except BaseException as error:
        if worker.http is not None:
            await worker.http.aclose()
        for feature in features:
            feature.close()
        await agent.aclose("it failed to start")
        await worker.close_transports()
        await _withdraw(rendezvous, error)
        raise
    _tune_process(options, agent.loop)
    worker_began(worker, agent.loop)
    watch_loop(worker)
    return worker


def _tune_process(options: RpcOptions, loop: asyncio.AbstractEventLoop) -> None:
    if options.switch_interval is not None:
        sys.setswitchinterval(options.switch_interval)
    BACKOFF.begin(options.gc_backoff, loop)


async def _listen(
    agent: Agent, options: RpcOptions, host: str, store_host: str | None, *, is_in_process: bool
) -> tuple[str, ...]:
    """Open the listeners, and return the addresses at which peers reach them."""
    addresses = options.listen or (("memory://",) if is_in_process else await default_addresses(options, store_host))
    check_guarded(addresses, options)
    taken = await agent.connector.listen(addresses, host)
    return tuple([await reachable_address(address, store_host) for address in taken])


def _serve_http(options: RpcOptions, metrics: MetricsService) -> asyncio.Task[HttpServing | None]:
    # the server makes calls for its requests, which belong to this worker: so its task has this worker's context
    from arpc.http.server import serve  # slow: aiohttp takes longer to import than most workers take to start

    return asyncio.get_running_loop().create_task(serve(options, metrics))


async def _record_trace(worker: Worker, seconds: float, form: str) -> bytes:
    """Record the group for some seconds; return the trace as a page of HTML or as JSON, for tools and the dashboard."""
    trace = await record_group(worker, seconds)
    return trace.as_html().encode() if form == "html" else msgspec.json.encode(trace.as_chrome_trace())


def _meeting_place(init_method: str, *, is_given: bool) -> str:
    """Return a text for the meeting place of a group, the same for all of its workers on a host."""
    if is_given:
        return f"of process {os.getpid()}"
    if init_method == "env://":
        return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    return init_method.removeprefix("tcp://").partition("?")[0]


async def _meet_members(rendezvous: Rendezvous, record: WorkerRecord, agent: Agent) -> None:
    members = [*await rendezvous.members(), record]
    claims = {member.name: member.devices for member in members}
    check_device_maps(claims, is_complete=not rendezvous.is_elastic)
    for member in members:
        agent.add_peer(member)
    agent.serve()


async def _withdraw(rendezvous: Rendezvous, error: BaseException) -> None:
    # every worker of the group detects a mistake in the configuration: the host of the store waits until all have
    grace_s = _LEAVE_S if isinstance(error, ConfigurationError) else 0
    with suppress(RendezvousError):
        await rendezvous.leave(grace_s=grace_s)  # no effect unless it had joined before the failure
    await rendezvous.aclose()


async def _resolve(rendezvous: Rendezvous, name: str, placement: Placement, to: str | int) -> WorkerRecord:
    """Find a worker. In an elastic group it may have joined after this one, so check the device maps for it now."""
    record = await rendezvous.resolve(to)
    if rendezvous.is_elastic:
        check_device_maps({name: placement.claims, record.name: record.devices}, is_complete=False)
    return record
