"""Train a LoRA on a tiny LTX-Video as diffusers runs it, and injected: the same losses and weights.

    python examples/train_lora.py --steps 10

Flow matching on one random video, on the CPU in float32. With your own transformer the four lines
that matter are the same: add the adapter, inject, train, restore.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig
from torch import Tensor, nn

import kernelwright as kw
from kernelwright import models


def transformer_with_lora(rank: int = 4) -> nn.Module:
    """A tiny LTX-Video with random weights; only the adapter is trained."""
    transformer = models.build("ltx-video", tiny=True, dtype=torch.float32).train()
    transformer.requires_grad_(False)
    torch.manual_seed(0)
    attention = ["to_q", "to_k", "to_v", "to_out.0"]
    transformer.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=attention))
    return transformer


def train(transformer: nn.Module, steps: int) -> list[float]:
    """The losses of flow matching: the model is to predict noise - video."""
    inputs = models.inputs("ltx-video", tiny=True, dtype=torch.float32)
    video = inputs.pop("hidden_states")
    draw = torch.Generator().manual_seed(1)
    adapter = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapter, lr=1e-3)
    losses = []
    for _ in range(steps):
        noise = torch.randn(video.shape, generator=draw)
        sigma = torch.rand(len(video), generator=draw)
        noisy = torch.lerp(video, noise, sigma[:, None, None])
        given = {**inputs, "hidden_states": noisy, "timestep": sigma * 1000}
        loss = (transformer(**given)[0] - (noise - video)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adapter_of(transformer: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in transformer.named_parameters() if p.requires_grad}


def main(steps: int) -> tuple[list[float], list[float], bool]:
    """The losses without and with injection, and whether both adapters end with the same bits."""
    plain = transformer_with_lora()
    losses = train(plain, steps)

    injected = transformer_with_lora()
    report = kw.inject(injected)  # numerics="exact"
    injected_losses = train(injected, steps)
    print(report)
    kw.restore(injected)

    ends = adapter_of(injected)
    same = all(torch.equal(w, ends[n]) for n, w in adapter_of(plain).items())
    for step, (a, b) in enumerate(zip(losses, injected_losses, strict=True), 1):
        print(
            f"step {step:2d}: loss {a:.6f}, injected {b:.6f}, {'equal' if a == b else 'DIFFERENT'}"
        )
    print(f"the adapters end {'equal' if same else 'DIFFERENT'}")
    return losses, injected_losses, same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    main(parser.parse_args().steps)
