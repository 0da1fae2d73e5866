"""Profiling: kernels by category, level 1, and the command."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from kernelwright.checking.planned_kernels import kernels
from kernelwright.commands.profile import profile
from kernelwright.measure import results
from kernelwright.ops.declared_ops import internal
from kernelwright.ops.op import Op, registry
from kernelwright.profiling import level1, nsight
from kernelwright.profiling.categories import (
    CATEGORIES,
    KernelTime,
    by_category,
    category,
    largest_others,
    split,
)
from kernelwright.profiling.our_kernels import is_ours, launched_by
from kernelwright.profiling.record import record
from kernelwright.profiling.workload import Workload
from kernelwright.report import page, read

NAMES = {
    "nvjet_sm90_tst_176x128_64x5_1x2_h_bz_coopA_bias_TNN": "GEMM",
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_gelubias_TNN": "GEMM",
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn": "GEMM",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16>(Params)": "GEMM",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams)": "GEMM",
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc": "GEMM",
    "triton_tem_fused_addmm_gelu_3": "GEMM",
    "aten::addmm": "GEMM",
    "aten::mkldnn_convolution": "GEMM",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x128x128": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)": "attention",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9>": "attention",
    "attention_kernel": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>": "norm",
    "void at::native::RowwiseMomentsCUDAKernel<c10::BFloat16>(long, float)": "norm",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps<float>>>": "norm",
    "void vectorized_elementwise_kernel<4, at::native::rsqrt_kernel_cuda(TensorIterator)>": "norm",
    "kernelwright_row": "norm",
    "row_kernel": "norm",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2": "norm",
    "aten::native_layer_norm": "norm",
    "aten::_fused_rms_norm": "norm",
    "void elementwise_kernel<128, 4, CUDAFunctor_add<c10::BFloat16>>(int, T)": "modulation",
    "void elementwise_kernel<128, 2, BinaryFunctor<float, MulFunctor<float>>>": "modulation",
    "triton_poi_fused_add_mul_1": "modulation",
    "aten::mul": "modulation",
    "aten::add_": "modulation",
    "kernelwright_rope": "RoPE",
    "rope_kernel": "RoPE",
    "kernelwright::qk_norm_rope": "RoPE",
    "void vectorized_elementwise_kernel<4, at::native::cos_kernel_cuda(TensorIterator)>": "RoPE",
    "triton_poi_fused_cos_mul_sin_0": "RoPE",
    "void at::native::vectorized_elementwise_kernel<8, GeluCUDAKernelImpl(Type)>": "activation",
    "void at::native::vectorized_elementwise_kernel<4, silu_kernel(TensorIterator)>": "activation",
    "kernelwright_glu": "activation",
    "glu_kernel": "activation",
    "triton_poi_fused_addmm_gelu_4": "activation",
    "aten::silu": "activation",
    "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(Iterator)>": "copies",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, 3>": "copies",
    "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float>": "copies",
    "Memset (Device)": "copies",
    "Memcpy DtoD (Device -> Device)": "copies",
    "[CUDA memcpy Device-to-Device]": "copies",
    "triton_poi_fused_cat_clone_5": "copies",
    "aten::copy_": "copies",
    "void (anonymous namespace)::elementwise_kernel_with_index<int, arange_cuda_out>": "other",
    "void distribution_elementwise_grid_stride_kernel<float, 4, normal_kernel>": "other",
    "aten::view": "other",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_known_by_its_name(name):
    assert category(name) == NAMES[name]


def test_every_category_has_a_name_that_is_tested():
    assert set(NAMES.values()) == set(CATEGORIES)


def test_the_kernels_that_ops_launch_are_found_from_their_declarations():
    """By the names in their plans: ncu would miss a kernel that is not listed."""
    launched = set()
    for op in registry().values():
        if isinstance(op, Op):
            for backend in {"triton", "cuda"} & set(op.backends):
                for planned in kernels(backend, "sm_90", everything=True, ops=[op]):
                    launch = planned.launch
                    name = launch.entry if backend == "cuda" else launch.kernel.__name__
                    assert op in launched_by(name), (op.name, name)
                    launched.add(name)
    assert len(launched) >= 8
    # and those of ops without cases or without a planner
    for name in {*launched, "attention_kernel", "attention_few_keys_kernel", "quantize_kernel"}:
        assert is_ours(name)
        assert category(name) != "other"
    for name in ("softmax_row_kernel", "load", "elementwise_kernel"):
        assert not is_ours(name)


def test_a_declared_category_counts_where_the_name_does_not_tell():
    for op in (*registry().values(), *internal.values()):
        assert op.category is None or op.category in CATEGORIES
        assert category(f"kernelwright::{op.name}") != "other", op.name
    assert category("kernelwright::gated_residual") == "modulation"
    # a kernel compiled ahead of time has a number after its name
    assert category("kernelwright_row_17") == category("kernelwright_row") == "norm"


def test_the_split_is_of_all_the_time():
    kernels = [
        KernelTime("nvjet_sm90_tst_176x128", 2, 8.0),
        KernelTime("attention_kernel", 1, 4.0),
        KernelTime("kernelwright_row", 3, 2.0),
        KernelTime("triton_poi_fused_add_mul_1", 1, 1.0),
        KernelTime("Memset (Device)", 1, 0.5),
    ]
    assert split(kernels) == {"GEMM": 8.0, "attention": 4.0, "fused": 3.0, "other": 0.5}
    assert largest_others(kernels) == {"Memset (Device)": 0.5}
    grouped = by_category(kernels)
    assert sum(grouped.values()) == 15.5
    assert grouped["norm"] == 2.0
    assert grouped["copies"] == 0.5


def test_every_call_of_an_op_is_recorded(tmp_path):
    x = torch.randn(64, 64)
    trace = tmp_path / "new" / "trace.json"
    found = {k.name: k for k in record(lambda: torch.mm(torch.mm(x, x), x), "cpu", trace)}
    assert found["aten::mm"].calls == 2
    assert found["aten::mm"].ms > 0
    assert "aten::mm" in trace.read_text()


def test_graph_breaks_are_counted_with_their_reasons():
    import torch._dynamo.utils as dynamo

    def broken(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    torch._dynamo.reset()
    dynamo.counters.clear()
    torch.compile(broken, backend="eager")(torch.ones(3))
    found = level1.graph_breaks()
    assert (found["graphs"], found["breaks"]) == (2, 1)
    assert list(found["reasons"].values()) == [1]

    torch._dynamo.reset()
    dynamo.counters.clear()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    assert level1.graph_breaks() == {"graphs": 1, "breaks": 0, "reasons": {}}


def test_the_process_under_a_tool_runs_the_same_workload():
    command = Workload("ltx-video", "cuda:1", True, {"frames": 9}).command("exact+graphs")
    assert command[1:] == [
        *("-m", "kernelwright.profiling.workload", "ltx-video", "--config", "exact+graphs"),
        *("--device", "cuda:1", "--dtype", "bfloat16", "--tiny", "--size", "frames=9"),
    ]


def invoke(*args):
    app = typer.Typer()
    app.command()(profile)
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "200"})


def test_eager_and_exact_stand_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "environment", lambda: {"gpu": "NVIDIA H200", "torch": "2.13"})
    out, trace = tmp_path / "profile.json", tmp_path / "trace.json"
    small = ("qwen3-8b", "--tiny", "--tokens", "8", "--device", "cpu")
    result = invoke(*small, "--out", str(out), "--trace", str(trace))
    assert result.exit_code == 0, result.output
    assert "the CPU's times" in " ".join(result.output.split())
    kept = json.loads(out.read_text())
    assert kept["kind"] == "profile"
    assert kept["environment"] == {"gpu": None, "torch": "2.13"}  # it was not involved
    assert [row["config"] for row in kept["rows"]] == ["eager", "exact"]
    for row in kept["rows"]:
        assert sum(row["categories"].values()) == pytest.approx(row["kernel_ms"])
        assert all(row["categories"][c] > 0 for c in ("GEMM", "attention", "norm", "activation"))
        assert row["wall_ms"] > 0
        assert row["config"] in result.output
    assert (tmp_path / "trace.eager.json").is_file()
    assert (tmp_path / "trace.exact.json").is_file()


def test_levels_that_can_run_do_and_the_others_name_the_package(monkeypatch):
    monkeypatch.setattr(nsight.shutil, "which", lambda name, path=None: None)
    how = ("dit-xl", "--tiny", "--device", "cpu", "--config", "eager", "--json")
    result = invoke(*how, "--level", "1,2,3")
    assert result.exit_code == 1
    assert "level 2: nsys is not installed" in result.stderr
    assert "nsight-systems" in result.stderr
    assert "level 3: ncu is not installed" in result.stderr
    assert "nsight-compute" in result.stderr
    assert [row["level"] for row in json.loads(result.stdout)] == [1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["no-such-model"], "no preset"),
        (["dit-xl", "--level", "4"], "no level 4"),
        (["dit-xl", "--level", "all"], "expected 1, 2, 3"),
        (["dit-xl", "--config", "quick"], "no configuration 'quick'"),
        (["dit-xl", "--frames", "9"], "no size 'frames'"),
        (["dit-xl", "--device", "nonsense"], "'nonsense' cannot be used"),
        (["dit-xl", "--trace", "/proc/none/x.json"], "cannot be written"),
        (["dit-xl", "--kernels", "("], "no regular expression"),
        (["dit-xl", "--out", "/proc/none/x.json"], "cannot be written"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(wrong, message):
    result = invoke(*wrong, "--tiny")
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU gets")
def test_a_model_of_full_size_does_not_go_to_the_cpu_unasked():
    result = invoke("ltx-video")
    assert result.exit_code == 1
    assert "torch sees no GPU: the tiny model" in result.output
    assert "--device cpu runs the full one" in result.output


def test_the_result_file_is_on_the_report_page(tmp_path):
    """`report` reads what `profile` writes."""
    row = level1.summary(
        Workload("ltx-video", "cpu", tiny=True), "eager", [KernelTime("aten::mm", 3, 2.0)], level=1
    )
    results.write(tmp_path / "p.json", "profile", [row | {"wall_ms": 3.0, "graph_breaks": None}])
    (file,) = read([tmp_path / "p.json"])
    assert file.profile[0].categories["GEMM"] == 2.0
    assert "aten::mm" in page([file])


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the profiler's errors matter")
def test_the_profiler_prints_nothing_of_its_own(capfd):
    assert record(lambda: torch.ones(3) + 1, "cpu")
    assert capfd.readouterr().err == ""
