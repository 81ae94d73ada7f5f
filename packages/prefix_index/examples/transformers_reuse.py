"""Exact prefix reuse for a `transformers` generation loop, by prefix_index alone.

The model is a tiny random Qwen3.5: three layers with a recurrent state that cannot be rolled back, one with attention.
The index says where a prompt can be resumed; this file owns the tensors: `pages` hold one block's keys and values,
`slots` a copy of everything recurrent. Run it:  python packages/prefix_index/examples/transformers_reuse.py
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable
from typing import Any

import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from prefix_index import Freed, Lease, PrefixIndex, SnapshotKind, TapHints, plan_taps

BLOCK = 16
KeysAndValues = list[tuple[torch.Tensor, torch.Tensor]]  # one pair per attention layer


def tiny_model() -> Qwen3_5ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        initializer_range=0.2,
    )
    model = Qwen3_5ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # decay slowly: a random model forgets so fast that a wrong state would not show
            torch.nn.init.constant_(parameter, -5.0)
    return model


def as_bytes(tokens: Iterable[int]) -> bytes:
    return array("i", tokens).tobytes()


class Reuse:
    """A generation loop that resumes each prompt from the deepest snapshot it finds."""

    def __init__(self, model: Qwen3_5ForCausalLM, num_pages: int, num_slots: int) -> None:
        self.model = model
        self.index = PrefixIndex(block_tokens=BLOCK)
        self.pages: dict[int, KeysAndValues] = {}
        self.slots: dict[int, DynamicCache] = {}
        self.free_pages = list(range(num_pages))
        self.free_slots = list(range(num_slots))
        self.last_logits = torch.empty(0)

    # ------------------------------------------------------------------ free lists

    def take_back(self, freed: Freed) -> None:
        for page in freed.pages:
            assert isinstance(page, int)
            del self.pages[page]
            self.free_pages.append(page)
        for slot in freed.slots:
            del self.slots[slot]
            self.free_slots.append(slot)

    def take_pages(self, count: int) -> list[int]:
        if count > len(self.free_pages):
            self.take_back(self.index.evict_device(count - len(self.free_pages)))
        return [self.free_pages.pop() for _ in range(count)]

    # ------------------------------------------------------------------ tensors in and out of the cache

    def attention(self, cache: DynamicCache) -> list[Any]:
        return [layer for layer in cache.layers if hasattr(layer, "keys")]

    def cut(self, cache: DynamicCache, first: int, end: int) -> KeysAndValues:
        """Keys and values of the tokens [first, end), copied."""
        layers = self.attention(cache)
        return [(layer.keys[:, :, first:end].clone(), layer.values[:, :, first:end].clone()) for layer in layers]

    def resume(self, lease: Lease) -> DynamicCache:
        """A cache at the lease's frontier: recurrent state from the slot, keys and values from the pages."""
        if lease.slot is None:
            return DynamicCache(config=self.model.config)
        cache = copy.deepcopy(self.slots[lease.slot])
        parts = [self.pages[page] for page in (*lease.pages[0], *lease.tail_pages)]
        for i, layer in enumerate(self.attention(cache)):
            layer.keys = torch.cat([part[i][0] for part in parts], dim=2)
            layer.values = torch.cat([part[i][1] for part in parts], dim=2)
        return cache

    def commit(self, lease: Lease, cache: DynamicCache, tokens: list[int], end: int) -> None:
        """Hand the blocks that are complete at `end` to the index; a duplicate's page comes straight back."""
        first, depth = lease.depth, end // BLOCK
        pages = self.take_pages(depth - first)
        for block, page in zip(range(first, depth), pages, strict=True):
            self.pages[page] = self.cut(cache, block * BLOCK, (block + 1) * BLOCK)
        done = self.index.extend(lease, tokens[first * BLOCK : depth * BLOCK], pages)
        for begin, stop in done.duplicate:
            self.take_back(Freed(pages=tuple(pages[begin - first : stop - first])))

    def publish(self, lease: Lease, cache: DynamicCache, tokens: list[int], frontier: int, kind: SnapshotKind) -> None:
        """Make the present state resumable, if a slot can be had for what it is worth."""
        if not self.free_slots:
            self.index.supersede(lease, frontier, kind)
            freed = self.index.claim_slot(self.index.worth(lease, frontier))
            if freed is None:
                return
            self.take_back(freed)
        tail = tokens[frontier // BLOCK * BLOCK : frontier]
        pages = self.take_pages(bool(tail))
        for page in pages:
            self.pages[page] = self.cut(cache, frontier - len(tail), frontier)
        slot = self.free_slots.pop()
        self.slots[slot] = copy.deepcopy(cache)
        for layer in self.attention(self.slots[slot]):
            layer.keys = layer.values = torch.empty(0)  # they live in the pages
        done = self.index.publish(lease, frontier, slot=slot, tail=as_bytes(tail), tail_pages=pages, kind=kind)
        if not done.created:
            self.take_back(Freed(pages=tuple(pages), slots=(slot,)))

    # ------------------------------------------------------------------ a request

    @torch.no_grad()
    def generate(self, prompt: list[int], new_tokens: int, breakpoints: tuple[int, ...] = ()) -> tuple[list[int], int]:
        """Greedy tokens, and how many tokens of the prompt were not computed."""
        match = self.index.match(self.index.prepare(prompt))
        best = match.best
        lease = self.index.acquire(match, best)
        cache = self.resume(lease)
        self.index.activate(lease)
        resumed = best.kind if best is not None else None
        # Without a kernel that captures state inside a chunk, every tap splits the prefill.
        hints = TapHints(explicit=breakpoints)
        taps = plan_taps(len(prompt), lease.frontier, hints, resumed=resumed, split_seconds=0.01)
        kinds = {tap.position: tap.kind for tap in taps}
        tokens = list(prompt)
        at = lease.frontier
        for stop in (*kinds, len(prompt)):
            output = self.model(torch.tensor([tokens[at:stop]]), cache=cache, use_cache=True)
            at = stop
            self.commit(lease, cache, tokens, at)
            if at in kinds:
                self.publish(lease, cache, tokens, at, kinds[at])
        for _ in range(new_tokens):
            self.last_logits = output.logits[0, -1]
            tokens.append(int(self.last_logits.argmax()))
            if len(tokens) - len(prompt) < new_tokens:
                output = self.model(torch.tensor([tokens[-1:]]), cache=cache, use_cache=True)
        frontier = len(tokens) - 1  # the last token was sampled, not computed
        self.commit(lease, cache, tokens, frontier)
        self.publish(lease, cache, tokens, frontier, SnapshotKind.ENDPOINT)
        self.index.release(lease)
        self.index.check_invariants()
        return tokens[len(prompt) :], lease.frontier


def compare(warm: Reuse, prompt: list[int], breakpoints: tuple[int, ...] = ()) -> tuple[list[int], int, float]:
    """Generate through `warm`; returns the tokens, what was reused, and how far the last log-probabilities are from
    those of an empty cache. Equal tokens alone would prove little on a random model."""
    tokens, reused = warm.generate(prompt, 20, breakpoints)
    cold = Reuse(warm.model, num_pages=40, num_slots=6)
    expected, _ = cold.generate(prompt, 20)
    distance = (warm.last_logits.log_softmax(-1) - cold.last_logits.log_softmax(-1)).abs().max()
    assert tokens == expected
    return tokens, reused, float(distance)


def main() -> None:
    warm = Reuse(tiny_model(), num_pages=40, num_slots=6)
    generator = torch.Generator().manual_seed(1)

    def written(count: int) -> list[int]:
        return torch.randint(256, (count,), generator=generator).tolist()

    system = written(100)
    first = system + written(30)
    answer: list[int] = []
    for name in ("first request", "its next turn", "another conversation", "the first again"):
        prompt = {
            "first request": first,
            "its next turn": first + answer + written(25),
            "another conversation": system + written(40),
            "the first again": first,
        }[name]
        answer, reused, distance = compare(warm, prompt, breakpoints=(len(system),))
        print(f"{name}: {reused} of {len(prompt)} prompt tokens reused, {distance:.0e} from cold")
        assert distance < 1e-4


if __name__ == "__main__":
    main()
