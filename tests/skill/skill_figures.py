"""The tables of the skill, from `results/`: `python tests/skill/skill_figures.py` updates them.

They are the same as in the documentation.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

import figures  # noqa: E402  from docs

from kernelwright.report import readme_tables  # noqa: E402

RESULTS = ROOT / "results" / "h200"
REFERENCES = ROOT / "src" / "kernelwright" / "skill" / "references"


def models() -> str:
    return readme_tables.models(RESULTS / "models")


def op_times() -> str:
    return figures.op_times(RESULTS)


# a page, the name of its section, and the function that generates it
SECTIONS = (
    (REFERENCES / "benchmark-and-profile.md", "models", models),
    (REFERENCES / "h100-optimization-guide.md", "op-times", op_times),
)


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"


def update() -> None:
    for page, name, make in SECTIONS:
        begin, end = marks(name)
        before, _, rest = page.read_text(encoding="utf-8").partition(begin)
        text = f"{before}{begin}{make()}\n{end}{rest.partition(end)[2]}"
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    update()
