"""The one layout table: where every byte of a page record and of a state image lies.

A *page record* is all bytes of one 64-token page, for all full-attention layers:

    layer 0                                             layer 1 ...
    [K values | V values | K scales | V scales | pad]   [...]          | pad to 256

Inside a plane: KV head, then token, then dim. Planes start at multiples of 16 bytes, all layer slices are
equal, the record's size is a multiple of 256. An arena is `uint8[num_pages, page_bytes]`, page 0 being
scratch.

A *state image* is everything else one sequence carries:

    layer 0                                   layer 1 ...    last
    [recurrent fp32 [HV][K][V] | conv [C][W-1]]   [...]      [continuation hidden]   | pad to 256

Nothing outside this module knows an offset: strides and byte ranges of parts are derived here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from qwen35_kernels.contracts import refuse

__all__ = ["BLOCK_TOKENS", "ByteRange", "KVProfile", "LayerKV", "PageLayout", "Plane", "PlaneFormat", "StateLayout"]

BLOCK_TOKENS = 64
_PART_ALIGNMENT = 16
_RECORD_ALIGNMENT = 256


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


class KVProfile(enum.StrEnum):
    """How keys and values are stored."""

    BF16 = "bf16"
    FP32 = "fp32"
    INT8 = "int8"
    FP8 = "fp8"
    NVFP4 = "nvfp4"
    K8V4 = "k8v4"


@dataclass(frozen=True, kw_only=True)
class PlaneFormat:
    """How one row (one token of one head) of a plane is stored.

    `values_per_byte` is 2 for packed nibbles: dim i and dim i + D/2 share a byte, the former in its low half.
    `group` dims share one scale (0: no scales; None: the whole row does).
    """

    name: str
    value_dtype: torch.dtype
    values_per_byte: int = 1
    scale_dtype: torch.dtype | None = None
    group: int | None = 0

    def row_bytes(self, head_dim: int) -> int:
        return head_dim * self.value_dtype.itemsize // self.values_per_byte

    def row_scales(self, head_dim: int) -> int:
        if self.scale_dtype is None:
            return 0
        return 1 if self.group is None else head_dim // self.group

    def row_scale_bytes(self, head_dim: int) -> int:
        return 0 if self.scale_dtype is None else self.row_scales(head_dim) * self.scale_dtype.itemsize


BF16_ROWS = PlaneFormat(name="bf16", value_dtype=torch.bfloat16)
FP32_ROWS = PlaneFormat(name="fp32", value_dtype=torch.float32)
INT8_ROWS = PlaneFormat(name="int8", value_dtype=torch.int8, scale_dtype=torch.float16, group=64)
FP8_ROWS = PlaneFormat(name="fp8", value_dtype=torch.float8_e4m3fn, scale_dtype=torch.float16, group=None)
FP4_ROWS = PlaneFormat(
    name="fp4", value_dtype=torch.uint8, values_per_byte=2, scale_dtype=torch.float8_e4m3fn, group=16
)

_FORMATS: dict[KVProfile, tuple[PlaneFormat, PlaneFormat]] = {
    KVProfile.BF16: (BF16_ROWS, BF16_ROWS),
    KVProfile.FP32: (FP32_ROWS, FP32_ROWS),
    KVProfile.INT8: (INT8_ROWS, INT8_ROWS),
    KVProfile.FP8: (FP8_ROWS, FP8_ROWS),
    KVProfile.NVFP4: (FP4_ROWS, FP4_ROWS),
    KVProfile.K8V4: (FP8_ROWS, FP4_ROWS),
}


class Plane(NamedTuple):
    """The keys or the values of one layer in an arena, views without a copy.

    `rows` says how a row is stored; `values` is [P, HKV, 64, D] (or [..., D/2] bytes of packed nibbles); `scales` is
    [P, HKV, 64, scales per row], or None where the profile has none.
    """

    rows: PlaneFormat
    values: Tensor
    scales: Tensor | None


@dataclass(frozen=True)
class ByteRange:
    """A half-open range of bytes inside a record."""

    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def _arena_view(arena: Tensor, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A strided view [rows, *shape] of one part of every record of an arena."""
    elements = arena.view(dtype)
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, size * strides[0])
    offset = elements.storage_offset() + begin // dtype.itemsize
    return elements.as_strided((arena.shape[0], *shape), (elements.stride(0), *strides), offset)


def _check_arena(name: str, arena: Tensor, record_bytes: int) -> None:
    if arena.dtype != torch.uint8 or arena.dim() != 2 or arena.shape[1] != record_bytes:
        refuse(
            name,
            f"arena must be uint8 [records, {record_bytes}]",
            (str(arena.dtype).removeprefix("torch."), tuple(arena.shape)),
        )
    if arena.stride(1) != 1 or arena.stride(0) < record_bytes or arena.stride(0) % _RECORD_ALIGNMENT:
        refuse(name, "arena rows must be dense records at a pitch of whole 256-byte units", arena.stride())
    if arena.data_ptr() % _PART_ALIGNMENT:
        refuse(name, "arena must start at a multiple of 16 bytes", arena.data_ptr() % _PART_ALIGNMENT)


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """The page record of one KV pool. `num_layers` counts full-attention layers only.

    >>> layout = PageLayout(profile=KVProfile.INT8, num_layers=16, num_kv_heads=4, head_dim=256)
    >>> layout.page_bytes / 2**20
    2.0625
    >>> layout.layer_range(1)
    ByteRange(begin=135168, end=270336)
    """

    profile: KVProfile
    num_layers: int
    num_kv_heads: int
    head_dim: int
    k_format: PlaneFormat = field(init=False)
    v_format: PlaneFormat = field(init=False)
    layer_bytes: int = field(init=False)
    page_bytes: int = field(init=False)
    _parts: tuple[int, int, int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            profile = KVProfile(self.profile)
        except ValueError:
            refuse("PageLayout", f"profile must be one of {[p.value for p in KVProfile]}", self.profile)
        for name, value in (("num_layers", self.num_layers), ("num_kv_heads", self.num_kv_heads)):
            if value < 1:
                refuse("PageLayout", f"{name} must be at least 1", value)
        k_format, v_format = _FORMATS[profile]
        multiple = max(16, *(f.group for f in (k_format, v_format) if f.group), 32 if v_format is FP4_ROWS else 16)
        if self.head_dim < 16 or self.head_dim % multiple:
            refuse("PageLayout", f"head_dim must be a multiple of {multiple} for {profile.value}", self.head_dim)
        offsets = [0]
        rows = self.num_kv_heads * BLOCK_TOKENS
        for row in (
            k_format.row_bytes(self.head_dim),
            v_format.row_bytes(self.head_dim),
            k_format.row_scale_bytes(self.head_dim),
            v_format.row_scale_bytes(self.head_dim),
        ):
            offsets.append(_align(offsets[-1] + rows * row, _PART_ALIGNMENT))
        values = {
            "profile": profile,
            "k_format": k_format,
            "v_format": v_format,
            "_parts": tuple(offsets[:4]),
            "layer_bytes": offsets[4],
            "page_bytes": _align(self.num_layers * offsets[4], _RECORD_ALIGNMENT),
        }
        for name, derived in values.items():
            object.__setattr__(self, name, derived)

    def layer_range(self, layer: int) -> ByteRange:
        """The bytes of one layer inside a record.

        Raises:
            KernelInputError: no such layer.
        """
        self._check_layer(layer)
        return ByteRange(layer * self.layer_bytes, (layer + 1) * self.layer_bytes)

    def kv(self, arena: Tensor, layer: int) -> LayerKV:
        """One layer's keys and values in `arena`, uint8 [P, page_bytes].

        Raises:
            KernelInputError: no such layer, or another kind of arena.
        """
        self._check_layer(layer)
        _check_arena("PageLayout", arena, self.page_bytes)
        begin = layer * self.layer_bytes
        k, v = self._plane(arena, begin, 0, self.k_format), self._plane(arena, begin, 1, self.v_format)
        return LayerKV(self, arena.shape[0], arena.device, k, v)

    def _plane(self, arena: Tensor, begin: int, part: int, rows: PlaneFormat) -> Plane:
        """The plane of a layer that starts at byte `begin`: part 0 keys, 1 values; their scales are two parts on."""
        line = (self.num_kv_heads, BLOCK_TOKENS)
        dim = self.head_dim // rows.values_per_byte
        values = _arena_view(arena, begin + self._parts[part], rows.value_dtype, (*line, dim))
        if rows.scale_dtype is None:
            return Plane(rows, values, None)
        shape = (*line, rows.row_scales(self.head_dim))
        return Plane(rows, values, _arena_view(arena, begin + self._parts[part + 2], rows.scale_dtype, shape))

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            refuse("PageLayout", f"layer must lie in [0, {self.num_layers})", layer)


@dataclass(frozen=True, eq=False)
class LayerKV:
    """One layer's keys and values in an arena of pages, as the ops over pages take them.

    Made and checked once, by `PageLayout.kv`.
    """

    layout: PageLayout
    num_pages: int
    device: torch.device
    k: Plane
    v: Plane


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """The state image of one sequence. `num_layers` counts Gated DeltaNet layers only.

    >>> layout = StateLayout(
    ...     num_layers=48, num_value_heads=48, key_dim=128, value_dim=128, conv_channels=10240, conv_width=4,
    ...     conv_dtype=torch.bfloat16, hidden_size=5120, hidden_dtype=torch.bfloat16)
    >>> layout.image_bytes == 48 * (48 * 128 * 128 * 4 + 10240 * 3 * 2) + 5120 * 2
    True
    """

    num_layers: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_width: int
    conv_dtype: torch.dtype
    hidden_size: int
    hidden_dtype: torch.dtype
    layer_bytes: int = field(init=False)
    image_bytes: int = field(init=False)
    _conv_offset: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_value_heads", "key_dim", "value_dim", "conv_channels", "hidden_size"):
            if getattr(self, name) < 1:
                refuse("StateLayout", f"{name} must be at least 1", getattr(self, name))
        if self.conv_width < 2:
            refuse("StateLayout", "conv_width must be at least 2", self.conv_width)
        recurrent = self.num_value_heads * self.key_dim * self.value_dim * 4
        conv_offset = _align(recurrent, _PART_ALIGNMENT)
        conv = self.conv_channels * (self.conv_width - 1) * self.conv_dtype.itemsize
        layer_bytes = _align(conv_offset + conv, _PART_ALIGNMENT)
        hidden = self.hidden_size * self.hidden_dtype.itemsize
        image_bytes = _align(self.num_layers * layer_bytes + hidden, _RECORD_ALIGNMENT)
        for field_name, derived in (
            ("_conv_offset", conv_offset),
            ("layer_bytes", layer_bytes),
            ("image_bytes", image_bytes),
        ):
            object.__setattr__(self, field_name, derived)

    def layer_range(self, layer: int) -> ByteRange:
        """The bytes of one layer (recurrent state, then conv history) inside an image.

        Raises:
            KernelInputError: no such layer.
        """
        self._check_layer(layer)
        return ByteRange(layer * self.layer_bytes, (layer + 1) * self.layer_bytes)

    def hidden_range(self) -> ByteRange:
        """The bytes of the continuation hidden."""
        begin = self.num_layers * self.layer_bytes
        return ByteRange(begin, begin + self.hidden_size * self.hidden_dtype.itemsize)

    def recurrent(self, arena: Tensor, layer: int) -> Tensor:
        """The recurrent states of a layer, a float32 view [S, HV, K, V].

        Raises:
            KernelInputError: no such layer, or another kind of arena.
        """
        self._check_layer(layer)
        _check_arena("StateLayout", arena, self.image_bytes)
        shape = (self.num_value_heads, self.key_dim, self.value_dim)
        return _arena_view(arena, layer * self.layer_bytes, torch.float32, shape)

    def conv(self, arena: Tensor, layer: int) -> Tensor:
        """The conv histories of a layer, a view [S, C, W - 1], oldest column first.

        Raises:
            KernelInputError: no such layer, or another kind of arena.
        """
        self._check_layer(layer)
        _check_arena("StateLayout", arena, self.image_bytes)
        shape = (self.conv_channels, self.conv_width - 1)
        return _arena_view(arena, layer * self.layer_bytes + self._conv_offset, self.conv_dtype, shape)

    def hidden(self, arena: Tensor) -> Tensor:
        """The continuation hiddens, a view [S, hidden].

        Raises:
            KernelInputError: another kind of arena.
        """
        _check_arena("StateLayout", arena, self.image_bytes)
        return _arena_view(arena, self.hidden_range().begin, self.hidden_dtype, (self.hidden_size,))

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            refuse("StateLayout", f"layer must lie in [0, {self.num_layers})", layer)
