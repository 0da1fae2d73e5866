"""The kernels in a diffusers pipeline: inspect, inject, generate, compare bits, restore.

python ltx_kernel_injection_example.py                                random weights, tiny
python ltx_kernel_injection_example.py --full                         random weights, 2B
python ltx_kernel_injection_example.py --model Lightricks/LTX-Video   yours, a folder or an id
"""

import argparse
import sys

import torch

import kernelwright as kw
from kernelwright import models
from kernelwright.errors import BadSetting, CannotRun
from kernelwright.inject.engine import NUMERICS
from kernelwright.place import choose_device, choose_dtype


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="LTX-Video 2B, not the tiny model")
    parser.add_argument("--model", help="a folder, or an id on the Hub")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; by default an idle GPU")
    parser.add_argument("--numerics", default="exact", choices=NUMERICS)
    parser.add_argument("--graphs", action="store_true", help="replay the denoiser as a CUDA graph")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps is {args.steps}, expected 2 or more")
    tiny = not (args.full or args.model)
    try:
        device = choose_device(args.device, tiny=tiny)
    except (BadSetting, CannotRun) as error:
        sys.exit(f"ltx_kernel_injection_example: {error}")
    dtype = choose_dtype(None, device)
    if args.model:
        from diffusers import LTXPipeline

        pipe = LTXPipeline.from_pretrained(args.model, torch_dtype=dtype).to(device)
    else:
        pipe = models.ltx_pipeline(tiny=tiny, dtype=dtype, device=device)
    size = {"num_frames": 9, "height": 64, "width": 96}
    if not tiny:
        size = {"num_frames": 25, "height": 480, "width": 704}

    def latents() -> torch.Tensor:
        return pipe(
            "a boat on a lake",
            **size,
            num_inference_steps=args.steps,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        ).frames

    print(kw.inspect(pipe, numerics=args.numerics).summary)
    eager = latents()
    report = kw.inject(pipe, numerics=args.numerics, graphs=args.graphs)
    fused = latents()
    print(report)
    same = torch.equal(fused, eager)
    print("the bits of eager" if same else f"largest difference {(fused - eager).abs().max():.3g}")
    print(f"restored {kw.restore(pipe)} modules")
    back = torch.equal(latents(), eager)
    print("the bits of eager again" if back else "restored, and yet other bits")
    return 0 if back and (same or args.numerics != "exact") else 1


if __name__ == "__main__":
    sys.exit(main())
