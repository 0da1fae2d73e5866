"""Rewrites constraints.txt with the newest versions that fit together: `make pins`.

    python tools/refresh_pins.py [TORCH]

uv resolves the package and the extras of a checkout for Python 3.10 and newer on Linux. torch is
not resolved: its version is a decision, since the bits of exact modes depend on it, and its CUDA
build would bring gigabytes that the CPU build does not need. It stays, or becomes TORCH.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "constraints.txt"
EXTRAS = ("cuda", "models", "video", "bench", "dev")
# the CUDA build of torch pins these itself; the Makefile leaves them out beside it
CUDA = re.compile(r"(triton|cuda-|nvidia-)")
PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;]+)(?: *; *(?P<marker>.*))?")

TEXT = """\
# exact versions for development; the ranges the package itself accepts are in pyproject.toml
# `make pins` writes this file
torch=={torch}

# beside the cpu build of torch. the cuda build pins these itself, so the Makefile leaves them out
{cuda}

{others}
"""


def main(torch: str | None) -> None:
    before = FILE.read_text()
    pinned = re.search(r"^torch==(\S+)$", before, flags=re.M)
    assert pinned is not None, f"{FILE} pins no torch"
    text = written(torch or pinned[1], resolved())
    FILE.write_text(text)
    for line in changes(before, text):
        print(line)


def resolved() -> str:
    """What uv finds, one requirement per line."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        # leaves torch out; what its CPU build needs is asked for in its place
        (place / "overrides.txt").write_text("torch; python_version < '3'\n")
        (place / "requirements.in").write_text("\n".join(needs_of_torch()) + "\n")
        options = ["--universal", "--upgrade", "--quiet", "--python-version", "3.10"]
        options += ["--no-header", "--no-annotate", "--no-strip-markers"]
        options += ["--override", str(place / "overrides.txt")]
        options += [part for extra in EXTRAS for part in ("--extra", extra)]
        sources = [str(ROOT / "pyproject.toml"), str(place / "requirements.in")]
        command = [sys.executable, "-m", "uv", "pip", "compile", *options, *sources]
        return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def needs_of_torch() -> list[str]:
    """The requirements of the installed torch, without those of CUDA and of extras."""
    needs = metadata.requires("torch") or []
    return [need for need in needs if "extra ==" not in need and not CUDA.match(need)]


def written(torch: str, found: str) -> str:
    """The text of constraints.txt."""
    matches = [m for line in found.splitlines() if (m := PIN.fullmatch(line.strip())) is not None]
    times = Counter(m["name"] for m in matches)
    pins = [pin(m, alone=times[m["name"]] == 1) for m in matches if m["name"] != "torch"]
    cuda = [p for p in pins if CUDA.match(p)]
    others = [p for p in pins if not CUDA.match(p)]
    return TEXT.format(torch=torch, cuda="\n".join(cuda), others="\n".join(others))


def pin(match: re.Match[str], alone: bool) -> str:
    """A line of uv as a constraint. A package with one version needs no marker: a constraint does
    not install it."""
    text = f"{match['name']}=={match['version']}"
    marker = re.sub(r"( and |^)sys_platform == 'linux'", "", match["marker"] or "")
    return text if alone or not marker else f"{text}; {marker}"


def changes(before: str, after: str) -> list[str]:
    """The pins that went and came, by name."""
    old, new = (set(text.splitlines()) for text in (before, after))
    lines = [f"- {line}" for line in old - new] + [f"+ {line}" for line in new - old]
    return sorted((x for x in lines if "==" in x), key=lambda x: (x[2:], x[0] == "+")) or [
        "nothing newer"
    ]


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
