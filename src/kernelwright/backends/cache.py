"""Compiled kernels on disk: content-addressed, private, written atomically.

A file holds the payload after a SHA-256 of its key and payload. A file that is truncated, tampered
with, or belongs to another user or key is rebuilt, never loaded. If the folder is not writable, or
others may write to it, each process compiles its kernels, with one warning.

Kernels are code, so owner and mode of each folder and file are checked after opening it: what is
read is what was checked, even if the name points elsewhere by then.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAGIC = b"kernelwright-2\n"
HEAD = len(MAGIC) + hashlib.sha256().digest_size
# our cubins have 6 to 18 kB on sm_90: a file larger than this is not one
MOST_BYTES = 64 << 20


class KernelCache:
    """Reads and writes kernels under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._warned = False

    @staticmethod
    @functools.lru_cache
    def default() -> KernelCache:
        """$KERNELWRIGHT_CACHE; else kernelwright in the XDG cache folder or in ~/.cache; else a
        folder of the user's own in the folder for temporary files."""
        named = os.environ.get("KERNELWRIGHT_CACHE")
        if named:
            return KernelCache(Path(named))
        usual = [KernelCache(folder) for folder in _usual_folders()]
        return next((cache for cache in usual if cache.problem() is None), usual[0])

    @staticmethod
    def key(*parts: str) -> str:
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def path(self, key: str, kind: str = "cubin") -> Path:
        return self.folder / key[:2] / f"{key}.{kind}"

    def read(self, key: str, kind: str = "cubin") -> bytes | None:
        """The kernel, or what else was kept, or None if no trusted file has it."""
        name = self.path(key, kind).name
        try:
            with self._open(key) as parent, _opened(name, os.O_RDONLY, parent) as at:
                size = os.fstat(at).st_size
                if size > MOST_BYTES:
                    return None
                with open(at, "rb", closefd=False) as file:
                    data = file.read(size)
        except OSError:
            return None
        payload = data[HEAD:]
        return payload if data[:HEAD] == _head(key, payload) else None

    def write(self, key: str, payload: bytes, kind: str = "cubin") -> None:
        """Write atomically: other processes see the complete file or none."""
        try:
            if HEAD + len(payload) > MOST_BYTES:
                raise OSError(errno.EFBIG, f"a kernel of {len(payload)} bytes")
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._open(key, make=True) as parent:
                _publish(parent, self.path(key, kind).name, _head(key, payload) + payload)
        except OSError as error:
            if not self._warned:
                self._warned = True
                # here, so that this file also runs outside of its package
                from .user_warnings import warn

                warn(
                    f"cannot keep compiled kernels in {self.folder} ({error}); each "
                    f"process compiles anew. Set KERNELWRIGHT_CACHE to a folder that you own, that "
                    f"is writable and that nobody else may write to."
                )

    def problem(self) -> str | None:
        """Why kernels cannot be read or written here, or None."""
        try:
            with _opened(self.folder, os.O_RDONLY | os.O_DIRECTORY):
                return None
        except FileNotFoundError:
            return None if _writable(self._nearest()) else f"{self.folder} cannot be made"
        except OSError as error:
            return str(error)

    def writable(self) -> bool:
        """Whether kernels can be written here."""
        return self.problem() is None and _writable(self._nearest())

    def _nearest(self) -> Path:
        """The folder itself, or its nearest parent that exists."""
        folder = self.folder
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return folder

    @contextmanager
    def _open(self, key: str, make: bool = False) -> Iterator[int]:
        """The folder that holds a key's file. The cache folder may be a symlink, say to another
        disk; below it symlinks are not followed."""
        part = self.path(key).parent.name
        with _opened(self.folder, os.O_RDONLY | os.O_DIRECTORY) as folder:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=folder)
            with _opened(part, os.O_RDONLY | os.O_DIRECTORY, folder) as found:
                yield found


@contextmanager
def _opened(name: str | Path, flags: int, parent: int | None = None) -> Iterator[int]:
    """Open a file or folder of this user that nobody else may write to, or raise OSError."""
    # O_NONBLOCK: opening a FIFO would block until someone writes to it
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
    """Write a temporary file and rename it to `name`; remove it if that fails."""
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
    """The header of a file. Keys have one length, so key and payload cannot be split otherwise."""
    return MAGIC + hashlib.sha256(MAGIC + key.encode() + payload).digest()


def _usual_folders() -> Iterator[Path]:
    """The default folders. XDG's specification says to ignore a relative XDG_CACHE_HOME; `~` is not
    expanded without HOME and an entry in the user database."""
    homes = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")
    yield from (Path(home) / "kernelwright" for home in homes if os.path.isabs(home))
    try:
        temporary = tempfile.gettempdir()
    except OSError:  # no temporary folder is writable
        temporary = os.path.abspath(os.sep)
    yield Path(temporary) / f"kernelwright-{os.geteuid()}"


def _writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
