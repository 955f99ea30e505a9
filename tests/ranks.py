"""What the processes of test_parallel.py do: torchrun starts `python -m tests.ranks FOLDER` in each of them.

Every case in FOLDER/cases.json is trained in fp32 and without dropout, so that what one process and what several
compute can be held against each other.
"""

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
from qa_lib.train import loop
from qa_lib.train.checkpoint import digest_of
from qa_lib.train.optim import clip
from qa_lib.train.parallel.data_parallel import gather_model
from qa_lib.train.parallel.process_group import ProcessGroup
from tests.tiny import CPU, quiet, resized, samples_of, stop_after, without_dropout

DEVICE = torch.device("cpu")
STEPS = 6


def spec_of(case: dict):
    """A variant at preset smoke, with 16 samples a step, the case's number of processes and a model of its shape."""
    TINY_CONFIG.update({"num_hidden_layers": 2, "num_attention_heads": 2} | case.get("shape", {}))
    preset = {
        "steps": STEPS,
        "checkpoint_every": 0,
        "measure_from": 2,
        "quality": False,
        "learning_rate": 1e-3,
    }
    world, stages = case.get("world", 2), case.get("stages")
    size = 16 // max(case.get("parts", 2), world)
    (spec,) = plan(
        [case["row"]], "smoke", [0], "synthetic:120", "", size, CPU, world=world, stages=stages
    )
    return resized(
        spec, {"compile": "none"} | case.get("settings", {}), **preset | case.get("preset", {})
    )


def unequal(batches):
    """Let the first micro-batch of each step lack three samples."""
    real = batches.step

    def step(number):
        first, *others = real(number)
        return [first[3:], *others]

    batches.step = step
    return batches


class FirstGradients(dict):
    """The gradients of a run's first step as the optimizer takes them, by their number in the whole model."""

    def __call__(self, optimizer, global_norm) -> None:
        if not self:
            strategy = global_norm.__self__
            own = {
                strategy.place(n): strategy.gather(p.grad, p).clone()
                for n, p in enumerate(strategy.parameters)
            }
            self.update(strategy.ranks.gather_stages(own))
        clip(optimizer, global_norm)


def trained(case: dict, run_dir: Path, ranks: ProcessGroup) -> dict:
    """Train a case: where it began, the digest of the weights of this process, and what this process has measured."""
    run_dir.mkdir(exist_ok=True, parents=True)
    spec = spec_of(case)
    batches = batches_of(samples_of("synthetic:120"), spec)
    batches = unequal(batches) if case.get("unequal") else batches
    batches = stop_after(batches, case["stop"]) if "stop" in case else batches
    model = without_dropout(build_model(spec))
    if "rounds" in case:  # as kernels do that sum in another order in each process
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * (1 + case["rounds"] * ranks.rank))
    loop.clip = FirstGradients()
    try:
        optimizer, _, begin, refused = train(
            model, batches, spec, DEVICE, run_dir, quiet, None, ranks
        )
    except KeyboardInterrupt:
        return {}
    if ranks.first:  # they are the same of all processes
        gradients = {str(number): gradient.contiguous() for number, gradient in loop.clip.items()}
        save_file(gradients, run_dir / "gradients.safetensors")
    model = gather_model(model, lambda: build_model(spec), ranks)
    weights = digest_of({name: p.detach() for name, p in model.named_parameters()}, {})
    state = sum(
        v.numel()
        for values in optimizer.state.values()
        for v in values.values()
        if torch.is_tensor(v)
    )
    norms, pipelined = ranks.stats.norms.tolist(), ranks.stats.pipelined()
    return {"begin": begin, "refused": refused, "weights": weights, "state": state, "norms": norms,
            "pipelined": pipelined, "wrapper": ranks.wrapper}  # fmt: skip


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if find_spec("deepspeed"):  # on CPUs it would compile an operator of its own, for minutes
        import deepspeed  # noqa: F401

        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    torch.set_num_threads(1)
    with ProcessGroup(DEVICE) as ranks:
        for case in json.loads((folder / "cases.json").read_text()):
            ranks.stats.norms.zero_()
            ranks.stats.waits.clear()
            ranks.wrapper = None
            found = trained(case, folder / case["name"], ranks)
            (folder / case["name"] / f"rank-{ranks.rank}.json").write_text(json.dumps(found))
