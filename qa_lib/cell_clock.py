"""A line below a notebook's cell that says how long it has been at work, while it is."""

import sys
import threading
import time

SILENT_S = 3.0  # seconds of a cell before the line comes
TICK_S = 1.0  # seconds from one change of it to the next


class CellClock:
    """The line of the cell that runs now. IPython calls `begin` and `end` around each cell."""

    def __init__(self):
        self._ended = threading.Event()
        self._ticker: threading.Thread | None = None

    def begin(self, *_) -> None:
        """Begin to count for a cell."""
        self._ended = threading.Event()
        # A kernel sends what a thread shows to the cell that started the thread.
        self._ticker = threading.Thread(target=self._tick, args=(self._ended,), daemon=True)
        self._ticker.start()

    def end(self, *_) -> None:
        """Take the line away, where there is one."""
        self._ended.set()
        if self._ticker is not None:
            self._ticker.join()
            self._ticker = None

    def _tick(self, ended: threading.Event) -> None:
        """Show the line from SILENT_S on until the cell has ended, and empty it then."""
        from IPython.display import DisplayHandle

        begun = time.monotonic()
        if ended.wait(SILENT_S):
            return
        line = DisplayHandle()
        line.display(_text(time.monotonic() - begun), raw=True)
        while not ended.wait(TICK_S):
            line.update(_text(time.monotonic() - begun), raw=True)
        line.update({"text/plain": ""}, raw=True)


def _text(seconds: float) -> dict[str, str]:
    return {"text/plain": f"at work for {seconds:.0f} s"}


def show_cell_clock() -> None:
    """Have this notebook's cells show a CellClock from the next one on.

    Without a notebook nothing happens.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if not hasattr(shell, "kernel") or hasattr(shell, "cell_clock"):
        return
    shell.cell_clock = CellClock()
    shell.events.register("pre_run_cell", shell.cell_clock.begin)
    shell.events.register("post_run_cell", shell.cell_clock.end)
