"""Signals that ask a process to end, as exceptions that let it tidy up first."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping

CTRL_C = "SIGINT (Ctrl-C)"
# The signals that ask for an end, and what a message calls them.
SIGNALS = {
    signal.SIGINT: CTRL_C,
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP (its terminal is gone)",
}
# Signals that come within so many seconds are one wish: a closing terminal sends several.
TOGETHER_S = 3
# After so many seconds a signal whose exception was lost is sent again.
AGAIN_S = 0.05


class Stopped(KeyboardInterrupt):
    """One of SIGNALS asked this process to end; the message is its name.

    Like Ctrl-C, it is not caught by `except Exception`.
    """


def stopped_by(problem: BaseException) -> str:
    """Return words for what stopped a run or a driver.

    A notebook's Ctrl-C is a KeyboardInterrupt without a message.
    """
    if isinstance(problem, KeyboardInterrupt):
        return f"stopped by {str(problem) or CTRL_C}"
    return f"stopped by {type(problem).__name__}"


@contextlib.contextmanager
def stoppable(names: Mapping[int, str] = SIGNALS) -> Iterator[None]:
    """Raise Stopped when one of SIGNALS comes inside the block; `names` are its messages.

    Only the main thread may enter, and the exception is raised there. A signal that is ignored
    stays so: that is how `nohup` keeps SIGHUP from a command. What follows within TOGETHER_S is
    dropped, so that tidying up is not interrupted by the second signal of one wish.

    Python may act on a signal within a finalizer or a weak reference's callback, and ignores what
    is raised there. PyTorch's compiler has many of them. Such a signal is sent again.
    """
    last_stop = -TOGETHER_S  # time.monotonic() begins at 0 or later
    last_number = signal.SIGTERM

    def stop(number: int, _frame) -> None:
        nonlocal last_stop, last_number
        now = time.monotonic()
        if now - last_stop < TOGETHER_S:
            return
        last_stop = now
        last_number = number
        raise Stopped(names[number])

    def send_again() -> None:
        nonlocal last_stop
        time.sleep(AGAIN_S)  # by then the finalizer has returned
        last_stop = -TOGETHER_S
        signal.pthread_kill(threading.main_thread().ident, last_number)

    def ignored(unraisable) -> None:
        if isinstance(unraisable.exc_value, Stopped):
            threading.Thread(target=send_again, daemon=True).start()
        else:
            hook_before(unraisable)

    hook_before = sys.unraisablehook
    sys.unraisablehook = ignored
    handlers_before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in handlers_before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        sys.unraisablehook = hook_before


@contextlib.contextmanager
def ended_soon(seconds: float) -> Iterator[None]:
    """End this process so many seconds after one of SIGNALS has come inside the block.

    Python acts on a signal when its main thread is back from what it has called. A main thread that
    waits for a GPU, which waits for the GPU of a dead process, never comes back. Only the main
    thread may enter. The exit code is 1.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Python's own handler, which is C, writes the number of each signal there at once.
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end_after, args=[reader, seconds], daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


def _end_after(reader: int, seconds: float) -> None:
    """End this process so long after one of SIGNALS is read; return once the block is left."""
    with open(reader, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            if number[0] in SIGNALS:
                time.sleep(seconds)
                os._exit(1)
