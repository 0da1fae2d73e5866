"""What to check before a benchmark: the package, an idle GPU, a folder for results.

python diffusion_env.py                             all of it, and whether the machine is usable
python diffusion_env.py root                        the folder of kernelwright
python diffusion_env.py idle-gpus --count 2         their indices, for CUDA_VISIBLE_DEVICES
python diffusion_env.py output-dir --kind profiles  created in the working folder
"""

import argparse
import sys
from pathlib import Path

import kernelwright
from kernelwright import doctor
from kernelwright.gpus import nvidia_smi


def root() -> Path:
    """The folder of the imported kernelwright: a checkout, or site-packages."""
    return Path(kernelwright.__file__).parent


def idle_gpus(count: int) -> list[int]:
    """The first idle GPUs by nvidia-smi's index; exits if there are fewer than `count`."""
    idle = [gpu.index for gpu in nvidia_smi()[1] if gpu.idle]
    if len(idle) < count:
        sys.exit(f"diffusion_env: {len(idle)} of {count} GPUs are idle: wait, or ask for fewer")
    return idle[:count]


def output_folder(kind: str) -> Path:
    folder = Path("outputs") / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(
            f"diffusion_env: {folder} cannot be created ({error.strerror}): run in another folder"
        )
    return folder.resolve()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", nargs="?", default="all", choices=("all", "root", "idle-gpus", "output-dir")
    )
    parser.add_argument("--count", type=int, default=1, help="how many idle GPUs")
    parser.add_argument("--kind", default="benchmarks", choices=("benchmarks", "profiles"))
    args = parser.parse_args()
    if args.what == "root":
        print(root())
    elif args.what == "idle-gpus":
        print(",".join(map(str, idle_gpus(args.count))))
    elif args.what == "output-dir":
        print(output_folder(args.kind))
    else:
        found = doctor.examine()
        idle = [gpu.index for gpu in found.gpus if gpu.idle]
        print(f"kernelwright {kernelwright.__version__} in {root()}")
        print(f"torch {found.torch}, triton {found.triton}, NVRTC {found.nvrtc}")
        print(f"GPUs {', '.join(g.name for g in found.gpus) or 'none'}; idle {idle or 'none'}")
        print(found.problem or "usable")
        return 0 if found.usable else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
