"""cuDNN's fp8 attention through nvidia-cudnn-frontend (the extra `cudnn`): a peer to time ours by.

On Hopper it takes one scale a tensor and writes e4m3, so its result still has to be widened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..fp8.reference import DTYPE, LARGEST


def available() -> str | None:
    """Why it cannot run, or None if it can."""
    try:
        import cudnn  # noqa: F401
    except ImportError:
        return "nvidia-cudnn-frontend is not installed: pip install 'kernelwright[cudnn]'"
    return None


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in fp8 with one scale, [1, 1, 1, 1]."""
    largest = x.abs().amax().float().view(1, 1, 1, 1)
    return (x * (LARGEST / largest)).to(DTYPE), largest / LARGEST


def plan(like: Tensor, scale: float) -> Callable[..., Tensor]:
    """A function of query, key and value in fp8 [B, H, S, D] and their three scales, for tensors of
    the shape and strides of `like`; it returns e4m3 in the units of value's scale."""
    import cudnn

    handle = cudnn.create_handle()
    kinds = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=kinds.FP8_E4M3,
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
        handle=handle,
    )
    shape, strides = list(like.shape), list(like.stride())

    def tensor(name: str) -> Any:
        return graph.tensor(name=name, dim=shape, stride=strides, data_type=kinds.FP8_E4M3)

    def number(name: str) -> Any:
        ones = [1, 1, 1, 1]
        return graph.tensor(name=name, dim=ones, stride=ones, data_type=kinds.FLOAT)

    q, k, v = map(tensor, "qkv")
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    numbers = {name: number(name) for name in names}
    out, _, amax_s, amax_o = graph.sdpa_fp8(
        q=q, k=k, v=v, **numbers, is_inference=True, attn_scale=scale, use_causal_mask=False
    )
    out.set_output(True).set_dim(shape).set_stride(strides).set_data_type(kinds.FP8_E4M3)
    for most in (amax_s, amax_o):
        most.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(kinds.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    device = like.device
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
    result = torch.empty_strided(like.shape, like.stride(), dtype=DTYPE, device=device)
    most_s, most_o = torch.empty(2, 1, 1, 1, 1, device=device)
    of_p = torch.full((1, 1, 1, 1), 256.0, device=device)

    def run(query: Tensor, key: Tensor, value: Tensor, *scales: Tensor) -> Tensor:
        given = {q: query, k: key, v: value, out: result, amax_s: most_s, amax_o: most_o}
        values = (*scales, 1 / of_p, of_p, 1 / scales[2])
        given |= dict(zip(numbers.values(), values, strict=True))
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph.execute(given, workspace, handle=handle)
        return result

    return run
