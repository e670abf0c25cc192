"""Sentences with numbers that are measured, as pages have them. Results that change make the tests ask for other words."""

from collections.abc import Callable

from benchmarks.tables.prose import compress, guides, measurements

SENTENCES: dict[str, list[Callable[[], str]]] = {
    page: [sentence for part in (guides, compress, measurements) for sentence in part.SENTENCES.get(page, [])]
    for page in {**guides.SENTENCES, **compress.SENTENCES, **measurements.SENTENCES}
}
