"""One command for a machine with a CUDA card: `python tools/gpu.py`.

Runs the package's tests with the Triton backend on the card (and compute-sanitizer on a few of them where it is
installed), then prints a table: time, bandwidth or TFLOP/s, the fraction of what the card reaches in a plain copy
or matrix product, and the ratio to torch's attention and to flash-linear-attention's kernels where installed.

`--dry-run` goes the same way on a CPU with the torch backend: it collects the tests instead of running them, and
times tiny shapes. Its numbers mean nothing; that the script itself works is all it shows.
"""

import argparse
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention.bias import causal_lower_right

from qwen35_kernels import (
    DecodePages,
    DecodeStates,
    KVProfile,
    PageLayout,
    PrefillPages,
    PrefillStates,
    TokenRows,
    gated_delta_rule_prefill,
    gated_delta_rule_step,
    paged_attention_decode,
    paged_attention_prefill,
    rms_norm,
    store_kv,
)

TESTS = Path(__file__).resolve().parent.parent / "tests"
FILES = ("delta_rule", "conv", "norms", "mlp", "rotary", "moe", "attention", "kv_store", "sampling")
# Numbers inside tensors are checked on a CPU only: those refusals are not the card's.
CHOSEN = "not bad and not refused"
SANITIZED = "65-1-heads1 or taps_equal or round_trip or merging"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the table's calls are."""

    tokens: int
    delta_heads: tuple[tuple[int, int], ...]
    delta_dim: int
    history: int
    queries: int
    heads: tuple[int, int]
    head_dim: int
    hidden: int
    copied_bytes: int
    square: int
    repeats: int


REAL = Sizes(
    tokens=4096,
    delta_heads=((16, 16), (16, 32), (16, 48)),
    delta_dim=128,
    history=32768,
    queries=2048,
    heads=(24, 4),
    head_dim=256,
    hidden=5120,
    copied_bytes=2**28,
    square=8192,
    repeats=20,
)
TINY = Sizes(
    tokens=128,
    delta_heads=((1, 2),),
    delta_dim=16,
    history=256,
    queries=64,
    heads=(4, 2),
    head_dim=64,
    hidden=64,
    copied_bytes=2**16,
    square=64,
    repeats=3,
)


class Table:
    """Times calls on one device and prints a line for each, beside what the device reaches in the plainest ones."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        source = torch.empty(sizes.copied_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        a = torch.randn(sizes.square, sizes.square, device=device, dtype=torch.bfloat16)
        # Bytes of a plain copy and operations of a plain bf16 product, per millisecond.
        self.copied = 2 * sizes.copied_bytes / self.milliseconds(lambda: target.copy_(source))
        self.multiplied = 2 * sizes.square**3 / self.milliseconds(lambda: a @ a)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def milliseconds(self, run: Callable[[], object]) -> float:
        """Median time of a call on the device."""
        for _ in range(3):
            run()
        return sorted(self._once(run) for _ in range(self.sizes.repeats))[self.sizes.repeats // 2]

    def _once(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def row(
        self,
        name: str,
        run: Callable[[], object],
        *,
        num_bytes: float = 0,
        flops: float = 0,
        theirs: dict[str, Callable[[], object]] | None = None,
    ) -> None:
        time_ms = self.milliseconds(run)
        amount, unit, ceiling = (
            (flops / 1e9, "TFLOP/s", self.multiplied / 1e9) if flops else (num_bytes / 1e6, "GB/s", self.copied / 1e6)
        )
        rate = amount / time_ms
        ratios = [f"{other} / ours {self._ratio(call, time_ms)}" for other, call in (theirs or {}).items()]
        print(f"{name:34} {time_ms:9.4f} ms {rate:9.1f} {unit:8}{rate / ceiling:6.0%} {', '.join(ratios)}")

    def _ratio(self, theirs: Callable[[], object], time_ms: float) -> str:
        # Another project's call may not run on this card; the table goes on without it.
        try:
            return f"{self.milliseconds(theirs) / time_ms:.2f}"
        except (RuntimeError, TypeError) as error:
            return f"not measured ({type(error).__name__}: {str(error).splitlines()[0]})"


def run_tests(*, dry: bool) -> int:
    """Every test of the ops, their tensors made on the card; then a few under compute-sanitizer."""
    environment = {**os.environ, "QWEN35_KERNELS_BACKEND": "triton", "QWEN35_TEST_DEVICE": "cuda"}
    if dry:
        environment |= {"QWEN35_KERNELS_BACKEND": "torch", "QWEN35_TEST_DEVICE": "cpu"}
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"test_{name}.py" for name in FILES)]
    if dry:
        pytest.append("--collect-only")
    sanitizer = shutil.which("compute-sanitizer")
    commands = [[*pytest, "-k", CHOSEN]]
    if sanitizer is not None or dry:
        commands.append([*([sanitizer, "--error-exitcode=1"] if sanitizer else []), *pytest, "-k", SANITIZED])
    code = 0
    for command in commands:
        code |= subprocess.run(command, cwd=TESTS, env=environment, check=False).returncode
    return code


def bench_delta(table: Table, key_heads: int, value_heads: int) -> None:
    tokens, dim = table.sizes.tokens, table.sizes.delta_dim
    q, k, v = (table.random(tokens, heads, dim) for heads in (key_heads, key_heads, value_heads))
    g, beta = (torch.rand(tokens, value_heads, device=table.device) for _ in range(2))
    state = torch.zeros(9, value_heads, dim, dim, device=table.device)
    call = {"q": q, "k": k, "v": v, "g": g.neg_(), "beta": beta}
    states = PrefillStates(slots=[1], cu_seqlens=[0, tokens], bases=[0], num_slots=len(state))
    theirs: dict[str, Callable[[], object]] = {}
    if importlib.util.find_spec("fla") is not None:
        chunk = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        repeated = [x.repeat_interleave(value_heads // key_heads, dim=1) for x in (q, k)]
        batch = [x.unsqueeze(0) for x in (*repeated, v, g, beta)]
        theirs["fla"] = lambda: chunk(*batch, use_qk_l2norm_in_kernel=True)
    tile_flops = 2 * (2 * 64 * 64 * dim + 3 * 64 * dim * dim + 2 * 64 * 64 * dim)
    table.row(
        f"delta prefill {key_heads}, {value_heads} T={tokens}",
        lambda: gated_delta_rule_prefill(**call, state=state, states=states),
        flops=tokens / 64 * value_heads * tile_flops,
        theirs=theirs,
    )
    lanes = {name: x[:8] for name, x in call.items()}
    slots = DecodeStates(slots=torch.arange(1, 9, device=table.device), num_slots=len(state))
    table.row(
        f"delta step {key_heads}, {value_heads} B=8",
        lambda: gated_delta_rule_step(**lanes, state=state, states=slots),
        num_bytes=2 * 8 * value_heads * dim * dim * 4,
    )


def bench_attention(table: Table, profile: KVProfile) -> None:
    sizes, device = table.sizes, table.device
    length, (heads, kv_heads), dim = sizes.history, sizes.heads, sizes.head_dim
    layout = PageLayout(profile=profile, num_layers=1, num_kv_heads=kv_heads, head_dim=dim)
    blocks = length // 64
    kv = layout.kv(torch.zeros(blocks + 1, layout.page_bytes, dtype=torch.uint8, device=device), 0)
    pages = torch.randperm(blocks, device=device).add_(1).unsqueeze(0)
    k, v = (table.random(length, kv_heads, dim) for _ in range(2))
    positions = torch.arange(length, device=device)
    rows = TokenRows(pages=pages[0][positions // 64], rows=positions % 64, num_pages=blocks + 1)
    written = 2 * k.numel() * 2 + blocks * layout.page_bytes
    table.row(f"store {profile}", lambda: store_kv(k=k, v=v, kv=kv, rows=rows), num_bytes=written)
    q = table.random(sizes.queries, heads, dim)
    base = length - len(q)
    keys, values = (x.repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1).unsqueeze(0) for x in (k, v))

    def library(x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1).unsqueeze(0)
        seen = causal_lower_right(x.shape[2], length) if x.shape[2] > 1 else None
        return torch.nn.functional.scaled_dot_product_attention(x, keys, values, attn_mask=seen)

    chunk = PrefillPages(block_tables=pages, cu_seqlens=[0, len(q)], bases=[base], num_pages=blocks + 1)
    table.row(
        f"attention prefill {profile}",
        lambda: paged_attention_prefill(q=q, kv=kv, pages=chunk),
        flops=4 * len(q) * (base + len(q) / 2) * heads * dim,
        theirs={"SDPA": lambda: library(q)},
    )
    one, lengths = q[:1], torch.tensor([length], device=device)
    step = DecodePages(block_tables=pages, lengths=lengths, num_pages=blocks + 1)
    table.row(
        f"attention decode {profile}",
        lambda: paged_attention_decode(q=one, kv=kv, pages=step),
        num_bytes=blocks * layout.page_bytes,
        theirs={"SDPA": lambda: library(one)},
    )


def print_table(device: torch.device, sizes: Sizes) -> None:
    table = Table(device, sizes)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, dry run"
    ceilings = f"copy {table.copied / 1e6:.1f} GB/s, bf16 {table.multiplied / 1e9:.2f} TFLOP/s"
    print(f"{name}: {ceilings}, torch {torch.__version__}")
    for key_heads, value_heads in sizes.delta_heads:
        bench_delta(table, key_heads, value_heads)
    for profile in (KVProfile.BF16, KVProfile.INT8, KVProfile.FP8, KVProfile.NVFP4, KVProfile.K8V4):
        bench_attention(table, profile)
    x, weight = table.random(sizes.tokens, sizes.hidden), table.random(sizes.hidden)
    table.row(f"rms_norm {tuple(x.shape)}", lambda: rms_norm(x=x, weight=weight, eps=1e-6), num_bytes=4 * x.numel())


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu.py")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU: does the script itself work?")
    dry = parser.parse_args().dry_run
    if not dry and not torch.cuda.is_available():
        print("no CUDA device: nothing was run (--dry-run tries the script on a CPU)")
        return 1
    code = run_tests(dry=dry)
    with torch.inference_mode():
        print_table(torch.device("cpu" if dry else "cuda"), TINY if dry else REAL)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
