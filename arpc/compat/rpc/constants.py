"""The constants of torch.distributed.rpc."""

from datetime import timedelta

DEFAULT_RPC_TIMEOUT_SEC: float = 60.0
DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS: int = 16
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)
UNSET_RPC_TIMEOUT: float = -1.0

# torch has these four under both names
_DEFAULT_INIT_METHOD = DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = UNSET_RPC_TIMEOUT

__all__: list[str] = []
