"""The cost model: what a prefill and a restore take. Arithmetic that ranks; it never decides what is possible."""

from __future__ import annotations

from dataclasses import dataclass

from prefix_index.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of prefill and of Host-to-device transfer.

    prefill(base, n) = ceil(n / chunk_tokens) * chunk_seconds + n * token_seconds + pairs * pair_seconds,
    pairs = base * n + n * (n + 1) / 2; restore(0) = 0, restore(bytes) = batch_seconds + bytes / bytes_per_second.
    The defaults suit a fast accelerator on an x16 link and only matter as ratios.

    Raises:
        InvalidArgument: a number is out of its range.
    """

    chunk_seconds: float = 0.0
    chunk_tokens: int = 2048
    token_seconds: float = 1 / 4000
    pair_seconds: float = 0.0
    bytes_per_second: float = 50e9
    batch_seconds: float = 20e-6

    def __post_init__(self) -> None:
        for name in ("chunk_seconds", "token_seconds", "pair_seconds", "batch_seconds"):
            value = getattr(self, name)
            if not value >= 0:
                raise InvalidArgument(f"CostModel: {name} must not be negative, got {value!r}")
        if not self.chunk_tokens >= 1:
            raise InvalidArgument(f"CostModel: chunk_tokens must be positive, got {self.chunk_tokens!r}")
        if not self.bytes_per_second > 0:
            raise InvalidArgument(f"CostModel: bytes_per_second must be positive, got {self.bytes_per_second!r}")

    def prefill_seconds(self, base: int, num_tokens: int) -> float:
        """Seconds to prefill `num_tokens` after `base` tokens of history."""
        return self._prefill(base, num_tokens, -(-num_tokens // self.chunk_tokens))

    def saved_seconds(self, base: int, num_tokens: int) -> float:
        """Seconds that a prompt is spared if it resumes `num_tokens` deeper than after `base` tokens.

        Its last token is computed in any case, in a chunk of its own; so of the chunks their share is spared, not their
        number: a snapshot a few tokens deeper than another is worth a few tokens.
        """
        return self._prefill(base, num_tokens, num_tokens / self.chunk_tokens)

    def _prefill(self, base: int, num_tokens: int, chunks: float) -> float:
        if num_tokens <= 0:
            return 0.0
        pairs = base * num_tokens + num_tokens * (num_tokens + 1) // 2
        return chunks * self.chunk_seconds + num_tokens * self.token_seconds + pairs * self.pair_seconds

    def restore_seconds(self, num_bytes: int) -> float:
        """Seconds to bring `num_bytes` from the Host in one batch; none for nothing."""
        return self.batch_seconds + num_bytes / self.bytes_per_second if num_bytes else 0.0
