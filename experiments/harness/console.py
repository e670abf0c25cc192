"""What experiments print, and how they end."""

import signal
import sys
from collections.abc import Callable, Sequence

import jax
from rich.console import Console
from rich.text import Text

from experiments.harness.errors import ExperimentError


def output() -> Console:
    """Where results go: text as it is, for names of files may have [brackets] and :colons: in them; one process prints."""
    return Console(markup=False, emoji=False, quiet=jax.process_index() != 0)


def exit_status(body: Callable[[list[str]], int], argv: Sequence[str] | None) -> int:
    """What `body(flags)` gives, or 2 after printing what the user has to put right, or 130 after Ctrl-C.

    `argv=None` means the flags of the process.
    """
    try:
        return body(sys.argv[1:] if argv is None else list(argv))
    except ExperimentError as error:
        message = str(error)
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        message = f"{where}{error.strerror or error}"
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one does not wait for what is still being written
        say_error("by Ctrl-C", "Stopped")
        return 130
    say_error(message)
    return 2


def say_error(message: str, title: str = "Error") -> None:
    # Names of files need not be UTF-8: Python has surrogates for other bytes, which cannot be printed.
    printable = message.encode("utf-8", "backslashreplace").decode()
    text = Text.assemble((f"{title}:", "bold red"), " ", printable)
    Console(stderr=True).print(text, soft_wrap=True, highlight=False)
