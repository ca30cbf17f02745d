"""On systems other than Linux: what they lack is hidden from a child process, which then imports and uses arpc.

This stands in for macOS. It shows that nothing depends on a name that only Linux has; it cannot show how the calls
that both systems have behave there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HIDING = """
import asyncio, ctypes, fcntl, mmap, os, resource, select, selectors, signal, socket, sys
import numpy, torch  # what they have read of /proc is not arpc's concern

ONLY_ON_LINUX = {
    os: "memfd_create MFD_ eventfd EFD_ pidfd_open PIDFD_ sched_getaffinity sched_setaffinity sched_setscheduler "
        "sched_getscheduler posix_fallocate posix_fadvise splice SPLICE_ copy_file_range getrandom GRND_ O_TMPFILE "
        "O_PATH O_DIRECT timerfd_ TFD_ unshare setns CLONE_ getxattr setxattr",
    socket: "SO_PEERCRED SO_BINDTODEVICE SO_MARK SO_INCOMING_CPU SOCK_CLOEXEC SOCK_NONBLOCK TCP_KEEPIDLE TCP_QUICKACK "
        "TCP_USER_TIMEOUT TCP_DEFER_ACCEPT MSG_NOSIGNAL MSG_CMSG_CLOEXEC MSG_ERRQUEUE AF_NETLINK AF_PACKET AF_VSOCK",
    signal: "sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT SIGPOLL pidfd_send_signal",
    mmap: "MAP_POPULATE MAP_NORESERVE MADV_DONTFORK MADV_DOFORK MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_REMOVE",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SEAL_ F_SETPIPE_SZ F_GETPIPE_SZ F_NOTIFY F_OFD_",
    resource: "prlimit RLIMIT_RTPRIO RLIMIT_SIGPENDING RLIMIT_MSGQUEUE RLIMIT_NICE",
    select: "epoll EPOLL",
}
hidden = 0
for module, prefixes in ONLY_ON_LINUX.items():
    for name in [name for name in vars(module) if name.startswith(tuple(prefixes.split()))]:
        delattr(module, name)
        hidden += 1
assert hidden > 60, hidden


def hide_files(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys", "/dev/shm")):
        raise FileNotFoundError(2, "no such file on this system", str(arguments[0]))


class NoLibrary:
    def __init__(self, name, *more, **options):
        self.library = ctypes_CDLL(name, *more, **options)

    def __getattr__(self, name):
        if name.startswith(("prctl", "fallocate", "timerfd", "memfd", "epoll", "eventfd")):
            raise AttributeError(name)
        return getattr(self.library, name)


sys.addaudithook(hide_files)
ctypes_CDLL, ctypes.CDLL = ctypes.CDLL, NoLibrary
selectors.DefaultSelector = selectors.PollSelector  # it was chosen when epoll was still there
sys.platform = "darwin"
"""

USING = """
import arpc
from arpc.launch.forking import can_fork
from arpc.testing import cluster
from torch.distributed import HashStore


def double(x):
    return x * 2


async def triple(x):
    return x * 3


async def count(stop):
    for number in range(stop):
        yield number


async def use(to):
    small, large = torch.arange(4.0), torch.arange(1 << 20)
    assert await arpc.rpc_sync(to, double, args=(21,)) == 42
    assert torch.equal(await arpc.rpc_sync(to, triple, args=(small,)), small * 3)
    assert torch.equal(await arpc.rpc_sync(to, double, args=(large,)), large * 2)
    assert [number async for number in arpc.stream(to, count, args=(3,))] == [0, 1, 2]
    rref = arpc.remote(to, double, args=(small,))
    assert torch.equal(await rref.to_here(), small * 2)
    async with arpc.autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        loss = (await arpc.rpc_sync(to, triple, args=(x,))).sum()
        await arpc.autograd.backward(context_id, [loss])
        assert torch.equal(arpc.autograd.get_gradients(context_id)[x], torch.full((3,), 3.0))


async def in_process():
    async with cluster(["a", "b"]):
        await use("b")


async def over(listen):
    store = HashStore()
    options = arpc.RpcOptions(gc_freeze=False, listen=listen)

    async def work(rank):
        async with arpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, store=store, options=options) as worker:
            assert worker.arena is None, "there is no shared memory"
            await use(f"worker{1 - rank}")

    await asyncio.gather(*(asyncio.create_task(work(rank)) for rank in range(2)))


async def main():
    assert not can_fork()
    await in_process()
    await over(("tcp://127.0.0.1:0",))
    await over(("unix://",))
    await over(())


LOOP
print("all is well")
"""

LOOPS = {
    "asyncio": "asyncio.run(main())",
    "arpc.run": "arpc.run(main)",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_arpc_works_without_what_only_linux_has(loop: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(HIDING + USING.replace("LOOP", LOOPS[loop]))
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all is well\n"
    assert not done.stderr


def test_windows_is_refused_with_what_is_supported() -> None:
    program = "import importlib.util, sys, typing; sys.platform = 'win32'; import arpc"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "ImportError: arpc runs on Linux and macOS, not on Windows. On a Windows machine, run it under WSL 2"
