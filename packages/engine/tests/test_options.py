"""Options: refused where they are written, and what is derived from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from qwen35_engine import EffectiveOptions, EngineOptions, OptionError
from qwen35_engine.checkpoint.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    layer_kinds=("linear_attention", "full_attention"),
    norm_eps=1e-6,
    tied_head=True,
    max_position=40_000,
    dtype=torch.bfloat16,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    rotary_dim=4,
    rope_theta=1e4,
    num_key_heads=1,
    num_value_heads=1,
    key_dim=8,
    value_dim=8,
    conv_width=4,
    weight_prefix="model.",
    eos_token_ids=frozenset(),
)
CPU = torch.device("cpu")


def resolve(
    options: EngineOptions, *, page_bytes: int = 2**20, image_bytes: int = 1, device: torch.device = CPU
) -> EffectiveOptions:
    return options.resolve_sizes(
        CONFIG, page_bytes=page_bytes, image_bytes=image_bytes, device=device, dtype=torch.float32
    )


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("max_concurrency", 0, "max_concurrency must be between 1 and 256, got 0"),
        ("max_concurrency", 257, "max_concurrency must be between 1 and 256, got 257"),
        ("max_concurrency", True, "max_concurrency must be between 1 and 256, got True"),
        ("max_pending", -1, "max_pending must be between 0 and 1000000, got -1"),
        ("prefill_chunk", 0, "prefill_chunk must be between 1 and 1000000, got 0"),
        ("threads", 0, "threads must be between 1 and 1024, got 0"),
        ("max_context", 1, "max_context must be between 2 and 100000000, got 1"),
        ("kv_capacity", 63, "kv_capacity must be between 64 and"),
        ("device_snapshot_slots", 0, "device_snapshot_slots must be between 1 and 68, got 0"),
        ("device_snapshot_slots", 69, "device_snapshot_slots must be between 1 and 68, got 69"),
        ("host_cache_mib", -1, "host_cache_mib must be between 0 and"),
        ("max_new_taps", 65, "max_new_taps must be between 0 and 64, got 65"),
        ("tap_min_gap_tokens", 16, "tap_min_gap_tokens must be between 64 and"),
        ("pending_timeout_seconds", 0, "pending_timeout_seconds must be above 0 and at most 86400, got 0"),
        ("device", "tpu", "device must be one of auto, cpu, cuda, got 'tpu'"),
        ("dtype", "float64", "dtype must be one of auto, float32, bfloat16, got 'float64'"),
        ("kv_dtype", "bf16", "kv_dtype must be one of auto, float32, bfloat16, got 'bf16'"),
        ("max_pending", "5", "max_pending must be between 0 and 1000000, got '5'"),
        ("max_pending", 5.0, "max_pending must be between 0 and 1000000, got 5.0"),
        ("threads", True, "threads must be between 1 and 1024, got True"),
        ("device_snapshot_slots", "3", "device_snapshot_slots must be a whole number, got '3'"),
        ("pending_timeout_seconds", "1", "pending_timeout_seconds must be above 0 and at most 86400, got '1'"),
        ("pending_timeout_seconds", float("nan"), "pending_timeout_seconds must be above 0 and at most 86400, got nan"),
        ("prefix_reuse", 0, "prefix_reuse must be true or false, got 0"),
        ("max_lanes", 4, "max_lanes is not an option"),
    ],
)
def test_a_value_out_of_range_names_option_bound_and_value(option: str, value: Any, complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint) as caught:
        EngineOptions(**{option: value})
    assert caught.value.option == option


def test_every_option_is_described_and_frozen() -> None:
    for name, info in EngineOptions.model_fields.items():
        assert info.description, name
        assert info.default is not None or "by default" in info.description.lower(), name
        assert EngineOptions.allowed(name)
    with pytest.raises(ValidationError, match="frozen"):
        EngineOptions().threads = 2  # type: ignore[misc]


def test_what_is_unset_is_derived() -> None:
    sizes = resolve(EngineOptions())
    assert sizes.num_blocks == 1024  # 1 GiB of pages
    assert sizes.max_context == 32_768
    assert sizes.snapshot_slots == 4 + 1 + 4
    assert sizes.host_cache_bytes == 2**30
    assert (sizes.taps.max_taps, sizes.taps.ladder_tokens, sizes.taps.min_gap_tokens) == (8, 4096, 1024)
    alone = resolve(EngineOptions(host_cache_mib=0, prefill_chunk=4096))
    assert (alone.taps.max_taps, alone.taps.ladder_tokens, alone.taps.min_gap_tokens) == (2, 8192, 4096)
    assert alone.snapshot_slots == 4 + 1 + 2
    assert resolve(EngineOptions(max_new_taps=0)).snapshot_slots == 4 + 1
    assert resolve(EngineOptions(max_new_taps=9, device_snapshot_slots=3)).snapshot_slots == 3
    assert resolve(EngineOptions(prefix_reuse=False)).host_cache_bytes == 0


def test_on_cuda_the_states_are_taken_off_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * 2**30, 140 * 2**30))
    cuda = torch.device("cuda")
    sizes = resolve(EngineOptions(max_context=4096), image_bytes=2**30, device=cuda)
    assert sizes.num_blocks == (85 - 1 - 4 - 9) * 1024
    sizes = resolve(EngineOptions(max_context=4096), image_bytes=2**34, device=cuda)
    assert sizes.num_blocks == 64


def test_the_capacity_always_holds_one_context() -> None:
    sizes = resolve(EngineOptions(max_context=10_000), page_bytes=2**30)
    assert sizes.num_blocks == 157


def test_a_given_capacity_bounds_the_context() -> None:
    sizes = resolve(EngineOptions(kv_capacity=1000))
    assert (sizes.num_blocks, sizes.max_context) == (15, 960)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("device_snapshot_slots", 3),
        ("host_cache_mib", 64),
        ("max_new_taps", 4),
        ("tap_ladder_tokens", 4096),
        ("tap_min_gap_tokens", 64),
    ],
)
def test_nothing_of_the_cache_is_chosen_where_there_is_none(option: str, value: int) -> None:
    with pytest.raises(OptionError, match=f"{option} must be left out where prefix_reuse is False, got {value}"):
        EngineOptions(prefix_reuse=False, **{option: value})  # type: ignore[arg-type]
    assert EngineOptions(prefix_reuse=False, host_cache_mib=0).host_cache_mib == 0


def test_the_dtype_of_kv_is_that_of_the_activations_unless_chosen() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert EngineOptions().resolve_kv_dtype(dtype) == dtype
        assert EngineOptions(kv_dtype="bfloat16").resolve_kv_dtype(dtype) == torch.bfloat16
        assert EngineOptions(kv_dtype="float32").resolve_kv_dtype(dtype) == torch.float32


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(),
        EngineOptions(prefix_reuse=False, max_concurrency=2),
        EngineOptions(kv_capacity=5000, host_cache_mib=0, kv_dtype="bfloat16", threads=3, max_new_taps=0),
        EngineOptions(device_snapshot_slots=7, tap_ladder_tokens=100, tap_min_gap_tokens=70, prefill_chunk=33),
    ],
)
def test_the_effective_options_are_options_with_nothing_left_to_derive(options: EngineOptions) -> None:
    effective = resolve(options)
    assert isinstance(effective, EngineOptions)
    assert resolve(effective) == effective
    unset = {name for name, value in effective.model_dump().items() if value is None or value == "auto"}
    assert not unset or not options.prefix_reuse
    for name, value in options.model_dump(exclude_unset=True).items():
        if name != "kv_capacity":
            assert getattr(effective, name) == value, name


def test_contradictions_are_refused() -> None:
    with pytest.raises(OptionError, match="hold a block of 64 tokens for each of 4 sequences, got 255"):
        resolve(EngineOptions(kv_capacity=255))
    with pytest.raises(OptionError, match="kv_capacity must hold one max_context of 4096 tokens, got 4000"):
        resolve(EngineOptions(kv_capacity=4000, max_context=4096))
    with pytest.raises(OptionError, match="max_context must be at most the model's 40000 positions, got 40001"):
        resolve(EngineOptions(max_context=40_001))


def test_the_dtype_on_a_cpu_is_float32_unless_asked_otherwise() -> None:
    assert EngineOptions().resolve_dtype(CONFIG, CPU) == torch.float32
    assert EngineOptions(dtype="bfloat16").resolve_dtype(CONFIG, CPU) == torch.bfloat16
    assert EngineOptions().resolve_dtype(replace(CONFIG, dtype=torch.float16), CPU) == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none() -> None:
    with pytest.raises(OptionError, match="device must be auto or cpu where torch sees no CUDA device"):
        EngineOptions(device="cuda").resolve_device()
    assert EngineOptions().resolve_device() == CPU
