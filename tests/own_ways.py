"""Ways to train that train nothing, for processes that import little (tests/test_own_bench.py)."""

import time


def idle(connection, word):
    """Raise an error, end at once or take an hour for a turn, as the word says."""
    if word == "raise":
        raise ValueError("no such model\nand more")
    if word == "end":
        raise SystemExit(3)
    connection.send({"setup_s": 1.0, "step_s": 1.0})
    connection.recv()
    time.sleep(3600)
