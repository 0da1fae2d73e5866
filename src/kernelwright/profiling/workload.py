"""The forward that is profiled: in this process, or for nsys and ncu in its own.

`python -m kernelwright.profiling.workload PRESET --config exact` warms up and then runs one forward
between cudaProfilerStart and cudaProfilerStop.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import models
from ..measure.configs import configured
from ..place import DTYPES

# the second forward captures CUDA graphs; from the third on all are alike
WARM_UP = 3


@dataclass(frozen=True)
class Workload:
    """A preset of one size on one device."""

    preset: str
    device: str = "cuda"
    tiny: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def describe(self) -> dict[str, Any]:
        known = models.presets()[self.preset]
        defaults = known.tiny_sizes if self.tiny else known.sizes
        return {
            "model": self.preset,
            "tiny": self.tiny,
            "sizes": {**defaults, **self.sizes},
            "dtype": self.dtype_name,
            "device": self.device,
        }

    @contextmanager
    def warm(self, config: str) -> Iterator[Callable[[], Any]]:
        """The forward of a new model in this configuration, after its warm-up."""
        gc.collect()  # free the model of an earlier call
        build: dict[str, Any] = {"tiny": self.tiny, "device": self.device, "dtype": self.dtype}
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.on_gpu:
                stack.enter_context(torch.cuda.device(self.device))
            inputs = models.inputs(self.preset, **{**build, **self.sizes})
            model = models.build(self.preset, **build)
            run, _ = configured(model, config, stack)
            for _ in range(WARM_UP):
                run(**inputs)
            yield lambda: run(**inputs)

    def command(self, config: str) -> list[str]:
        """The command line that runs this in its own process."""
        sizes = [f"{name}={size}" for name, size in self.sizes.items()]
        return [
            *(sys.executable, "-m", "kernelwright.profiling.workload", self.preset),
            *("--config", config, "--device", self.device, "--dtype", self.dtype_name),
            *(["--tiny"] if self.tiny else []),
            *(["--size", *sizes] if sizes else []),
        ]


def check(preset: str, tiny: bool, sizes: dict[str, int]) -> None:
    """Raise a ValueError for a preset or a size that does not exist."""
    given: dict[str, Any] = {"tiny": tiny, **sizes}
    models.inputs(preset, **given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("--config", default="eager")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--size", nargs="*", default=[], metavar="NAME=N")
    args = parser.parse_args()
    sizes = {name: int(size) for name, _, size in (s.partition("=") for s in args.size)}
    workload = Workload(args.preset, args.device, args.tiny, sizes, getattr(torch, args.dtype))
    with workload.warm(args.config) as forward:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        forward()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
