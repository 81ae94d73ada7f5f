"""PrefixIndex against the naive model: the same calls, the same answers, the same state after every one.

Hypothesis finds and shrinks; the seeded runs go further for the same time, since a draw costs them nothing. The default
run is short; ``--hypothesis-profile=long`` selects the long one.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from follower import Follower
from paired_world import World

EXAMPLES = {"long": 1000, "share": 200}.get(settings.get_current_profile_name(), 40)
settings.register_profile("prefix-index", max_examples=EXAMPLES, stateful_step_count=30, deadline=None)
PROFILE = settings.get_profile("prefix-index")
SEEDS = EXAMPLES
STEPS = 150


class IndexMachine(RuleBasedStateMachine):
    snapshots = True

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.data = data
        self.world = World(self.pick, snapshots=self.snapshots)

    def pick(self, count: int) -> int:
        return self.data.draw(st.integers(0, count - 1)) if count > 1 else 0

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.data = data
        self.world.step()

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        self.data = data
        if self.world.chance(8):
            self.world.clear()

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


class StatelessMachine(IndexMachine):
    snapshots = False


def test_the_index_equals_the_naive_model() -> None:
    run_state_machine_as_test(IndexMachine, settings=PROFILE)


def test_the_index_without_snapshots_equals_the_naive_model() -> None:
    run_state_machine_as_test(StatelessMachine, settings=settings(PROFILE, max_examples=PROFILE.max_examples // 2))


def run_seed(seed: int, steps: int, *, snapshots: bool) -> None:
    rng = random.Random(seed)
    world = World(rng.randrange, snapshots=snapshots)
    for step in range(steps):
        try:
            if step % 50 == 49:
                world.clear()
            else:
                world.step()
            world.check()
        except BaseException as error:
            error.add_note(f"seed {seed}, snapshots={snapshots}, step {step}")
            raise


def test_values_come_out_the_same_however_many_changes_they_were_put_off_for() -> None:
    """Values are derived on demand: here after up to twenty operations, not after each."""
    for seed in range(2000, 2000 + 2 * SEEDS):
        rng = random.Random(seed)
        world = World(rng.randrange)
        for step in range(STEPS // 10):
            try:
                for _ in range(rng.randrange(1, 20)):
                    world.step()
                world.check()
            except BaseException as error:
                error.add_note(f"seed {seed}, step {step}")
                raise


def test_an_exported_index_is_imported_as_what_it_was() -> None:
    """Whatever the history: the tables of the importing index are the tables it was made from."""
    imported = 0
    for seed in range(1000, 1000 + SEEDS):
        rng = random.Random(seed)
        world = World(rng.randrange)
        for _ in range(60):
            world.step()
        world.settle()
        tables = world.index.export()
        other_world = World(random.Random(seed).randrange)
        other = other_world.index
        other.import_tables(tables)
        other.check_invariants()
        assert other.export() == tables, f"seed {seed}"
        if other_world.follower is not None:  # with forced collisions a hash names no block
            late = Follower()
            late.catch_up(other.state_events())
            assert len(late.snapshots) == len(tables.snapshots), f"seed {seed}"
        imported += len(tables.snapshots)
    assert imported > SEEDS


@pytest.mark.parametrize("part", range(4))
def test_seeded_runs_equal_the_naive_model(part: int) -> None:
    """The reference catalogue's random stress: no handle is lost, none is returned twice."""
    for seed in range(part, SEEDS, 4):
        run_seed(seed, STEPS, snapshots=seed % 5 > 0)
