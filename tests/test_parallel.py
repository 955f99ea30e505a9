"""Several processes make the steps of one: the rows of family P over gloo, in real processes, held against one process.

In fp32 and without dropout nothing differs but the order of sums, so that the losses of 20 steps must agree closely;
the tolerances below are relative and many times what was seen.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.ranks import losses_of, trained

LIMIT_S = 240  # of a launch, which takes 30 s on two free cores
BF16 = {"precision": "bf16", "optimizer": "master"}
# name -> (the case, the same in one process, relative tolerance of each step's loss)
CASES = {
    "ddp": ({"row": "P1"}, {"row": "A1", "world": 1}, 1e-4),
    "ddp-accumulated": ({"row": "P1", "scale": {"effective_batch": 32}}, None, 1e-4),
    "ddp-bf16": ({"row": "P1-bf16"}, {"row": "A1", "world": 1}, 0.05),
    "fsdp": ({"row": "P-fsdp"}, {"row": "A1", "world": 1}, 1e-4),
    "fsdp-accumulated": ({"row": "P-fsdp", "scale": {"effective_batch": 32}}, None, 1e-4),
    "flat": ({"row": "P-fast"}, {"row": "E-best", "world": 1}, 1e-4),
    "sharded": ({"row": "P-sharded"}, {"row": "E-best", "world": 1}, 1e-4),
    "sharded-accumulated": ({"row": "P-sharded", "scale": {"effective_batch": 32}}, None, 1e-4),
    "sharded-masters": ({"row": "P-sharded", "settings": BF16}, {"row": "P-fast", "settings": BF16}, 0.05),
    "ddp-unequal": ({"row": "P-fast", "unequal": True, "settings": {"parallel": "ddp"}}, None, 1e-4),
    "flat-unequal": ({"row": "P-fast", "unequal": True}, None, 1e-4),
    "sharded-unequal": ({"row": "P-sharded", "unequal": True}, None, 1e-4),
    "fsdp-unequal": ({"row": "P-fast", "unequal": True, "settings": {"parallel": "fsdp"}}, None, 1e-4),
    # Within an epoch: at its end the Trainer leaves out more features with more processes.
    "trainer": ({"row": "P0", "scale": {"steps": 7}}, {"row": "A0", "world": 1, "scale": {"steps": 7}}, 1e-4),
}


def launch(cases: list[dict], world: int, folder) -> None:
    """Train the cases in so many processes."""
    folder.mkdir(exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    command = "-m torch.distributed.run --standalone --nproc-per-node".split()
    done = subprocess.run(
        [sys.executable, *command, str(world), "-m", "tests.ranks", str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:6000]


def found_by_ranks(folder) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    launch([case | {"name": name} for name, (case, _, _) in CASES.items()], 2, folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_processes_make_the_steps_of_one(name, shared, tmp_path):
    case, alone, tolerance = CASES[name]
    # Without another row for it, the same case: one process takes all of a step's micro-batches.
    trained(alone or case, tmp_path / "alone")
    np.testing.assert_allclose(losses_of(shared / name), losses_of(tmp_path / "alone"), rtol=tolerance)
    first, second = found_by_ranks(shared / name)
    assert first["weights"] == second["weights"]


def test_ways_to_reduce_see_one_noise_scale(shared):
    """Square norms of each process's gradient and of the mean of all, which the noise scale is made of."""
    flat, sharded, ddp = (
        np.mean([rank["norms"] for rank in found_by_ranks(shared / name)], axis=0)
        for name in ("flat", "sharded", "ddp")
    )
    assert flat == pytest.approx(sharded, rel=1e-3)
    own, mean = flat
    assert own / 2 < mean < own, "two gradients that partly agree"
    assert not ddp.any(), "which never has its gradients in one piece"


def test_a_sharded_optimizer_is_half_of_it(shared):
    flat, sharded, fsdp, whole = (
        found_by_ranks(shared / name)[0]["state"] for name in ("flat", "sharded", "fsdp", "ddp")
    )
    assert sharded < 0.51 * flat
    assert whole == pytest.approx(fsdp, rel=0.01), "numbers of elements of DTensors are those of the whole"


@pytest.mark.parametrize("row", ["P1", "P-sharded", "P-fsdp"])
def test_a_run_that_four_began_goes_on_with_two(row, tmp_path):
    """Its steps are those of one process throughout: the same micro-batches, and optimizer state in other shares."""
    case = {"row": row, "world": 4, "scale": {"checkpoint_every": 5}, "name": "run"}
    launch([case | {"stop": 10}], 4, tmp_path)
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()
    launch([case], 2, tmp_path)
    first, second, *_ = found_by_ranks(tmp_path / "run")
    assert (first["begin"], first["refused"]) == (10, None)
    assert first["weights"] == second["weights"]
    trained(case, tmp_path / "alone")
    np.testing.assert_allclose(losses_of(tmp_path / "run"), losses_of(tmp_path / "alone"), rtol=1e-4)
