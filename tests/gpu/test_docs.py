"""The blocks of the documentation on a GPU: those that need one, and all others of Python."""

import pytest
import torch
from blocks import blocks, documents
from running import run

BLOCKS = [
    block
    for path in documents()
    for block in blocks(path)
    if block.gpu or block.language == "python"
]


@pytest.mark.gpu
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_a_block_runs_on_a_gpu(block, tmp_path):
    if "from kernels import" in block.text:
        pytest.importorskip("kernels")
    # a command that names no device looks for an idle GPU, which one is not that other tests use,
    # unless its process uses a GPU already
    torch.cuda.init()
    run(block, tmp_path)
