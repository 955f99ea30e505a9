"""Two processes with packed sequences make the steps of plain models with padded batches."""

import os

import pytest
import torch
from torch import multiprocessing
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Trainer, TrainingArguments

from qa_lib.own.packing import PackedCollator, pack
from qa_lib.own.speed_up import speed_up
from qa_lib.own.trainer import FastTrainer
from tests.own import drawn_samples, padded_batch, quiet, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
WORLD = 2
SAMPLES = 12  # of each process in a step


def in_a_group(rank: int, work, folder: str) -> None:
    """Do a process's work in a group of gloo, as torchrun would start it."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "localhost",  # asked for, but not used: the processes meet by a file
    }
    init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    work(rank, folder)
    destroy_process_group()


def by_processes(work, folder) -> None:
    """Have WORLD processes do their work."""
    multiprocessing.spawn(in_a_group, (work, str(folder)), nprocs=WORLD)


def a_step(model, losses) -> dict[str, torch.Tensor]:
    """The weights after a step by the mean of some losses: those before, less their gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.stack(losses).mean().backward()
    optimizer.step()
    return model.state_dict()


def step_of_a_loop(rank: int, folder: str) -> None:
    """A step of one's own loop, on this process's packed sequence."""
    rows = pack(drawn_samples("sequences", SAMPLES * WORLD), samples=SAMPLES, say=quiet)
    sampler = DistributedSampler(rows, shuffle=False)
    (batch,) = DataLoader(rows, batch_size=None, sampler=sampler, collate_fn=PackedCollator())
    for kind in ("bert", "mpnet"):
        model = speed_up(tiny_model(kind), say=quiet).train()
        wrapped = DistributedDataParallel(model)
        state = a_step(model, [wrapped(**batch).loss])
        torch.save(state, f"{folder}/{kind}-{rank}.pt")


def test_gradients_of_ddp_are_those_of_one_process_on_the_same_samples(tmp_path):
    by_processes(step_of_a_loop, tmp_path)
    batch = padded_batch(drawn_samples("sequences", SAMPLES * WORLD))
    for kind in ("bert", "mpnet"):
        plain = tiny_model(kind).train()
        expected = a_step(plain, [plain(**batch).loss])
        before = tiny_model(kind).state_dict()
        for rank in range(WORLD):
            found = torch.load(tmp_path / f"{kind}-{rank}.pt")
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        assert max((expected[name] - before[name]).abs().max() for name in before) > 1e-2


def trained_by(trainer_class, folder: str, **options) -> dict[str, torch.Tensor]:
    """The weights after three epochs, each of a step with all samples."""
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=SAMPLES,
        num_train_epochs=3,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = trainer_class(
        tiny_model(),
        arguments,
        data_collator=padded_batch if trainer_class is Trainer else None,
        train_dataset=drawn_samples("sequences", SAMPLES * WORLD),
        **options,
    )
    trainer.train()
    assert trainer.state.global_step == 3
    return trainer.model.state_dict()


def trainers(rank: int, folder: str) -> None:
    """The same training by both Trainers, each in WORLD processes."""
    torch.save(trained_by(Trainer, folder), f"{folder}/plain-{rank}.pt")
    torch.save(trained_by(FastTrainer, folder, say=quiet), f"{folder}/fast-{rank}.pt")


def test_fast_trainer_of_two_processes_trains_as_trainer_does(tmp_path):
    """Both are of two processes: Trainer multiplies the loss of a sequence by their number."""
    by_processes(trainers, tmp_path)
    for rank in range(WORLD):
        expected = torch.load(tmp_path / f"plain-{rank}.pt")
        found = torch.load(tmp_path / f"fast-{rank}.pt")
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
