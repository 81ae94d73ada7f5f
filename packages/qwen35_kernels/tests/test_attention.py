import pytest
import torch

from kernel_testing import (
    assert_close,
    assert_same_bits,
    generator,
    nan_arena,
    shuffled_tables,
    store_sequence,
    stored_sequence,
    tolerance,
)
from qwen35_kernels import (
    KernelInputError,
    KVProfile,
    PageLayout,
    attention_gate,
    paged_attention_decode,
    paged_attention_prefill,
    reference,
)

PLAIN = [KVProfile.BF16, KVProfile.FP32]
DTYPES = [torch.float32, torch.bfloat16]


def fill(seed: int, lengths: list[int], *, profile=KVProfile.FP32, kv_heads=2, dim=32):
    """An arena whose pages, scratch and unused rows are NaN except for the stored keys and values of layer 1."""
    layout = PageLayout(profile=profile, num_layers=2, num_kv_heads=kv_heads, head_dim=dim)
    tables, num_pages = shuffled_tables(seed, lengths)
    guarded = nan_arena(layout, num_pages)
    rng = generator(seed)
    for i, length in enumerate(lengths):
        k, v = (torch.randn(length, kv_heads, dim, generator=rng) for _ in range(2))
        store_sequence(guarded.arena, layout, 1, tables[i], k, v)
    return layout, guarded, tables, rng


@pytest.mark.parametrize("profile", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [2, 6])
def test_prefill_matches_the_oracle(profile: KVProfile, dtype: torch.dtype, heads: int) -> None:
    chunks, bases = [1, 70, 0, 64, 33], [0, 64, 9, 0, 100]
    lengths = [base + chunk for base, chunk in zip(bases, chunks, strict=True)]
    layout, guarded, tables, rng = fill(50, lengths, profile=profile)
    before = guarded.arena.clone()
    q = (torch.randn(sum(chunks), heads, 32, generator=rng) * 2).to(dtype)
    cu = [0, 1, 71, 71, 135, 168]
    o = paged_attention_prefill(
        q=q, arena=guarded.arena, layout=layout, layer=1, block_tables=tables, cu_seqlens=cu, bases=bases
    )
    for i, length in enumerate(lengths):
        k, v = stored_sequence(guarded.arena, layout, 1, tables[i], length)
        expected, _ = reference.attention(q[cu[i] : cu[i + 1]], k, v, bases[i])
        assert_close(o[cu[i] : cu[i + 1]], expected, **tolerance(dtype))
    assert_same_bits(guarded.arena, before)
    guarded.check()


def test_prefill_over_several_key_tiles_matches_the_oracle() -> None:
    layout, guarded, tables, rng = fill(51, [4200], kv_heads=1)
    q = torch.randn(150, 2, 32, generator=rng) * 3
    o = paged_attention_prefill(
        q=q,
        arena=guarded.arena,
        layout=layout,
        layer=1,
        block_tables=tables,
        cu_seqlens=[0, 150],
        bases=[4050],
    )
    k, v = stored_sequence(guarded.arena, layout, 1, tables[0], 4200)
    expected, _ = reference.attention(q, k, v, 4050)
    assert_close(o, expected, **tolerance(torch.float32))


@pytest.mark.parametrize("profile", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [2, 6])
def test_decode_matches_the_oracle(profile: KVProfile, dtype: torch.dtype, heads: int) -> None:
    lengths = [1, 63, 64, 65, 200]
    layout, guarded, tables, rng = fill(52, lengths, profile=profile)
    before = guarded.arena.clone()
    q = (torch.randn(5, heads, 32, generator=rng) * 3).to(dtype)
    o = paged_attention_decode(
        q=q,
        arena=guarded.arena,
        layout=layout,
        layer=1,
        block_tables=tables,
        lengths=torch.tensor(lengths),
    )
    for i, length in enumerate(lengths):
        k, v = stored_sequence(guarded.arena, layout, 1, tables[i], length)
        expected, _ = reference.attention(q[i : i + 1], k, v, length - 1)
        assert_close(o[i : i + 1], expected, **tolerance(dtype))
    assert_same_bits(guarded.arena, before)
    guarded.check()


def test_large_scores_do_not_overflow() -> None:
    layout, guarded, tables, rng = fill(53, [130])
    q = torch.randn(1, 2, 32, generator=rng) * 500
    o = paged_attention_decode(
        q=q, arena=guarded.arena, layout=layout, layer=1, block_tables=tables, lengths=torch.tensor([130])
    )
    k, v = stored_sequence(guarded.arena, layout, 1, tables[0], 130)
    assert_close(o, reference.attention(q, k, v, 129)[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("threads", [1, 2])
def test_two_sequences_may_share_pages_and_do_not_depend_on_the_batch(threads: int, set_threads) -> None:
    set_threads(threads)
    lengths = [200, 150, 64, 301]
    layout, guarded, tables, rng = fill(54, lengths, dim=64)
    tables[1, :2] = tables[0, :2]
    q = torch.randn(4, 6, 64, generator=rng)
    arguments = {"arena": guarded.arena, "layout": layout, "layer": 1}
    whole = paged_attention_decode(q=q, block_tables=tables, lengths=torch.tensor(lengths), **arguments)
    chunk = torch.randn(90, 6, 64, generator=rng)
    cu, bases = [0, 40, 41, 60, 90], [160, 149, 45, 271]
    chunked = paged_attention_prefill(q=chunk, block_tables=tables, cu_seqlens=cu, bases=bases, **arguments)
    for rows in ([0], [1], [2], [3], [3, 1], [2, 0, 1]):
        part = paged_attention_decode(
            q=q[rows], block_tables=tables[rows], lengths=torch.tensor(lengths)[rows], **arguments
        )
        assert_same_bits(part, whole[rows], f"lanes {rows}")
    for i in range(4):
        part = paged_attention_prefill(
            q=chunk[cu[i] : cu[i + 1]],
            block_tables=tables[i : i + 1],
            cu_seqlens=[0, cu[i + 1] - cu[i]],
            bases=[bases[i]],
            **arguments,
        )
        assert_same_bits(part, chunked[cu[i] : cu[i + 1]], f"sequence {i}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_matches_the_oracle(dtype: torch.dtype) -> None:
    rng = generator(55)
    o, gate = ((torch.randn(5, 6, 32, generator=rng) * 4).to(dtype) for _ in range(2))
    assert_close(attention_gate(o=o, gate=gate), reference.attention_gate(o, gate), **tolerance(dtype))


def test_bad_input_names_op_constraint_and_value() -> None:
    layout, guarded, tables, _ = fill(56, [100, 10])
    arguments = {
        "q": torch.zeros(2, 2, 32),
        "arena": guarded.arena,
        "layout": layout,
        "layer": 1,
        "block_tables": tables,
        "lengths": torch.tensor([100, 10]),
    }
    scratch = tables.clone()
    scratch[0, 1] = 0
    for changes, message in (
        ({"lengths": torch.tensor([100, 0])}, "lengths must be at least 1, got 0"),
        ({"lengths": torch.tensor([129, 10])}, "block_tables must cover 129 tokens, got 128"),
        ({"block_tables": scratch}, r"pages must lie in \[1, 7\) \(page 0 is scratch\), got 0"),
        ({"q": torch.zeros(2, 3, 32)}, "query heads must be a multiple of the 2 KV heads, got 3"),
        ({"q": torch.zeros(2, 2, 16)}, "q must have head dim 32, got 16"),
        ({"q": torch.zeros(2, 2, 32).half()}, "q must be float32 or bfloat16, got 'float16'"),
    ):
        with pytest.raises(KernelInputError, match="paged_attention_decode: " + message):
            paged_attention_decode(**{**arguments, **changes})
    del arguments["lengths"]
    with pytest.raises(KernelInputError, match="paged_attention_prefill: block_tables must cover 201 tokens"):
        paged_attention_prefill(**arguments, cu_seqlens=[0, 1, 2], bases=[200, 0])
    with pytest.raises(KernelInputError, match="bases must not be negative"):
        paged_attention_prefill(**arguments, cu_seqlens=[0, 1, 2], bases=[-1, 0])
