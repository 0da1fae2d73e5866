"""Several measurements on one machine at once: each has it to itself while it takes times.

Compiling and building models take longer than timing them. Processes that were started together by
`tools/record_results.py --jobs N` do these side by side; one that times stops the others meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# names the file whose lock the timing process holds
VARIABLE = "KERNELWRIGHT_TURNS"
SETTLE = 0.5  # seconds after which the GPU is asked whether it still works for those stopped
# they may have launched seconds of work: a forward of Wan takes half a second
LONGEST = 10.0


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
            _settle()
            yield
        finally:
            send(signal.SIGCONT, others)


def _settle() -> None:
    """Wait until the GPU has done what processes had launched before they were stopped."""
    end = time.monotonic() + LONGEST
    time.sleep(SETTLE)
    while _is_busy() and time.monotonic() < end:
        time.sleep(SETTLE / 2)


def _is_busy() -> bool:
    """Whether a GPU is working, as far as nvidia-smi knows."""
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=LONGEST, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return any(line.strip() not in ("0", "[N/A]") for line in said.stdout.splitlines())


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
