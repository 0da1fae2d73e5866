"""Compiled kernels on disk: content-addressed, private, published whole or not at all.

A file holds a SHA-256 of its key and its payload, and the payload. What is truncated, foreign,
tampered with or kept under another key is rebuilt, never loaded; a folder that cannot be written,
or that others may write to, costs a compile a process, with one warning.

A kernel is code, so everything on the way to one is opened first and asked then whose it is: what
is checked is what is read, whatever is put under its name meanwhile.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import secrets
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAGIC = b"kernelwright-2\n"
HEAD = len(MAGIC) + hashlib.sha256().digest_size
# cubins of our kernels have 6 to 18 kB for sm_90: what is larger than this is none
MOST_BYTES = 64 << 20


class KernelCache:
    """Reads and writes kernels under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._warned = False

    @staticmethod
    @functools.lru_cache
    def default() -> KernelCache:
        """The folder of this user: $KERNELWRIGHT_CACHE, or else kernelwright in the XDG cache
        folder or in ~/.cache, or else one of the user's own beside other temporary files."""
        named = os.environ.get("KERNELWRIGHT_CACHE")
        if named:
            return KernelCache(Path(named))
        usual = [KernelCache(folder) for folder in _usual_folders()]
        return next((cache for cache in usual if cache.problem() is None), usual[0])

    @staticmethod
    def key(*parts: str) -> str:
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.cubin"

    def read(self, key: str) -> bytes | None:
        """The kernel, or None if there is none that can be trusted."""
        try:
            with self._open(key) as parent, _opened(self.path(key).name, os.O_RDONLY, parent) as at:
                size = os.fstat(at).st_size
                if size > MOST_BYTES:
                    return None
                with open(at, "rb", closefd=False) as file:
                    data = file.read(size)
        except OSError:
            return None
        payload = data[HEAD:]
        return payload if data[:HEAD] == _head(key, payload) else None

    def write(self, key: str, payload: bytes) -> None:
        """Publish atomically: other processes see the whole file or none."""
        try:
            if HEAD + len(payload) > MOST_BYTES:
                raise OSError(errno.EFBIG, f"a kernel of {len(payload)} bytes")
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._open(key, make=True) as parent:
                _publish(parent, self.path(key).name, _head(key, payload) + payload)
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"kernelwright: cannot keep compiled kernels in {self.folder} ({error}); each "
                    f"process compiles anew. Set KERNELWRIGHT_CACHE to a folder that you own, that "
                    f"is writable and that nobody else may write to.",
                    stacklevel=2,
                )

    def problem(self) -> str | None:
        """Why no kernels can be read or kept here, or None."""
        try:
            with _opened(self.folder, os.O_RDONLY | os.O_DIRECTORY):
                return None
        except FileNotFoundError:
            return None if _writable(self._nearest()) else f"{self.folder} cannot be made"
        except OSError as error:
            return str(error)

    def writable(self) -> bool:
        """Whether kernels can be kept here."""
        return self.problem() is None and _writable(self._nearest())

    def _nearest(self) -> Path:
        """The folder itself, or the nearest one above it that there is."""
        folder = self.folder
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return folder

    @contextmanager
    def _open(self, key: str, make: bool = False) -> Iterator[int]:
        """The folder that holds a key's file. The cache folder may be a link: a person may have put
        it on another disk. Below it there are none."""
        part = self.path(key).parent.name
        with _opened(self.folder, os.O_RDONLY | os.O_DIRECTORY) as folder:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=folder)
            with _opened(part, os.O_RDONLY | os.O_DIRECTORY, folder) as found:
                yield found


@contextmanager
def _opened(name: str | Path, flags: int, parent: int | None = None) -> Iterator[int]:
    """A file or folder of this user that nobody else may write to; raises OSError for any other."""
    # O_NONBLOCK: a FIFO would wait for someone to write
    flags |= os.O_NONBLOCK | os.O_CLOEXEC
    if parent is not None:
        flags |= os.O_NOFOLLOW
    at = os.open(name, flags, dir_fd=parent)
    try:
        status = os.fstat(at)
        wanted = stat.S_ISDIR if flags & os.O_DIRECTORY else stat.S_ISREG
        if not wanted(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(name))
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"it belongs to user {status.st_uid}", str(name))
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            why = f"others may write to it: chmod go-w {name}"
            raise PermissionError(errno.EPERM, why, str(name))
        yield at
    finally:
        os.close(at)


def _publish(parent: int, name: str, content: bytes) -> None:
    """Write a file beside its place and move it there; leaves nothing behind if that fails."""
    temporary = f"{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    at = os.open(temporary, flags, 0o600, dir_fd=parent)
    try:
        with open(at, "wb") as file:
            file.write(content)
        os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=parent)
        raise


def _head(key: str, payload: bytes) -> bytes:
    """What a file begins with. The key is of one length, so no other key and payload give it."""
    return MAGIC + hashlib.sha256(MAGIC + key.encode() + payload).digest()


def _usual_folders() -> Iterator[Path]:
    """Where kernels go if nobody says. A relative XDG_CACHE_HOME is to be ignored, as its
    specification says; without HOME and an entry in the user database `~` stays as it is."""
    homes = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")
    yield from (Path(home) / "kernelwright" for home in homes if os.path.isabs(home))
    try:
        temporary = tempfile.gettempdir()
    except OSError:  # not one that can be written
        temporary = os.path.abspath(os.sep)
    yield Path(temporary) / f"kernelwright-{os.geteuid()}"


def _writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
