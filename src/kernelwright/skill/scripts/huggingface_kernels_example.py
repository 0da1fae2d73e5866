"""Hugging Face Kernels: build our package, check it, load it, kernelize a model with it.

    python huggingface_kernels_example.py                       no network, no GPU needed
    python huggingface_kernels_example.py --use kernels-community/activation@v1    asks the Hub

Needs `pip install 'kernelwright[models,hub]'`.
"""

import argparse
import copy
import sys
import tempfile
from pathlib import Path

import torch

import kernelwright as kw
from kernelwright import models
from kernelwright.errors import BadSetting, CannotRun
from kernelwright.ops.rmsnorm import rmsnorm
from kernelwright.place import choose_device


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; by default an idle GPU")
    parser.add_argument("--out", type=Path, help="keep the package in this folder")
    parser.add_argument("--use", metavar="REPO@vN", help="try a kernel from the Hub in our ops")
    args = parser.parse_args()
    try:
        from kernels import Mode, get_local_kernel

        device = choose_device(args.device, tiny=True)
    except (BadSetting, CannotRun, ImportError) as error:
        sys.exit(f"huggingface_kernels_example: {error}")

    with tempfile.TemporaryDirectory() as temporary:
        package = args.out or Path(temporary)
        variant = "torch-cuda" if device.type == "cuda" else "torch-cpu"
        for built in kw.hub.build(package, [variant]):
            print(f"built {built.variant}: {built.files} files")
        failures = kw.hub.check(package)
        print("nothing the Hub would refuse" if not failures else "\n".join(map(str, failures)))

        kernel = get_local_kernel(package)
        x = torch.randn(4, 64, device=device)
        right = torch.equal(kernel.rmsnorm(x), rmsnorm(x))
        print(f"loaded {kernel.__name__}: rmsnorm is {'ours' if right else 'another'}")

        model = models.build("llama-3-8b", tiny=True, dtype=torch.float32, device=device)
        words = torch.arange(16, device=device)[None]
        with torch.no_grad():
            with kw.injected(model, numerics="fused"):
                expected = model(words).logits
            ours = kw.hub.kernelize(
                copy.deepcopy(model), mode=Mode.INFERENCE, package=package, device=device.type
            )
            close = torch.allclose(ours(words).logits, expected, rtol=1e-5, atol=1e-5)
        print(f"kernelized: the logits are {'those of inject' if close else 'others'}")

    if args.use:
        repository, _, version = args.use.partition("@v")
        print(kw.hub.use(repository, version=int(version or 1), device=device.type))
        kw.hub.release()
    return 0 if right and close and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
