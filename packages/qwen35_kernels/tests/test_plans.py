"""Plans: where a pass's tokens stand and are stored, and that one made for another arena or pass is refused."""

import pytest
import torch

from kernel_testing import generator
from qwen35_kernels import (
    DecodePages,
    DecodeStates,
    KernelInputError,
    KVProfile,
    PageLayout,
    PrefillPages,
    PrefillStates,
    TokenRows,
    causal_conv1d_prefill,
    causal_conv1d_step,
    paged_attention_decode,
    store_kv,
)

TABLES = [[5, 2, 9, 0], [1, 7, 3, 4]]


def test_the_tokens_of_chunks_stand_behind_their_bases() -> None:
    tables = torch.tensor(TABLES)
    pages = PrefillPages(block_tables=tables, cu_seqlens=[0, 70, 70 + 129], bases=[60, 127], num_pages=10)
    positions, owners = [*range(60, 130), *range(127, 256)], [0] * 70 + [1] * 129
    assert pages.positions.tolist() == positions
    assert pages.rows.pages.tolist() == [TABLES[i][p // 64] for i, p in zip(owners, positions, strict=True)]
    assert pages.rows.rows.tolist() == [p % 64 for p in positions]
    with pytest.raises(KernelInputError, match="PrefillPages: block_tables must cover 257 tokens, got 256"):
        PrefillPages(block_tables=tables, cu_seqlens=[0, 70, 200], bases=[60, 127], num_pages=10)


def test_lanes_store_their_last_token() -> None:
    pages = DecodePages(block_tables=torch.tensor(TABLES), lengths=torch.tensor([65, 256]), num_pages=10)
    assert pages.rows.pages.tolist() == [2, 4]
    assert pages.rows.rows.tolist() == [0, 63]
    assert pages.rows is pages.rows
    assert [lane.numbers.tolist() for lane in pages.lanes] == [[5, 2], [1, 7, 3, 4]]


def test_what_is_derived_is_derived_once() -> None:
    states = PrefillStates(slots=[1], cu_seqlens=[0, 3], bases=[0], num_slots=2)
    made = []
    for _ in range(3):
        assert states.once("key", lambda: made.append(1) or len(made)) == 1
    assert made == [1]


def test_a_plan_of_another_pass_is_refused() -> None:
    rng = generator(80)
    x, weight = torch.randn(3, 4, generator=rng), torch.randn(4, 3, generator=rng)
    history = torch.zeros(5, 4, 2)
    for tokens, slots, message in ((4, 5, "x must have the plan's 4 tokens, got 3"), (3, 9, "history must have the")):
        chunk = PrefillStates(slots=[1], cu_seqlens=[0, tokens], bases=[0], num_slots=slots)
        with pytest.raises(KernelInputError, match=f"causal_conv1d_prefill: {message}"):
            causal_conv1d_prefill(x=x, weight=weight, history=history, states=chunk)
        step = DecodeStates(slots=torch.arange(1, 1 + tokens), num_slots=slots)
        with pytest.raises(KernelInputError, match=f"causal_conv1d_step: {message}"):
            causal_conv1d_step(x=x, weight=weight, history=history, states=step)
    layout = PageLayout(profile=KVProfile.FP32, num_layers=1, num_kv_heads=1, head_dim=32)
    kv = layout.kv(torch.zeros(4, layout.page_bytes, dtype=torch.uint8), 0)
    k = torch.randn(1, 1, 32, generator=rng)
    rows = TokenRows(pages=torch.tensor([1]), rows=torch.tensor([0]), num_pages=5)
    with pytest.raises(KernelInputError, match="store_kv: kv must have the rows' 5 pages, got 4"):
        store_kv(k=k, v=k, kv=kv, rows=rows)
    pages = DecodePages(block_tables=torch.tensor([[1]]), lengths=torch.tensor([1]), num_pages=5)
    with pytest.raises(KernelInputError, match="paged_attention_decode: kv must have the plan's 5 pages, got 4"):
        paged_attention_decode(q=k, kv=kv, pages=pages)
