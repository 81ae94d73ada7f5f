"""The gated delta rule on a GPU. The formulas are those of `qwen35_kernels.delta_rule`.

`delta_prepare` makes, for every tile and value head at once, what does not need the carried state;
`delta_scan` walks a sequence's tiles with a slice of the state, [K, BV], in registers. Keys and queries
stay as they came in: their inverse norms scale the products.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["HV", "GROUPS"])
def delta_prepare(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    tiles_ptr,
    t_ptr,
    p_ptr,
    c_ptr,
    rq_ptr,
    rk_ptr,
    stride_q,
    stride_k,
    stride_g,
    stride_beta,
    scale,
    eps,
    HV,
    K: tl.constexpr,
    BK: tl.constexpr,
    GROUPS,
    BT: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_tile, i_hv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_hk = i_hv // GROUPS
    first = tl.load(tiles_ptr + i_tile * 3)
    low = tl.load(tiles_ptr + i_tile * 3 + 1)
    high = tl.load(tiles_ptr + i_tile * 3 + 2)
    rows, cols = tl.arange(0, BT), tl.arange(0, BK)
    valid = (rows >= low) & (rows < high)
    token = first + rows
    inside = valid[:, None] & (cols < K)[None, :]
    b_g = tl.load(g_ptr + token * stride_g + i_hv, mask=valid, other=0.0).to(tl.float32)
    b_beta = tl.load(beta_ptr + token * stride_beta + i_hv, mask=valid, other=0.0).to(tl.float32)
    b_c = tl.cumsum(b_g, axis=0)
    b_k = tl.load(k_ptr + token[:, None] * stride_k + i_hk * K + cols[None, :], mask=inside, other=0.0)
    wide_k = b_k.to(tl.float32)
    b_rk = 1.0 / tl.sqrt(tl.sum(wide_k * wide_k, axis=1) + eps)
    b_kt = tl.trans(b_k.to(DOT))
    b_kk = tl.dot(b_k.to(DOT), b_kt, input_precision=PRECISION)
    b_q = tl.load(q_ptr + token[:, None] * stride_q + i_hk * K + cols[None, :], mask=inside, other=0.0)
    wide_q = b_q.to(tl.float32)
    b_rq = scale / tl.sqrt(tl.sum(wide_q * wide_q, axis=1) + eps)
    b_qk = tl.dot(b_q.to(DOT), b_kt, input_precision=PRECISION)
    # Masked before exp: a positive exponent overflows to inf, and inf * 0 is NaN.
    past = rows[:, None] >= rows[None, :]
    decay = tl.exp(tl.where(past, b_c[:, None] - b_c[None, :], float("-inf")))
    i_out = i_tile * HV + i_hv
    square = i_out * BT * BT + rows[:, None] * BT + rows[None, :]
    b_p = decay * b_qk * b_rq[:, None] * b_rk[None, :]
    tl.store(p_ptr + square, b_p.to(p_ptr.dtype.element_ty))
    b_a = decay * b_kk * b_rk[:, None] * b_rk[None, :] * b_beta[:, None]
    # The inverse of I + strictly lower part of A, by blocks of twice the size: with T the inverse of the
    # diagonal blocks, that of a pair [[X, 0], [C, Y]] differs from it by -Y^-1 C X^-1 at C's place.
    b_t = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    for level in tl.static_range(6):
        block_i, block_j = rows[:, None] >> level, rows[None, :] >> level
        pair = (block_i == block_j + 1) & ((block_i & 1) == 1)
        b_pair = tl.where(pair, b_a, 0.0)
        b_left = tl.dot(b_t, b_pair, input_precision=PRECISION)
        b_t -= tl.dot(b_left, b_t, input_precision=PRECISION)
    tl.store(t_ptr + square, b_t.to(t_ptr.dtype.element_ty))
    tl.store(c_ptr + i_out * BT + rows, b_c)
    tl.store(rq_ptr + i_out * BT + rows, b_rq)
    tl.store(rk_ptr + i_out * BT + rows, b_rk)


@triton.jit(do_not_specialize=["HV", "GROUPS"])
def delta_scan(
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    o_ptr,
    state_ptr,
    t_ptr,
    p_ptr,
    c_ptr,
    rq_ptr,
    rk_ptr,
    tiles_ptr,
    sequences_ptr,
    tile_taps_ptr,
    taps_ptr,
    stride_q,
    stride_k,
    stride_v,
    stride_beta,
    stride_state,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUPS,
    BT: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_v, i_hv, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_hk = i_hv // GROUPS
    tile_begin = tl.load(sequences_ptr + i_n * 3)
    tile_end = tl.load(sequences_ptr + i_n * 3 + 1)
    slot = tl.load(sequences_ptr + i_n * 3 + 2)
    rows, k_cols, v_cols = tl.arange(0, BT), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    part = i_hv * K * V + k_cols[:, None] * V + v_cols[None, :]
    inside = (k_cols < K)[:, None] & (v_cols < V)[None, :]
    b_s = tl.load(state_ptr + slot * stride_state + part, mask=inside, other=0.0)
    for i_tile in range(tile_begin, tile_end):
        first = tl.load(tiles_ptr + i_tile * 3)
        low = tl.load(tiles_ptr + i_tile * 3 + 1)
        high = tl.load(tiles_ptr + i_tile * 3 + 2)
        valid = (rows >= low) & (rows < high)
        token = first + rows
        i_in = i_tile * HV + i_hv
        b_c = tl.load(c_ptr + i_in * BT + rows)
        b_rk = tl.load(rk_ptr + i_in * BT + rows)
        key_mask = valid[:, None] & (k_cols < K)[None, :]
        value_mask = valid[:, None] & (v_cols < V)[None, :]
        b_k = tl.load(k_ptr + token[:, None] * stride_k + i_hk * K + k_cols[None, :], mask=key_mask, other=0.0).to(DOT)
        b_v = tl.load(v_ptr + token[:, None] * stride_v + i_hv * V + v_cols[None, :], mask=value_mask, other=0.0).to(
            tl.float32
        )
        b_beta = tl.load(beta_ptr + token * stride_beta + i_hv, mask=valid, other=0.0).to(tl.float32)
        b_start = tl.exp(b_c)
        b_met = tl.dot(b_k, b_s.to(DOT), input_precision=PRECISION) * (b_start * b_rk)[:, None]
        b_x = (b_v - b_met) * b_beta[:, None]
        square = i_in * BT * BT + rows[:, None] * BT + rows[None, :]
        b_t = tl.load(t_ptr + square).to(DOT)
        b_d = tl.dot(b_t, b_x.to(DOT), input_precision=PRECISION)
        b_rq = tl.load(rq_ptr + i_in * BT + rows)
        b_q = tl.load(q_ptr + token[:, None] * stride_q + i_hk * K + k_cols[None, :], mask=key_mask, other=0.0).to(DOT)
        b_p = tl.load(p_ptr + square).to(DOT)
        b_o = tl.dot(b_q, b_s.to(DOT), input_precision=PRECISION) * (b_start * b_rq)[:, None]
        b_o += tl.dot(b_p, b_d.to(DOT), input_precision=PRECISION)
        tl.store(
            o_ptr + (token[:, None] * HV + i_hv) * V + v_cols[None, :],
            b_o.to(o_ptr.dtype.element_ty),
            mask=value_mask,
        )
        # The one place where a state is computed: after the row of each tap, and last after the tile's end.
        tap_begin = tl.load(tile_taps_ptr + i_tile)
        tap_end = tl.load(tile_taps_ptr + i_tile + 1)
        b_kt = tl.trans(b_k)
        b_next = b_s
        for i_tap in range(tap_begin, tap_end + 1):
            is_tap = i_tap < tap_end
            row = tl.where(is_tap, tl.load(taps_ptr + i_tap * 2), BT - 1)
            b_last = tl.sum(tl.where(rows == row, b_c, 0.0), axis=0)
            kept = rows <= row
            b_w = tl.exp(tl.where(kept, b_last - b_c, float("-inf"))) * b_rk
            b_wd = tl.where(kept[:, None], b_d * b_w[:, None], 0.0)
            b_next = b_s * tl.exp(b_last) + tl.dot(b_kt, b_wd.to(DOT), input_precision=PRECISION)
            tap_slot = tl.load(taps_ptr + i_tap * 2 + 1)
            wanted = (k_cols < tl.where(is_tap, K, 0))[:, None] & (v_cols < V)[None, :]
            tl.store(state_ptr + tap_slot * stride_state + part, b_next, mask=wanted)
        b_s = b_next
    tl.store(state_ptr + slot * stride_state + part, b_s, mask=inside)


@triton.jit(do_not_specialize=["HV", "GROUPS"])
def delta_step(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    o_ptr,
    state_ptr,
    slots_ptr,
    stride_q,
    stride_k,
    stride_v,
    stride_g,
    stride_beta,
    stride_state,
    scale,
    eps,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUPS,
):
    i_v, i_hv, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_hk = i_hv // GROUPS
    k_cols, v_cols = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    slot = tl.load(slots_ptr + i_b)
    b_k = tl.load(k_ptr + i_b * stride_k + i_hk * K + k_cols, mask=k_cols < K, other=0.0).to(tl.float32)
    b_q = tl.load(q_ptr + i_b * stride_q + i_hk * K + k_cols, mask=k_cols < K, other=0.0).to(tl.float32)
    b_v = tl.load(v_ptr + i_b * stride_v + i_hv * V + v_cols, mask=v_cols < V, other=0.0).to(tl.float32)
    b_g = tl.load(g_ptr + i_b * stride_g + i_hv).to(tl.float32)
    b_beta = tl.load(beta_ptr + i_b * stride_beta + i_hv).to(tl.float32)
    b_k = b_k * (1.0 / tl.sqrt(tl.sum(b_k * b_k, axis=0) + eps))
    b_q = b_q * (scale / tl.sqrt(tl.sum(b_q * b_q, axis=0) + eps))
    part = state_ptr + slot * stride_state + i_hv * K * V + k_cols[:, None] * V + v_cols[None, :]
    inside = (k_cols < K)[:, None] & (v_cols < V)[None, :]
    b_s = tl.load(part, mask=inside, other=0.0) * tl.exp(b_g)
    b_d = (b_v - tl.sum(b_s * b_k[:, None], axis=0)) * b_beta
    b_s += b_k[:, None] * b_d[None, :]
    b_o = tl.sum(b_s * b_q[:, None], axis=0)
    tl.store(o_ptr + (i_b * HV + i_hv) * V + v_cols, b_o.to(o_ptr.dtype.element_ty), mask=v_cols < V)
    tl.store(part, b_s, mask=inside)
