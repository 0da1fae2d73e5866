"""The kernels in a language model: inspect, inject, compare logits, generate, restore.

python transformers_injection_example.py                           a tiny Llama, random weights
python transformers_injection_example.py --preset qwen3-8b --full  a real size, random weights
python transformers_injection_example.py --model FOLDER            yours, a folder or an id
"""

import argparse
import sys

import torch

import kernelwright as kw
from kernelwright import models
from kernelwright.errors import BadSetting, CannotRun
from kernelwright.inject.engine import NUMERICS
from kernelwright.place import choose_device, choose_dtype

PRESETS = [p.name for p in models.presets().values() if p.library == "transformers"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="llama-3-8b", choices=PRESETS)
    parser.add_argument("--full", action="store_true", help="the real size, not the tiny model")
    parser.add_argument("--model", help="a folder, or an id on the Hub")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; by default an idle GPU")
    parser.add_argument("--numerics", default="exact", choices=NUMERICS)
    parser.add_argument("--tokens", type=int, default=32, help="length of the prompt")
    args = parser.parse_args()
    tiny = not (args.full or args.model)
    try:
        device = choose_device(args.device, tiny=tiny)
    except (BadSetting, CannotRun) as error:
        sys.exit(f"transformers_injection_example: {error}")
    dtype = choose_dtype(None, device)
    if args.model:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
    else:
        model = models.build(args.preset, tiny=tiny, dtype=dtype, device=device)
    words = torch.randint(model.config.vocab_size, (1, args.tokens), device=device)

    with torch.no_grad():
        eager = model(words).logits
        with kw.injected(model, numerics=args.numerics) as report:
            fused = model(words).logits
            # random weights may end the text at any token
            length = {"min_new_tokens": 4, "max_new_tokens": 4}
            generated = model.generate(words, **length, do_sample=False, pad_token_id=0)
        print(report)
        print(f"{generated.shape[1] - args.tokens} tokens generated with the kernels injected")
        same = torch.equal(fused, eager)
        print("the bits of eager" if same else f"difference {(fused - eager).abs().max():.3g}")
        back = torch.equal(model(words).logits, eager)
        print("the bits of eager again" if back else "restored, and yet other bits")
    return 0 if back and (same or args.numerics != "exact") else 1


if __name__ == "__main__":
    sys.exit(main())
