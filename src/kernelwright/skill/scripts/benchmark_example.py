"""LTX-Video from prompt to frames: plain diffusers and the kernels, compared and timed.

    python benchmark_example.py --tiny                                   seconds, on a CPU too
    python benchmark_example.py --num-frames 49 --steps 30               eager and exact+graphs
    python benchmark_example.py --config compile,exact+graphs,fused+graphs --out video.json
    python benchmark_example.py --use-optimized-kernels --model Lightricks/LTX-Video

This is `kernelwright bench video`, with the same options.
"""

import typer

from kernelwright.commands.video import bench_video

if __name__ == "__main__":
    typer.run(bench_video)
