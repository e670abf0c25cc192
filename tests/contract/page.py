"""Writes docs/reference/contract.md, what every transform answers: python -m tests.contract.page"""

from pathlib import Path

from tests.contract.questions import QUESTIONS
from tests.contract.transforms import NO_FUNCTION, TRANSFORMS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "contract.md"

_HEAD = """# What composes with what

Every transform is put to the same questions by `tests/contract`, on a CPU with eight simulated devices, with a small function.
Values and gradients must be those of the function without the transform, up to rounding or the error of its codes. Where a
transform cannot do something, an error must say so, with the argument, its value and what to do instead.

The questions:

"""

_TABLE = """
All answers are right but for these. Each is refused, with an error, or not asked, for the reason given. Where a transform is in
the table with several arguments, questions in whose answers these play no part are asked with one of them: "as" says which.
Modules, pickles and arguments that are no arrays are asked of what returns a function.

| Transform | Refused | Not asked |
|---|---|---|
"""


def page() -> str:
    questions = "".join(f"- {name}\n" for name in QUESTIONS)
    return _HEAD + questions + _TABLE + "".join(map(_row, TRANSFORMS))


def _row(name: str) -> str:
    transform = TRANSFORMS[name]
    by_reason: dict[str, list[str]] = {}
    for question in QUESTIONS:
        if (reason := transform.without.get(question, NO_FUNCTION)) != NO_FUNCTION:
            by_reason.setdefault(reason, []).append(question)
    without = "<br>".join(f"{'; '.join(questions)} ({reason})" for reason, questions in by_reason.items())
    return f"| `{name}` | {'; '.join(transform.refuses)} | {without} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
