"""Times the package beside eager PyTorch: `kernels benchmark hub/ltx-kernels`.

The shapes are those of LTX-Video at 49 frames of 768 x 512; on a CPU they are small ones.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class LTXVideo(Benchmark):
    seed = 42

    def setup(self) -> None:
        small = self.device == "cpu"
        shape = (2, 16, 128) if small else (2, 2688, 2048)
        # the runner allows 0.01 whatever the size: float16 values stay small enough for that
        dtype = torch.float32 if small else torch.float16
        like = {"device": self.device, "dtype": dtype}
        self.x, self.residual = torch.randn(2, *shape, **like)
        self.weight = torch.rand(shape[-1], **like) + 0.5
        self.scale, self.shift, self.gate = torch.randn(3, shape[0], 1, shape[-1], **like) / 32
        self.packed = torch.randn(*shape[:2], 2 * shape[-1], **like) / 2
        self.query, self.key = torch.randn(2, *shape[:2], shape[-1] // 64, 64, **like)
        angle = torch.rand(shape[1], 32, device=self.device) * 6.28
        self.cos, self.sin = angle.cos(), angle.sin()

    def benchmark_rmsnorm(self) -> None:
        self.out = self.kernel.rmsnorm(self.x, self.weight)

    def verify_rmsnorm(self) -> torch.Tensor:
        return F.rms_norm(self.x, self.x.shape[-1:], self.weight, 1e-6)

    def benchmark_adaln_rmsnorm(self) -> None:
        self.out = self.kernel.adaln_rmsnorm(self.x, self.weight, self.scale, self.shift)

    def verify_adaln_rmsnorm(self) -> torch.Tensor:
        return self.verify_rmsnorm() * (1 + self.scale) + self.shift

    def benchmark_gated_residual_norm(self) -> None:
        self.out, _ = self.kernel.gated_residual_norm(
            self.residual, self.x, self.gate, None, None, self.scale, self.shift
        )

    def verify_gated_residual_norm(self) -> torch.Tensor:
        total = self.residual + self.x * self.gate
        return F.rms_norm(total, total.shape[-1:], None, 1e-6) * (1 + self.scale) + self.shift

    def benchmark_geglu(self) -> None:
        self.out = self.kernel.geglu(self.packed, approximate=False)

    def verify_geglu(self) -> torch.Tensor:
        first, second = self.packed.chunk(2, dim=-1)
        return first * F.gelu(second)

    def benchmark_apply_rope(self) -> None:
        self.out, _ = self.kernel.apply_rope_qk(self.query, self.key, self.cos, self.sin)

    def verify_apply_rope(self) -> torch.Tensor:
        a, b = self.query.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.cos[:, None], self.sin[:, None]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return turned.flatten(-2).to(self.query.dtype)
