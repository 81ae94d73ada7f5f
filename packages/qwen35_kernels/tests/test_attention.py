import pytest
import torch

from kernel_testing import (
    assert_close,
    assert_same_bits,
    attention_decode,
    attention_prefill,
    distant_rows,
    generator,
    nan_arena,
    place_sequence,
    shuffled_tables,
    stored_sequence,
    tolerance,
)
from qwen35_kernels import (
    KernelInputError,
    KVProfile,
    PageLayout,
    Workspace,
    attention_gate,
    attention_tiles,
    merge_attention_states,
    reference,
)
from qwen35_kernels.dispatch import triton_for

PROFILES = list(KVProfile)
DTYPES = [torch.float32, torch.bfloat16]


def fill(seed: int, lengths: list[int], *, profile=KVProfile.FP32, kv_heads=2, dim=64):
    """An arena whose pages, scratch and unused rows are NaN except for the stored keys and values of layer
    1."""
    layout = PageLayout(profile=profile, num_layers=2, num_kv_heads=kv_heads, head_dim=dim)
    tables, num_pages = shuffled_tables(seed, lengths)
    guarded = nan_arena(layout, num_pages)
    rng = generator(seed)
    for i, length in enumerate(lengths):
        k, v = (torch.randn(length, kv_heads, dim, generator=rng) for _ in range(2))
        place_sequence(guarded.arena, layout, 1, tables[i], k, v)
    return layout, guarded, tables, rng


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [2, 6])
def test_prefill_matches_the_oracle(profile: KVProfile, dtype: torch.dtype, heads: int) -> None:
    chunks, bases = [1, 70, 0, 64, 33], [0, 64, 9, 0, 100]
    lengths = [base + chunk for base, chunk in zip(bases, chunks, strict=True)]
    layout, guarded, tables, rng = fill(50, lengths, profile=profile)
    before = guarded.arena.clone()
    q = (torch.randn(sum(chunks), heads, 64, generator=rng) * 2).to(dtype)
    cu = [0, 1, 71, 71, 135, 168]
    lse = torch.full((sum(chunks), heads), float("nan"))
    o = attention_prefill(
        q=q,
        kv=layout.kv(guarded.arena, 1),
        block_tables=tables,
        cu_seqlens=cu,
        bases=bases,
        lse=lse,
    )
    for i, length in enumerate(lengths):
        k, v = stored_sequence(guarded.arena, layout, 1, tables[i], length)
        expected, expected_lse = reference.attention(q[cu[i] : cu[i + 1]], k, v, bases[i])
        assert_close(o[cu[i] : cu[i + 1]], expected, **tolerance(dtype))
        assert_close(lse[cu[i] : cu[i + 1]], expected_lse, atol=1e-5, rtol=1e-5)
    assert_same_bits(guarded.arena, before)
    guarded.check()


def test_prefill_over_several_key_tiles_matches_the_oracle() -> None:
    layout, guarded, tables, rng = fill(51, [4200], kv_heads=1)
    q = torch.randn(150, 2, 64, generator=rng) * 3
    o = attention_prefill(
        q=q,
        kv=layout.kv(guarded.arena, 1),
        block_tables=tables,
        cu_seqlens=[0, 150],
        bases=[4050],
    )
    k, v = stored_sequence(guarded.arena, layout, 1, tables[0], 4200)
    expected, _ = reference.attention(q, k, v, 4050)
    assert_close(o, expected, **tolerance(torch.float32))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [2, 6])
def test_decode_matches_the_oracle(profile: KVProfile, dtype: torch.dtype, heads: int) -> None:
    lengths = [1, 63, 64, 65, 200]
    layout, guarded, tables, rng = fill(52, lengths, profile=profile)
    before = guarded.arena.clone()
    q = (torch.randn(5, heads, 64, generator=rng) * 3).to(dtype)
    lse = torch.full((5, heads), float("nan"))
    o = attention_decode(
        q=q,
        kv=layout.kv(guarded.arena, 1),
        block_tables=tables,
        lengths=torch.tensor(lengths),
        lse=lse,
    )
    for i, length in enumerate(lengths):
        k, v = stored_sequence(guarded.arena, layout, 1, tables[i], length)
        expected, expected_lse = reference.attention(q[i : i + 1], k, v, length - 1)
        assert_close(o[i : i + 1], expected, **tolerance(dtype))
        assert_close(lse[i : i + 1], expected_lse, atol=1e-5, rtol=1e-5)
    assert_same_bits(guarded.arena, before)
    guarded.check()


def test_large_scores_do_not_overflow() -> None:
    layout, guarded, tables, rng = fill(53, [130])
    q = torch.randn(1, 2, 64, generator=rng) * 500
    o = attention_decode(q=q, kv=layout.kv(guarded.arena, 1), block_tables=tables, lengths=torch.tensor([130]))
    k, v = stored_sequence(guarded.arena, layout, 1, tables[0], 130)
    assert_close(o, reference.attention(q, k, v, 129)[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("profile", [KVProfile.FP32, KVProfile.K8V4])
def test_two_sequences_may_share_pages_and_do_not_depend_on_the_batch(
    profile: KVProfile, threads: int, set_threads
) -> None:
    set_threads(threads)
    lengths = [200, 150, 64, 301]
    layout, guarded, tables, rng = fill(54, lengths, profile=profile)
    tables[1, :2] = tables[0, :2]
    q = torch.randn(4, 6, 64, generator=rng)
    arguments = {"kv": layout.kv(guarded.arena, 1)}
    whole = attention_decode(q=q, block_tables=tables, lengths=torch.tensor(lengths), **arguments)
    chunk = torch.randn(90, 6, 64, generator=rng)
    cu, bases = [0, 40, 41, 60, 90], [160, 149, 45, 271]
    chunked = attention_prefill(q=chunk, block_tables=tables, cu_seqlens=cu, bases=bases, **arguments)
    for rows in ([0], [1], [2], [3], [3, 1], [2, 0, 1]):
        part = attention_decode(q=q[rows], block_tables=tables[rows], lengths=torch.tensor(lengths)[rows], **arguments)
        assert_same_bits(part, whole[rows], f"lanes {rows}")
    for i in range(4):
        part = attention_prefill(
            q=chunk[cu[i] : cu[i + 1]],
            block_tables=tables[i : i + 1],
            cu_seqlens=[0, cu[i + 1] - cu[i]],
            bases=[bases[i]],
            **arguments,
        )
        assert_same_bits(part, chunked[cu[i] : cu[i + 1]], f"sequence {i}")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 3, 8])
def test_keys_read_where_they_lie_give_the_bits_of_gathered_ones(
    groups: int, threads: int, set_threads, monkeypatch
) -> None:
    set_threads(threads)
    lengths = [1000, 700]
    layout, guarded, tables, rng = fill(61, lengths)
    if triton_for(guarded.arena) is not None:
        pytest.skip("the kernels gather nothing")
    # The first sequence moves to pages close to each other, backwards, with a foreign one (NaN) among them.
    close = torch.tensor([page for page in range(17, 0, -1) if page != 9])
    far = torch.tensor([18, *range(20, 26), *range(27, 30), 40])
    arena = nan_arena(layout, 41).arena
    arena[close], arena[far] = guarded.arena[tables[0]], guarded.arena[tables[1, :11]]
    tables = torch.stack([close, torch.nn.functional.pad(far, (0, 5))])
    q = torch.randn(2, 2 * groups, 64, generator=rng)
    arguments = {"kv": layout.kv(arena, 1)}
    gathered = []
    plain = attention_tiles.LayerPages.keys
    monkeypatch.setattr(
        attention_tiles.LayerPages, "keys", lambda self, pages: (gathered.append(len(pages)), plain(self, pages))[1]
    )
    alone = attention_decode(
        q=q[:1],
        block_tables=tables[:1],
        lengths=torch.tensor(lengths[:1]),
        lse=(lse := torch.empty(1, len(q[0]))),
        **arguments,
    )
    assert gathered == []
    both_lse = torch.empty(2, 2 * groups)
    both = attention_decode(q=q, block_tables=tables, lengths=torch.tensor(lengths), lse=both_lse, **arguments)
    assert sum(gathered) == 27
    assert_same_bits(alone, both[:1])
    assert_same_bits(lse, both_lse[:1])


def test_merging_partitions_of_the_keys_equals_attention_over_all() -> None:
    layout, guarded, tables, rng = fill(57, [200, 330])
    arguments = {"kv": layout.kv(guarded.arena, 1)}
    q = torch.randn(2, 6, 64, generator=rng) * 2
    shared = tables[0, :2]
    tables[1, :2] = shared
    lengths = torch.tensor([200, 330])
    outputs, sums = [], []
    partitions = ((shared.expand(2, 2), torch.tensor([128, 128])), (tables[:, 2:], lengths - 128))
    for block_tables, counts in partitions:
        lse = torch.empty(2, 6)
        part = attention_decode(q=q, block_tables=block_tables, lengths=counts, lse=lse, **arguments)
        outputs.append(part)
        sums.append(lse)
    o, lse = merge_attention_states(o=torch.stack(outputs), lse=torch.stack(sums))
    for i, length in enumerate((200, 330)):
        k, v = stored_sequence(guarded.arena, layout, 1, tables[i], length)
        expected, expected_lse = reference.attention(q[i : i + 1], k, v, length - 1)
        assert_close(o[i : i + 1], expected, **tolerance(torch.float32))
        assert_close(lse[i : i + 1], expected_lse, atol=1e-5, rtol=1e-5)
    swapped = merge_attention_states(o=torch.stack(outputs[::-1]), lse=torch.stack(sums[::-1]))
    assert_close(swapped[0], o.double(), atol=1e-6, rtol=1e-6)
    one, _ = merge_attention_states(o=torch.stack(outputs)[:, 1:], lse=torch.stack(sums)[:, 1:])
    assert_same_bits(one, o[1:])


def test_partitions_without_keys_are_not_read() -> None:
    rng = generator(58)
    full, lse = torch.randn(3, 2, 8, generator=rng), torch.randn(3, 2, generator=rng) * 50
    empty, nothing = torch.full_like(full, float("nan")), torch.full_like(lse, float("-inf"))
    o, merged = merge_attention_states(o=torch.stack([empty, full]), lse=torch.stack([nothing, lse]))
    assert_same_bits(o, full)
    assert_same_bits(merged, lse)
    o, merged = merge_attention_states(o=torch.stack([empty, empty]), lse=torch.stack([nothing, nothing]))
    assert bool((o == 0).all())
    assert bool(merged.isneginf().all())


def test_a_workspace_changes_no_bit() -> None:
    layout, guarded, tables, rng = fill(59, [300, 90])
    workspace = Workspace()
    arguments = {"kv": layout.kv(guarded.arena, 1), "block_tables": tables}
    for _ in range(2):
        q = torch.randn(2, 4, 64, generator=rng)
        lengths = torch.tensor([300, 90])
        plain = attention_decode(q=q, lengths=lengths, **arguments)
        reused = attention_decode(q=q, lengths=lengths, workspace=workspace, **arguments)
        assert_same_bits(reused, plain)
        chunk = {"q": torch.randn(70, 4, 64, generator=rng), "cu_seqlens": [0, 50, 70], "bases": [250, 70]}
        plain = attention_prefill(**chunk, **arguments)
        assert_same_bits(attention_prefill(**chunk, workspace=workspace, **arguments), plain)
    assert workspace.num_bytes > 0


@pytest.mark.parametrize("profile", [KVProfile.FP32, KVProfile.NVFP4])
def test_pages_beyond_two_gibibytes_are_reached(profile: KVProfile) -> None:
    layout, guarded, tables, rng = fill(60, [70, 130], profile=profile)
    element_bytes = layout.k_format.value_dtype.itemsize
    far, first = distant_rows(layout.page_bytes, guarded.arena.shape[0], element_bytes=element_bytes)
    far[first:].copy_(guarded.arena)
    q = torch.randn(2, 4, 64, generator=rng)
    decode = {"q": q, "lengths": torch.tensor([70, 130])}
    prefill = {"q": q, "cu_seqlens": [0, 1, 2], "bases": [69, 129]}
    for op, arguments in ((attention_decode, decode), (attention_prefill, prefill)):
        near = op(**arguments, kv=layout.kv(guarded.arena, 1), block_tables=tables)
        assert_same_bits(op(**arguments, kv=layout.kv(far, 1), block_tables=tables + first), near)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_matches_the_oracle(dtype: torch.dtype) -> None:
    rng = generator(55)
    o, gate = ((torch.randn(5, 6, 32, generator=rng) * 4).to(dtype) for _ in range(2))
    assert_close(attention_gate(o=o, gate=gate), reference.attention_gate(o, gate), **tolerance(dtype))


def test_bad_input_names_op_constraint_and_value() -> None:
    layout, guarded, tables, _ = fill(56, [100, 10])
    arguments = {
        "q": torch.zeros(2, 2, 64),
        "kv": layout.kv(guarded.arena, 1),
        "block_tables": tables,
        "lengths": torch.tensor([100, 10]),
    }
    scratch = tables.clone()
    scratch[0, 1] = 0
    for changes, message in (
        ({"lengths": torch.tensor([100, 0])}, "lengths must be at least 1, got 0"),
        ({"lengths": torch.tensor([129, 10])}, "block_tables must cover 129 tokens, got 128"),
        ({"block_tables": scratch}, r"pages must lie in \[1, 7\) \(page 0 is scratch\), got 0"),
        ({"q": torch.zeros(2, 3, 64)}, "query heads must be a multiple of the 2 KV heads, got 3"),
        ({"q": torch.zeros(2, 2, 32)}, "q must have head dim 64, got 32"),
        ({"q": torch.zeros(2, 2, 64).half()}, "q must be float32 or bfloat16, got 'float16'"),
    ):
        op = "paged_attention_decode" if "q" in changes else "DecodePages"
        with pytest.raises(KernelInputError, match=f"{op}: {message}"):
            attention_decode(**{**arguments, **changes})
    del arguments["lengths"]
    with pytest.raises(KernelInputError, match="PrefillPages: block_tables must cover 201 tokens"):
        attention_prefill(**arguments, cu_seqlens=[0, 1, 2], bases=[200, 0])
    with pytest.raises(KernelInputError, match="bases must not be negative"):
        attention_prefill(**arguments, cu_seqlens=[0, 1, 2], bases=[-1, 0])
