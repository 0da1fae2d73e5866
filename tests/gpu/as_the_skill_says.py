"""softcap, cap · tanh(x / cap), made from the template as the skill's pages tell."""

from pathlib import Path

from plugged import change

from kernelwright.scaffold import Created, create

NAMES = {"triton": "softcap_in_triton", "cuda": "softcap_in_cuda"}

TANH = """@triton.jit
def tanh(b_u):
    b_z = b_u * b_u
    b_p = -0.00840731623 + b_z * 0.00237205864
    b_p = -0.0539609327 + b_z * (0.0217858579 + b_z * b_p)
    b_p = -0.333333331 + b_z * (0.133333075 + b_z * b_p)
    b_t = tl.exp(-2.0 * tl.abs(b_u))
    b_far = 1.0 - tl.div_rn(2.0 * b_t, 1.0 + b_t)
    b_far = tl.where(b_u < 0.0, -b_far, b_far)
    return tl.where(b_z < 0.36, b_u + b_u * b_z * b_p, b_far)


@triton.jit(do_not"""


def make(language: str, out: Path) -> Created:
    """A package of the op in this language."""
    name = NAMES[language]
    made = create(name, language, "elementwise", out)
    folder = out / "src" / name
    change(folder / "reference.py", "x * torch.sigmoid(x * beta)", "beta * torch.tanh(x / beta)")
    eager = "input * torch.sigmoid(input * beta)"
    change(folder / "reference.py", eager, "beta * torch.tanh(input / beta)")
    example = "tensor([ 0.0000, 17.4835, 29.9999])"
    change(folder / "__init__.py", "tensor([0.0000, 0.8458, 1.9357])", example)
    change(folder / "__init__.py", "[0.0, 1.0, 2.0]", "[0.0, 20.0, 200.0]")
    change(folder / "__init__.py", "x · sigmoid(beta · x)", "beta · tanh(x / beta)")
    if language == "triton":
        change(folder / "triton.py", "@triton.jit(do_not", TANH)
        change(folder / "triton.py", "b_x * tl.sigmoid(beta * b_x)", "beta * tanh(b_x / beta)")
    else:
        _cuda(folder)
    for file in folder.iterdir():
        if file.suffix in (".py", ".cuh"):
            text = file.read_text().replace("1.702", "30.0").replace('"beta": 1.0', '"beta": 50.0')
            file.write_text(text.replace("BETA", "CAP").replace("beta", "cap"))
    return made


def _cuda(folder: Path) -> None:
    header, launch = folder / "cuda.cuh", folder / "cuda.py"
    text = header.read_text()
    loop = text[text.index("    const float z") : text.index("  });\n  y.store")]
    computed = "    const float u = Round::mul(x.get(i), inverse);\n"
    computed += "    return Round::mul(Round::keep(tanhf(u)), args.beta);\n"
    change(header, loop, computed)
    change(
        header, "  Vec<X, V> x, y;", "  const float inverse = 1.f / args.beta;\n  Vec<X, V> x, y;"
    )
    change(header, "ops/glu/cuda.cuh", "backends/common.cuh")
    change(header, "int DIMS, bool FAST, class", "int DIMS, class")
    change(launch, "{len(rows.sizes)}, {fast}, ", "{len(rows.sizes)}, ")
    text = launch.read_text()
    fast = text[text.index("    # the fast exp") : text.index("    return CudaLaunch")]
    change(launch, fast, "")
