"""Runs generated CUDA C++ without a GPU, as `kernelwright check` runs that of ops."""

import ctypes
import struct
import subprocess

from kernelwright.checking import emulator
from kernelwright.fuser import launching

AFTER = r"""
extern "C" void launch(const void* packed, unsigned grid, unsigned block) {
  static Args args;
  memcpy(&args, packed, sizeof args);
  launch_blocks([] { kernelwright_program(args); }, grid, block);
}
"""


def launched(kernel, tensors, folder):
    """Runs a kernel on CPU tensors, which have the names that its pointers have."""
    launch = launching.launch_of(kernel)
    source, library = folder / "kernel.cpp", folder / f"{abs(hash(kernel.code))}.so"
    source.write_text(emulator.GPU.read_text() + emulator.included(kernel.code, set()) + AFTER)
    subprocess.run(["g++", *emulator.FLAGS, "-o", library, source], check=True)
    places = [tensors[n].data_ptr() + o * tensors[n].element_size() for n, o in kernel.pointers]
    arguments = struct.pack(f"@{len(places)}P{launch.layout}0q", *places, *launch.scalars)
    ctypes.CDLL(str(library)).launch(arguments, launch.grid, launch.block)
