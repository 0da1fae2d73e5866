"""Which folder kernels are kept in: there is one for every user, home or not."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kernelwright.backends import cache as kept
from kernelwright.backends.cache import KernelCache

# a process of a user whom nobody knows. root becomes one, others pretend
NOBODY = """
import os, pwd, runpy, sys, warnings

KernelCache = runpy.run_path(sys.argv[1])["KernelCache"]

def unknown(user):
    raise KeyError(user)

if os.getuid() == 0:
    os.setgroups([])
    os.setgid(54321)
    os.setuid(54321)
pwd.getpwuid = unknown
warnings.simplefilter("error")
cache, key = KernelCache.default(), KernelCache.key("a kernel")
cache.write(key, b"its code")
assert cache.read(key) == b"its code"
assert cache.writable()
print(cache.folder)
"""


@pytest.fixture
def usual(monkeypatch):
    """The folder that is taken with these variables set and the others of its kind not."""

    def folder(**variables):
        for name in ("KERNELWRIGHT_CACHE", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        return KernelCache.default.__wrapped__().folder

    return folder


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """There is no entry for this user; temporary files go to a folder of the test."""

    def unknown(user):
        raise KeyError(user)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"kernelwright-{os.geteuid()}"


@pytest.mark.parametrize("xdg", [None, "", "relative/folder"])
def test_a_process_without_home_and_user_entry_keeps_kernels(xdg):
    variables = {} if xdg is None else {"XDG_CACHE_HOME": xdg}
    # not a folder of pytest's, which no other user may enter
    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o1777)
        done = subprocess.run(
            [sys.executable, "-c", NOBODY, kept.__file__],
            env={"TMPDIR": shared, **variables},
            cwd=shared,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        folder = Path(done.stdout.strip())
        assert [str(folder)] == [entry.path for entry in os.scandir(shared)]
        status = folder.stat()
    assert folder.name == f"kernelwright-{status.st_uid}"
    assert stat.S_IMODE(status.st_mode) == 0o700


def test_the_folders_by_their_variables(usual, nobody, tmp_path):
    home, xdg = tmp_path / "home", tmp_path / "xdg"
    assert usual(KERNELWRIGHT_CACHE=tmp_path / "named", XDG_CACHE_HOME=xdg) == tmp_path / "named"
    assert usual(XDG_CACHE_HOME=xdg, HOME=home) == xdg / "kernelwright"
    assert usual(HOME=home) == home / ".cache" / "kernelwright"
    for relative in ("", "folder", "./folder"):
        assert usual(XDG_CACHE_HOME=relative, HOME=home) == home / ".cache" / "kernelwright"
        assert usual(XDG_CACHE_HOME=relative) == nobody
    assert usual(HOME="relative") == nobody
    assert usual() == nobody


def test_a_home_that_cannot_be_written_leaves_temporary_files(usual, nobody, tmp_path):
    (tmp_path / "file").write_text("")
    assert usual(HOME=tmp_path / "file" / "home") == nobody
    # a folder named by a person is theirs to mend, and no other is taken for it
    assert usual(KERNELWRIGHT_CACHE=tmp_path / "file" / "x") == tmp_path / "file" / "x"


def test_a_temporary_folder_that_somebody_else_made_is_not_taken_for_ones_own(usual, nobody):
    nobody.mkdir()
    nobody.chmod(0o777)
    cache = KernelCache(usual())
    assert cache.folder == nobody
    key = KernelCache.key("a kernel")
    with pytest.warns(UserWarning, match="others may write to it"):
        cache.write(key, b"its code")
    assert list(nobody.iterdir()) == []


def test_no_temporary_folder_at_all_is_no_crash(usual, nobody, monkeypatch):
    def none():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    assert usual() == Path("/") / nobody.name
