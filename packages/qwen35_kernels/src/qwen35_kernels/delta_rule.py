"""The gated delta rule: chunked for prefill, one token at a time for decode.

With q, k l2-normalised and q scaled by K**-0.5, one token does

    S <- exp(g) S;   d = beta (v - k S);   S <- S + k^T d;   o = q S

The chunked form handles 64 tokens at once. In a tile with c = cumsum(g) (Yang et al., "Gated Delta Networks",
2024, equations of the chunkwise form):

    A = strictly lower part of beta_i exp(c_i - c_j) (k_i . k_j),   T = (I + A)^-1
    d = T (beta (v - exp(c) k S)),   o = exp(c) q S + lower(exp(c_i - c_j) q_i . k_j) d
    state after row r = exp(c_r) S + sum over i <= r of exp(c_r - c_i) k_i^T d_i

Tiles lie on an absolute 64-token grid: a call at `base` is padded on the left with base % 64 identity tokens
(k = v = 0, g = 0, beta = 0) and its last tile is filled up with them. The state after any row, a tile's end
or a tap, comes from the one function `delta_tiles._state_after`, whose row is a run-time value; as row i of d depends
on rows <= i only, a tap has the bits of a call that ends there.
"""

from typing import cast

import torch
from torch import Tensor

from qwen35_kernels.contracts import (
    FLOAT_DTYPES,
    as_float32,
    check_device,
    check_dtype,
    check_inner_contiguous,
    check_rank,
    check_shape,
    refuse,
    rounded,
)
from qwen35_kernels.delta_tiles import KEY_EPS, prefill_sequence
from qwen35_kernels.dispatch import triton_for
from qwen35_kernels.elementwise import constant, small_sigmoid, softplus
from qwen35_kernels.norms import inverse_norm
from qwen35_kernels.plans import DecodeStates, PrefillStates, check_slots, check_tokens
from qwen35_kernels.workspace import Workspace

__all__ = ["delta_gates", "gated_delta_rule_prefill", "gated_delta_rule_step"]


def delta_gates(*, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta) = (-exp(a_log) softplus(a + dt_bias), sigmoid(b)), both float32 [T, HV].

    a, b [T, HV] in fp32 or bf16, any strides; a_log, dt_bias [HV]. New tensors; an element's bits depend on
    its own inputs only.

    Raises:
        KernelInputError: a shape, dtype or device that does not fit.
    """
    op = "delta_gates"
    if not (
        a.dim() == 2
        and b.shape == a.shape
        and a_log.shape == dt_bias.shape == a.shape[1:]
        and all(x.dtype in FLOAT_DTYPES and x.device == a.device for x in (a, b, a_log, dt_bias))
    ):
        _check_gates(op, a, b, a_log, dt_bias)
    steps = softplus(as_float32(a) + as_float32(dt_bias))
    g = torch.addcmul(constant(0.0, a.device), steps, as_float32(a_log).exp(), value=-1.0)
    return g, small_sigmoid(as_float32(b))


def _check_gates(op: str, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> None:
    check_rank(op, "a", a, 2)
    check_shape(op, "b", b, tuple(a.shape))
    for name, x in (("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)):
        check_dtype(op, name, x, FLOAT_DTYPES)
        check_device(op, name, x, a.device)
    check_shape(op, "a_log", a_log, (a.shape[1],))
    check_shape(op, "dt_bias", dt_bias, (a.shape[1],))


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
    if not _is_good(q, k, v, g, beta, state):
        _refuse_bad(op, q, k, v, g, beta, state)


def _is_good(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> bool:
    """Every condition of `_refuse_bad` at once: a decode step cannot afford them one by one."""
    if not (q.dim() == 3 and v.dim() == 3 and state.dim() == 4):
        return False
    shape, heads = q.shape, v.shape[1]
    dtype, device = q.dtype, q.device
    return (
        k.shape == shape
        and v.shape[0] == shape[0]
        and shape[1] > 0
        and heads % shape[1] == 0
        and g.shape == beta.shape == v.shape[:2]
        and state.shape[1:] == (heads, shape[2], v.shape[2])
        and dtype in FLOAT_DTYPES
        and k.dtype == v.dtype == dtype
        and g.dtype == state.dtype == torch.float32
        and beta.dtype in FLOAT_DTYPES
        and k.device == v.device == g.device == beta.device == state.device == device
        and q.stride(2) == k.stride(2) == v.stride(2) == state.stride(3) == 1
        and state.stride(2) == v.shape[2]
        and state.stride(1) == shape[2] * v.shape[2]
    )


def _refuse_bad(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
    for name, x, rank in (("q", q, 3), ("k", k, 3), ("v", v, 3), ("state", state, 4)):
        check_rank(op, name, x, rank)
    tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[1:]
    check_shape(op, "k", k, (tokens, key_heads, key_dim))
    check_shape(op, "v", v, (tokens, value_heads, value_dim))
    if key_heads < 1 or value_heads % key_heads:
        refuse(op, f"value heads must be a multiple of the {key_heads} key heads", value_heads)
    check_shape(op, "g", g, (tokens, value_heads))
    check_shape(op, "beta", beta, (tokens, value_heads))
    check_shape(op, "state", state, (state.shape[0], value_heads, key_dim, value_dim))
    check_dtype(op, "q", q, FLOAT_DTYPES)
    check_dtype(op, "k", k, (q.dtype,))
    check_dtype(op, "v", v, (q.dtype,))
    check_dtype(op, "g", g, (torch.float32,))
    check_dtype(op, "beta", beta, FLOAT_DTYPES)
    check_dtype(op, "state", state, (torch.float32,))
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta), ("state", state)):
        check_device(op, name, x, q.device)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_inner_contiguous(op, name, x)
    if state[0].numel() and not state[0].is_contiguous():
        refuse(op, "each slot of state must be contiguous", state.stride())


def gated_delta_rule_prefill(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    states: PrefillStates,
    workspace: Workspace | None = None,
) -> Tensor:
    """The chunked form over N sequences laid end to end.

    q, k [T, HK, K] and v [T, HV, V] in fp32 or bf16, dense in the last axis; g [T, HV] float32 log decay
    (<= 0); beta [T, HV]; state, a float32 view [S, HV, K, V]. Value heads are grouped: HV // HK consecutive
    ones share a key head. Each sequence starts from its slot's state and leaves its final state there; each
    tap's state goes to the tap's slot. Computed in fp32; returns o [T, HV, V] in v's dtype, new and
    contiguous. Inputs are not written.

    Raises:
        KernelInputError: a shape, dtype, stride or device that does not fit, or states of another number of tokens or
            slots.
    """
    op = "gated_delta_rule_prefill"
    _check(op, q, k, v, g, beta, state)
    check_tokens(op, "q", q, states.num_tokens)
    check_slots(op, "state", state, states.num_slots)
    backend = triton_for(q)
    if backend is not None:
        return cast(Tensor, backend.delta_rule.prefill(q=q, k=k, v=v, g=g, beta=beta, state=state, states=states))
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    workspace = workspace or Workspace()
    for own in states.sequences:
        prefill_sequence((q, k, v, g, beta), state, o, own, workspace)
    return o


def gated_delta_rule_step(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, states: DecodeStates
) -> Tensor:
    """The recurrent form: one token for each of B lanes, states updated in place.

    q, k [B, HK, K] and v [B, HV, V] in fp32 or bf16; g, beta [B, HV]; state, a float32 view [S, HV, K, V].
    Returns o [B, HV, V] in v's dtype. Not bit-equal to the chunked form: the caller chooses one.

    Raises:
        KernelInputError: a shape, dtype, stride or device that does not fit, or states of another number of lanes or
            slots.
    """
    op = "gated_delta_rule_step"
    _check(op, q, k, v, g, beta, state)
    lanes, value_heads = v.shape[:2]
    slots = states.slots
    check_tokens(op, "q", q, states.num_tokens)
    check_slots(op, "state", state, states.num_slots)
    check_device(op, "slots", slots, q.device)
    backend = triton_for(q)
    if backend is not None:
        return cast(Tensor, backend.delta_rule.step(q=q, k=k, v=v, g=g, beta=beta, state=state, slots=slots))
    numbers = states.numbers
    if lanes == 0:
        return torch.empty_like(v)
    qk = as_float32(torch.cat((q, k)))
    qk = qk * inverse_norm(qk, weight=1.0, eps=KEY_EPS)
    if value_heads != q.shape[1]:
        qk = qk.repeat_interleave(value_heads // q.shape[1], dim=1)
    rows = lanes * value_heads
    query, key = qk.view(2, rows, 1, -1).unbind()
    v_rows = as_float32(v).reshape(rows, 1, -1)
    token = [query, key, v_rows, as_float32(beta).reshape(rows, 1, 1), g.exp().reshape(rows, 1, 1)]
    if lanes == 1:
        o = _step(token, state[numbers[0]])
    elif state.shape[1:].numel() >= _IN_PLACE_FLOATS:
        # Large states are updated where they are; small ones together in a gathered copy. The bits are equal.
        heads = [slice(i * value_heads, (i + 1) * value_heads) for i in range(lanes)]
        each = zip(heads, numbers, strict=True)
        o = torch.cat([_step([x[own] for x in token], state[slot]) for own, slot in each])
    else:
        gathered = state.index_select(0, slots).flatten(0, 1)
        o = _step(token, gathered)
        state.index_copy_(0, slots, gathered.view(lanes, *state.shape[1:]))
    return rounded(o.view(v.shape), v.dtype)


_IN_PLACE_FLOATS = 2**16


def _step(token: list[Tensor], state: Tensor) -> Tensor:
    """Outputs [N, 1, V] of one token (query and key [N, 1, K], v [N, 1, V], beta and decay [N, 1, 1]); state
    [N, K, V] in place."""
    query, key, v, beta, decay = token
    state.mul_(decay)
    d = torch.baddbmm(v, key, state, alpha=-1).mul_(beta)
    state.addcmul_(key.transpose(1, 2), d)
    return torch.bmm(query, state).mul_(constant(key.shape[2] ** -0.5, state.device))
