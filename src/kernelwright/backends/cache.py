"""Compiled kernels on disk: content-addressed, private, published whole or not at all.

A file holds the SHA-256 of its payload and the payload. A truncated, foreign or tampered file is
rebuilt, never loaded; a folder that cannot be written costs a compile a process, with one warning.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

MAGIC = b"kernelwright-1\n"


class KernelCache:
    """Reads and writes kernels under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._warned = False

    @staticmethod
    @functools.lru_cache
    def default() -> KernelCache:
        """The folder of this user: $KERNELWRIGHT_CACHE, or kernelwright in the XDG cache folder."""
        named = os.environ.get("KERNELWRIGHT_CACHE")
        if named:
            return KernelCache(Path(named))
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return KernelCache(Path(home) / "kernelwright")

    @staticmethod
    def key(*parts: str) -> str:
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.cubin"

    def read(self, key: str) -> bytes | None:
        """The kernel, or None if there is none that can be trusted."""
        try:
            with open(self.path(key), "rb") as file:
                if not _private(os.fstat(file.fileno())):
                    return None
                data = file.read()
        except OSError:
            return None
        head = len(MAGIC) + 32
        payload = data[head:]
        if data[:head] != MAGIC + hashlib.sha256(payload).digest():
            return None
        return payload

    def write(self, key: str, payload: bytes) -> None:
        """Publish atomically: other processes see the whole file or none."""
        path = self.path(key)
        temporary = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent)  # mkstemp makes it 0600
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + hashlib.sha256(payload).digest() + payload)
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"kernelwright: cannot keep compiled kernels in {self.folder} ({error}); "
                    f"each process compiles anew. Set KERNELWRIGHT_CACHE to a writable folder.",
                    stacklevel=2,
                )

    def writable(self) -> bool:
        """Whether kernels can be kept here."""
        folder = self.folder
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _private(status: os.stat_result) -> bool:
    mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return mine and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
