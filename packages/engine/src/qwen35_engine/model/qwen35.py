"""The Qwen3.5 text model: embeddings, layers of Gated DeltaNet or gated attention with a SwiGLU each, head.

Reads top to bottom like the architecture. Two passes: ``prefill`` runs one chunk of one sequence, ``decode`` one token
of each of several sequences. KV goes to pages of the page arena, recurrent state and conv history to a slot of the
state arena; both are written in place. The mathematics is in ``qwen35_kernels``.

Axis letters: T tokens of a chunk, B sequences of a decode round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import qwen35_kernels as kernels
from qwen35_kernels import StateTap

from ..checkpoint.config import ModelConfig
from ..memory import DeviceMemory
from .weights import AttentionWeights, DeltaNetWeights, ModelWeights

__all__ = ["Qwen35Model"]


class Qwen35Model:
    """The forward pass over one set of weights and one device memory.

    It keeps no state but the arenas and scratch memory, hence it is for one thread. Which request owns a page or slot
    is the caller's business.

    Attributes:
        frequencies: of the rotary embedding.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, memory: DeviceMemory) -> None:
        self._config = config
        self._weights = weights
        self._memory = memory
        # The views of the layers' states, one a Gated DeltaNet layer: an arena stays where it is.
        layout, layers = memory.state_layout, range(memory.state_layout.num_layers)
        self._recurrent = tuple(layout.recurrent(memory.states, layer) for layer in layers)
        self._conv = tuple(layout.conv(memory.states, layer) for layer in layers)
        self._continuation = layout.hidden(memory.states)
        # Likewise of the full-attention layers.
        pages = memory.page_layout
        self._kv = tuple(pages.kv(memory.pages, layer) for layer in range(pages.num_layers))
        self._workspace = kernels.Workspace()
        self.frequencies = kernels.rotary_frequencies(rotary_dim=config.rotary_dim, theta=config.rope_theta).to(
            weights.device
        )

    @property
    def workspace_bytes(self) -> int:
        """What the scratch buffers of its passes have grown to."""
        return self._workspace.num_bytes

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @torch.inference_mode()
    def prefill(
        self,
        *,
        tokens: Tensor,
        base: int,
        block_table: Tensor,
        slot: int,
        taps: Sequence[tuple[int, int]] = (),
        before_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Run tokens ``base .. base + T`` of one sequence.

        Args:
            tokens: int64 ``[T]``.
            base: tokens of the sequence whose KV and state exist already.
            block_table: int64 ``[blocks]``, the page of each block; covers ``base + T`` tokens.
            slot: state slot with the state after ``base`` tokens (zeros for 0); afterwards, after ``base + T``.
            taps: ``(position, slot)`` pairs, ``base < position <= base + T``: the slot receives the complete state
                image after that position.
            before_layer: called with each layer's number just before it reads pages and slot, e.g. to wait for a copy.

        Returns:
            The last token's hidden state ``[hidden]``, before the final norm; ``logits`` reads it.

        Raises:
            KernelInputError: a page, slot or tap out of range; no state is written.
        """
        chunk: dict[str, Any] = {"cu_seqlens": (0, tokens.shape[0]), "bases": (base,)}
        states = kernels.PrefillStates(
            slots=(slot,),
            taps=[StateTap(sequence=0, position=position, slot=tap_slot) for position, tap_slot in taps],
            num_slots=len(self._memory.states),
            **chunk,
        )
        pages = kernels.PrefillPages(block_tables=block_table.unsqueeze(0), num_pages=len(self._memory.pages), **chunk)
        hidden = self._layers(tokens, pages.positions, _Prefill(states, pages, self._workspace), before_layer)
        self._continuation[slot] = hidden[-1]
        for position, tap_slot in taps:
            self._continuation[tap_slot] = hidden[position - base - 1]
        return hidden[-1]

    @torch.inference_mode()
    def decode(self, *, tokens: Tensor, positions: Tensor, block_tables: Tensor, slots: Tensor) -> Tensor:
        """Run one token of each of B sequences.

        Args:
            tokens: int64 ``[B]``.
            positions: int64 ``[B]``, where each token stands; its KV row is written there.
            block_tables: int64 ``[B, blocks]``, rows padded with page 0.
            slots: int64 ``[B]``, distinct; the states are advanced in place.

        Returns:
            Hidden states ``[B, hidden]``, before the final norm; ``logits`` reads them.

        Raises:
            KernelInputError: a page or slot out of range; no state is written.
        """
        states = kernels.DecodeStates(slots=slots, num_slots=len(self._memory.states))
        pages = kernels.DecodePages(block_tables=block_tables, lengths=positions + 1, num_pages=len(self._memory.pages))
        hidden = self._layers(tokens, positions, _Decode(states, pages, self._workspace))
        self._continuation.index_copy_(0, slots, hidden)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits fp32 ``[B, vocab]`` of hidden states ``[B, hidden]`` that ``prefill`` or ``decode`` returned."""
        x = kernels.rms_norm(x=hidden, weight=self._weights.norm, eps=self._config.norm_eps)
        return (x @ self._weights.head).float()

    def _layers(
        self,
        tokens: Tensor,
        positions: Tensor,
        pass_: _Prefill | _Decode,
        before_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Hidden states ``[T, hidden]`` after the last layer, before the final norm."""
        config, weights = self._config, self._weights
        cos, sin = kernels.rotary_tables(positions=positions, frequencies=self.frequencies)
        hidden = F.embedding(tokens, weights.embedding)
        for number, (layer, (_, index)) in enumerate(zip(weights.layers, self._memory.layers, strict=True)):
            if before_layer is not None:
                before_layer(number)
            x = kernels.rms_norm(x=hidden, weight=layer.input_norm, eps=config.norm_eps)
            if isinstance(layer.mixer, DeltaNetWeights):
                mixed = self._delta_net(x, layer.mixer, index, pass_)
            else:
                mixed = self._attention(x, layer.mixer, index, pass_, cos, sin)
            # The product that ends a block adds it to the residual stream in place: one rounding, one pass less.
            hidden.addmm_(mixed, layer.mixer.out_proj)
            x = kernels.rms_norm(x=hidden, weight=layer.post_norm, eps=config.norm_eps)
            hidden.addmm_(kernels.swiglu(gate_up=x @ layer.mlp.gate_up_proj), layer.mlp.down_proj)
        return hidden

    def _delta_net(self, x: Tensor, weights: DeltaNetWeights, layer: int, pass_: _Prefill | _Decode) -> Tensor:
        """Gated DeltaNet but for its output projection: causal conv over q, k, v; gated delta rule; norm gated by z."""
        config = self._config
        heads_k, heads_v = config.num_key_heads, config.num_value_heads
        key_size, value_size = heads_k * config.key_dim, heads_v * config.value_dim
        length = x.shape[0]
        qkv, z, b, a = (x @ weights.in_proj).split_with_sizes(
            [config.conv_channels, value_size, heads_v, heads_v], dim=-1
        )
        qkv = pass_.conv(qkv, weights.conv, self._conv[layer])
        q, k, v = qkv.split_with_sizes([key_size, key_size, value_size], dim=-1)
        g, beta = kernels.delta_gates(a=a, b=b, a_log=weights.a_log, dt_bias=weights.dt_bias)
        o = pass_.delta_rule(
            q=q.view(length, heads_k, config.key_dim),
            k=k.view(length, heads_k, config.key_dim),
            v=v.view(length, heads_v, config.value_dim),
            g=g,
            beta=beta,
            state=self._recurrent[layer],
        )
        o = kernels.gated_rms_norm(
            x=o,
            gate=z.reshape(length, heads_v, config.value_dim),
            weight=weights.norm,
            eps=config.norm_eps,
        )
        return o.view(length, value_size)

    def _attention(
        self,
        x: Tensor,
        weights: AttentionWeights,
        layer: int,
        pass_: _Prefill | _Decode,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Gated attention but for its output projection: norms and partial rotary on q and k, attention over pages, a
        sigmoid gate."""
        config, kv = self._config, self._kv[layer]
        heads, heads_kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
        length = x.shape[0]
        q_gate, k, v = (x @ weights.qkv_proj).split_with_sizes(
            [2 * heads * dim, heads_kv * dim, heads_kv * dim], dim=-1
        )
        q, gate = q_gate.view(length, heads, 2 * dim).split_with_sizes([dim, dim], dim=-1)
        q, k = kernels.qk_norm_rotary(
            q=q,
            k=k.view(length, heads_kv, dim),
            q_weight=weights.q_norm,
            k_weight=weights.k_norm,
            eps=config.norm_eps,
            cos=cos,
            sin=sin,
        )
        kernels.store_kv(k=k, v=v.view(length, heads_kv, dim), kv=kv, rows=pass_.pages.rows)
        o = pass_.attention(q, kv)
        o = kernels.attention_gate(o=o, gate=gate)
        return o.reshape(length, heads * dim)


class _Prefill:
    """The ops of a prefill chunk of one sequence."""

    def __init__(
        self, states: kernels.PrefillStates, pages: kernels.PrefillPages, workspace: kernels.Workspace
    ) -> None:
        self._states = states
        self.pages = pages
        self._workspace = workspace

    def conv(self, x: Tensor, weight: Tensor, history: Tensor) -> Tensor:
        return kernels.causal_conv1d_prefill(x=x, weight=weight, history=history, states=self._states)

    def delta_rule(self, *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        return kernels.gated_delta_rule_prefill(
            q=q, k=k, v=v, g=g, beta=beta, state=state, states=self._states, workspace=self._workspace
        )

    def attention(self, q: Tensor, kv: kernels.LayerKV) -> Tensor:
        return kernels.paged_attention_prefill(q=q, kv=kv, pages=self.pages, workspace=self._workspace)


class _Decode:
    """The ops of a decode round."""

    def __init__(self, states: kernels.DecodeStates, pages: kernels.DecodePages, workspace: kernels.Workspace) -> None:
        self._states = states
        self.pages = pages
        self._workspace = workspace

    def conv(self, x: Tensor, weight: Tensor, history: Tensor) -> Tensor:
        return kernels.causal_conv1d_step(x=x, weight=weight, history=history, states=self._states)

    def delta_rule(self, *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        return kernels.gated_delta_rule_step(q=q, k=k, v=v, g=g, beta=beta, state=state, states=self._states)

    def attention(self, q: Tensor, kv: kernels.LayerKV) -> Tensor:
        return kernels.paged_attention_decode(q=q, kv=kv, pages=self.pages, workspace=self._workspace)
