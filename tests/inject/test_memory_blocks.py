"""Weights of the tier "fp8" are slices of large blocks: in eight bits of a GPU's memory, in 16 bits
of pinned memory."""

import threading
from weakref import ref

import pytest
import torch

import kernelwright as kw
from kernelwright import models
from kernelwright.inject.fp8 import memory_blocks, pinned_memory, suitable_layers
from kernelwright.inject.fp8.memory_blocks import ALIGNED, GpuBlocks, MemoryBlocks, joined
from kernelwright.inject.fp8.weights import Pack


def noting(sizes, device="cpu"):
    """Allocates, and notes how much; on "meta" it takes no memory."""

    def allocate(size):
        sizes.append(size)
        return torch.zeros(size, dtype=torch.uint8, device=device)

    return allocate


def test_slices_are_aligned_and_apart(monkeypatch):
    monkeypatch.setattr(memory_blocks, "SMALLEST", 2**10)
    monkeypatch.setattr(memory_blocks, "LARGEST", 2**12)
    sizes = []
    blocks = MemoryBlocks(noting(sizes))
    asked = [(100, 0), (700, 9), (300, 2**11), (5000, 1), (10, 1), (2000, 2**13), (1000, 1)]
    taken = [blocks.take(*sizes) for sizes in asked]
    for number, piece in enumerate(taken, 1):
        piece.fill_(number)
    assert [int(t.float().mean()) for t in taken] == list(range(1, 8))
    assert all((t.storage_offset() % ALIGNED) == 0 for t in taken)
    # large slices are blocks of their own, and the others go on in theirs
    assert sizes == [2**10, 2**11, 5000, 2000]


@pytest.mark.parametrize("most", [1, 4, 20, 100])
def test_little_of_the_blocks_stays_empty(most):
    sizes, generator = [], torch.Generator().manual_seed(0)
    blocks = MemoryBlocks(noting(sizes, "meta"))
    asked = (torch.rand(200, generator=generator) * most * 2**20).int().tolist()
    for size in asked:
        blocks.take(size, sum(asked) // memory_blocks.BLOCKS)
    assert sum(sizes) == blocks.total < 1.2 * sum(asked)


class Pages(bytearray):
    """Memory whose end can be seen."""


def test_a_block_is_freed_with_its_last_slice(monkeypatch):
    monkeypatch.setattr(memory_blocks, "SMALLEST", 2**10)
    pages = [Pages(2**10), Pages(2**10)]
    given = iter(pages)
    first_block = ref(pages[0])
    blocks = MemoryBlocks(lambda size: torch.frombuffer(next(given), dtype=torch.uint8))
    *in_first, in_second = (blocks.take(256, 0) for _ in range(5))
    pages.clear()
    last = in_first[2]
    del in_first
    assert first_block() is not None
    del last
    assert first_block() is None
    in_second.fill_(1)


def test_threads_get_slices_of_their_own():
    blocks, taken = MemoryBlocks(noting([])), []

    def take():
        taken.extend(blocks.take(ALIGNED, 0) for _ in range(200))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({t.data_ptr() for t in taken}) == 1600


def test_neighbours_are_joined_without_a_copy():
    memory = GpuBlocks()
    given = [torch.randn(rows, 64).to(torch.float8_e4m3fn) for rows in (16, 32, 48)]
    a, b, c = (memory.copy_of(t) for t in given)
    whole = joined([a, b, c])
    assert whole.shape == (96, 64)
    assert whole.data_ptr() == a.data_ptr()
    assert torch.equal(whole.float(), torch.cat([t.float() for t in given]))
    assert joined([a, c]) is None
    assert joined([b, a]) is None
    assert joined([a, b.clone()]) is None


def test_a_copy_takes_the_place_of_another_of_its_size():
    memory = GpuBlocks()
    first = memory.copy_of(torch.ones(4, 64).to(torch.float8_e4m3fn))
    second = memory.copy_of(torch.full((4, 64), 7, dtype=torch.int8), instead=first)
    assert second.dtype == torch.int8
    assert second.data_ptr() == first.data_ptr()
    assert (second == 7).all()
    other = memory.copy_of(torch.full((4, 32), 7, dtype=torch.int8), instead=first)
    assert other.data_ptr() != first.data_ptr()


@pytest.mark.parametrize("preset", ["ltx-video", "flux-dev"])
def test_layers_that_share_a_product_share_its_memory(preset, monkeypatch):
    monkeypatch.setattr(suitable_layers, "ROWS", 4)
    packs, made = [], Pack.of

    def of(*args):
        packs.append(made(*args))
        return packs[-1]

    monkeypatch.setattr(Pack, "of", staticmethod(of))
    model = models.build(preset, tiny=True, device="cpu", dtype=torch.float32)
    inputs = models.inputs(preset, tiny=True, device="cpu", dtype=torch.float32)
    with kw.injected(model, numerics="fp8"), torch.no_grad():
        model(**inputs)
        assert packs
        for pack in packs:
            begin = pack.layers[0].weight.data_ptr()
            assert pack.weight.data_ptr() == begin
            assert pack.layers[-1].weight.data_ptr() > begin


class Cudart:
    """Notes what CUDA is asked to lock."""

    def __init__(self):
        self.locked = {}

    def cudaHostRegister(self, address, size, flags):
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0


def test_pinned_blocks_are_unlocked_when_their_last_slice_is_gone(monkeypatch):
    monkeypatch.setattr(memory_blocks, "SMALLEST", 2**16)
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    memory = pinned_memory.PinnedMemory()
    weights = [torch.randn(48, 64), torch.randn(24, 64), torch.randn(100, 70).bfloat16()]
    slices = [memory.like(w).copy_(w) for w in weights]
    assert list(cudart.locked.values()) == [2**16]
    # the last one finds no room in the first block
    slices.extend(memory.like(weights[0]) for _ in range(3))
    assert list(cudart.locked.values()) == [2**16, 2**16]
    assert all(map(torch.equal, slices, weights))
    first = slices[1]
    del memory, slices
    assert len(cudart.locked) == 1
    assert torch.equal(first, weights[1])
    del first
    assert not cudart.locked


def test_memory_that_cannot_be_locked_is_plain(monkeypatch):
    cudart = Cudart()
    cudart.cudaHostRegister = lambda address, size, flags: 2
    cleared = []
    monkeypatch.setattr(pinned_memory, "_clear_error", lambda: cleared.append(True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    weight = torch.randn(8, 8)
    assert torch.equal(pinned_memory.PinnedMemory().like(weight).copy_(weight), weight)
    assert cleared
