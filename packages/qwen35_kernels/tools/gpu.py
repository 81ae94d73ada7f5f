"""One command for a machine with a CUDA card: `python tools/gpu.py`.

Runs the package's tests with the Triton backend on the card (and compute-sanitizer on a few of them where it is
installed), then prints a table: time, bandwidth or TFLOP/s, the fraction of what the card reaches in a plain copy
or matrix product, and the ratio to torch's attention and to flash-linear-attention's kernels where installed.
"""

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from qwen35_kernels import (
    KVProfile,
    PageLayout,
    gated_delta_rule_prefill,
    gated_delta_rule_step,
    paged_attention_decode,
    paged_attention_prefill,
    rms_norm,
    store_kv,
)

TESTS = Path(__file__).resolve().parent.parent / "tests"


def milliseconds(run: Callable[[], object], *, repeats: int = 20) -> float:
    """Median time on the device."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


@dataclass(frozen=True)
class Card:
    """What a card reaches, per millisecond: bytes of a plain copy, operations of a plain bf16 matrix product."""

    copied: float
    multiplied: float

    def row(self, name: str, time_ms: float, *, num_bytes: float = 0, flops: float = 0, ratio: str = "") -> None:
        amount, unit, ceiling = (
            (flops / 1e9, "TFLOP/s", self.multiplied / 1e9) if flops else (num_bytes / 1e6, "GB/s", self.copied / 1e6)
        )
        rate = amount / time_ms
        print(f"{name:34} {time_ms:9.4f} ms {rate:9.1f} {unit:8}{rate / ceiling:6.0%} {ratio}")


def measure_card() -> Card:
    source = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel() / milliseconds(lambda: target.copy_(source))
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    multiplied = 2 * 8192**3 / milliseconds(lambda: a @ a)
    return Card(copied, multiplied)


def run_tests() -> int:
    """Every test of the ops, their tensors made on the card; then a few under compute-sanitizer."""
    environment = {**os.environ, "QWEN35_KERNELS_BACKEND": "triton", "QWEN35_TEST_DEVICE": "cuda"}
    files = ("delta_rule", "conv", "norms", "mlp", "rotary", "moe", "records", "attention", "kv_store")
    # Numbers inside tensors are checked on a CPU only: those refusals are not the card's.
    chosen = "not bad and not refused"
    command = [sys.executable, "-m", "pytest", "-q", *(f"test_{name}.py" for name in files), "-k", chosen]
    code = subprocess.run(command, cwd=TESTS, env=environment, check=False).returncode
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is not None:
        few = [*command[:-1], "65-1-heads1 or taps_equal or round_trip or merging"]
        checked = [sanitizer, "--error-exitcode=1", *few]
        code |= subprocess.run(checked, cwd=TESTS, env=environment, check=False).returncode
    return code


def bench_delta(card: Card, heads: tuple[int, int], tokens: int) -> None:
    key_heads, value_heads = heads
    q, k = (torch.randn(tokens, key_heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(tokens, value_heads, 128, device="cuda", dtype=torch.bfloat16)
    g = -torch.rand(tokens, value_heads, device="cuda")
    beta = torch.rand(tokens, value_heads, device="cuda")
    state = torch.zeros(9, value_heads, 128, 128, device="cuda")
    call = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state}
    time_ms = milliseconds(lambda: gated_delta_rule_prefill(**call, slots=[1], cu_seqlens=[0, tokens], bases=[0]))
    ratio = ""
    if importlib.util.find_spec("fla") is not None:
        chunk = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        batch = [x.unsqueeze(0) for x in (q, k, v, g, beta)]
        repeated = [x.repeat_interleave(value_heads // key_heads, dim=2) for x in batch[:2]]
        theirs = milliseconds(lambda: chunk(*repeated, *batch[2:], use_qk_l2norm_in_kernel=True))
        ratio = f"fla / ours {theirs / time_ms:.2f}"
    tile_flops = 2 * (2 * 64 * 64 * 128 + 3 * 64 * 128 * 128 + 2 * 64 * 64 * 128)
    card.row(f"delta prefill {heads} T={tokens}", time_ms, flops=tokens / 64 * value_heads * tile_flops, ratio=ratio)
    lanes = {name: x[:8] for name, x in call.items() if name != "state"}
    slots = torch.arange(1, 9, device="cuda")
    time_ms = milliseconds(lambda: gated_delta_rule_step(**lanes, state=state, slots=slots))
    card.row(f"delta step {heads} B=8", time_ms, num_bytes=2 * 8 * value_heads * 128 * 128 * 4)


def bench_attention(card: Card, profile: KVProfile, heads: int, kv_heads: int, length: int = 32768) -> None:
    layout = PageLayout(profile=profile, num_layers=1, num_kv_heads=kv_heads, head_dim=256)
    blocks = length // 64
    arena = torch.zeros(blocks + 1, layout.page_bytes, dtype=torch.uint8, device="cuda")
    table = torch.randperm(blocks, device="cuda").add_(1).unsqueeze(0)
    k, v = (torch.randn(length, kv_heads, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    positions = torch.arange(length, device="cuda")
    place = {"pages": table[0][positions // 64], "rows": positions % 64}
    where = {"arena": arena, "layout": layout, "layer": 0}
    time_ms = milliseconds(lambda: store_kv(k=k, v=v, **where, **place))
    card.row(f"store {profile}", time_ms, num_bytes=2 * k.numel() * 2 + blocks * layout.page_bytes)
    q = torch.randn(2048, heads, 256, device="cuda", dtype=torch.bfloat16)
    base = length - len(q)
    keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))
    mask = positions.unsqueeze(0) <= positions[base:].unsqueeze(1)

    def theirs(x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        x = x.transpose(0, 1).unsqueeze(0)
        return torch.nn.functional.scaled_dot_product_attention(x, keys, values, attn_mask=seen, enable_gqa=True)

    time_ms = milliseconds(
        lambda: paged_attention_prefill(q=q, **where, block_tables=table, cu_seqlens=[0, len(q)], bases=[base])
    )
    ratio = f"SDPA / ours {milliseconds(lambda: theirs(q, mask)) / time_ms:.2f}"
    card.row(f"attention prefill {profile}", time_ms, flops=4 * len(q) * (base + len(q) / 2) * heads * 256, ratio=ratio)
    one, lengths = q[:1], torch.tensor([length], device="cuda")
    time_ms = milliseconds(lambda: paged_attention_decode(q=one, **where, block_tables=table, lengths=lengths))
    ratio = f"SDPA / ours {milliseconds(lambda: theirs(one, None)) / time_ms:.2f}"
    card.row(f"attention decode {profile}", time_ms, num_bytes=blocks * layout.page_bytes, ratio=ratio)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was run")
        return 1
    code = run_tests()
    card = measure_card()
    print(
        f"{torch.cuda.get_device_name()}: copy {card.copied / 1e6:.0f} GB/s, bf16 {card.multiplied / 1e9:.0f} TFLOP/s"
    )
    for heads in ((16, 16), (16, 32), (16, 48)):
        bench_delta(card, heads, 4096)
    for profile in (KVProfile.BF16, KVProfile.INT8, KVProfile.FP8, KVProfile.NVFP4, KVProfile.K8V4):
        bench_attention(card, profile, 24, 4)
    x = torch.randn(4096, 5120, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(5120, device="cuda", dtype=torch.bfloat16)
    time_ms = milliseconds(lambda: rms_norm(x=x, weight=weight, eps=1e-6))
    card.row("rms_norm 4096 x 5120", time_ms, num_bytes=4 * x.numel())
    return code


if __name__ == "__main__":
    raise SystemExit(main())
