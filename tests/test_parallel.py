"""Several processes make the steps of one: family P over gloo, in real processes, held against one process.

In fp32 and without dropout nothing differs but the order of sums, so that the losses of a few steps must agree closely;
the tolerances below are relative and many times what was seen.
"""

import functools
import gc
import json
import types
import weakref
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qa_lib.train.parallel.overlap import GradReadyHooks
from qa_lib.train.parallel.pipeline import bubble, measured_bubble
from qa_lib.train.parallel.process_group import ProcessGroup
from qa_lib.train.parallel.zero1 import ALIGN, FlatShard
from tests import warm
from tests.conftest import slow
from tests.material import cases, table
from tests.ranks import DEVICE, TINY_CONFIG, trained
from tests.tiny import losses_of

# "brief" is within an epoch, at whose end the Trainer leaves out more samples with more processes.
OPTIONS = cases("options of parallel cases")
# For variants that cut the model: four layers and heads, and four micro-batches a step.
CUT = OPTIONS["cut"]
UNCUT = CUT | {"row": "E-masters-eager", "world": 1}


def case_of(
    name: str, row: str, alone: str, tolerance: str, options: str
) -> tuple[dict, dict | None, float]:
    """The case, the same in one process, and the relative tolerance of each step's loss. Without another variant for it
    the case itself is trained by one process; what parts of a variant alone have is of the case alone."""
    own, other = {"row": row}, {"row": alone} | ({} if alone.startswith("P") else {"world": 1})
    for word in options.split():
        own |= OPTIONS[word]
        other |= {} if word == "rounds" or "=" in word else OPTIONS[word]
    return own, other if alone else None, float(tolerance)


CASES = {
    line[0]: case_of(*line)
    for line in table("together")
    if line[0] != "deepspeed" or find_spec("deepspeed")
}


# One of each kind.
QUICK = set(cases("parallel cases of the default tier"))


def tiers(names) -> list:
    return [name if name in QUICK else slow(name) for name in names]


def launch(cases: list[dict], world: int, folder) -> None:
    """Train the cases in so many processes."""
    folder.mkdir(exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    warm.together(folder, world, "tests.ranks", str(folder))


class Launched(dict):
    """The folders of cases by name. When the first of a tier is asked for, `train` trains all of it in one launch."""

    def __init__(self, cases: dict[str, dict], train, folder):
        self.cases, self.train, self.folder = cases, train, folder

    def __missing__(self, name):
        folder = self.folder / ("quick" if name in QUICK else "slow")
        own = [
            case | {"name": other}
            for other, case in self.cases.items()
            if (other in QUICK) == (name in QUICK)
        ]
        self.train(own, folder)
        self.update({case["name"]: folder / case["name"] for case in own})
        return self[name]


@pytest.fixture(scope="module")
def by_one(tmp_path_factory, one_thread):
    """Trains a case in this process, or takes the folder in which that was done before."""

    @functools.cache
    def folder_of(case: str):
        folder = tmp_path_factory.mktemp("one")
        (folder / "rank-0.json").write_text(
            json.dumps(trained(json.loads(case), folder, ProcessGroup(DEVICE)))
        )
        return folder

    own = dict(TINY_CONFIG)
    yield lambda case: folder_of(json.dumps(case, sort_keys=True))
    TINY_CONFIG.update(own)  # which cases of other shapes have changed


def test_what_waits_for_gradients_does_not_keep_the_model():
    """Else every run of a process would leave its model on the GPU."""
    model = torch.nn.Linear(3, 1)
    sent, gone = [], weakref.ref(model)
    arrivals = GradReadyHooks([[model.weight], [model.bias]], sent.append)
    with arrivals.awaited(last=True):
        model(torch.ones(1, 3)).sum().backward()
    del model, arrivals
    gc.collect()
    assert (sorted(sent), gone()) == ([0, 1], None)


def found_by_ranks(folder) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    cases = {name: case for name, (case, _, _) in CASES.items()}
    return Launched(
        cases, lambda found, folder: launch(found, 2, folder), tmp_path_factory.mktemp("two")
    )


WRAPPERS = {
    "ddp": "DistributedDataParallel",
    "trainer": "DistributedDataParallel",
    "deepspeed": "DeepSpeedEngine",
}
WRAPPERS |= {"one-bucket": None, "fsdp": None}


@pytest.mark.parametrize("name", tiers(CASES))
def test_two_processes_make_the_steps_of_one(name, shared, by_one):
    """With gradients as large as its, before they are clipped, whatever shares they are in, and equal ones of a model
    in parts: neither AdamW nor clipping lets a loss show a common factor. The class that trained is named."""
    case, alone, tolerance = CASES[name]
    # Without another variant for it, the same case: one process takes all of a step's micro-batches.
    folder, one = shared[name], by_one(alone or case)
    np.testing.assert_allclose(losses_of(folder), losses_of(one), rtol=tolerance)
    first, second = found_by_ranks(folder)
    assert first["weights"] == second["weights"]
    if name in WRAPPERS:
        assert first["wrapper"] == second["wrapper"] == WRAPPERS[name]
    if name not in ("trainer", "deepspeed"):  # which have steps of their own
        assert norm_in(folder) == pytest.approx(norm_in(one), rel=tolerance)
    if "parts" in case:
        assert_gradients(folder, one, tolerance)


def assert_gradients(folder, whole, tolerance) -> None:
    found, expected = (load_file(each / "gradients.safetensors") for each in (folder, whole))
    assert found.keys() == expected.keys() and len(found) > 60
    # Keys' biases have none but what rounding leaves.
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for number, gradient in found.items():
        torch.testing.assert_close(
            gradient, expected[number], rtol=tolerance, atol=tolerance * largest
        )


def square_norms_in(folder) -> np.ndarray:
    """What processes have noted of their gradients, a mean over them."""
    return np.mean([rank["norms"] for rank in found_by_ranks(folder)], axis=0)


def norm_in(folder) -> float:
    """The norm of a run's first gradients."""
    gradients = load_file(folder / "gradients.safetensors").values()
    return torch.cat([gradient.double().flatten() for gradient in gradients]).norm().item()


@pytest.mark.parametrize(
    ("name", "formula"), [slow("gpipe", 1 / 5), ("1f1b", 1 / 5), slow("interleaved", 1 / 9)]
)
def test_a_stage_waits_at_least_as_long_as_the_formula_says(name, formula, shared):
    assert bubble(2, 4, 2 if name == "interleaved" else 1) == pytest.approx(formula)
    stages = [rank["pipelined"] for rank in found_by_ranks(shared[name])]
    assert formula / 2 < measured_bubble(stages) < 1, "less where the stages are not equally long"


def test_a_bubble_is_of_the_whole_step():
    """Of 15 units (see train/parallel/pipeline.py) both stages compute 12; the second ends two before the first."""
    assert measured_bubble([(12, 15), (12, 13)]) == pytest.approx(bubble(2, 4))
    assert measured_bubble([(12, 15), (11.4, 13)]) == pytest.approx(0.24), (
        "that of the stage that waits most"
    )


def test_ways_to_reduce_see_one_noise_scale(shared):
    """Square norms of each process's gradient and of the mean of all, which the noise scale is made of."""
    one, overlap, zero1, ddp = (
        square_norms_in(shared[name]) for name in ("one-bucket", "overlap", "zero1", "ddp")
    )
    assert [*zero1, *overlap] == pytest.approx([*one, *one], rel=1e-3)
    assert one[0] / 2 < one[1] < one[0], "two gradients that partly agree"
    assert not ddp.any(), "which never has its gradients in one piece"


@pytest.mark.parametrize("name", tiers(["gpipe", "1f1b", "interleaved", "interleaved-unequal"]))
def test_a_pipeline_compares_its_first_micro_batch_with_all_as_one_process_does(
    name, shared, by_one
):
    case, *_ = CASES[name]
    one, *_ = found_by_ranks(by_one(case | {"row": "P-one-bucket", "world": 1}))
    stages = [rank["norms"] for rank in found_by_ranks(shared[name])]
    assert np.sum(stages, axis=0) == pytest.approx(one["norms"], rel=1e-3) and min(one["norms"]) > 0


def test_a_sharded_optimizer_is_half_of_it(shared):
    size = {
        name: found_by_ranks(shared[name])[0]["state"]
        for name in ("one-bucket", "zero1", "fsdp", "ddp")
    }
    assert size["zero1"] < 0.51 * size["one-bucket"]
    assert size["ddp"] == pytest.approx(size["fsdp"], rel=0.01), (
        "DTensors have as many elements as the whole"
    )


BREAK = 4
BEGUN = {"world": 4, "preset": {"checkpoint_every": 2}}
FOUR = {name: BEGUN | case for name, case in cases("runs that four processes begin").items()}
GRID = CUT | {"row": "P-1f1b", "world": 4, "stages": 2, "name": "grid"}  # two pipelines of two


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Runs that four processes broke off after BREAK steps and two ended: of pipelines two, and then one. And GRID,
    which four began and ended."""

    def train(cases, folder):
        launch([case if case == GRID else case | {"stop": BREAK} for case in cases], 4, folder)
        cases = [case for case in cases if case != GRID]
        assert len(list(folder.glob("*/checkpoint.safetensors"))) == len(cases)
        launch(cases, 2, folder)

    return Launched(FOUR | {"grid": GRID}, train, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("row", [slow(row) for row in FOUR])
def test_a_run_that_four_began_goes_on_with_two(row, resumed, by_one):
    """Its steps are those of one process throughout: the same micro-batches, and optimizer state in other shares."""
    first, second, *_ = found_by_ranks(resumed[row])
    assert (first["begin"], first["refused"], first["weights"]) == (BREAK, None, second["weights"])
    half = {"settings": FOUR[row]["settings"]} if "settings" in FOUR[row] else {}
    alone = by_one(UNCUT | half if "parts" in FOUR[row] else FOUR[row])
    np.testing.assert_allclose(
        losses_of(resumed[row]), losses_of(alone), rtol=0.05 if half else 1e-4
    )


def test_shares_begin_and_end_where_the_kernels_read_quickly():
    for rank in range(3):
        parameters = [torch.nn.Parameter(torch.ones(size)) for size in (35, 17)]
        share = FlatShard(parameters, types.SimpleNamespace(world=3, rank=rank))
        assert len(share.own) == 2 * ALIGN and share.own.storage_offset() == rank * 2 * ALIGN
        assert [p.sum().item() for p in parameters] == [35, 17]
        assert torch.equal(share.shard(share.flat[: share.size]), share.own), (
            "of state, too, each has its own part"
        )


def test_two_pipelines_of_two_make_the_steps_of_one_process(resumed, shared, by_one):
    folder, one = resumed["grid"], by_one(UNCUT)
    np.testing.assert_allclose(losses_of(folder), losses_of(one), rtol=1e-4)
    assert_gradients(folder, one, 1e-4)
    ranks = found_by_ranks(folder)
    assert len(ranks) == 4 and len({rank["weights"] for rank in ranks}) == 1
    # Each stage has a part of both square norms; in all they are those of two processes that have the whole model.
    assert 2 * square_norms_in(folder) == pytest.approx(
        square_norms_in(shared["tensor-one-bucket"]), rel=1e-3
    )
