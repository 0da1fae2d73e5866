"""What an agent is given: the request in a few lines, and where to put the package."""

from __future__ import annotations

from .requests import Request

NAMES = {"triton": "Triton", "cuda": "CUDA C++"}
GRADIENT = "Its gradients are computed by a kernel too: declare `backward=`.\n"


def prompt(request: Request, language: str, folder: str = ".") -> str:
    """The text for the agent. The skill must be installed where it looks: `skill add`."""
    gradient = GRADIENT if request.by_kernels(language) else ""
    return (
        f"Use the skill cuda-kernels. Add an op {request.name} in {NAMES[language]}, as a package "
        f"of its own in {folder}/{request.name}:\n"
        f"{request.name}({request.signature}) = {request.asks}.\n{gradient}"
        f"float16, bfloat16 and float32; rows [..., D] of any strides; names and defaults of the "
        f"arguments as above. Say what you have checked, and what you could not.\n"
    )
