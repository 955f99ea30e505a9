"""The public `plan`: specs of runs, with what is left to the machine chosen by recommend.py.

No torch is imported unless there is something to choose, or a machine to be looked at: a driver
plans without.
"""

import os
from collections.abc import Sequence
from functools import partial

from qa_lib.calls import argument_names, check_names, checked, expect, expect_folder
from qa_lib.run.plan import OWN_NAMES, Several, make_request
from qa_lib.run.plan import plan as plan_request
from qa_lib.spec.machine import Machine
from qa_lib.spec.spec import Spec


@checked
def plan(
    variants: Sequence[str],
    preset: str | None = None,
    seeds: Sequence[int] = (0,),
    data: str | os.PathLike | None = None,
    model: str | os.PathLike | None = None,
    micro_batch: Several = None,
    machine: Machine | None = None,
    world: Several = None,
    max_length: Several = None,
    batch: Several = None,
    left_out: list[str] | None = None,
    runs: str | os.PathLike = "runs",
    **own,
) -> list[Spec]:
    """Return the specs of variants x seeds at a preset: all variants with the first seed, then on.

    For instance plan(["A1", "E-uncompiled"], "local", [0, 1], data="squad/", model="my-bert/",
    epochs=2). Each spec is there once.

    `data` and `model` (paths, or hub names) replace the preset's own, unless they are empty; where
    both are given, `preset` may be left out and is `local`. `machine` is this one unless given.
    Sizes, and what `own` may hold, are arguments of `resolve`. A list in place of a size gives
    every variant a spec for each, and several lists their product.

    What is left to the machine is chosen by lab/search/recommend.py, by the records below `runs`
    too, and told in the first line of a spec's `adjusted`: `recommended` becomes the variant, and
    without `micro_batch` the size, that suits it. At the presets for one's own training
    (presets.QUICKEST) all other variants get, without `micro_batch`, the quickest size that fits
    all of them, which divides the `batch`.

    Raises SpecError for a name or number that cannot be, before files and the hub are asked, or a
    length that the model does not take, and UserError for what is not to be had. Where `left_out`
    is given, it gets a sentence for sizes that do not go together, as long as their variant has
    others.
    """
    check_names("plan", own, [*argument_names(plan), *OWN_NAMES])
    expect_folder("runs", runs)
    expect(
        "machine",
        machine,
        Machine | None,
        "give a qa_lib.spec.machine.Machine, or None for this one",
    )
    expect("left_out", left_out, list | None, "give a list, to which sentences are added")
    request = make_request(
        variants=variants,
        preset=preset,
        seeds=seeds,
        data=data,
        model=model,
        machine=machine,
        sizes={
            "max_length": max_length,
            "batch": batch,
            "micro_batch": micro_batch,
            "world": world,
        },
        own=own,
        leave_out=left_out is not None,
    )
    planned = plan_request(request, partial(choose_all, runs=runs))
    if left_out is not None:
        left_out += planned.left_out
    return planned.specs


def choose_all(
    specs: list[Spec], machine: Machine, has_config: bool, runs: str | os.PathLike
) -> list[Spec]:
    """Return the specs with what was left to the machine, each run once.

    Where a choice is a run that was named as well, it stays a choice: another takes its place if it
    fails.
    """
    from qa_lib.lab.search.recommend import choose, with_quickest_size  # these import torch

    specs = [choose(spec, machine, runs) if spec.recommended else spec for spec in specs]
    specs = with_quickest_size(specs, machine, runs, has_config)
    by_run = {}
    for spec in specs:
        if spec.recommended or spec.run_path not in by_run:
            by_run[spec.run_path] = spec
    return list(by_run.values())
