"""A stand-in for cuBLASLt that computes on the CPU, column-major as the real one.

It is called through ctypes' own objects and reads and writes at the addresses it is given, so its
results are right only if layouts, descriptors and addresses are.
"""

import ctypes
from dataclasses import astuple, dataclass, field

import torch
import torch.nn.functional as F

from kernelwright.ops.linear import algorithms
from kernelwright.ops.linear.configurations import Configuration
from kernelwright.ops.linear.cublaslt import Found

TYPES = {2: torch.float16, 14: torch.bfloat16}
NOT_SUPPORTED = 15


@dataclass
class Known:
    """An algorithm. `adds`: the error of its result; `of`: its configuration, on Hopper; `named`:
    whether the heuristic lists it, or it must be requested by number."""

    us: float
    adds: float = 0
    workspace: int = 0
    status: int = 0
    of: Configuration | None = None
    named: bool = True


@dataclass
class CublasLt:
    """The functions of the library that are used. `torch_us`: the time of F.linear."""

    known: list[Known]
    torch_us: float = 100
    version: int = 130_100
    capability: tuple[int, int] = (9, 0)
    answers: dict = field(default_factory=dict)  # the status to return, by function name
    launched: list = field(default_factory=list)  # number of the algorithm, address of the bias
    checked: list = field(default_factory=list)  # configurations that were requested
    things: dict = field(default_factory=dict)
    made: int = 0
    ran: int | None = None

    def _make(self, name, at, **thing):
        if name in self.answers:
            return self.answers[name]
        self.made += 1
        at._obj.value = self.made
        self.things[self.made] = thing
        return 0

    def _set(self, thing, attribute, at, size):
        assert size.value == ctypes.sizeof(at._obj)
        self.things[thing.value][attribute] = at._obj.value
        return 0

    def _destroy(self, thing):
        del self.things[thing.value]
        return 0

    def cublasLtGetVersion(self):
        return self.version

    def cublasLtCreate(self, at):
        return self._make("cublasLtCreate", at)

    def cublasLtMatrixLayoutCreate(self, at, kind, rows, columns, apart):
        facts = {"dtype": TYPES[kind], "rows": rows.value, "columns": columns.value}
        return self._make("cublasLtMatrixLayoutCreate", at, apart=apart.value, **facts)

    def cublasLtMatmulDescCreate(self, at, compute, scale):
        assert (compute, scale) == (68, 0)
        return self._make("cublasLtMatmulDescCreate", at)

    def cublasLtMatmulPreferenceCreate(self, at):
        return self._make("cublasLtMatmulPreferenceCreate", at)

    cublasLtMatmulDescSetAttribute = cublasLtMatmulPreferenceSetAttribute = _set
    cublasLtMatrixLayoutDestroy = cublasLtMatmulDescDestroy = _destroy
    cublasLtMatmulPreferenceDestroy = _destroy

    def cublasLtMatmulAlgoGetHeuristic(
        self, handle, description, a, b, c, d, preference, asked, found, count
    ):
        assert self.things[preference.value] == {1: 32 << 20}
        named = [(number, one) for number, one in enumerate(self.known) if one.named][:asked]
        for place, (number, one) in zip(found, named, strict=False):
            place.algorithm[0] = number
            place.workspace, place.status = one.workspace, one.status
            for word, part in enumerate(astuple(one.of) if one.of else (), 1):
                place.algorithm[word] = part
        count._obj.value = len(named)
        return self.answers.get("cublasLtMatmulAlgoGetHeuristic", 0)

    def cublasLtMatmulAlgoConfigGetAttribute(self, algorithm, attribute, at, size, written):
        assert size.value == ctypes.sizeof(at._obj) == (2 if attribute == 8 else 4)
        words = algorithm._obj.algorithm
        values = {0: 66 if words[1] else 7, 1: words[1], 5: words[2], 8: words[3]}
        at._obj.value = values[attribute]
        return 0

    def cublasLtMatmulAlgoConfigSetAttribute(self, algorithm, attribute, at, size):
        assert size.value == ctypes.sizeof(at._obj) == (2 if attribute == 8 else 4)
        algorithm._obj.algorithm[{1: 1, 5: 2, 8: 3}[attribute]] = at._obj.value
        return 0

    def cublasLtMatmulAlgoCheck(self, handle, description, a, b, c, d, algorithm, result):
        words = algorithm._obj.algorithm
        of = Configuration(*words[1:4]) if words[1] else None
        self.checked.append(of)
        for number, one in enumerate(self.known):
            if one.of == of and (of or number == words[0]):
                words[0] = number
                result._obj.workspace = one.workspace
                return 0
        return NOT_SUPPORTED

    def cublasLtMatmul(
        self, handle, description, one, a, a_is, b, b_is, zero, c, c_is, d, d_is, algorithm, room,
        room_bytes, stream,
    ):  # fmt: skip
        found = algorithm._obj
        assert isinstance(found, Found)
        number = found.algorithm[0]
        known, wanted = self.known[number], self.things[description.value]
        assert (one._obj.value, zero._obj.value, c.value) == (1, 0, d.value)
        assert room_bytes.value == known.workspace
        assert bool(room.value) == bool(known.workspace)
        self.launched.append((number, wanted.get(8)))
        self.ran = number
        if "cublasLtMatmul" in self.answers:
            return self.answers["cublasLtMatmul"]
        first, second, out = (
            self._columns(*matrix) for matrix in ((a, a_is), (b, b_is), (d, d_is))
        )
        # the columns of `first` are rows of the weight if it is marked as transposed, else columns
        first = first if wanted.get(3) else first.t()
        second = second.t() if wanted.get(4) else second
        bias = None
        if wanted.get(7):
            bias = _memory(wanted[8], len(first), first.dtype)
        # the columns of a matrix are the rows of a tensor
        y = F.linear(second, first, bias)
        if wanted.get(7) == 36:  # as torch._addmm_activation on a CPU
            y = F.gelu(y)
        out.copy_(y + known.adds)
        return 0

    def _columns(self, at, layout):
        """A matrix as a tensor whose rows are its columns."""
        facts = self.things[layout.value]
        rows, columns, apart = facts["rows"], facts["columns"], facts["apart"]
        memory = _memory(at.value, (columns - 1) * apart + rows, facts["dtype"])
        return memory.as_strided((columns, rows), (apart, 1))

    def readings(self, ways, rounds):
        """Fake times instead of CUDA events: the known time of each algorithm."""
        times = []
        for way in ways:
            self.ran = None
            way()
            times.append(self.torch_us if self.ran is None else self.known[self.ran].us)
        return times


def _memory(at, elements, dtype):
    held = (ctypes.c_char * (elements * dtype.itemsize)).from_address(at)
    return torch.frombuffer(held, dtype=dtype)


def operands(rows=(6,), width=32, outputs=16, bias=True, dtype=torch.bfloat16):
    x, weight = torch.randn(*rows, width, dtype=dtype), torch.randn(outputs, width, dtype=dtype)
    return x, weight, torch.randn(outputs, dtype=dtype) if bias else None


def decided():
    """The decision for the only GEMM."""
    (decision,) = algorithms.decisions()
    return decision


def untouched(library, call):
    """Whether this call runs F.linear although an algorithm was chosen."""
    before = len(library.launched)
    call()
    return len(library.launched) == before
