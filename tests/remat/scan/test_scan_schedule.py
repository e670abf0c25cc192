"""Schedules against recurrences and against a machine that replays them."""

import functools
import math
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax._plan.schedule import forward_counts
from memjax._plan.schedule.schedule import CORE, INIT, _counts
from memjax.remat import Schedule, schedule

# Minimal forward steps, found by exhaustive search and dynamic programming outside this project:
# (strategy, length, slots, internal size): steps.
KNOWN = {
    ("hidden", 10, 3, 1): 25,
    ("hidden", 50, 10, 1): 138,
    ("hidden", 1000, 10, 1): 4636,
    ("hidden", 1000, 50, 1): 2948,
    ("internal", 10, 3, 1): 18,
    ("internal", 50, 5, 1): 125,
    ("mixed", 1000, 50, 5): 2723,
    ("mixed", 1000, 100, 5): 1995,
    ("mixed", 1000, 150, 5): 1974,
    ("mixed", 1000, 250, 5): 1950,
    ("mixed-shared", 10, 50, 10): 14,
    ("mixed-shared", 500, 100, 10): 995,
    ("mixed-shared", 1000, 7, 5): 5692,
    ("mixed-shared", 1000, 100, 5): 1988,
    ("mixed-shared", 1000, 250, 5): 1941,
    ("mixed-shared", 1000, 500, 5): 1877,
    ("mixed-shared", 1000, 100, 10): 2392,
}


@functools.cache
def least(strategy, t, m, alpha):
    """The paper's recurrences, read off one by one."""
    if t == 0:
        return 0
    if m == 1:
        return t * (t + 1) // 2
    rest = functools.partial(least, strategy, alpha=alpha)
    if strategy == "internal":
        return min(y + rest(t - y, m - 1) + rest(y - 1, m) for y in range(1, t + 1))
    options = [t + rest(t - 1, m)]
    for y in range(1, t):
        options.append(y + rest(t - y, m - 1) + rest(y, m))
        if strategy != "hidden" and m > alpha:
            options.append(y + rest(t - y, m - alpha) + rest(y - 1, m))
    if strategy == "mixed-shared" and t > 1 and m - alpha + 1 >= 1:
        options.append(1 + rest(t - 1, m - alpha + 1))
    return min(options)


def replay(plan: Schedule):
    """Run the actions on a machine that refuses what it cannot do; (forward steps, most units in use)."""
    internal_only = plan.strategy == "internal"
    units_of_internal = 1 if internal_only else plan.internal_size
    hidden = {} if internal_only else {0: 0}  # slot: the step it stands before
    internal, end_of = {}, {}  # slot: step; slot where a kept step's output hidden state lies: step after it
    units = dict.fromkeys(hidden, 1)
    working, core, left, forward, most = 0, None, plan.length, 0, sum(units.values())
    for kind, start, stop, slot in plan.actions:
        if kind == "load":
            if slot == INIT:
                assert (internal_only, start) == (True, 0)
            else:
                assert {**hidden, **end_of}[slot] == start
            working = start
        elif kind == "advance":
            assert working == start < stop
            working, forward = stop, forward + stop - start
        elif kind == "store":
            assert working == start
            assert slot not in units
            hidden[slot], units[slot] = start, 1
        elif kind == "keep":
            assert working == start == stop - 1
            working, forward = stop, forward + 1
            if slot == CORE:
                core = start
            else:
                assert slot not in units
                shared = plan.strategy == "mixed-shared" and hidden.get(slot - 1, end_of.get(slot - 1)) == start
                internal[slot], units[slot] = start, units_of_internal - shared
                end_of[slot + units[slot] - 1] = stop
        elif kind == "backward":
            left -= 1
            assert left == start
            if slot == CORE:
                assert core == start
            else:
                assert internal.pop(slot) == start
                end_of.pop(slot + units.pop(slot) - 1)
            core = working = None
        elif kind == "free":
            del hidden[slot], units[slot]
        most = max(most, sum(units.values()) + (internal_only and core is not None))
    assert left == 0
    return forward, most


@pytest.mark.smoke
@pytest.mark.parametrize(("case", "steps"), KNOWN.items())
def test_known_counts(case, steps):
    strategy, length, slots, size = case
    plan = schedule(length, slots, strategy=strategy, internal_size=size)
    assert plan.forward_steps == steps
    assert replay(plan) == (steps, plan.peak_slots)
    assert plan.peak_slots <= slots


@pytest.mark.parametrize("strategy", ["hidden", "internal", "mixed", "mixed-shared"])
@settings(max_examples=150, deadline=None)
@given(length=st.integers(0, 40), slots=st.integers(1, 60), size=st.integers(1, 12))
def test_equals_the_recurrence_and_runs(strategy, length, slots, size):
    size += strategy == "mixed-shared"  # there the input counts as well
    plan = schedule(length, slots, strategy=strategy, internal_size=size)
    assert plan.forward_steps == least(strategy, length, slots, size)
    if strategy != "hidden":  # a bound by which tables are left out
        assert schedule(length, slots, strategy="internal").forward_steps <= plan.forward_steps
    forward, most = replay(plan)
    assert forward == plan.forward_steps
    if length:
        assert most == plan.peak_slots <= slots


def test_actions_of_a_small_chain():
    moves = [(a.kind, a.start, a.stop, a.slot) for a in schedule(4, 2, strategy="hidden").actions]
    assert moves == [
        ("advance", 0, 2, 0),
        ("store", 2, 2, 1),
        ("advance", 2, 3, 1),
        ("keep", 3, 4, CORE),
        ("backward", 3, 4, CORE),
        ("load", 2, 2, 1),
        ("keep", 2, 3, CORE),
        ("backward", 2, 3, CORE),
        ("free", 2, 2, 1),
        ("load", 0, 0, 0),
        ("advance", 0, 1, 0),
        ("keep", 1, 2, CORE),
        ("backward", 1, 2, CORE),
        ("load", 0, 0, 0),
        ("keep", 0, 1, CORE),
        ("backward", 0, 1, CORE),
    ]


def test_more_memory_never_costs_more():
    for strategy in ("hidden", "internal", "mixed", "mixed-shared"):
        costs = [schedule(200, m, strategy=strategy, internal_size=4).forward_steps for m in range(1, 120, 7)]
        assert costs == sorted(costs, reverse=True)


def test_the_papers_headline():
    """5% of the memory for one third more time: a backward step is worth two forward steps."""
    plan = schedule(1000, 250, strategy="mixed", internal_size=5)
    assert (plan.forward_steps + 2 * 1000) / (1000 + 2 * 1000) == pytest.approx(1.317, abs=1e-3)


@pytest.mark.parametrize("length", [1_000, 1_000_000, 1_000_000_000])
def test_hidden_takes_a_few_binomials(length, monkeypatch):
    binomials = []
    counted = types.SimpleNamespace(comb=lambda n, k: binomials.append((n, k)) or math.comb(n, k))
    monkeypatch.setattr(forward_counts, "math", counted)
    schedule(length, 10, strategy="hidden")
    assert len(binomials) < 2 * math.log10(length)


@pytest.mark.parametrize("length", [500, 1000, 2000])
def test_mixed_looks_at_few_places(length, monkeypatch):
    """Looking at every split of every segment in every row takes several times `length` places a row."""
    places = []
    growing_slopes = forward_counts._growing_slopes

    def counted(values):
        places.extend(found := growing_slopes(values))
        return found

    monkeypatch.setattr(forward_counts, "_growing_slopes", counted)
    _counts.cache_clear()
    schedule(length, 50, strategy="mixed", internal_size=5)
    assert 0 < len(places) < 0.5 * length * 50


def test_long_mixed_schedule():
    assert schedule(10_000, 100, strategy="mixed", internal_size=5).forward_steps == 28948


def test_is_plain_data():
    plan = schedule(30, 4, strategy="mixed", internal_size=3)
    again = Schedule.from_json(plan.to_json())
    assert again == plan
    assert again.actions == plan.actions
    assert str(
        plan
    ) == f"mixed schedule: 30 steps, 4 slots, internal states of 3: {plan.forward_steps} forward steps " + (
        f"({plan.forward_steps / 30:.2f} per step)"
    )


def test_plot():
    plt = pytest.importorskip("matplotlib.pyplot")
    ax = schedule(10, 8, strategy="mixed", internal_size=3).plot()
    assert ax.get_xlabel() == "step"
    plt.close(ax.figure)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((-1, 3), {}, "length must be a number of steps of at least 0, got -1"),
        ((5, 0), {}, "slots must be units of memory of at least 1, got 0"),
        ((5, 2), {"internal_size": 0}, "internal_size must be units of memory of at least 1"),
        (
            (5, 2),
            {"strategy": "both"},
            "strategy must be one of 'hidden', 'internal', 'mixed', 'mixed-shared', got 'both'",
        ),
        (("10", 3), {}, "length must be a number of steps"),
        ((10, None), {}, "slots must be units of memory"),
        ((10, float("nan")), {}, "slots must be units of memory"),
        ((float("inf"), 3), {}, "length must be a number of steps"),
        ((10, True), {}, "slots must be units of memory"),
        ((10, 3), {"internal_size": 1.5}, "internal_size must be units of memory"),
        ((10, 3), {"internal_size": None}, "internal_size must be units of memory"),
        ((10_000_000, 1000), {}, "length and slots must give a table of at most 50,000,000 entries"),
    ],
)
def test_refuses(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        schedule(*arguments, **options)
