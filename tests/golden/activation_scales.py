# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.11.0", "numpy==2.4.6"]
# ///
"""Writes kernels/tests/data/ue8m0.bin: activations quantised to fp8 as in DeepSeek-V3.1's `act_quant` with `scale_fmt` "ue8m0".

    uv run tests/golden/activation_scales.py

Per group of 128 values: `s = 2^ceil(log2(max(max |x|, 1e-4) * (1 / 448)))`, and the fp8 value is `x / s`, rounded to nearest even by
torch. The file has the bf16 inputs [24, 256], the fp8 e4m3 bytes [24, 256] and the f32 scales [24, 2], in little-endian order.
"""
import pathlib

import numpy as np
import torch

ROWS, COLS, GROUP = 24, 256, 128
FILE = pathlib.Path(__file__).resolve().parents[2] / "kernels/tests/data/ue8m0.bin"


def inputs() -> torch.Tensor:
    torch.manual_seed(1)
    x = torch.randn(ROWS, COLS) * torch.exp2(torch.arange(ROWS, dtype=torch.float32)[:, None] - 12)
    x[0] = 0
    x[1] *= 1e-9  # Below the smallest peak.
    # Peaks at a power of two times 448, and one bf16 step below and above.
    for row, peak in enumerate([448.0, 446.0, 450.0, 0.875, 0.87109375, 0.87890625, 57344.0, 57600.0], start=2):
        x[row] *= 0.5 * peak / x[row].abs().max()
        x[row, 5], x[row, 200] = peak, -peak
    return x.to(torch.bfloat16)


def main():
    x = inputs()
    groups = x.float().view(ROWS, COLS // GROUP, GROUP)
    peak = groups.abs().amax(-1).clamp(min=1e-4)
    ratio = peak * torch.tensor(1 / 448, dtype=torch.float32)
    mantissa, exponent = torch.frexp(ratio)  # ratio = mantissa * 2^exponent, with 0.5 <= mantissa < 1
    scales = torch.ldexp(torch.ones_like(ratio), exponent - (mantissa == 0.5).int())
    quantized = (groups / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    FILE.parent.mkdir(exist_ok=True)
    parts = [x.view(torch.uint16), quantized.view(torch.uint8), scales]
    FILE.write_bytes(b"".join(np.ascontiguousarray(part.numpy()).tobytes() for part in parts))


if __name__ == "__main__":
    main()
