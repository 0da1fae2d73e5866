"""Kernels on disk: whole or absent, private, and never in the way."""

import errno
import multiprocessing
import os
import stat
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from kernelwright.backends import cache as kept
from kernelwright.backends import cuda
from kernelwright.backends.cache import KernelCache

KEY = KernelCache.key("a kernel")
PAYLOAD = bytes(range(256)) * 8
CODE = 'extern "C" __global__ void entry(float* x) { x[threadIdx.x] *= 2.f; }\n'


@pytest.fixture
def cache(tmp_path):
    return KernelCache(tmp_path / "kernels")


@pytest.fixture
def blocked(tmp_path):
    """A folder that nobody can make, root included: its parent is a file."""
    (tmp_path / "file").write_text("")
    return KernelCache(tmp_path / "file" / "kernels")


def files(cache):
    return [p for p in cache.folder.rglob("*") if p.is_file()]


def test_what_was_written_is_read(cache):
    assert cache.read(KEY) is None
    cache.write(KEY, PAYLOAD)
    assert cache.read(KEY) == PAYLOAD
    assert files(cache) == [cache.path(KEY)]


def test_a_kernel_is_its_owners_alone(cache):
    cache.write(KEY, PAYLOAD)
    assert stat.S_IMODE(cache.path(KEY).stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.path(KEY).parent.stat().st_mode) == 0o700


def test_a_truncated_file_is_not_read(cache):
    cache.write(KEY, PAYLOAD)
    whole = cache.path(KEY).read_bytes()
    for size in (0, 1, len(kept.MAGIC), len(kept.MAGIC) + 32, len(whole) // 2, len(whole) - 1):
        cache.path(KEY).write_bytes(whole[:size])
        assert cache.read(KEY) is None, size


def test_a_foreign_or_changed_file_is_not_read(cache):
    cache.write(KEY, PAYLOAD)
    whole = cache.path(KEY).read_bytes()
    changed = bytearray(whole)
    changed[-1] ^= 1
    for content in (
        PAYLOAD,
        b"\x7fELF" + PAYLOAD,
        bytes(changed),
        whole + b"\0",
        b"older\n" + whole,
    ):
        cache.path(KEY).write_bytes(content)
        assert cache.read(KEY) is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_read(cache, mode):
    cache.write(KEY, PAYLOAD)
    cache.path(KEY).chmod(mode)
    assert cache.read(KEY) is None


def moved(cache, other):
    cache.path(KEY).rename(cache.path(other))


def linked(cache, other):
    os.link(cache.path(KEY), cache.path(other))


def copied(cache, other):
    cache.path(other).write_bytes(cache.path(KEY).read_bytes())
    cache.path(other).chmod(0o600)


@pytest.mark.parametrize("how", [moved, linked, copied])
def test_a_kernel_under_the_key_of_another_is_not_read_and_is_made_anew(cache, how):
    other = KernelCache.key("another kernel")
    cache.write(KEY, PAYLOAD)
    cache.path(other).parent.mkdir(mode=0o700, exist_ok=True)
    how(cache, other)
    assert cache.read(other) is None
    cache.write(other, PAYLOAD[::-1])
    assert cache.read(other) == PAYLOAD[::-1]
    assert cache.read(KEY) == (None if how is moved else PAYLOAD)


@pytest.mark.parametrize("below", [True, False], ids=["file", "folder"])
def test_a_link_is_not_followed(cache, tmp_path, below):
    """Neither in place of the file nor of the folder that holds it, whatever lies behind it."""
    place = cache.path(KEY) if below else cache.path(KEY).parent
    cache.write(KEY, PAYLOAD)
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert cache.read(KEY) is None
    if below:
        cache.write(KEY, PAYLOAD)
        assert not place.is_symlink()
        assert cache.read(KEY) == PAYLOAD


def test_the_cache_folder_itself_may_be_a_link_to_another_disk(cache, tmp_path):
    (tmp_path / "disk").mkdir(mode=0o700)
    cache.folder.symlink_to(tmp_path / "disk")
    cache.write(KEY, PAYLOAD)
    assert cache.read(KEY) == PAYLOAD
    assert files(KernelCache(tmp_path / "disk"))


def test_a_fifo_in_place_of_a_file_is_no_kernel_and_holds_nobody_up(cache):
    cache.write(KEY, PAYLOAD)
    cache.path(KEY).unlink()
    os.mkfifo(cache.path(KEY), 0o600)
    reader = threading.Thread(target=cache.read, args=(KEY,), daemon=True)
    reader.start()
    reader.join(timeout=60)
    assert not reader.is_alive()
    assert cache.read(KEY) is None
    cache.write(KEY, PAYLOAD)
    assert cache.read(KEY) == PAYLOAD


def test_a_folder_in_place_of_a_file_is_no_kernel(cache):
    cache.path(KEY).parent.mkdir(mode=0o700, parents=True)
    cache.path(KEY).mkdir(mode=0o700)
    assert cache.read(KEY) is None
    with pytest.warns(UserWarning, match="cannot keep compiled kernels"):
        cache.write(KEY, PAYLOAD)
    assert files(cache) == []


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
@pytest.mark.parametrize("below", [True, False], ids=["part", "whole"])
def test_a_folder_that_others_may_write_to_is_no_cache_and_costs_one_warning(cache, mode, below):
    cache.write(KEY, PAYLOAD)
    folder = cache.path(KEY).parent if below else cache.folder
    before = cache.path(KEY).stat()
    folder.chmod(mode)
    assert cache.read(KEY) is None
    assert cache.writable() is below
    with pytest.warns(UserWarning, match=r"others may write to it: chmod go-w.*KERNELWRIGHT_CACHE"):
        cache.write(KEY, PAYLOAD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.write(KEY, PAYLOAD)
    assert cache.path(KEY).stat() == before
    folder.chmod(0o700)
    assert cache.read(KEY) == PAYLOAD


@pytest.mark.parametrize("part", ["file", "part", "folder"])
def test_what_belongs_to_another_user_is_not_read(cache, monkeypatch, part):
    cache.write(KEY, PAYLOAD)
    path = cache.path(KEY)
    foreign = {"file": path, "part": path.parent, "folder": path.parent.parent}[part].stat().st_ino
    fstat = os.fstat

    def of_another(at):
        found = fstat(at)
        fields = list(found)
        fields[stat.ST_UID] += found.st_ino == foreign
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", of_another)
    assert cache.read(KEY) is None
    if part != "file":
        with pytest.warns(UserWarning, match="it belongs to user"):
            cache.write(KEY, PAYLOAD)


def test_what_is_too_large_for_a_kernel_is_neither_read_nor_kept(cache, monkeypatch):
    cache.write(KEY, PAYLOAD)
    size = cache.path(KEY).stat().st_size
    monkeypatch.setattr(kept, "MOST_BYTES", size)
    assert cache.read(KEY) == PAYLOAD
    monkeypatch.setattr(kept, "MOST_BYTES", size - 1)
    assert cache.read(KEY) is None
    with pytest.warns(UserWarning, match="a kernel of 2048 bytes"):
        cache.write(KEY, PAYLOAD)


def test_a_folder_that_can_only_be_read_serves_what_it_holds(cache, monkeypatch):
    cache.write(KEY, PAYLOAD)
    monkeypatch.setattr(os, "access", lambda folder, how: not how & os.W_OK)  # root may write
    assert cache.read(KEY) == PAYLOAD
    assert cache.problem() is None
    assert not cache.writable()


def test_a_folder_that_cannot_be_written_costs_one_warning(blocked):
    assert blocked.read(KEY) is None
    assert not blocked.writable()
    with pytest.warns(UserWarning, match="KERNELWRIGHT_CACHE"):
        blocked.write(KEY, PAYLOAD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blocked.write(KEY, PAYLOAD)


def test_a_full_disk_leaves_nothing_behind(cache, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        cache.write(KEY, PAYLOAD)
    assert files(cache) == []


def test_writable_asks_the_nearest_folder_there_is(cache, tmp_path):
    assert cache.writable()
    assert not cache.folder.exists()
    assert KernelCache(tmp_path).writable()


def test_readers_see_a_whole_kernel_or_none(cache):
    payloads = {n: bytes([n]) * 200_000 for n in range(4)}
    done = threading.Event()
    seen = []

    def read():
        while not done.is_set():
            data = cache.read(KEY)
            seen.append(data is None or data in payloads.values())

    reader = threading.Thread(target=read)
    reader.start()
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda i: cache.write(KEY, payloads[i % 4]), range(200)))
    done.set()
    reader.join()
    assert seen
    assert all(seen)
    assert files(cache) == [cache.path(KEY)]


class TestCompiling:
    """The same through NVRTC, which needs no GPU."""

    @pytest.fixture(autouse=True)
    def here(self, cache, monkeypatch):
        pytest.importorskip("cuda.core")
        monkeypatch.setattr(KernelCache, "default", staticmethod(lambda: cache))

    @pytest.fixture
    def built(self, monkeypatch):
        """The kernels that were really compiled."""
        made = []
        build = cuda.build

        def counting(code, arch, verbose=False):
            made.append((code, arch))
            return build(code, arch, verbose)

        monkeypatch.setattr(cuda, "build", counting)
        return made

    def test_a_kernel_is_compiled_once(self, built):
        first = cuda.compile_cubin(CODE, "sm_90")
        assert cuda.compile_cubin(CODE, "sm_90") == first
        assert first.startswith(b"\x7fELF")
        assert len(built) == 1

    def test_a_spoilt_file_is_compiled_again(self, cache, built):
        first = cuda.compile_cubin(CODE, "sm_90")
        (file,) = files(cache)
        file.write_bytes(file.read_bytes()[:-5])
        assert cuda.compile_cubin(CODE, "sm_90") == first
        assert cuda.compile_cubin(CODE, "sm_90") == first
        assert len(built) == 2

    def test_another_architecture_code_or_header_is_another_kernel(self, cache, built, monkeypatch):
        cuda.compile_cubin(CODE, "sm_90")
        cuda.compile_cubin(CODE, "sm_80")
        cuda.compile_cubin(CODE.replace("2.f", "3.f"), "sm_90")
        assert len(built) == len(files(cache)) == 3
        changed = {n: t + "// edited\n" for n, t in cuda.headers().items()}
        monkeypatch.setattr(cuda, "headers", lambda: changed)
        cuda.fingerprint.cache_clear()
        try:
            cuda.compile_cubin(CODE, "sm_90")
        finally:
            cuda.fingerprint.cache_clear()
        assert len(built) == len(files(cache)) == 4

    def test_an_unwritable_folder_does_not_stop_it(self, blocked, built, monkeypatch):
        monkeypatch.setattr(KernelCache, "default", staticmethod(lambda: blocked))
        with pytest.warns(UserWarning, match="each process compiles anew"):
            first = cuda.compile_cubin(CODE, "sm_90")
        assert first.startswith(b"\x7fELF")

    def test_an_error_in_the_code_is_shown(self):
        with pytest.raises(RuntimeError, match=r"NVRTC could not compile for sm_90(.|\n)*nonsense"):
            cuda.compile_cubin("nonsense here;", "sm_90")

    def test_threads_that_need_the_same_kernel_compile_it_once(self, cache, built):
        with ThreadPoolExecutor(8) as pool:
            cubins = list(pool.map(lambda _: cuda.compile_cubin(CODE, "sm_90"), range(16)))
        assert len(set(cubins)) == 1
        assert len(built) == 1
        assert files(cache) == [next(iter(files(cache)))]

    def test_processes_that_need_the_same_kernel_all_get_it(self, cache):
        context = multiprocessing.get_context("fork")  # to import PyTorch again takes seconds
        together = context.Barrier(3)
        with context.Pool(3, _start, (str(cache.folder), together)) as pool:
            cubins = pool.map(_compile, range(3), chunksize=1)
        assert len(set(cubins)) == 1
        assert len(files(cache)) == 1
        assert cuda.compile_cubin(CODE, "sm_90") == cubins[0]


def _start(folder, together):
    os.environ["KERNELWRIGHT_CACHE"] = folder
    _compile.together = together


def _compile(_):
    _compile.together.wait(timeout=120)
    return cuda.compile_cubin(CODE, "sm_90")


def test_kernels_are_compiled_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELWRIGHT_CACHE", str(tmp_path))
    together = threading.Barrier(2, timeout=30)

    def build(code, arch):
        together.wait()  # nobody gets past it alone
        return code.encode(), ""

    monkeypatch.setattr(cuda, "build", build)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda code: cuda.compile_cubin(code, "sm_90"), ["a", "b"]))
    assert found == [b"a", b"b"]
