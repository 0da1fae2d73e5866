"""Training of every preset, tiny, on the CPU: are loss, gradients and the weights after some steps
of AdamW eager's, bit for bit?

    python tests/training_presets.py [--steps 20] [NAME ...]

Takes about an hour on two cores for all; the test suite has a few of them.
"""

import argparse
import sys
import warnings

import torch
from inject.trained import differing, gradients, preset, steps, twice

import kernelwright as kw
from kernelwright import models


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=models.presets())
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    wrong = 0
    for name in given.names:
        for dtype in (torch.float32, torch.bfloat16):
            inputs = models.inputs(name, tiny=True, dtype=dtype)
            for lora in (False, True):
                eager, ours = twice(preset(name, lora, dtype))
                report = kw.inject(ours)
                expected = gradients(eager, inputs)
                bad = [n for _ in range(2) for n in differing(gradients(ours, inputs), expected)]
                losses = steps(eager, inputs, given.steps), steps(ours, inputs, given.steps)
                weights = differing(eager.state_dict(), ours.state_dict())
                good = not bad and torch.equal(*losses) and not weights
                wrong += not good
                kind = "LoRA" if lora else "full"
                word = "equal" if good else f"differs: {[*bad, *weights][:4]}"
                print(f"{name} {kind} {dtype}: {len(expected) - 1} gradients, {word}", flush=True)
                for line in report.gradients:
                    if "kernels" in line:
                        print(f"  {line}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
