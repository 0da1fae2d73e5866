"""Linear layers of few rows on a GPU: as close to float64 as eager, and decoding with them."""

import pytest
import torch
from inject.language import model_of, words
from numerics import hold_case

import kernelwright as kw
from kernelwright.inject.fp8 import suitable_layers
from kernelwright.inject.verify import accuracy
from kernelwright.ops.case import Inputs
from kernelwright.ops.few_rows import EIGHT_BIT_LINEAR_FEW_ROWS, LINEAR_FEW_ROWS

pytestmark = pytest.mark.gpu
OPS = [LINEAR_FEW_ROWS, EIGHT_BIT_LINEAR_FEW_ROWS]
HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    ("op", "case"), [(op, c) for op in OPS for c in op.cases], ids=lambda x: x.name
)
def test_a_result_is_as_close_to_float64_as_eager_and_repeats(op, case, dtype):
    hold_case(op, case, dtype, lambda a: op.call(a, backend="cuda"), "cuda")
    given = case.arguments(Inputs(dtype, "cuda"))
    first = op.call(given, backend="cuda")
    assert all(torch.equal(op.call(given, backend="cuda"), first) for _ in range(3))


@pytest.mark.parametrize("graphs", [False, True], ids=["", "graphs"])
@pytest.mark.parametrize(("numerics", "most"), [("fused", 2**-6), ("fp8", 0.074)])
def test_tokens_are_decoded_near_eager(monkeypatch, numerics, most, graphs):
    monkeypatch.setattr(suitable_layers, "ROWS", 16)
    model = model_of("Llama", torch.bfloat16, hidden_size=128, intermediate_size=192).cuda()
    prompt = words(batch=1, tokens=24)["input_ids"].cuda()
    how = {
        "max_new_tokens": 8,
        "do_sample": False,
        "cache_implementation": "static",
        "output_logits": True,
        "return_dict_in_generate": True,
        "disable_compile": True,
    }
    eager = model.generate(prompt, **how)
    with kw.injected(model, numerics=numerics, graphs=graphs):
        for _ in range(2):
            near = model.generate(prompt, **how)
    # the second token is decoded from the same one in both, unless the prompt's logits were a tie
    for want, got in list(zip(eager.logits, near.logits, strict=True))[:2]:
        assert accuracy.error(got, want) <= most
