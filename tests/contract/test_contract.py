"""Every question of every transform: it answers as the function without it does, or refuses clearly."""

import re
import warnings

import pytest

from tests.contract.page import PAGE, page
from tests.contract.questions import QUESTIONS
from tests.contract.transforms import TRANSFORMS

SMOKE = next(iter(QUESTIONS))
CELLS = [
    pytest.param(name, question, id=f"{name}: {question}", marks=[pytest.mark.smoke] if question == SMOKE else [])
    for name in TRANSFORMS
    for question in QUESTIONS
    if question not in TRANSFORMS[name].without
]


@pytest.mark.parametrize(("name", "question"), CELLS)
def test_contract(name, question):
    transform = TRANSFORMS[name]
    ask = QUESTIONS[question]
    if question not in transform.refuses:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(split evenly over|holds if all arguments are on one device)")
            return ask(transform)
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
        ask(transform)
    assert re.search(transform.refuses[question], str(error.value), re.DOTALL)


def test_page_is_current():
    assert PAGE.read_text() == page(), "write it again: python -m tests.contract.page"
