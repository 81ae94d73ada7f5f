"""The Triton implementations, module for module beside the torch ones.

Imported by `qwen35_kernels.dispatch` alone, and only when it picks this backend: triton is an extra.
Modules hold kernels and `plan_...` functions that describe launches; inputs have been checked before.
"""

from qwen35_kernels.triton import attention, conv, delta_rule, kv_store, moe, rows

__all__ = ["attention", "conv", "delta_rule", "kv_store", "moe", "rows"]
