"""The search for the plan that fills a budget, on frontiers and compilers that are given."""

import numpy as np
import pytest

from memjax._plan.budget.search import Patience, is_out_of_reach, search, told_apart
from memjax._plan.result import Try

RNG = np.random.default_rng(0)


def frontier(count):
    predicted = np.cumsum(RNG.integers(10, 1000, count)) + 1000
    seconds = 2 - np.cumsum(RNG.uniform(0.01, 1, count)) / count
    return predicted.tolist(), seconds.tolist()


def off_by(predicted, factor, amount, noise=0.0):
    """Compiled bytes of a model that is wrong by so much."""
    return (np.array(predicted) * factor * RNG.uniform(1 - noise, 1 + noise, len(predicted)) + amount).astype(int)


def test_where_it_is_known_what_arrays_take_the_second_try_corrects_by_an_amount():
    """However much the first is off: by a factor the second would be far from the budget."""
    predicted, seconds = frontier(100)
    amount, budget = 3 * predicted[0], predicted[50] + 3 * predicted[0]
    compiled = off_by(predicted, 1.0, amount).tolist()
    patience = Patience(by_amount=True)
    first, second, *_ = search(predicted, seconds, budget, compiled.__getitem__, patience=patience)
    assert first.compiled > budget >= second.compiled == second.expected


def test_the_step_as_it_is_written_corrects_the_first_try():
    """What XLA gathers on several devices it gathers in that step, too."""
    predicted, seconds = frontier(100)
    amount, budget = 3 * predicted[0], predicted[50] + 3 * predicted[0]
    compiled = off_by(predicted, 1.0, amount).tolist()
    most = predicted[-1] + 500
    above = Try(len(predicted), most, most, most + amount + 800)
    first, second = search(
        predicted, seconds, budget, compiled.__getitem__, patience=Patience(by_amount=True), above=above
    )
    assert compiled[0] < first.compiled == first.expected - 800 < 0.985 * budget
    assert 0.985 * budget < second.compiled == second.expected <= budget


def test_what_is_known_not_to_fit_is_not_tried_for_a_small_gain():
    predicted, budget = [1000, 2000, 2100], 2050
    found = lambda gain: search(predicted, [1 + gain, 1 + gain, 1.0], budget, predicted.__getitem__, patience=patience)
    patience = Patience(by_amount=True)
    assert [one.number for one in found(0.01)] == [1]
    assert [one.number for one in found(0.03)] == [1, 2]


def best(compiled, budget):
    return max(np.flatnonzero(compiled <= budget), default=None)


@pytest.mark.parametrize(("factor", "amount"), [(1.0, 0), (1.2, 0), (0.8, 0), (0.25, 0), (3.0, 0), (0.9, 700)])
def test_the_answer_fits_and_fills_the_budget_or_is_the_fastest_that_fits(factor, amount):
    for count in (1, 2, 5, 100):
        predicted, seconds = frontier(count)
        compiled = off_by(predicted, factor, amount)
        for budget in np.linspace(0.8 * compiled[0], 1.1 * compiled[-1], 12).astype(int).tolist():
            tries = search(predicted, seconds, budget, compiled.tolist().__getitem__)
            assert len(tries) <= 4
            assert len({one.number for one in tries}) == len(tries)
            fitting = [one for one in tries if one.compiled <= budget]
            wanted = best(compiled, budget)
            if wanted is None:
                assert not fitting
                assert tries[-1].number == 0
            else:
                chosen = max(fitting)
                is_full = chosen.number == wanted or chosen.compiled >= 0.98 * budget
                assert is_full or seconds[chosen.number] <= seconds[wanted] * (1 + 1e-3)


def test_no_more_than_four_are_compiled_and_the_least_is_when_nothing_fits():
    predicted, seconds = frontier(100)
    compiled = [10**7] * 99 + [10**8]
    tries = search(predicted, seconds, 10**6, compiled.__getitem__)
    assert len(tries) <= 4
    assert tries[-1].number == 0


def test_a_larger_budget_is_never_filled_with_less():
    """Where compiled bytes rise with predicted ones, and budgets are further apart than what may be left of one."""
    for noise in (0.0, 0.02):
        predicted, seconds = frontier(60)
        compiled = np.maximum.accumulate(off_by(predicted, 1.15, 500, noise))
        peaks, times = [], []
        for budget in np.geomspace(compiled[0], compiled[-1], 12).astype(int).tolist():
            tries = search(predicted, seconds, budget, compiled.tolist().__getitem__)
            chosen = max(one for one in tries if one.compiled <= budget)
            peaks.append(chosen.compiled)
            times.append(seconds[chosen.number])
        assert peaks == sorted(peaks)
        assert times == sorted(times, reverse=True)


def test_what_is_expected_after_a_correction_is_what_is_compiled():
    predicted, seconds = frontier(100)
    for factor, amount in ((0.25, 0), (1.0, 7000)):  # sharded over four devices; something unseen
        compiled = off_by(predicted, factor, amount).tolist()
        tries = search(predicted, seconds, compiled[50], compiled.__getitem__)
        assert tries[0].expected == tries[0].predicted
        assert abs(tries[0].expected / tries[0].compiled - 1) > 0.1
        assert len(tries) > 1
        for one in tries[1:]:
            assert abs(one.expected / one.compiled - 1) < 0.001


def test_two_tries_tell_an_amount_from_a_factor():
    """Twice the predicted bytes may be a factor, as of a sharded step, or an amount, as of what is gathered at once."""
    predicted, seconds = frontier(100)
    for factor, amount in ((2.0, 0), (1.0, predicted[-1])):
        compiled = off_by(predicted, factor, amount).tolist()
        tries = search(predicted, seconds, compiled[50], compiled.__getitem__)
        assert max(one.compiled for one in tries if one.compiled <= compiled[50]) > 0.985 * compiled[50]
        for one in tries[2:]:
            assert abs(one.expected / one.compiled - 1) < 0.001


def test_what_one_plan_of_a_kind_is_off_by_is_expected_of_all_of_its_kind():
    """Plans of two kinds in turn, of which one takes more than predicted and the other less."""
    predicted = list(range(10_000, 20_000, 100))
    seconds = np.linspace(2, 1, len(predicted)).tolist()
    kind = lambda i: i // 30 % 2
    compiled = lambda i: predicted[i] + (-700, 400)[kind(i)]
    for budget in (12_800, 14_700, 16_400, 18_600):
        tries = search(predicted, seconds, budget, compiled, kind)
        for n, one in enumerate(tries):
            if kind(one.number) in [kind(other.number) for other in tries[:n]]:
                assert one.expected == one.compiled
        filled = max(compiled(i) for i in range(len(predicted)) if compiled(i) <= budget)
        assert max(one.compiled for one in tries if one.compiled <= budget) > 0.97 * filled
    assert len(tries) > 1


def test_on_a_stair_of_compiled_bytes_the_whole_budget_is_aimed_at():
    predicted = list(range(2000, 2700, 16))
    seconds = np.linspace(2, 1, len(predicted)).tolist()
    compiled = lambda i: 1936 if predicted[i] < 2400 else 2192 if predicted[i] < 2580 else 2256
    tries = search(predicted, seconds, 2240, compiled)
    assert [one.compiled for one in tries] == [1936, 2192, 2192, 2192]
    assert all(2240 - 16 < one.expected <= 2240 for one in tries[2:])


def test_no_try_is_spent_on_what_gains_nothing():
    predicted = [1000, 2000, 3000]
    tries = search(predicted, [2.0, 1.0, 1.0 - 1e-5], 2500, lambda i: predicted[i])
    assert [one.number for one in tries] == [1]


def test_a_much_faster_plan_is_tried_though_it_may_take_too_much():
    """The model takes 100 too few for slow plans, and 800 too many for fast ones."""
    predicted = list(range(10_000, 20_000, 100))
    seconds = [2 - 1e-4 * i - 0.1 * (i >= 60) for i in range(len(predicted))]
    compiled = lambda i: predicted[i] + (-800 if i >= 60 else 100)
    tries = search(predicted, seconds, 15_500, compiled)
    assert max(one for one in tries if one.compiled <= 15_500).number >= 60
    # It is not where the gain is small, nor where much more is expected.
    assert len(search(predicted, [2 - 1e-4 * i for i in range(len(predicted))], 15_500, compiled)) == 1
    assert max(one.number for one in search(predicted, seconds, 14_500, compiled)) < 60


def test_patience_ends_a_search():
    predicted, seconds = list(range(1000, 2000, 10)), np.linspace(2, 1.9, 100).tolist()
    tried = lambda budget, factor, **patience: [
        one.number for one in search(predicted, seconds, budget, lambda i: int(factor * predicted[i]), **patience)
    ]
    patient = tried(1500, 1.2)
    assert len(patient) > 2  # the first takes too much, the next ones fit
    assert tried(1500, 1.2, patience=Patience(enough=2)) == patient[:2]
    assert tried(1500, 1.2, patience=Patience(off=1.3)) == patient
    assert tried(1500, 1.2, patience=Patience(off=1.1)) == patient[:1]
    # Of three times the bytes nothing fits, and after the first try nothing is expected to.
    assert tried(1500, 3.0)[-1] == 0
    assert len(tried(1500, 3.0, patience=Patience(over=1.25))) == 1
    # While nothing fits, enough is not enough.
    assert len(tried(1100, 1.12, patience=Patience(enough=1))) > 1


def test_plans_of_much_the_same_bytes_are_one():
    assert told_apart([1000, 1001, 2000, 2003, 2500], [5.0, 4.0, 3.0, 2.0, 1.0]) == [0, 1, 3, 4]
    assert told_apart([7], [1.0]) == [0]


def test_of_plans_that_are_as_fast_the_one_of_the_fewest_bytes_is_tried():
    assert told_apart([1000, 2000, 2001, 2002, 2500], [2.0, 1.5, 1.00005, 1.0, 0.9]) == [0, 2, 4]
    assert told_apart([1000, 2000, 2001], [2.0, 1.0, 1.0]) == [0, 1, 2]  # the last keeps everything


def test_of_the_plans_that_are_predicted_to_take_the_least_one_is_compiled_if_none_fits():
    """By default the first; the caller may know which one takes less."""
    tries = search([1000, 1000, 1500], [3.0, 2.0, 1.0], 900, lambda number: 1020, least=1)
    assert [one.number for one in tries] == [1]


@pytest.mark.parametrize(
    ("predicted", "compiled", "is_known"),
    [(1000, 1020, True), (1000, 1100, False), (1000, 1240, True), (2600, 1240, False)],
)
def test_nothing_is_expected_to_fit_where_the_least_is_far_over_or_as_predicted(predicted, compiled, is_known):
    """A plan that takes more than the budget, but not far more than was predicted, leaves room for others to take less."""
    assert is_out_of_reach(Try(0, predicted, predicted, compiled), 990) == is_known


def test_the_last_of_the_tries_is_the_least_plan_if_none_fits():
    """Every plan but the least takes a byte too much, whatever was predicted."""
    predicted = list(range(1000, 2000, 10))
    tries = search(predicted, [1 / nbytes for nbytes in predicted], 1500, lambda number: 1501 if number else 1000)
    assert len(tries) == 4
    assert (tries[-1].number, tries[-1].compiled) == (0, 1000)
