"""One run in a fresh process, for searches that need no notebook."""

import contextlib
import multiprocessing
import os
from pathlib import Path

from qa_lib.errors import UserError
from qa_lib.measure.machine import imitate
from qa_lib.record import FINISHED, read_record
from qa_lib.run.sweep import card, is_finished
from qa_lib.spec import Spec

SHARE = "QA_LIB_SHARE"  # set where other runs train on the same GPU at the same time


def _fit(spec: Spec, runs: Path, gpu: int | None, shared: bool, sm: int) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = card(gpu)  # read when CUDA is first used, which is later than this
    # Not before: bitsandbytes, which it imports, asks CUDA for its cards.
    from qa_lib.run.fit import fit

    imitate(sm)
    if shared:
        os.environ[SHARE] = "1"
    with contextlib.suppress(KeyboardInterrupt):  # the record says it, and so does the search
        fit(spec, runs, say=lambda _: None)


def attempt(spec: Spec, runs: Path, gpu: int | None = None, shared: bool = False, sm: int = 90) -> dict:
    """The record of a try: of an earlier one, or of a fresh process, so that nothing of it is left in memory.

    `sm` is the compute capability x 10 whose attention kernels it may use. Raises UserError where it failed. An
    out-of-memory is a result.
    """
    if not is_finished(spec, runs, set()):
        process = multiprocessing.get_context("spawn").Process(target=_fit, args=(spec, runs, gpu, shared, sm))
        process.start()
        process.join()
    entry = read_record(runs / spec.run_path)
    if entry["status"] not in FINISHED:
        raise UserError(f"{spec.run_id}: {entry['status']}, {entry['error']['message']}")
    return entry
