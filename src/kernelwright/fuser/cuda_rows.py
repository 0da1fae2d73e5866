"""The head of a kernel, and where each of its threads finds its rows, as CUDA C++."""

from __future__ import annotations

from collections.abc import Sequence

from .cuda_kernel import ENTRY
from .cuda_steps import GRADIENTS, type_name
from .expression import Step, walk
from .row_layout import Access
from .row_orders import scratch_name
from .row_sharing import RowSharing


def include_lines(sharing: RowSharing) -> list[str]:
    """The headers with what a kernel calls."""
    return [
        '#include "ops/row/norms.cuh"',
        '#include "ops/gelu/cuda.cuh"',
        *(['#include "ops/row/eight.cuh"'] if sharing.eight else []),
        *(['#include "fuser/gradients.cuh"'] if _has_gradients(sharing) else []),
        "using namespace kernelwright;",
    ]


def head_lines(sharing: RowSharing, count: int, wide: bool) -> list[str]:
    """Up to the body of a kernel that takes `count` pointers, if `wide` with strides of 64 bits."""
    variables = max(len(sharing.shape.rows), 1)
    return [
        *include_lines(sharing),
        f"using Bytes = {'i64' if wide else 'unsigned long long'};",
        f"struct Args {{ void* at[{count}]; {'i64' if wide else 'unsigned'} "
        f"strides[{count}][{variables}]; Divisor extents[{variables}]; unsigned count; }};",
        f'extern "C" __global__ void __launch_bounds__({sharing.block})',
        f"{ENTRY}(const __grid_constant__ Args a) {{",
    ]


def row_lines(sharing: RowSharing, pointers: Sequence[Access]) -> list[str]:
    """Where the row of a thread lies."""
    lines = _row_of_many(sharing) if sharing.by_row else _row_of_one(sharing)
    extents = sharing.extents_of_rows
    for i in reversed(range(len(extents))):
        name = sharing.shape.rows[i]
        times = f" * {sharing.together}" if name == sharing.by else ""
        if extents[i] == 1:
            lines.append(f"  const unsigned {name} = 0;")
        elif i:
            lines.append(f"  const unsigned above{i} = a.extents[{i}].into(row);")
            inside = f"row - above{i} * a.extents[{i}].size"
            lines.append(f"  const unsigned {name} = ({inside}){times};")
            lines.append(f"  row = above{i};")
        else:
            lines.append(f"  const unsigned {name} = row{times};")
    for access in pointers:
        steps = [
            f" + (Bytes){name} * a.strides[{access.number}][{i}]"
            for i, name in enumerate(sharing.shape.rows)
            if access.strides[i]
        ]
        kind, begin = _type(sharing, access), first_row(sharing, access)
        address = f"(char*)a.at[{access.number}]{''.join(steps)}"
        lines.append(f"  {kind}* const {begin} = ({kind}*)({address});")
    for n in dict.fromkeys(sharing.orders.values()):
        floats = f"Scratch<{n}, S, {sharing.block}>::FLOATS"
        lines.append(f"  __shared__ float {scratch_name(n)}[{floats}];")
    return lines


def first_row(sharing: RowSharing, access: Access) -> str:
    """The pointer to the first row of a thread."""
    return f"begin{access.number}" if sharing.differs(access) else f"p{access.number}"


def _has_gradients(sharing: RowSharing) -> bool:
    steps = (e for e in walk(*(s.value for s in sharing.program.stores)) if isinstance(e, Step))
    return any(getattr(e.op, "overloadpacket", e.op) in GRADIENTS for e in steps)


def _type(sharing: RowSharing, access: Access) -> str:
    eight = any(access.name == made.rows for made in sharing.eight)
    return "unsigned char" if eight else type_name(access.dtype)


def _row_of_many(sharing: RowSharing) -> list[str]:
    """Which row a thread takes part in, and where its first vector begins."""
    rows = sharing.block // sharing.threads
    if rows == 1:
        number = ["  unsigned row = blockIdx.x;", "  constexpr bool live = true;"]
    else:
        number = [
            f"  const unsigned number = blockIdx.x * {rows} + threadIdx.x / {sharing.threads};",
            "  const bool live = number < a.count;",
            "  unsigned row = live ? number : a.count - 1;",
        ]
    return [
        f"  using S = Spread<{sharing.width}, {sharing.V}, {sharing.threads}>;",
        *number,
        f"  const unsigned first = S::thread() * {sharing.V};",
    ]


def _row_of_one(sharing: RowSharing) -> list[str]:
    """Which vector of which row a thread has."""
    many = sharing.rows * sharing.threads >= 2**31
    kind = "unsigned long long" if many else "unsigned"
    number = [f"  const {kind} number = ({kind})blockIdx.x * {sharing.block} + threadIdx.x;"]
    return [
        *([] if sharing.tables else number),
        f"  unsigned row = unsigned(number / {sharing.threads});",
        *([] if sharing.tables else ["  if (row >= a.count) return;"]),
        f"  const unsigned first = unsigned(number % {sharing.threads}) * {sharing.V};",
    ]
