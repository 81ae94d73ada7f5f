"""Float64 oracles: the plain formulas, token by token and softmax by softmax.

Nothing here is fast, tiled or shared with the ops it judges. Arguments are what one sequence sees: contiguous
keys and values instead of pages, one initial state instead of a slot.
"""

import math

import torch
from torch import Tensor

__all__ = [
    "attention",
    "attention_gate",
    "causal_conv1d",
    "delta_gates",
    "gated_delta_rule",
    "gated_rms_norm",
    "kept_tokens",
    "log_probabilities",
    "moe",
    "quantised_row",
    "rms_norm",
    "rotary",
    "sample_row",
    "swiglu",
]


def _sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (1 + weight)."""
    x, weight = x.double(), weight.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * (1.0 + weight)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * gate * sigmoid(gate)."""
    x, gate, weight = x.double(), gate.double(), weight.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight * gate * _sigmoid(gate)


def rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Turn dims (i, i + R/2) of x [T, heads, D] by angles [T, R/2]."""
    x, angles = x.double(), angles.double()
    out = x.clone()
    half = angles.shape[1]
    for i in range(half):
        cos, sin = torch.cos(angles[:, i])[:, None], torch.sin(angles[:, i])[:, None]
        out[..., i] = x[..., i] * cos - x[..., i + half] * sin
        out[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu of the first half of the columns times the second half."""
    gate_up = gate_up.double()
    inner = gate_up.shape[1] // 2
    gate = gate_up[:, :inner]
    return gate * _sigmoid(gate) * gate_up[:, inner:]


def causal_conv1d(x: Tensor, weight: Tensor, history: Tensor) -> Tensor:
    """silu(sum over w of weight[c, w] x[t - (W - 1) + w, c]) with x [T, C] preceded by history [C, W - 1]."""
    joined = torch.cat([history.double().t(), x.double()])
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for w in range(weight.shape[1]):
            y[t] += weight[:, w].double() * joined[t + w]
    return y * _sigmoid(y)


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(-exp(a_log) log(1 + exp(a + dt_bias)), sigmoid(b))."""
    total = a.double() + dt_bias.double()
    return -torch.exp(a_log.double()) * torch.logaddexp(total, torch.zeros_like(total)), _sigmoid(b.double())


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [T, HV, V], and the states after 0, 1, .. T tokens [T + 1, HV, K, V], by the recurrence."""
    q, k, v, g, beta = q.double(), k.double(), v.double(), g.double(), beta.double()
    groups = v.shape[1] // q.shape[1]
    q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6) / math.sqrt(q.shape[-1])
    k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    current = state.double().clone()
    states = [current.clone()]
    outputs = torch.zeros(v.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        for h in range(v.shape[1]):
            key, query = k[t, h // groups], q[t, h // groups]
            decayed = current[h] * torch.exp(g[t, h])
            correction = beta[t, h] * (v[t, h] - key @ decayed)
            current[h] = decayed + torch.outer(key, correction)
            outputs[t, h] = query @ current[h]
        states.append(current.clone())
    return outputs, torch.stack(states)


def attention(q: Tensor, k: Tensor, v: Tensor, base: int) -> tuple[Tensor, Tensor]:
    """(o [T, H, D], log-sum-exp [T, H]) of queries q [T, H, D] at positions base.. over k, v [L, HKV, D]."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    o = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.zeros(q.shape[:2], dtype=torch.float64)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            seen = base + t + 1
            scores = k[:seen, h // groups] @ q[t, h] / math.sqrt(q.shape[2])
            lse[t, h] = torch.logsumexp(scores, 0)
            o[t, h] = torch.exp(scores - lse[t, h]) @ v[:seen, h // groups]
    return o, lse


def attention_gate(o: Tensor, gate: Tensor) -> Tensor:
    """o * sigmoid(gate)."""
    return o.double() * _sigmoid(gate.double())


def quantised_row(row: list[float], profile: str) -> list[float]:
    """What one row reads as after being stored in `profile` (int8, fp8 or fp4), by search over all codes.

    Scales are rounded by torch to their dtype; everything else is the nearest-code rule with ties to even.
    """
    group, largest, scale_dtype = {
        "int8": (64, 127.0, torch.float16),
        "fp8": (len(row), 448.0, torch.float16),
        "fp4": (16, 6.0, torch.float8_e4m3fn),
    }[profile]
    if profile == "int8":
        codes = [float(i) for i in range(128)]
    elif profile == "fp8":
        codes = [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
        codes = [m * 2.0**-9 for m in range(8)] + codes
    else:
        codes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    out = []
    for begin in range(0, len(row), group):
        part = row[begin : begin + group]
        wanted = min(max(abs(x) for x in part) / largest, torch.finfo(scale_dtype).max)
        scale = float(torch.tensor(wanted, dtype=torch.float32).to(scale_dtype))
        for x in part:
            size = abs(x) / scale if scale else 0.0
            # Codes are listed in order, so that an even index is an even code.
            best = min(range(len(codes)), key=lambda i: (abs(codes[i] - size), i % 2))
            out.append(math.copysign(codes[best] * scale, x))
    return out


def moe(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> Tensor:
    """The routed experts' output for every token, expert by expert."""
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    probabilities = torch.softmax(x @ router.double().t(), dim=1)
    y = torch.zeros_like(x)
    for t in range(x.shape[0]):
        chosen = sorted(range(router.shape[0]), key=lambda e: (-float(probabilities[t, e]), e))[:top_k]
        share = sum(float(probabilities[t, e]) for e in chosen)
        for e in chosen:
            inner = swiglu((gate_up[e] @ x[t]).unsqueeze(0))[0]
            y[t] += probabilities[t, e] / share * (down[e] @ inner)
    return y


def log_probabilities(logits: Tensor) -> Tensor:
    """logits - log(sum(exp(logits))) over the last axis."""
    logits = logits.double()
    peak = logits.amax(-1, keepdim=True)
    return logits - peak - torch.log(torch.exp(logits - peak).sum(-1, keepdim=True))


def kept_tokens(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """The tokens that survive the filters of one row, and their unnormalised probabilities."""
    peak = max(logits)
    weights = [math.exp((x - peak) / temperature) if x > -math.inf else 0.0 for x in logits]
    kept = [i for i, w in enumerate(weights) if w > 0]
    if top_k:
        kept = [i for i in kept if sum(1 for w in weights if w > weights[i]) < top_k]
    if top_p < 1:
        total = sum(weights[i] for i in kept)
        kept = [i for i in kept if sum(weights[j] for j in kept if weights[j] > weights[i]) < top_p * total]
    return {i: weights[i] for i in kept if weights[i] >= min_p}


def sample_row(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, noise: float) -> int:
    """The token of one row, by the filters' definitions and a walk along the vocabulary."""
    if temperature == 0:
        return max(range(len(logits)), key=lambda i: (logits[i], -i))
    kept = kept_tokens(logits, temperature, top_k, top_p, min_p)
    target = noise * sum(kept.values())
    running = 0.0
    for i, weight in kept.items():
        running += weight
        if running > target:
            return i
    return max(kept)
