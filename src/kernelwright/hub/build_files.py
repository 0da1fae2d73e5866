"""The build files of the compiled kernels, generated from the declared ops.

A *family* is all CUDA kernels of one op folder. For each: `cuda/<family>.inc` lists its instances,
`cuda/<family>.cu` compiles them by way of the hand-written `cuda/family.cuh`, and build.toml gets a
section. `cuda/families.h` declares all of them for `torch_binding.cpp`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..backends.cuda import CudaLaunch

ARCHS = ("7.5", "8.0", "8.9", "9.0", "10.0", "12.0")
# where the exported project keeps the headers of the ops
INCLUDE = "include"
SHARED = ("cuda/families.h", "cuda/family.cuh", "cuda/instances.h")
ORIGIN = "Written by `kernelwright hub source` from the declared ops."

# kernel-builder provides a header of this name; builds without it use this one
REGISTRATION = """#pragma once
#include <Python.h>
#include <torch/library.h>

// expands the macro that holds the extension's name before torch's macros see it
#define TORCH_LIBRARY_EXPAND(name, ops) TORCH_LIBRARY(name, ops)
#define LTX_JOINED(a, b) a##b
#define LTX_JOIN(a, b) LTX_JOINED(a, b)
#define LTX_QUOTED(a) #a
#define LTX_QUOTE(a) LTX_QUOTED(a)

// an empty Python module: importing it loads the library, which registers the ops
#define REGISTER_EXTENSION(name)                                                          \\
  PyMODINIT_FUNC LTX_JOIN(PyInit_, name)() {                                              \\
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, LTX_QUOTE(name), nullptr, 0, nullptr, \\
                                 nullptr, nullptr, nullptr, nullptr};                     \\
    return PyModule_Create(&module);                                                      \\
  }
"""


def build_files(
    families: Mapping[str, Sequence[CudaLaunch]], headers: Mapping[str, str], toml: str
) -> dict[str, str]:
    """Every generated file by its path. `headers` are the texts that kernels may include, `toml` is
    the hand-written part of build.toml."""
    files = {"cuda/families.h": families_header(families)}
    sections = [toml.rstrip() + "\n"]
    for family, launches in families.items():
        sources = sorted({launch.source for launch in launches})
        files[f"cuda/{family}.cu"] = translation_unit(family, sources)
        files[f"cuda/{family}.inc"] = listing(launches)
        sections.append(toml_section(family, included(sources, headers)))
    files["build.toml"] = "\n".join(sections)
    return files


def families_header(families: Iterable[str]) -> str:
    names = [f"family_{family}" for family in families]
    return (
        f'// {ORIGIN}\n#pragma once\n#include "instances.h"\n\n'
        f"extern const Family {', '.join(names)};\n"
        f"constexpr const Family* FAMILIES[] = {{{', '.join(f'&{name}' for name in names)}}};\n"
    )


def translation_unit(family: str, sources: Iterable[str]) -> str:
    """The .cu file of a family."""
    includes = "".join(f'#include "{source}"\n' for source in sources)
    return (
        f"// {ORIGIN}\n{includes}"
        f'#define FAMILY {family}\n#define INSTANCES "{family}.inc"\n#include "family.cuh"\n'
    )


def listing(launches: Sequence[CudaLaunch]) -> str:
    """The instances of a family, as `cuda/family.cuh` reads them."""
    return "".join(
        f"INSTANCE({i}, {launch.block}, {launch.arguments}, {launch.template})\n"
        for i, launch in enumerate(launches)
    )


def toml_section(family: str, headers: Iterable[str]) -> str:
    """The section of build.toml that has kernel-builder compile a family."""
    own = (f"cuda/{family}.cu", f"cuda/{family}.inc")
    sources = sorted((*SHARED, *own, *(f"{INCLUDE}/{header}" for header in headers)))
    listed = "".join(f'  "{source}",\n' for source in sources)
    capabilities = ", ".join(f'"{arch}"' for arch in ARCHS)
    return (
        f'[kernel.{family}]\nbackend = "cuda"\ndepends = []\nsrc = [\n{listed}]\n'
        f'include = ["cuda", "{INCLUDE}"]\ncuda-capabilities = [{capabilities}]\n'
    )


def included(sources: Iterable[str], headers: Mapping[str, str]) -> list[str]:
    """The headers `sources` and all that they include, directly or not."""
    found: dict[str, None] = {}
    left = list(sources)
    while left:
        header = left.pop()
        if header in headers and header not in found:
            found[header] = None
            folder = header.rpartition("/")[0]
            for name in re.findall(r'^ *# *include "(.*)"', headers[header], flags=re.M):
                left += [name, f"{folder}/{name}"]
    return sorted(found)
