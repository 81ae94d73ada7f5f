"""Compiles every Triton kernel as the launchers would, without a GPU, and prints what came out as JSON.

Run in a process of its own: `python compile_checks.py 90`. Compilation fails where the interpreter is on.
"""

import dataclasses
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from qwen35_kernels.layout import KVProfile, PageLayout
from qwen35_kernels.plans import DecodePages, PrefillPages, PrefillStates, StateTap
from qwen35_kernels.triton import attention, conv, delta_rule, kv_store, moe, rows
from qwen35_kernels.triton.launch import Launch


@dataclass(frozen=True)
class Model:
    """The sizes of one published model that kernels see."""

    hidden: int
    heads: int
    kv_heads: int
    key_heads: int
    value_heads: int
    inner: int
    experts: int = 0
    head_dim: int = 256
    delta_dim: int = 128


MODELS = {
    "0.8B": Model(1024, 8, 2, 16, 16, 3584),
    "4B": Model(2560, 16, 4, 16, 32, 9216),
    "9B": Model(4096, 16, 4, 16, 32, 12288),
    "27B": Model(5120, 24, 4, 16, 48, 17408),
    "35B-A3B": Model(2048, 16, 2, 16, 32, 512, experts=256),
}
TOKENS = 192


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def delta_launches(model: Model, dtype: torch.dtype) -> Iterator[Launch]:
    dim = model.delta_dim
    state = meta(9, 4 * model.value_heads * dim * dim, dtype=torch.float32)[:, : model.value_heads * dim * dim]
    state = state.view(9, model.value_heads, dim, dim)
    sizes = [model.key_heads * dim, model.key_heads * dim, model.value_heads * dim]
    q, k, v = (x.view(TOKENS, -1, dim) for x in torch.split(meta(TOKENS, sum(sizes), dtype=dtype), sizes, dim=1))
    g = beta = meta(TOKENS, model.value_heads, dtype=torch.float32)
    states = PrefillStates(slots=[1], cu_seqlens=[0, TOKENS], bases=[5], taps=[StateTap(0, 70, 2)], num_slots=9)
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state, "o": torch.empty_like(v)}
    yield from delta_rule.plan_prefill(**inputs, states=states)
    yield from delta_rule.plan_step(**inputs, slots=meta(TOKENS, dtype=torch.int64))
    x = meta(TOKENS, sum(sizes), dtype=dtype)
    history = meta(9, sum(sizes), 3, dtype=dtype)
    weight = meta(sum(sizes), 4, dtype=dtype)
    yield from conv.plan_prefill(x=x, weight=weight, history=history, y=x, states=states)
    yield from conv.plan_step(x=x, weight=weight, history=history, slots=meta(TOKENS, dtype=torch.int64), y=x)


def row_launches(model: Model, dtype: torch.dtype) -> Iterator[Launch]:
    x = meta(TOKENS, model.hidden, dtype=dtype)
    yield from rows.plan_rms_norm(x=x, weight=meta(model.hidden, dtype=dtype), y=x, eps=1e-6)
    head = meta(TOKENS * model.value_heads, model.delta_dim, dtype=dtype)
    weight = meta(model.delta_dim, dtype=dtype)
    yield from rows.plan_gated_rms_norm(x=head, gate=head, weight=weight, y=head, eps=1e-6)
    both = meta(TOKENS, model.heads, 2 * model.head_dim, dtype=dtype)
    q, gate = both[..., : model.head_dim], both[..., model.head_dim :]
    y = meta(TOKENS, model.heads, model.head_dim, dtype=dtype)
    table = meta(TOKENS, 32, dtype=torch.float32)
    weight = meta(model.head_dim, dtype=dtype)
    yield from rows.plan_qk_norm_rotary(x=q, weight=weight, cos=table, sin=table, y=y, eps=1e-6)
    yield from rows.plan_attention_gate(o=y, gate=gate, y=y)
    gate_up = meta(TOKENS, 2 * model.inner, dtype=dtype)
    yield from rows.plan_swiglu(x=gate_up, y=meta(TOKENS, model.inner, dtype=dtype))


def attention_launches(model: Model, dtype: torch.dtype, profile: KVProfile) -> Iterator[Launch]:
    layout = PageLayout(profile=profile, num_layers=8, num_kv_heads=model.kv_heads, head_dim=model.head_dim)
    arena = meta(50, layout.page_bytes, dtype=torch.uint8)
    q = meta(TOKENS, model.heads, 2 * model.head_dim, dtype=dtype)[..., : model.head_dim]
    o = meta(TOKENS, model.heads, model.head_dim, dtype=dtype)
    lse = meta(TOKENS, model.heads, dtype=torch.float32)
    kv = layout.kv(arena, 1)
    shared: dict[str, Any] = {"kv": kv, "o": o, "lse": lse}
    tables = meta(1, 40, dtype=torch.int64)
    chunk = PrefillPages(block_tables=tables, cu_seqlens=[0, TOKENS], bases=[700], num_pages=50)
    yield from attention.plan_prefill(q=q, pages=chunk, **shared)
    lanes = meta(TOKENS, 40, dtype=torch.int64)
    lengths = meta(TOKENS, dtype=torch.int64)
    step = DecodePages(block_tables=lanes, lengths=lengths, num_pages=50)
    yield from attention.plan_decode(q=q, pages=step, **shared)
    k = meta(TOKENS, model.kv_heads, model.head_dim, dtype=dtype)
    index = meta(TOKENS, dtype=torch.int64)
    yield from kv_store.plan_store_kv(k=k, v=k, kv=kv, pages=index, rows=index)


def moe_launches(model: Model, dtype: torch.dtype) -> Iterator[Launch]:
    chosen = torch.arange(8).repeat(4, 1)
    groups = moe.group_pairs(weights=torch.ones(4, 8), experts=chosen, num_experts=model.experts)
    x = meta(4, model.hidden, dtype=dtype)
    gate_up = meta(model.experts, 2 * model.inner, model.hidden, dtype=dtype)
    down = meta(model.experts, model.hidden, model.inner, dtype=dtype)
    yield from moe.plan_experts(x=x, gate_up=gate_up, down=down, groups=groups, y=x)


def all_launches() -> Iterator[tuple[str, Launch]]:
    """Every model in bf16, and the smallest in fp32 as well."""
    for name, model in MODELS.items():
        for dtype in (torch.bfloat16, torch.float32) if name == "0.8B" else (torch.bfloat16,):
            profiles = {KVProfile.FP32} if dtype == torch.float32 else set(KVProfile) - {KVProfile.FP32}
            label = f"{name}/{str(dtype).removeprefix('torch.')}"
            for launch in (*delta_launches(model, dtype), *row_launches(model, dtype)):
                yield label, launch
            for profile in sorted(profiles):
                for launch in attention_launches(model, dtype, profile):
                    yield f"{label}/{profile}", launch
            if model.experts:
                for launch in moe_launches(model, dtype):
                    yield label, launch


TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int64: "i64",
    torch.uint8: "u8",
}


def source_of(launch: Launch) -> ASTSource:
    """What the JIT would compile: its rules for ones and for multiples of 16, pointers aligned."""
    kernel = launch.kernel
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    attributes: dict[tuple[int, ...], Any] = {}
    plain = {kernel.arg_names[i] if isinstance(i, int) else i for i in kernel.do_not_specialize or ()}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = launch.arguments[name]
        if isinstance(value, Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and name not in plain:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and name not in plain:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def compile_launch(launch: Launch, capability: int) -> Any:
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": False}
    return triton.compile(source_of(launch), target=GPUTarget("cuda", capability, 32), options=options)


def stack_bytes(cubin: bytes) -> int:
    """STACK of cuobjdump: where spills show (LOCAL is 0 whatever happens)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"STACK:(\d+)", listing)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no STACK: {listing!r}")
    return int(found.group(1))


@triton.jit
def oversized(x_ptr, y_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """Deliberately too much of everything: the checks must refuse it."""
    rows, cols = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    b_x = tl.load(x_ptr + rows[:, None] * WIDTH + cols[None, :])
    b_z = tl.load(x_ptr + rows[None, :] * WIDTH + cols[:, None])
    b_y = tl.dot(b_x, b_z, input_precision=PRECISION)
    tl.store(y_ptr + rows[:, None] * ROWS + rows[None, :], b_y)


def oversized_launch() -> Launch:
    x = meta(16, 2048, dtype=torch.float32)
    return Launch(
        kernel=oversized,
        grid=(1, 1, 1),
        arguments={"x_ptr": x, "y_ptr": x},
        constants={"ROWS": 16, "WIDTH": 2048, "PRECISION": "tf32"},
        num_warps=1,
    )


# In float32 these take half a minute each to compile at a model's shapes and spill by kilobytes
# (docs/kernels.md): of their code only the precision of every product is looked at, before any target, and once
# more in the machine code of a small instance.
ONLY_READ_IN_FP32 = ("delta_prepare", "delta_scan", "attend_prefill", "attend_decode")
SMALL = Model(64, 2, 2, 2, 2, 64, head_dim=32, delta_dim=16)


def lowered(launch: Launch, capability: int, stages: int = 0) -> str:
    """The code after so many of the compiler's stages (ttir, ttgir, llir, ptx); 0: before any target."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({"num_warps": launch.num_warps, "enable_fp_fusion": False})
    functions = backend.get_codegen_implementation(options)
    source = source_of(launch)
    code = source.make_ir(target, options, functions, backend.get_module_map(), context)
    passes: dict[str, Any] = {}
    backend.add_stages(passes, options, source.language)
    for name in ("ttir", "ttgir", "llir", "ptx")[:stages]:
        code = passes[name](code, {"target": target, **vars(options)})
    return str(code)


def small_fp32_launches() -> Iterator[Launch]:
    """The kernels that are only read, with the smallest tiles a product takes."""
    every = (*delta_launches(SMALL, torch.float32), *attention_launches(SMALL, torch.float32, KVProfile.FP32))
    for launch in every:
        if launch.kernel.__name__ in ONLY_READ_IN_FP32:
            small = {name: 16 for name in ("BT", "BLOCK", "BM") if name in launch.constants}
            yield dataclasses.replace(launch, constants={**launch.constants, **small}, num_warps=1)


def tensor_core_products(launch: Launch, capability: int, precision: str) -> int:
    """Instructions of tf32 products in the PTX when the kernel's dots name this precision."""
    named = dataclasses.replace(launch, constants={**launch.constants, "PRECISION": precision})
    return len(re.findall(r"mma[^\n;]*tf32", lowered(named, capability, stages=4)))


def single_passes(code: str) -> int:
    """Products that are one pass of tf32: three-pass ones carry their own name until they are lowered."""
    return len(re.findall(r"tt\.dot[^\n]*inputPrecision = tf32 ", code))


def measure(label: str, launch: Launch, capability: int) -> dict[str, Any]:
    promised_fp32 = launch.constants.get("PRECISION") == "tf32x3"
    common = {"label": label, "kernel": launch.kernel.__name__, "promises_fp32": promised_fp32}
    if promised_fp32 and launch.kernel.__name__ in ONLY_READ_IN_FP32:
        code = lowered(launch, capability)
        return {**common, "dots": code.count("tt.dot"), "single_pass_tf32": single_passes(code)}
    compiled = compile_launch(launch, capability)
    return {
        **common,
        "shared": compiled.metadata.shared,
        "stack": stack_bytes(compiled.asm["cubin"]),
        "dots": compiled.asm["ttir"].count("tt.dot"),
        "single_pass_tf32": single_passes(compiled.asm["ttir"]),
        "tf32_instructions": len(re.findall(r"mma[^\n;]*tf32", compiled.asm["ptx"])),
        "wide_accesses": len(re.findall(r"(?:ld|st)\.global[^\n;]*\.v[24]", compiled.asm["ptx"])),
    }


def main(capability: int) -> None:
    results = []
    seen = set()
    for label, launch in all_launches():
        source = source_of(launch)
        key = (launch.kernel.__name__, source.hash(), launch.num_warps, launch.num_stages)
        if key not in seen and math.prod(launch.grid):
            seen.add(key)
            results.append(measure(label, launch, capability))
    bad = measure("deliberately bad", oversized_launch(), capability)
    passes = {
        launch.kernel.__name__: [tensor_core_products(launch, capability, p) for p in ("tf32", "tf32x3")]
        for launch in small_fp32_launches()
    }
    print(json.dumps({"kernels": results, "oversized": bad, "passes": passes}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
