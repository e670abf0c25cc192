"""Processes that work for a run."""

import multiprocessing
import os
import signal
import threading


def begin() -> None:
    """To be called first in such a process: leaves Ctrl-C to the run's own process, and ends with it, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent():
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
