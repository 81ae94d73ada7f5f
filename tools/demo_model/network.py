"""Qwen3.5's text model in plain torch, for training: whole sequences from position 0, with autograd.

Parameters have the names of the stored tensors. The formulas are those of ``transformers``' ``modeling_qwen3_5``; the
demo's tests compare the exported checkpoint with it.

Axis letters: B sequences, T tokens, H heads, N chunks, C tokens of a chunk, K and V key and value dims.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Network", "Seen", "delta_rule"]

CHUNK = 32


class Network(nn.Module):
    """``config`` is the mapping that ``config.json`` holds; head and embedding are tied."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        hidden = config["hidden_size"]
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        self.model.layers = nn.ModuleList(_Layer(config, kind) for kind in config["layer_types"])
        self.model.norm = _Norm(hidden, config["rms_norm_eps"])
        nn.init.normal_(self.model.embed_tokens.weight, std=hidden**-0.5)

    @property
    def attentions(self) -> list[_Attention]:
        return [layer.self_attn for layer in self.model.layers if hasattr(layer, "self_attn")]

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits of int64 tokens ``[B, T]``: ``[B, T, vocab]``, or ``[n, vocab]`` for n flat ``positions``."""
        rotary = _rotary_tables(self.config, tokens.shape[1])
        hidden = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            hidden = layer(hidden, rotary)
        if positions is not None:
            hidden = hidden.flatten(0, 1)[positions]
        return F.linear(self.model.norm(hidden), self.model.embed_tokens.weight)


class _Norm(nn.Module):
    """RMS norm whose weight is stored less one."""

    def __init__(self, size: int, eps: float, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), start))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


def _linear(inputs: int, outputs: int, *, scale: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=scale / math.sqrt(inputs))
    return layer


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = _Norm(hidden, eps)
        self.post_attention_layernorm = _Norm(hidden, eps)
        if kind == "linear_attention":
            self.linear_attn = _DeltaNet(config)
        else:
            self.self_attn = _Attention(config)
        self.mlp = nn.Module()
        inner = config["intermediate_size"]
        depth = math.sqrt(2 * len(config["layer_types"]))
        self.mlp.gate_proj, self.mlp.up_proj = _linear(hidden, inner), _linear(hidden, inner)
        self.mlp.down_proj = _linear(inner, hidden, scale=1 / depth)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = self.input_layernorm(hidden)
        hidden = hidden + (self.linear_attn(x) if hasattr(self, "linear_attn") else self.self_attn(x, rotary))
        x = self.post_attention_layernorm(hidden)
        return hidden + self.mlp.down_proj(F.silu(self.mlp.gate_proj(x)) * self.mlp.up_proj(x))


class _DeltaNet(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, depth = config["hidden_size"], math.sqrt(2 * len(config["layer_types"]))
        self.heads, self.key_dim = config["linear_num_value_heads"], config["linear_key_head_dim"]
        self.value_dim, self.eps = config["linear_value_head_dim"], config["rms_norm_eps"]
        if config["linear_num_key_heads"] != self.heads:
            raise ValueError("linear_num_key_heads must equal linear_num_value_heads to train this network")
        keys, values, width = self.heads * self.key_dim, self.heads * self.value_dim, config["linear_conv_kernel_dim"]
        self.in_proj_qkv = _linear(hidden, 2 * keys + values)
        self.in_proj_z = _linear(hidden, values)
        self.in_proj_b, self.in_proj_a = _linear(hidden, self.heads), _linear(hidden, self.heads, scale=0.1)
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(torch.empty(2 * keys + values, 1, width).uniform_(-0.5, 0.5))
        # Step sizes between 0.001 and 0.1, as state space models start with: some heads remember for long.
        step = torch.exp(torch.empty(self.heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(0.5, 4).log())
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(self.value_dim))
        self.out_proj = _linear(values, hidden, scale=1 / depth)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.heads * self.key_dim
        qkv = self.in_proj_qkv(x)
        mixed = _Convolution.apply(qkv, self.conv1d.weight.squeeze(1))
        q, k, v = F.silu(mixed).split([keys, keys, self.heads * self.value_dim], dim=-1)
        o = delta_rule(
            q=self._by_head(q),
            k=self._by_head(k),
            v=self._by_head(v),
            g=(-self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)).transpose(1, 2),
            beta=self.in_proj_b(x).sigmoid().transpose(1, 2),
        ).transpose(1, 2)
        o = F.rms_norm(o, o.shape[-1:], self.norm.weight, self.eps)
        return self.out_proj(o.flatten(2) * F.silu(self.in_proj_z(x)))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class _Convolution(torch.autograd.Function):
    """Causal depthwise convolution of ``[B, T, channels]`` with ``[channels, width]``, as shifted products.

    On a CPU about twice as fast as ``conv1d``, forwards and backwards together.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x * weight[:, -1]
        for shift in range(1, weight.shape[1]):
            out[:, shift:].addcmul_(x[:, :-shift], weight[:, -1 - shift])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad_x = grad * weight[:, -1]
        grad_weight = [(grad * x).sum((0, 1))]
        for shift in range(1, weight.shape[1]):
            grad_x[:, :-shift].addcmul_(grad[:, shift:], weight[:, -1 - shift])
            grad_weight.append((grad[:, shift:] * x[:, :-shift]).sum((0, 1)))
        return grad_x, torch.stack(grad_weight[::-1], 1)


def delta_rule(*, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule from a zero state, in chunks.

    ``S_t = e^{g_t} S_{t-1} + k_t (beta_t (v_t - e^{g_t} S_{t-1}^T k_t))^T`` and ``o_t = S_t^T q_t / sqrt(K)``, with
    k and q of unit length.

    Args:
        q, k: ``[B, H, T, K]``; v: ``[B, H, T, V]``; g, beta: ``[B, H, T]``.

    Returns:
        ``[B, H, T, V]``.
    """
    length = q.shape[2]
    rest = -length % CHUNK
    if rest:
        q, k, v = (F.pad(x, (0, 0, 0, rest)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, rest)) for x in (g, beta))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    q, k, v, g, beta = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v, g, beta))
    decay = g.cumsum(-1)
    ones = torch.ones(CHUNK, CHUNK, dtype=torch.bool)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~ones.tril(), -torch.inf).exp()
    k_beta = k * beta.unsqueeze(-1)
    # Within a chunk each row corrects the ones after it: a unit lower triangular system.
    system = (k_beta @ k.transpose(-1, -2)) * between.masked_fill(~ones.tril(-1), 0)
    right = torch.cat([v * beta.unsqueeze(-1), k_beta * decay.exp().unsqueeze(-1)], -1)
    solved = torch.linalg.solve_triangular(torch.eye(CHUNK) + system, right, upper=False, unitriangular=True)
    new_v, read_k = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = (q @ k.transpose(-1, -2)) * between
    q_in = q * decay.exp().unsqueeze(-1)
    k_out = (k * (decay[..., -1:] - decay).exp().unsqueeze(-1)).transpose(-1, -2)
    keep = decay[..., -1].exp()[..., None, None]
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outs = []
    for n in range(q.shape[2]):
        corrected = new_v[:, :, n] - read_k[:, :, n] @ state
        outs.append(q_in[:, :, n] @ state + within[:, :, n] @ corrected)
        state = state * keep[:, :, n] + k_out[:, :, n] @ corrected
    return torch.stack(outs, 2).flatten(2, 3)[:, :, :length]


class Seen(NamedTuple):
    """An attention's last pass, for its teacher: input ``[B, T, hidden]``, queries and keys ``[B, heads, T, dim]``."""

    x: Tensor
    q: Tensor
    k: Tensor


class _Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps, depth = config["hidden_size"], config["rms_norm_eps"], math.sqrt(2 * len(config["layer_types"]))
        self.heads, self.heads_kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config["head_dim"]
        self.q_proj = _linear(hidden, 2 * self.heads * self.dim)
        self.k_proj, self.v_proj = (_linear(hidden, self.heads_kv * self.dim) for _ in range(2))
        self.o_proj = _linear(self.heads * self.dim, hidden, scale=1 / depth)
        # Start sharper than usual: a look-up among thousands of tokens needs large scores.
        self.q_norm, self.k_norm = _Norm(self.dim, eps, 0.8), _Norm(self.dim, eps, 0.8)
        self.seen: Seen | None = None

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        k, v = (proj(x).unflatten(-1, (self.heads_kv, -1)) for proj in (self.k_proj, self.v_proj))
        q, k = (_rotate(norm(x).transpose(1, 2), rotary) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        self.seen = Seen(x, q, k)
        o = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return self.o_proj((o.transpose(1, 2) * gate.sigmoid()).flatten(2))


def _rotary_tables(config: dict[str, Any], length: int) -> tuple[Tensor, Tensor]:
    rope = config["rope_parameters"]
    size = int(config["head_dim"] * rope["partial_rotary_factor"])
    frequencies = rope["rope_theta"] ** -(torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    turned, kept = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    left, right = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-right, left], -1) * sin, kept], -1)
