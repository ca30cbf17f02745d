"""The HTTP server: the handlers of all paths, behind access control."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from arpc._version import __version__
from arpc.errors import ConfigurationError, OverloadedError, UnsupportedError
from arpc.http.address import is_open_to_all
from arpc.http.exposition import expose
from arpc.http.feed import Feed
from arpc.http.guard import COOKIE, SESSION_S, Guard
from arpc.http.login_attempts import LoginAttempts
from arpc.log import get_logger
from arpc.metrics.journal import MAX_LINES
from arpc.metrics.service import MetricsService
from arpc.metrics.summary import join_histories
from arpc.options import RpcOptions, split_host_port
from arpc.transport.forked_children import close_port_in_children, leave_port_to_children

__all__ = ["HttpServer", "serve"]

logger = get_logger("arpc.http")

_STATIC: Final = Path(__file__).parent / "static"
_HEADERS: Final = {
    # everything is loaded from here, only this server's own scripts run, and no other page may embed this one
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    # not no-referrer, with which a browser does not send the origin of this server's own forms either
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TRACE_HEADERS: Final = {
    **_HEADERS,
    # a timeline has its script inline, so it gets an origin of its own, from which it cannot query this server
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
        "frame-ancestors 'none'; base-uri 'none'; sandbox allow-scripts"
    ),
}
_KEEP_TRACE_S: Final = 600.0
_OPEN_PATHS: Final = frozenset({"/healthz", "/login", "/style.css", "/login.js", "/favicon.svg"})
"""The paths that need no login."""
_LOGIN_DELAY_S: Final = 0.5
_KEEP_ALIVE_S: Final = 10.0
_MAX_FORM_BYTES: Final = 4096
_FORM_S: Final = 10.0
_encode = msgspec.json.Encoder().encode

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """The HTTP server of one worker, for its group. Made by `serve`."""

    def __init__(self, options: RpcOptions, metrics: MetricsService) -> None:
        self.url = ""
        self._port: int | None = None
        self._options = options
        self._metrics = metrics
        self._guard = Guard(options.secret, needs_secret=not is_open_to_all(options))
        self._feed = Feed(metrics)
        self._login_attempts = LoginAttempts()
        self._streams: set[asyncio.Task[Any]] = set()
        self._kept_trace: tuple[str, bytes] | None = None
        """The name and the page of the last timeline that was recorded to be opened in the browser."""
        self._forget_trace: asyncio.TimerHandle | None = None
        app = web.Application(middlewares=[self._admit], client_max_size=_MAX_FORM_BYTES)
        app.add_routes(
            [
                web.get("/", self._static("index.html")),
                web.get("/login", self._static("login.html")),
                web.post("/login", self._login),
                web.post("/logout", self._logout),
                *[web.get(f"/{path.name}", self._static(path.name)) for path in _STATIC.iterdir()],
                web.get("/healthz", self._health),
                web.get("/metrics", self._prometheus),
                web.get("/api/group", self._group),
                web.get("/api/events", self._events, allow_head=False),
                web.get("/api/stack", self._stack),
                web.get("/api/logs", self._logs),
                web.get("/api/errors", self._errors),
                web.get("/api/history", self._history),
                web.post("/api/trace", self._trace),
                web.get("/traces/{name}", self._timeline),
                web.get("/api/workers/{name}", self._worker),
            ]
        )
        # a client that has disconnected needs no reply
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0, keepalive_timeout=_KEEP_ALIVE_S
        )

    async def start(self) -> None:
        """Start listening. Raises `OSError` if the address is not available."""
        host, port = split_host_port(self._options.http)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        taken = self._runner.addresses[0][1]
        close_port_in_children(taken)
        self._port = taken
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{taken}"

    async def aclose(self) -> None:
        for task in list(self._streams):
            task.cancel()
        self._drop_trace()
        await self._feed.aclose()
        await self._runner.cleanup()
        if self._port is not None:
            leave_port_to_children(self._port)
            self._port = None

    # -- access

    @web.middleware
    async def _admit(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        is_open = request.path in _OPEN_PATHS
        guard = self._guard
        verdict = (
            guard.judge_origin(request.method, request.headers)
            if is_open
            else guard.judge(request.method, request.headers, request.cookies.get(COOKIE))
        )
        if verdict.status == 401 and request.path == "/":
            response: web.StreamResponse = web.Response(status=303, headers={"Location": "/login"})
        elif verdict.status != 200:
            headers = {"WWW-Authenticate": 'Bearer realm="arpc"'} if verdict.status == 401 else None
            response = _json({"error": verdict.reason}, status=verdict.status, headers=headers)
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = _json({"error": error.reason}, status=error.status)
        if not response.prepared:
            for name, value in _HEADERS.items():
                response.headers.setdefault(name, value)
        return response

    async def _login(self, request: web.Request) -> web.StreamResponse:
        try:
            async with asyncio.timeout(_FORM_S):
                typed = (await request.post()).get("secret", "")
        except (ValueError, TimeoutError):
            return _json({"error": "no form with a secret in it"}, status=400)
        # from here on the client cannot prolong the login
        if not self._login_attempts.begin(request.remote):
            error = "too many try to log in from this address: wait a moment"
            return _json({"error": error}, status=429, headers={"Retry-After": "1"})
        try:
            cookie = self._guard.login(typed) if isinstance(typed, str) else None
            if cookie is None:
                # a client that guesses has to wait, and other clients do not
                await asyncio.sleep(_LOGIN_DELAY_S)
                return web.Response(status=303, headers={"Location": "/login?wrong"})
        finally:
            self._login_attempts.end(request.remote)
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(
            COOKIE, cookie, max_age=SESSION_S, httponly=True, samesite="Strict", secure=request.secure, path="/"
        )
        return response

    async def _logout(self, _: web.Request) -> web.StreamResponse:
        response = web.Response(status=303, headers={"Location": "/login" if self._guard.needs_secret else "/"})
        response.del_cookie(COOKIE, path="/")
        return response

    # -- resources

    @staticmethod
    def _static(name: str) -> _Handler:
        path = _STATIC / name

        async def handler(_: web.Request) -> web.StreamResponse:
            return web.FileResponse(path, headers=_HEADERS)

        return handler

    async def _health(self, _: web.Request) -> web.StreamResponse:
        snapshot = self._metrics.inspector
        agent = snapshot.agent
        is_up = agent.is_serving and not agent.is_closing
        body = {"status": "ok" if is_up else "unavailable", "worker": snapshot.info.name, "version": __version__}
        return _json(body, status=200 if is_up else 503)

    async def _prometheus(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("scope") == "worker":
            snapshots = [self._metrics.snapshot()]
        else:
            snapshots = await self._metrics.snapshots()
        try:
            body, content_type = expose(snapshots, request.headers.get("Accept", ""))
        except UnsupportedError as error:
            return _json({"error": str(error)}, status=501)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _group(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=await self._feed.current(), content_type="application/json")

    async def _worker(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        for snapshot in await self._metrics.snapshots():
            if snapshot.name == name:
                return _json(snapshot)
        return _json({"error": f"no worker {name!r} answers in this group"}, status=404)

    async def _stack(self, _: web.Request) -> web.StreamResponse:
        return _json(await self._metrics.stacks())

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        try:
            limit = int(query.get("limit", "200"))
        except ValueError:
            return _json({"error": "limit must be a number of lines"}, status=400)
        limit = max(1, min(limit, MAX_LINES))
        answers = await self._metrics.group_logs(
            query.get("level", ""), query.get("search", ""), limit, query.get("worker", "")
        )
        found = ((line.time_s, one.worker, line) for one in answers for line in one.lines)
        lines = sorted(found, key=lambda row: row[:2])
        return _json([{"worker": worker, **msgspec.to_builtins(line)} for _, worker, line in lines[-limit:]])

    async def _errors(self, request: web.Request) -> web.StreamResponse:
        answers = await self._metrics.group_errors(request.query.get("worker", ""))
        rows = [{"worker": one.worker, **msgspec.to_builtins(entry)} for one in answers for entry in one.errors]
        return _json(sorted(rows, key=lambda row: -row["last_s"]))

    async def _history(self, request: web.Request) -> web.StreamResponse:
        answers = await self._metrics.group_history(request.query.get("worker", ""))
        return _json({"step_s": 10, "history": join_histories(one.history for one in answers)})

    async def _timeline(self, request: web.Request) -> web.StreamResponse:
        name, body = self._kept_trace or ("", b"")
        if not name or not secrets.compare_digest(request.match_info["name"].encode(), name.encode()):
            return _json({"error": "this trace is not kept any more: record another"}, status=404)
        response = web.Response(body=body, content_type="text/html", charset="utf-8")
        response.headers.update(_TRACE_HEADERS)
        return response

    def _keep_trace(self, body: bytes) -> str:
        """Keep a timeline for a while, in place of the one before, and return its path."""
        self._drop_trace()
        name = secrets.token_hex(16)
        self._kept_trace = (name, body)
        self._forget_trace = asyncio.get_running_loop().call_later(_KEEP_TRACE_S, self._drop_trace)
        return f"traces/{name}"

    def _drop_trace(self) -> None:
        self._kept_trace = None
        if self._forget_trace is not None:
            self._forget_trace.cancel()
            self._forget_trace = None

    async def _trace(self, request: web.Request) -> web.StreamResponse:
        keep = request.query.get("keep") == "1"
        form = request.query.get("form", "html" if keep else "json")
        try:
            if keep and form != "html":
                raise ConfigurationError("a trace that is kept is a page: form=html")
            body = await self._metrics.trace(float(request.query.get("seconds", "5")), form)
        except ValueError as error:
            status = 501 if isinstance(error, UnsupportedError) else 400
            return _json({"error": str(error)}, status=status)
        except OverloadedError as error:
            return _json({"error": str(error)}, status=409, headers={"Retry-After": "5"})
        if keep:
            return _json({"path": self._keep_trace(body)}, status=201)
        kind = "application/json" if form == "json" else "text/html"
        headers = {"Content-Disposition": f'attachment; filename="arpc-trace.{form}"'}
        return web.Response(body=body, content_type=kind, headers=headers)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send the summary once a second, as server-sent events."""
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        updates = self._feed.updates()
        try:
            async for update in updates:
                await response.write(b"data: " + update + b"\n\n")
        except ConnectionResetError:
            pass  # the client has disconnected
        finally:
            self._streams.discard(task)
            await updates.aclose()  # type: ignore[attr-defined]
        return response


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=_encode(value), status=status, content_type="application/json", headers=headers)


async def serve(options: RpcOptions, metrics: MetricsService) -> HttpServer | None:
    """Serve the dashboard of a worker's group. If the address is taken, log a warning and return None: work goes on."""
    server = HttpServer(options, metrics)
    name = metrics.inspector.info.name
    try:
        await server.start()
    except OSError as error:
        logger.warning(
            "worker %s cannot serve the dashboard on %s: %s",
            name,
            options.http,
            error.strerror or error,
            extra={"worker": name},
        )
        await server.aclose()
        return None
    except BaseException:
        await server.aclose()
        raise
    logger.info("worker %s serves the dashboard at %s", name, server.url, extra={"worker": name})
    return server
