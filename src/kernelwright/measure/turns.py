"""Several measurements on one machine at once: each has it to itself while it takes times.

Compiling and building models take longer than timing them. Processes that were started together by
`tools/record_results.py --jobs N` do these side by side; one that times stops the others meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# names the file whose lock the timing process holds
VARIABLE = "KERNELWRIGHT_TURNS"
SETTLE = 0.5  # seconds in which the GPU ends what processes had started before they were stopped


def taken() -> bool:
    """Whether this process takes its times in turns with others."""
    return VARIABLE in os.environ


@contextmanager
def alone() -> Iterator[None]:
    """Stop the other processes of the same parent; does nothing without VARIABLE."""
    if not taken():
        yield
        return
    with locked(Path(os.environ[VARIABLE])):
        others = [pid for pid in children(os.getppid()) if pid != os.getpid()]
        try:
            send(signal.SIGSTOP, others)
            time.sleep(SETTLE)
            yield
        finally:
            send(signal.SIGCONT, others)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def children(parent: int) -> list[int]:
    """The processes that were started by any thread of this one."""
    return [
        int(pid)
        for task in Path(f"/proc/{parent}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]


def send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
