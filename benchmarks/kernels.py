"""`python -m benchmarks.kernels`: how the torch implementations compare on this CPU, as one JSON object.

Every ratio is theirs / ours (above 1: ours is faster), the median of runs in which A and B alternate, at
the same number of threads. "Theirs" is the Gated DeltaNet layer of `transformers` without its projections
and without any accelerator package, and torch's scaled_dot_product_attention on contiguous keys and values.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command import command_line, load, write_result
from benchmarks.timing import Times, spent, take_turns
from qwen35_kernels import (
    BLOCK_TOKENS,
    DecodePages,
    DecodeStates,
    KVProfile,
    PageLayout,
    PrefillPages,
    PrefillStates,
    TokenRows,
    Workspace,
    causal_conv1d_prefill,
    causal_conv1d_step,
    delta_gates,
    gated_delta_rule_prefill,
    gated_delta_rule_step,
    gated_rms_norm,
    paged_attention_decode,
    paged_attention_prefill,
    store_kv,
)

Run = Callable[[], Any]


@dataclass(frozen=True)
class Comparison:
    """Medians in milliseconds, their ratio, the wider of the two spreads, and whether that is too wide."""

    theirs_ms: float
    ours_ms: float
    ratio: float
    spread: float
    contended: bool


@dataclass(frozen=True)
class DeltaShape:
    hidden: int
    key_heads: int
    value_heads: int
    dim: int

    @property
    def name(self) -> str:
        return f"{self.hidden}x{self.key_heads}x{self.value_heads}x{self.dim}"

    @property
    def sizes(self) -> list[int]:
        return [self.key_heads * self.dim, self.key_heads * self.dim, self.value_heads * self.dim]


DELTA_SHAPES = (DeltaShape(256, 4, 4, 64), DeltaShape(1024, 16, 16, 128))
# (query heads, KV heads, head dim) beside the same two hidden sizes.
ATTENTION_SHAPES = ((4, 2, 64), (8, 2, 256))


def compare(theirs: Run, ours: Run, *, runs: int) -> Comparison:
    """Alternate the two, after one warm-up each."""
    sides = [(Times(), theirs), (Times(), ours)]
    theirs()
    ours()
    for times, run in take_turns(sides, runs):
        times.add(spent(run))
    (theirs_times, _), (ours_times, _) = sides
    return Comparison(
        theirs_ms=round(theirs_times.median * 1e3, 4),
        ours_ms=round(ours_times.median * 1e3, 4),
        ratio=round(theirs_times.median / ours_times.median, 3),
        spread=round(max(theirs_times.spread, ours_times.spread), 3),
        contended=theirs_times.contended or ours_times.contended,
    )


class _Fixed(nn.Module):
    """Stands for a projection: hands out a tensor made beforehand."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, _: Tensor) -> Tensor:
        return self.value


class DeltaBench:
    """One Gated DeltaNet layer: theirs, and ours on the same weights, with and without projections."""

    def __init__(self, shape: DeltaShape, tokens: int) -> None:
        from transformers.cache_utils import DynamicCache
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

        self.shape, self.tokens, self.sizes = shape, tokens, shape.sizes
        config = Qwen3_5TextConfig(
            hidden_size=shape.hidden,
            num_hidden_layers=4,
            linear_num_key_heads=shape.key_heads,
            linear_num_value_heads=shape.value_heads,
            linear_key_head_dim=shape.dim,
            linear_value_head_dim=shape.dim,
        )
        self.layer: Any = Qwen3_5GatedDeltaNet(config, 0).eval()
        self.eps: float = config.rms_norm_eps
        self.new_cache: Callable[[], Any] = lambda: DynamicCache(config=config)
        rng = torch.Generator().manual_seed(0)
        self.x = torch.randn(1, tokens, shape.hidden, generator=rng)
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        self.projections = {name: getattr(self.layer, name) for name in names}
        self.projected = {name: module(self.x) for name, module in self.projections.items()}
        self.ready = [x[0] for x in self.projected.values()]
        self.out_proj = self.layer.out_proj
        # What an engine holds ready: plain tensors, not attributes found anew at each step.
        self.conv_weight = self.layer.conv1d.weight[:, 0].detach()
        self.a_log, self.dt_bias = self.layer.A_log.detach(), self.layer.dt_bias.detach()
        self.norm_weight = self.layer.norm.weight.detach()
        channels = sum(shape.sizes)
        self.history = torch.zeros(2, channels, config.linear_conv_kernel_dim - 1)
        self.state = torch.zeros(2, shape.value_heads, shape.dim, shape.dim)
        # Made once a pass, for all of its layers.
        self.chunk = PrefillStates(slots=[1], cu_seqlens=[0, tokens], bases=[0], num_slots=2)
        self.step = DecodeStates(slots=torch.ones(1, dtype=torch.int64), num_slots=2)
        self.workspace = Workspace()

    def set_projections(self, *, real: bool) -> None:
        for name, module in self.projections.items():
            setattr(self.layer, name, module if real else _Fixed(self.projected[name]))
        self.layer.out_proj = self.out_proj if real else nn.Identity()

    def filled_cache(self) -> Any:
        self.set_projections(real=True)
        cache = self.new_cache()
        self.layer(torch.randn(1, 70, self.shape.hidden), cache=cache)
        return cache

    def ours(self, *, projected: bool, decode: bool) -> Tensor:
        x = self.x[0]
        if projected:
            qkv, z, b, a = self.ready
        else:
            qkv, z, b, a = (module(x) for module in self.projections.values())
        weight = self.conv_weight
        g, beta = delta_gates(a=a, b=b, a_log=self.a_log, dt_bias=self.dt_bias)
        if decode:
            y = causal_conv1d_step(x=qkv, weight=weight, history=self.history, states=self.step)
        else:
            y = causal_conv1d_prefill(x=qkv, weight=weight, history=self.history, states=self.chunk)
        heads = (self.shape.key_heads, self.shape.key_heads, self.shape.value_heads)
        q, k, v = (
            part.view(self.tokens, n, self.shape.dim)
            for part, n in zip(y.split_with_sizes(self.sizes, dim=1), heads, strict=True)
        )
        if decode:
            o = gated_delta_rule_step(q=q, k=k, v=v, g=g, beta=beta, state=self.state, states=self.step)
        else:
            o = gated_delta_rule_prefill(
                q=q, k=k, v=v, g=g, beta=beta, state=self.state, states=self.chunk, workspace=self.workspace
            )
        o = gated_rms_norm(x=o, gate=z.view(o.shape), weight=self.norm_weight, eps=self.eps)
        out = o.view(self.tokens, -1)
        return out if projected else self.out_proj(out)

    def prefill(self, *, projected: bool, runs: int) -> Comparison:
        self.set_projections(real=not projected)
        return compare(
            lambda: self.layer(self.x, cache=self.new_cache()),
            lambda: self.ours(projected=projected, decode=False),
            runs=runs,
        )

    def decode(self, *, projected: bool, runs: int) -> Comparison:
        cache = self.filled_cache()
        self.set_projections(real=not projected)
        return compare(
            lambda: self.layer(self.x, cache=cache), lambda: self.ours(projected=projected, decode=True), runs=runs
        )


class AttentionBench:
    """128 queries, or one, over 4,096 tokens of history in shuffled fp32 pages."""

    def __init__(self, heads: int, kv_heads: int, dim: int, *, queries: int = 128, history: int = 4096) -> None:
        rng = torch.Generator().manual_seed(0)
        self.base, self.length = history, history + queries
        self.q = torch.randn(queries, heads, dim, generator=rng)
        k, v = (torch.randn(self.length, kv_heads, dim, generator=rng) for _ in range(2))
        layout = PageLayout(profile=KVProfile.FP32, num_layers=2, num_kv_heads=kv_heads, head_dim=dim)
        blocks = -(-self.length // BLOCK_TOKENS)
        self.kv = layout.kv(torch.zeros(blocks + 1, layout.page_bytes, dtype=torch.uint8), 1)
        self.tables = torch.randperm(blocks, generator=rng).add_(1).unsqueeze(0)
        positions = torch.arange(self.length)
        pages = self.tables[0][positions // BLOCK_TOKENS]
        rows = TokenRows(pages=pages, rows=positions % BLOCK_TOKENS, num_pages=self.kv.num_pages)
        store_kv(k=k, v=v, kv=self.kv, rows=rows)
        self.k, self.v = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in (k, v))
        seen = positions.unsqueeze(0) <= (self.base + torch.arange(queries)).unsqueeze(1)
        self.mask = torch.zeros(queries, self.length).masked_fill(~seen, float("-inf"))
        self.workspace = Workspace()
        shared: dict[str, Any] = {"block_tables": self.tables, "num_pages": self.kv.num_pages}
        self.chunk = PrefillPages(cu_seqlens=[0, queries], bases=[history], **shared)
        self.step = DecodePages(lengths=torch.tensor([self.length]), **shared)

    def theirs(self, q: Tensor, mask: Tensor | None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask, enable_gqa=True)

    def prefill(self, *, runs: int) -> Comparison:
        q = self.q.transpose(0, 1).unsqueeze(0).contiguous()

        def ours() -> Tensor:
            return paged_attention_prefill(
                q=self.q,
                kv=self.kv,
                pages=self.chunk,
                workspace=self.workspace,
            )

        return compare(lambda: self.theirs(q, self.mask), ours, runs=runs)

    def decode(self, *, runs: int) -> Comparison:
        q = self.q[-1:].transpose(0, 1).unsqueeze(0).contiguous()

        def ours() -> Tensor:
            return paged_attention_decode(
                q=self.q[-1:],
                kv=self.kv,
                pages=self.step,
                workspace=self.workspace,
            )

        return compare(lambda: self.theirs(q, None), ours, runs=runs)


def measure(*, runs: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """All comparisons by name, and the worst ratio of each family under its own key."""
    load_before = load()
    details: dict[str, Comparison] = {}
    families: dict[str, list[Comparison]] = {}

    def add(family: str, name: str, comparison: Comparison) -> None:
        details[f"{family}/{name}"] = comparison
        families.setdefault(family, []).append(comparison)

    try:
        import transformers
    except ImportError:
        reason: str | None = "transformers is not installed: no DeltaNet comparison"
    else:
        reason = None
        logging.getLogger("transformers").setLevel(logging.ERROR)
        transformers.logging.disable_progress_bar()
        for shape in DELTA_SHAPES:
            for tokens in lengths:
                bench = DeltaBench(shape, tokens)
                few = max(5, runs * 1024 // tokens // 2)
                add("deltanet_prefill", f"{shape.name}/T={tokens}", bench.prefill(projected=True, runs=few))
                add("deltanet_layer_prefill", f"{shape.name}/T={tokens}", bench.prefill(projected=False, runs=few))
            bench = DeltaBench(shape, 1)
            add("deltanet_decode", shape.name, bench.decode(projected=True, runs=10 * runs))
            add("deltanet_layer_decode", shape.name, bench.decode(projected=False, runs=10 * runs))
    for heads, kv_heads, dim in ATTENTION_SHAPES:
        attention = AttentionBench(heads, kv_heads, dim)
        name = f"{heads}x{kv_heads}x{dim}"
        add("attention_prefill", name, attention.prefill(runs=runs))
        add("attention_decode", name, attention.decode(runs=3 * runs))
    result: dict[str, Any] = {
        f"{family}_ratio": min(c.ratio for c in comparisons) for family, comparisons in families.items()
    }
    return {
        **result,
        "threads": torch.get_num_threads(),
        "load": load_before,
        "spread": max(c.spread for c in details.values()),
        "contended": any(c.contended for c in details.values()),
        "not_measured": reason,
        "details": {name: asdict(comparison) for name, comparison in details.items()},
    }


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> None:
    parser = command_line("kernels", __doc__)
    parser.add_argument("--runs", type=int, default=21, help="runs of each side per comparison")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        if options.quick:
            result = measure(runs=7, lengths=(1024,))
        else:
            result = measure(runs=options.runs, lengths=(1024, 4096))
    write_result(result, write)


if __name__ == "__main__":
    main()
