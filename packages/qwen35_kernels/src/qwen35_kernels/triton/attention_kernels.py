"""Attention over pages on a GPU. The formulas are those of `qwen35_kernels.attention`.

A head is handled as two halves of its dims, because packed nibbles hold dims i and i + D/2 in one byte: every
profile is read, multiplied and summed half by half, and only the loads know the profile.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _fp4_value(code):
    """The number behind a 4-bit code: 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign in bit 3.

    The code's two bits of exponent and one of mantissa, put where float32 has its lowest ones, are the number times
    2^-126, subnormal codes included.
    """
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _load_half(
    values_ptr,
    scales_ptr,
    line,
    valid,
    PART: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Dims [PART D/2, (PART + 1) D/2) of the rows `line` of one page's plane, [rows, D/2]; rows not valid
    are 0."""
    HALF: tl.constexpr = D // 2
    cols = tl.arange(0, HALF)
    mask = valid[:, None] & (cols < HALF)[None, :]
    if FORMAT == "plain":
        return tl.load(values_ptr + line[:, None] * D + PART * HALF + cols[None, :], mask=mask, other=0.0).to(DOT)
    group = (PART * HALF + cols) // GROUP
    scale = tl.load(scales_ptr + line[:, None] * (D // GROUP) + group[None, :], mask=mask, other=0.0)
    if FORMAT == "fp4":
        byte = tl.load(values_ptr + line[:, None] * HALF + cols[None, :], mask=mask, other=0)
        value = _fp4_value((byte.to(tl.int32) >> (4 * PART)) & 15)
    elif FORMAT == "int8":
        value = tl.load(values_ptr + line[:, None] * D + PART * HALF + cols[None, :], mask=mask, other=0)
        value = value.to(tl.float32)
    else:
        value = tl.load(values_ptr + line[:, None] * D + PART * HALF + cols[None, :], mask=mask, other=0.0)
        value = value.to(tl.float32)
    return (value * scale.to(tl.float32)).to(DOT)


@triton.jit
def _attend_pages(
    q_ptr,
    mask,
    position,
    k_ptr,
    ks_ptr,
    v_ptr,
    vs_ptr,
    k_page,
    ks_page,
    v_page,
    vs_page,
    table_ptr,
    begin,
    end,
    length,
    i_hk,
    scale,
    BM: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    K_FORMAT: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_GROUP: tl.constexpr,
):
    """Attention of BM rows of queries at `position`, the halves of each at q_ptr [BM, D/2], over a block table's
    pages [begin, end), of which `length` keys count: (maximum, sum, output halves not divided by it), carried from
    page to page."""
    HALF: tl.constexpr = D // 2
    b_q0 = tl.load(q_ptr, mask=mask, other=0.0).to(DOT)
    b_q1 = tl.load(q_ptr + HALF, mask=mask, other=0.0).to(DOT)
    b_max = tl.full([BM], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BM], dtype=tl.float32)
    b_o0 = tl.zeros([BM, HALF], dtype=tl.float32)
    b_o1 = tl.zeros([BM, HALF], dtype=tl.float32)
    rows = tl.arange(0, BLOCK)
    line = i_hk * BLOCK + rows
    for i_page in range(begin, end):
        page = tl.load(table_ptr + i_page)
        key = i_page * BLOCK + rows
        # Rows past the sequence's end are not loaded: they may hold anything.
        valid = key < length
        p_k, p_ks = k_ptr + page * k_page, ks_ptr + page * ks_page
        p_v, p_vs = v_ptr + page * v_page, vs_ptr + page * vs_page
        # One half at a time: both at once do not fit the registers of the quantised profiles.
        b_k0 = _load_half(p_k, p_ks, line, valid, 0, D, K_FORMAT, K_GROUP, DOT)
        b_s = tl.dot(b_q0, tl.trans(b_k0), input_precision=PRECISION)
        b_k1 = _load_half(p_k, p_ks, line, valid, 1, D, K_FORMAT, K_GROUP, DOT)
        b_s = tl.dot(b_q1, tl.trans(b_k1), b_s, input_precision=PRECISION)
        seen = (key[None, :] <= position[:, None]) & valid[None, :]
        b_s = tl.where(seen, b_s * scale, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        # A row that has seen no key yet keeps a finite shift, so that no inf - inf arises.
        shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp(b_s - shift[:, None])
        shrink = tl.exp(b_max - shift)
        b_max = b_new
        b_sum = b_sum * shrink + tl.sum(b_p, axis=1)
        b_v0 = _load_half(p_v, p_vs, line, valid, 0, D, V_FORMAT, V_GROUP, DOT)
        b_o0 = b_o0 * shrink[:, None] + tl.dot(b_p.to(DOT), b_v0, input_precision=PRECISION)
        b_v1 = _load_half(p_v, p_vs, line, valid, 1, D, V_FORMAT, V_GROUP, DOT)
        b_o1 = b_o1 * shrink[:, None] + tl.dot(b_p.to(DOT), b_v1, input_precision=PRECISION)
    return b_max, b_sum, b_o0, b_o1


@triton.jit(do_not_specialize=["H", "GROUPS", "stride_table"])
def attend_prefill(
    q_ptr,
    k_ptr,
    ks_ptr,
    v_ptr,
    vs_ptr,
    o_ptr,
    lse_ptr,
    tables_ptr,
    blocks_ptr,
    stride_token,
    stride_head,
    stride_table,
    k_page,
    ks_page,
    v_page,
    vs_page,
    scale,
    H,
    GROUPS,
    D: tl.constexpr,
    BM: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    K_FORMAT: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_GROUP: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    i_block, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # A block of queries: first token, sequence's end, sequence, position of the first token.
    first = tl.load(blocks_ptr + i_block * 4)
    end = tl.load(blocks_ptr + i_block * 4 + 1)
    i_n = tl.load(blocks_ptr + i_block * 4 + 2)
    base = tl.load(blocks_ptr + i_block * 4 + 3)
    rows, cols = tl.arange(0, BM), tl.arange(0, HALF)
    token = first + rows
    valid = token < end
    position = base + rows
    mask = valid[:, None] & (cols < HALF)[None, :]
    source = q_ptr + token[:, None] * stride_token + i_h * stride_head + cols[None, :]
    # Keys up to the block's last query; the sequence's end bounds what the pages hold.
    length = base + tl.minimum(end - first, BM)
    b_max, b_sum, b_o0, b_o1 = _attend_pages(
        source,
        mask,
        position,
        k_ptr,
        ks_ptr,
        v_ptr,
        vs_ptr,
        k_page,
        ks_page,
        v_page,
        vs_page,
        tables_ptr + i_n * stride_table,
        0,
        (length + BLOCK - 1) // BLOCK,
        length,
        i_h // GROUPS,
        scale,
        BM,
        D,
        BLOCK,
        DOT,
        PRECISION,
        K_FORMAT,
        K_GROUP,
        V_FORMAT,
        V_GROUP,
    )
    out = o_ptr + (token[:, None] * H + i_h) * D + cols[None, :]
    tl.store(out, (b_o0 / b_sum[:, None]).to(o_ptr.dtype.element_ty), mask=mask)
    tl.store(out + HALF, (b_o1 / b_sum[:, None]).to(o_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + token * H + i_h, b_max + tl.log(b_sum), mask=valid)


@triton.jit(do_not_specialize=["H", "GROUPS", "stride_table", "num_lanes"])
def attend_decode(
    q_ptr,
    k_ptr,
    ks_ptr,
    v_ptr,
    vs_ptr,
    o_ptr,
    lse_ptr,
    tables_ptr,
    lengths_ptr,
    stride_token,
    stride_head,
    stride_table,
    k_page,
    ks_page,
    v_page,
    vs_page,
    scale,
    num_lanes,
    H,
    GROUPS,
    D: tl.constexpr,
    BM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    K_FORMAT: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_GROUP: tl.constexpr,
):
    """Attention of a lane's group of heads over PAGES pages; partial outputs [split, lane, head]."""
    HALF: tl.constexpr = D // 2
    i_b, i_hk, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + i_b)
    begin = i_split * PAGES
    end = tl.minimum((length + BLOCK - 1) // BLOCK, begin + PAGES)
    if begin < end:
        rows, cols = tl.arange(0, BM), tl.arange(0, HALF)
        valid = rows < GROUPS
        head = i_hk * GROUPS + rows
        mask = valid[:, None] & (cols < HALF)[None, :]
        source = q_ptr + i_b * stride_token + head[:, None] * stride_head + cols[None, :]
        position = rows * 0 + (length - 1)
        b_max, b_sum, b_o0, b_o1 = _attend_pages(
            source,
            mask,
            position,
            k_ptr,
            ks_ptr,
            v_ptr,
            vs_ptr,
            k_page,
            ks_page,
            v_page,
            vs_page,
            tables_ptr + i_b * stride_table,
            begin,
            end,
            length,
            i_hk,
            scale,
            BM,
            D,
            BLOCK,
            DOT,
            PRECISION,
            K_FORMAT,
            K_GROUP,
            V_FORMAT,
            V_GROUP,
        )
        i_out = (i_split * num_lanes + i_b) * H + head
        out = o_ptr + i_out[:, None] * D + cols[None, :]
        tl.store(out, b_o0 / b_sum[:, None], mask=mask)
        tl.store(out + HALF, b_o1 / b_sum[:, None], mask=mask)
        tl.store(lse_ptr + i_out, b_max + tl.log(b_sum), mask=valid)


@triton.jit(do_not_specialize=["H", "num_tokens", "parts"])
def merge_states(
    o_ptr,
    lse_ptr,
    lengths_ptr,
    out_ptr,
    out_lse_ptr,
    num_tokens,
    parts,
    H,
    D: tl.constexpr,
    BD: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Merge o [parts, T, H, D] and lse [parts, T, H]; with KEYS, a token has ceil(length / KEYS) parts."""
    i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BD)
    mask = cols < D
    if KEYS > 0:
        parts = (tl.load(lengths_ptr + i_t) + KEYS - 1) // KEYS
    b_max = tl.full([1], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([1], dtype=tl.float32)
    b_o = tl.zeros([BD], dtype=tl.float32)
    for i_part in range(parts):
        i_in = (i_part * num_tokens + i_t) * H + i_h
        b_lse = tl.load(lse_ptr + i_in + tl.zeros([1], dtype=tl.int32))
        b_new = tl.maximum(b_max, b_lse)
        shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        weight = tl.exp(b_lse - shift)
        shrink = tl.exp(b_max - shift)
        b_part = tl.load(o_ptr + i_in * D + cols, mask=mask, other=0.0).to(tl.float32)
        # The output of a partition without keys was never written.
        b_o = b_o * shrink + tl.where(weight > 0.0, b_part * weight, 0.0)
        b_sum = b_sum * shrink + weight
        b_max = b_new
    b_o = b_o / tl.where(b_sum > 0.0, b_sum, 1.0)
    tl.store(out_ptr + (i_t * H + i_h) * D + cols, b_o.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(
        out_lse_ptr + i_t * H + i_h + tl.zeros([1], dtype=tl.int32), b_max + tl.log(tl.where(b_sum > 0.0, b_sum, 1.0))
    )
