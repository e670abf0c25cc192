"""Schedules of chains: against a machine that tries everything, against closed forms, and their limits."""

import dataclasses
import heapq
import itertools
import json
import random

import pytest

from memjax._plan.schedule.forward_counts import HiddenCounts
from memjax.remat import BlockCost, ChainSchedule, chain_schedule
from memjax.remat._chain import solvers
from memjax.remat._chain.solvers import LeastTime, predict


def random_costs(seed, n, *, largest=6):
    rng = random.Random(seed)
    return [
        BlockCost(
            rng.randint(1, 5),
            rng.randint(1, 9),
            output := rng.choice([1, 2, 2 * largest]),
            output + rng.choice([0, 1, largest]),
            rng.choice([0, 1, 2 * largest]),
            rng.choice([0, 1, 2 * largest]),
        )
        for _ in range(n)
    ]


class Machine:
    """Shortest way through every state that blocks, stored inputs and kept blocks can be in, by Dijkstra's algorithm.

    A state is: the activation at hand, the inputs stored, the blocks kept, and the block whose backward pass is next (one
    more). What is stored stays until its backward pass has run. Knows nothing of groups or recurrences.
    """

    def __init__(self, costs):
        self.costs = costs
        self.n = len(costs)

    def size(self, i):
        """Bytes of the input of block `i`; that of the chain costs nothing."""
        return self.costs[i - 1].output if i else 0

    def moves(self, state):
        """(time, memory while it runs, next state)."""
        at, stored, kept, back = state
        held = sum(self.size(i) for i in stored) + sum(self.costs[i].kept for i in kept)
        outputs = {i + 1 for i in kept}
        gradient = self.size(back)
        here = stored | outputs | {0}
        for i in range(back):
            cost = self.costs[i]
            alone = self.size(i) if i == at and i not in here else 0
            if i == at or i in here:
                yield (
                    cost.forward,
                    held + alone + gradient + cost.output + cost.forward_work,
                    (i + 1, stored, kept, back),
                )
            if i in here and i not in kept:
                at_hand = (i + 1, stored, kept | {i}, back)
                yield cost.forward, held + gradient + cost.kept + cost.forward_work, at_hand
        if at not in here and at < back:
            yield 0, 0, (at, stored | {at}, kept, back)
        i = back - 1
        if i in kept and i in here:
            rest = frozenset(j for j in stored if j < i)
            yield self.costs[i].backward, held + self.costs[i].backward_work, (-1, rest, kept - {i}, i)

    def least_time(self, budget):
        start = (0, frozenset(), frozenset(), self.n)
        queue, done, order = [(0, 0, start)], set(), itertools.count(1)
        while queue:
            time_, _, state = heapq.heappop(queue)
            if state in done:
                continue
            done.add(state)
            if state[-1] == 0:
                return time_
            for more, memory, following in self.moves(state):
                if memory <= budget:
                    heapq.heappush(queue, (time_ + more, next(order), following))
        return None


def least_times(costs):
    """By budget, from one too small to that of keeping everything."""
    _, plain = predict(tuple(range(len(costs))), costs)
    return {budget: Machine(costs).least_time(budget) for budget in range(plain + 1)}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("n", "seed"),
    # The last two are chains on which the forward passes of groups are what limits.
    [*((n, 10 * n + i) for n, count in ((1, 2), (2, 8), (3, 12), (4, 10)) for i in range(count)), (4, 4029), (5, 5000)],
)
def test_no_machine_is_faster_at_any_budget(n, seed):
    costs = random_costs(seed, n, largest=4 if seed > 4000 else 6)
    for budget, expected in least_times(costs).items():
        if expected is None:
            with pytest.raises(ValueError, match="least possible"):
                chain_schedule(costs, budget)
        else:
            found = chain_schedule(costs, budget)
            assert found.seconds == expected
            assert found.nbytes <= budget


@pytest.mark.parametrize("seed", range(3))
def test_five_blocks(seed):
    costs = random_costs(seed, 5)
    _, plain = predict(tuple(range(5)), costs)
    for budget in (plain // 2, plain * 2 // 3, plain * 5 // 6):
        expected = Machine(costs).least_time(budget)
        if expected is not None:
            assert chain_schedule(costs, budget).seconds == expected


@pytest.mark.parametrize(("n", "slots"), [(10, 3), (20, 4), (37, 5), (56, 3)])
def test_equal_blocks_that_can_only_be_kept_one_at_a_time_are_revolve(n, slots):
    """What a block keeps is as large as all checkpoints together: the hidden states of a scan, in closed form."""
    kept = 1000
    found = chain_schedule([BlockCost(1, 0, 1, kept)] * n, kept + slots + 1)
    assert found.seconds == HiddenCounts().count(n, slots)


def test_everything_is_kept_where_it_fits():
    costs = random_costs(0, 20)
    everything = predict(tuple(range(20)), costs)
    found = chain_schedule(costs, everything[1])
    assert found.items == tuple(range(20))
    assert (found.seconds, found.nbytes) == everything == (found.plain_seconds, found.plain_nbytes)


@pytest.mark.parametrize("n", [40, 70])
def test_unequal_blocks_of_many_bytes_use_their_budget(n):
    costs = [cost._replace(output=cost.output << 20, kept=cost.kept * 1_000_003) for cost in random_costs(n, n)]
    _, plain = predict(tuple(range(n)), costs)
    seconds = []
    for share in (0.15, 0.3, 0.5, 0.7, 0.9):
        found = chain_schedule(costs, int(share * plain))
        assert 0.9 * share * plain < found.nbytes <= share * plain
        seconds.append(found.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_a_budget_below_the_least_possible_says_what_is():
    costs = random_costs(3, 30)
    with pytest.raises(ValueError, match=r"budget is 1 B, but the least possible is [\d.]+ \w+, at [\d.]+ of the time"):
        chain_schedule(costs, 1)
    least = chain_schedule(costs, "min").nbytes
    assert chain_schedule(costs, least).nbytes == least
    with pytest.raises(ValueError, match="least possible"):
        chain_schedule(costs, least - 1)


def test_equal_stretches_are_solved_once():
    """What takes the time is a row of the table for each different stretch of blocks."""
    equal = [BlockCost(1, 2, 1 << 20, 5 << 20, 3 << 20, 6 << 20)] * 300
    assert LeastTime(equal, 300 << 20).segments == 300
    period = random_costs(0, 12)
    assert LeastTime(period, 1 << 10).segments == 12 * 13 // 2
    assert LeastTime(period * 5, 1 << 10).segments == 12 * 60 - 12 * 11 // 2  # of each length up to 12 starts


def test_work_is_bounded(monkeypatch):
    """More different blocks share fewer units of memory, down to a number that schedules still follow from."""
    monkeypatch.setattr(solvers, "_WORK", 1e5)
    costs, budget = random_costs(0, 40), 1 << 20
    found = LeastTime(costs, budget)
    assert found.segments == 40 * 41 // 2
    assert budget / found.unit <= 150
    assert chain_schedule(costs, "min").nbytes <= chain_schedule(costs, 1 << 8).nbytes <= 1 << 8


def test_schedules_are_data():
    found = chain_schedule(random_costs(1, 12), 60)
    assert any(isinstance(item, tuple) for item in found.items)
    assert ChainSchedule.from_json(found.to_json()) == found
    assert found != dataclasses.replace(found, nbytes=0)
    small = dataclasses.replace(found, items=(0, 1, (2, (3,), 4), 5))
    assert "kept, and [recomputed from the input]: 0-1 [2 [3] 4] 5" in str(small)


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ([], "costs must have one entry for each block, got none"),
        ([BlockCost(1, 1, -1, 1)], r"costs\[0\].output must be a number of bytes of at least 0, got -1"),
        ([BlockCost(1, float("nan"), 1, 1)], r"costs\[0\].backward must be a finite number .* got nan"),
        ([BlockCost(1, 1, 1, float("nan"))], r"costs\[0\].kept must be a number of bytes"),
        ([BlockCost(1, 1, 10**30, 1)], r"costs\[0\].output must be a number of bytes below 2\^48"),
        ([(1, 1)], r"costs\[0\] must be a BlockCost"),
        (None, "costs must be a sequence of BlockCost"),
    ],
)
def test_bad_costs(costs, said):
    with pytest.raises((TypeError, ValueError), match=said):
        chain_schedule(costs, 10)


def test_arrays_that_stand_count_once_for_equal_blocks():
    costs = [BlockCost(1, 2, 10, 30, 5, 40)] * 3
    standing = [cost._replace(standing=7) for cost in costs]
    assert chain_schedule(standing, "min").nbytes == chain_schedule(costs, "min").nbytes + 7
    assert chain_schedule(standing, 1000).nbytes == chain_schedule(costs, 1000).nbytes + 7
    for budget in range(chain_schedule(standing, "min").nbytes, 150):
        assert chain_schedule(standing, budget).nbytes <= budget
    # However much it is: the rest of the budget is divided as finely.
    costs = [cost._replace(kept=cost.kept * 997 + 13 * i) for i, cost in enumerate(random_costs(0, 8))]
    standing = [costs[0]._replace(standing=10**7), *costs[1:]]
    least, plain = chain_schedule(costs, "min").nbytes, chain_schedule(costs, "1GiB").nbytes
    for budget in range(least, plain, (plain - least) // 8):
        assert chain_schedule(standing, 10**7 + budget).seconds == chain_schedule(costs, budget).seconds


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", None])
def test_texts_that_are_no_schedule(text):
    with pytest.raises(ValueError, match=r"text must be what ChainSchedule.to_json wrote"):
        ChainSchedule.from_json(text)


@pytest.mark.parametrize(
    "change", [{"items": []}, {"items": None}, {"items": [0, []]}, {"seconds": None}, {"nbytes": 1.5}, {"nbytes": -1}]
)
def test_fields_that_are_no_schedule(change):
    fields = json.loads(chain_schedule([BlockCost(1, 2, 10, 30, 5, 40)] * 3, "min").to_json())
    with pytest.raises(
        ValueError, match=rf"text must be what ChainSchedule.to_json wrote, .*: {next(iter(change))} must"
    ):
        ChainSchedule.from_json(json.dumps(fields | change))
