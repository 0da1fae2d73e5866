"""RMSNorm by itself: our kernels, F.rms_norm, torch.compile and other libraries.

    python benchmark_rmsnorm.py                             the seven shapes that models have
    python benchmark_rmsnorm.py --shape 2x1024x2048 --dtype float16,bfloat16

Only a result that is as close to float64 as F.rms_norm's is timed. GB/s is compared with a copy of
as many bytes in the same run. Without a GPU one small shape runs, to show the output format.
"""

import argparse
import sys

import torch

from kernelwright.bench import ops
from kernelwright.bench.ops_table import notes, table
from kernelwright.bench.peers import PEERS
from kernelwright.commands.wide_tables import show
from kernelwright.errors import BadSetting, CannotRun

PRESETS = ("seed", "ltx", "llama")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", action="append", default=[], help="rows and width, such as 2x1024x2048"
    )
    parser.add_argument("--dtype", default="", help="bfloat16, float16, float32, comma-separated")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; by default an idle GPU")
    parser.add_argument("--seconds", type=float, default=0.1, help="time for each kernel and shape")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available() and args.device != "cpu"
    try:
        rows, missing = ops.run(
            ["rmsnorm"],
            presets=PRESETS if on_gpu and not args.shape else (),
            shapes=args.shape,
            dtypes=args.dtype.split(",") if args.dtype else (),
            device=args.device,
            seconds=args.seconds,
        )
    except (BadSetting, CannotRun) as error:
        sys.exit(f"benchmark_rmsnorm: {error}")
    peers = [PEERS[name].column for name in ops.default_peers(rows[0]["device"])]
    show(table(rows, peers), notes(rows))
    for line in missing:
        print(line, file=sys.stderr)
    return 1 if ops.failures(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
