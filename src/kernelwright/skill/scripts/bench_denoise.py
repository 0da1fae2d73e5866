"""One denoising step of diffusion models: eager, torch.compile and the kernels, saved by label.

python bench_denoise.py --tiny --model ltx-video               seconds, on a CPU too
python bench_denoise.py --model ltx-video --label before       before a change of a kernel
python bench_denoise.py --model ltx-video --label after        and after it, then:
kernelwright compare outputs/benchmarks/before.json outputs/benchmarks/after.json
"""

import argparse
import sys
from pathlib import Path

from kernelwright import models
from kernelwright.bench import models as bench
from kernelwright.bench.models_table import notes, table
from kernelwright.commands.wide_tables import show
from kernelwright.errors import BadSetting, CannotRun

PRESETS = [p.name for p in models.presets().values() if p.library == "diffusers"]
CONFIGS = "eager,compile,exact,exact+graphs,fused+graphs"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=PRESETS, help="may be repeated")
    parser.add_argument("--all", action="store_true", help="every diffusion preset")
    parser.add_argument("--config", default=CONFIGS, help="what to compare, comma-separated")
    parser.add_argument("--label", default="run", help="the name of the result file")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/benchmarks"))
    parser.add_argument("--tiny", action="store_true", help="small models of the same kind")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; by default an idle GPU")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="time spent on each configuration"
    )
    args = parser.parse_args()
    names = PRESETS if args.all else args.model or ["ltx-video"]
    out = args.output_dir / f"{args.label}.json"
    try:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        rows = bench.run(
            names,
            args.config.split(","),
            {},
            tiny=args.tiny,
            device=args.device,
            seconds=args.seconds,
            out=out,
        )
    except (BadSetting, CannotRun, OSError, ValueError) as error:
        sys.exit(f"bench_denoise: {error}")
    show(table(rows), notes(rows))
    print(f"written to {out}")
    return 1 if any("failed" in row and "unavailable" not in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
