"""The mathematics of Qwen3.5: ops over tensors, pages and state slots, without a word about requests."""

from qwen35_kernels.attention import (
    attention_gate,
    merge_attention_states,
    paged_attention_decode,
    paged_attention_prefill,
)
from qwen35_kernels.conv import causal_conv1d_prefill, causal_conv1d_step
from qwen35_kernels.delta_rule import delta_gates, gated_delta_rule_prefill, gated_delta_rule_step
from qwen35_kernels.errors import KernelInputError
from qwen35_kernels.kv_store import store_kv
from qwen35_kernels.layout import BLOCK_TOKENS, ByteRange, KVProfile, LayerKV, PageLayout, PlaneFormat, StateLayout
from qwen35_kernels.mlp import swiglu
from qwen35_kernels.moe import moe_combine_shared, moe_experts, moe_route
from qwen35_kernels.norms import gated_rms_norm, rms_norm
from qwen35_kernels.plans import DecodePages, DecodeStates, PrefillPages, PrefillStates, StateTap, TokenRows
from qwen35_kernels.rotary import qk_norm_rotary, rotary_frequencies, rotary_tables
from qwen35_kernels.sampling import log_probabilities, sample
from qwen35_kernels.workspace import Workspace

__all__ = [
    "BLOCK_TOKENS",
    "ByteRange",
    "DecodePages",
    "DecodeStates",
    "KVProfile",
    "KernelInputError",
    "LayerKV",
    "PageLayout",
    "PlaneFormat",
    "PrefillPages",
    "PrefillStates",
    "StateLayout",
    "StateTap",
    "TokenRows",
    "Workspace",
    "attention_gate",
    "causal_conv1d_prefill",
    "causal_conv1d_step",
    "delta_gates",
    "gated_delta_rule_prefill",
    "gated_delta_rule_step",
    "gated_rms_norm",
    "log_probabilities",
    "merge_attention_states",
    "moe_combine_shared",
    "moe_experts",
    "moe_route",
    "paged_attention_decode",
    "paged_attention_prefill",
    "qk_norm_rotary",
    "rms_norm",
    "rotary_frequencies",
    "rotary_tables",
    "sample",
    "store_kv",
    "swiglu",
]
