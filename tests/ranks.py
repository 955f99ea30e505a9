"""What the processes of test_parallel.py do, each of which is `python -m tests.ranks FOLDER`.

Every case in FOLDER/cases.json is trained in fp32 and without dropout, so that what one process and
what several compute can be held against each other.
"""

import dataclasses
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file

from qa_lib.data.load import batches_of
from qa_lib.data.synthetic import TINY_CONFIG
from qa_lib.lab.search.plan import plan
from qa_lib.model.build import build_model
from qa_lib.run.fit import train
from qa_lib.spec.spec import Spec
from qa_lib.train import loop
from qa_lib.train.checkpoint import digest_of
from qa_lib.train.optim import clip
from qa_lib.train.parallel.data_parallel import gather_model
from qa_lib.train.parallel.process_group import ProcessGroup
from tests.tiny import CPU, quiet, resized, samples_of, stop_after, without_dropout

DEVICE = torch.device("cpu")
STEPS = 6
SAMPLES = 16  # of a step


@dataclasses.dataclass(frozen=True)
class Case:
    """A training of a variant at preset smoke, by so many processes."""

    variant: str
    world: int = 2
    stages: int | None = None  # of a pipeline
    micro_batches: int = 2  # of a step, at the least
    layers: int = 2  # of the model
    heads: int = 2
    # Values of settings and of the preset other than the variant's and the tests' own.
    settings: dict = dataclasses.field(default_factory=dict)
    preset: dict = dataclasses.field(default_factory=dict)
    unequal: bool = False  # the first micro-batch of each step lacks three samples
    # Relative error that grows with the rank, in all gradients of a process.
    rounding: float = 0.0
    stop: int | None = None  # the number of steps after which the run is broken off

    def spec(self) -> Spec:
        """Return the spec of the case, and make the tiny model its shape."""
        TINY_CONFIG.update({"num_hidden_layers": self.layers, "num_attention_heads": self.heads})
        (spec,) = plan(
            [self.variant],
            "smoke",
            seeds=[0],
            data="synthetic:120",
            micro_batch=SAMPLES // max(self.micro_batches, self.world),
            machine=CPU,
            world=self.world,
            stages=self.stages,
        )
        preset = {
            "steps": STEPS,
            "checkpoint_every": 0,
            "measure_from": 2,
            "quality": False,
            "learning_rate": 1e-3,
        }
        return resized(spec, {"compile": "none"} | self.settings, **preset | self.preset)


def lacking_three_samples(batches):
    """Let the first micro-batch of each step lack three samples."""
    whole_step = batches.step

    def step(number):
        first, *others = whole_step(number)
        return [first[3:], *others]

    batches.step = step
    return batches


class FirstGradients(dict):
    """Stands in for `clip`, and keeps the gradients of a run's first step before it.

    They are as the optimizer takes them, by their number in the whole model.
    """

    def __call__(self, optimizer, global_norm) -> None:
        if not self:
            strategy = global_norm.__self__
            gradients = {}
            for number, parameter in enumerate(strategy.parameters):
                gradient = strategy.gather(parameter.grad, parameter).clone()
                gradients[strategy.place(number)] = gradient
            self.update(strategy.ranks.gather_stages(gradients))
        clip(optimizer, global_norm)


def trained(case: Case, run_dir: Path, ranks: ProcessGroup) -> dict:
    """Train a case; return what this process has measured, and the digest of its weights.

    Returns nothing where the case is broken off.
    """
    run_dir.mkdir(exist_ok=True, parents=True)
    spec = case.spec()
    batches = batches_of(samples_of("synthetic:120"), spec)
    if case.unequal:
        batches = lacking_three_samples(batches)
    if case.stop is not None:
        batches = stop_after(batches, case.stop)
    model = without_dropout(build_model(spec))
    if case.rounding:  # like kernels that sum in another order in each process
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * (1 + case.rounding * ranks.rank))
    loop.clip = FirstGradients()
    try:
        done = train(model, batches, spec, DEVICE, run_dir, quiet, None, ranks)
    except KeyboardInterrupt:
        return {}
    if ranks.first:  # all processes have the same
        gradients = {str(number): gradient.contiguous() for number, gradient in loop.clip.items()}
        save_file(gradients, run_dir / "gradients.safetensors")
    model = gather_model(model, lambda: build_model(spec), ranks)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    states = [value for state in done.optimizer.state.values() for value in state.values()]
    return {
        "begin": done.resumed_from,
        "refused": done.checkpoint_note,
        "weights": digest_of(weights, {}),
        "state": sum(value.numel() for value in states if torch.is_tensor(value)),
        "norms": ranks.stats.norms.tolist(),
        "pipelined": ranks.stats.pipelined(),
        "wrapper": ranks.wrapper,
    }


def train_all(folder: Path) -> None:
    """Train the cases of a folder as one of the processes that torchrun has started."""
    if find_spec("deepspeed"):  # on CPUs it would compile an operator of its own, for minutes
        import deepspeed  # noqa: F401

        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    torch.set_num_threads(1)
    with ProcessGroup(DEVICE) as ranks:
        for name, fields in json.loads((folder / "cases.json").read_text()).items():
            ranks.stats.norms.zero_()
            ranks.stats.waits.clear()
            ranks.wrapper = None
            measured = trained(Case(**fields), folder / name, ranks)
            (folder / name / f"rank-{ranks.rank}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    train_all(Path(sys.argv[1]))
