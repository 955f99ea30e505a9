"""What a run puts into its record, a function a subject; qa_lib.records says what fields mean."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from qa_lib.data.load import Data
from qa_lib.loaded import CODE, said_of_changes
from qa_lib.measure import hardware
from qa_lib.measure.meter import Meter, StepCounts
from qa_lib.model.architectures import param_counts
from qa_lib.records.schema import Speed
from qa_lib.spec.spec import Spec
from qa_lib.train.checkpoint import digest_of
from qa_lib.train.compile import found_in_cache
from qa_lib.train.grad_noise import efficiency
from qa_lib.train.parallel.pipeline import bubble, measured_bubble
from qa_lib.train.parallel.process_group import ProcessGroup


def note_sizes(entry: dict, data: Data, model: torch.nn.Module, steps: int) -> None:
    """Put into a record how many steps, samples, questions and parameters there are.

    How long answers may be is noted, too, where the preset leaves that to the training answers.
    """
    if data.max_answer_length:
        entry["spec"]["preset"]["max_answer_length"] = data.max_answer_length
    entry["spec"]["planned_steps"] = steps
    entry["spec"]["n_train"] = len(data.samples)
    entry["spec"]["n_eval"] = data.n_eval
    entry["data"]["n"] = data.n
    counts = param_counts(model)
    trainable = sum(count for parameter, count in counts.items() if parameter.requires_grad)
    entry["model"]["params_total"] = sum(counts.values())
    entry["model"]["params_trainable"] = trainable
    entry["model"]["layers"] = model.config.num_hidden_layers


def note_steps(entry: dict, steps: int, resumed_from: int, checkpoint_note: str | None) -> None:
    """Put into a record how many steps were trained, and what became of an earlier process's.

    `steps` are those of this process, which went on after the first `resumed_from`.
    """
    entry["time"]["steps"] = resumed_from + steps
    entry["time"]["resumed_from_step"] = resumed_from or None
    if checkpoint_note:
        entry["spec"]["adjusted"].append(f"checkpoint: {checkpoint_note}")


def note_noise(entry: dict, steps: int, ranks: ProcessGroup) -> None:
    """Put into a record the gradient noise scale, and how efficient the batch is by it.

    It is measured where the variant sees its gradients in one piece. All processes call this
    together.
    """
    noise = ranks.stats.noise(steps)
    entry["parallel"]["noise"] = dataclasses.asdict(noise)
    entry["parallel"]["efficiency"] = efficiency(noise, ranks.batch)


def note_processes(entry: dict, spec: Spec, ranks: ProcessGroup) -> None:
    """Put into a record what PyTorch put around the model, and processes lost on the way."""
    entry["parallel"]["wrapper"] = ranks.wrapper
    if ranks.world != spec.world:  # torchrun's may be fewer after a loss, down to one
        entry["parallel"]["world"] = ranks.world
        entry["spec"]["adjusted"].append(f"world: {ranks.world} processes at the end")


def note_changed_code(entry: dict) -> None:
    """Put into a record that code changed on disk since this process took its digests.

    What is imported late may be of the one or the other, so that the run's checkpoints are not gone
    on from.
    """
    changed = CODE.changed()
    if changed:
        places = said_of_changes(changed)
        note = f"code: {places} changed on disk since this process began"
        entry["spec"]["adjusted"].append(note)


# What each of several processes has measured.


@dataclass
class RankMeasures:
    """What one process of several has measured of its part of a run."""

    # Joules per sample of this process's GPU; None where that was not measured.
    joules: float | None
    # The meter's counts and memory samples.
    counts: list
    samples: list
    # MiB, and ms of the median step.
    peak_mib: float | None
    step_ms: float | None
    # A digest of the weights at the end.
    weights: str
    # GB/s of an all-reduce.
    allreduce_gbs: float | None
    # (seconds of computing, seconds in all) of a pipeline's stage.
    pipelined: tuple
    # How much of its communication was beside computing; empty where nothing was measured.
    overlap: dict


def gather_measures(
    entry: dict, meter: Meter, model: torch.nn.Module, ranks: ProcessGroup
) -> list[RankMeasures]:
    """Return what each process has measured, by rank; all processes call this together."""
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    measured = RankMeasures(
        joules=meter.joules_per_sample(),
        counts=meter.step_counts,
        samples=meter.busy_shares,
        peak_mib=entry["memory"]["peak_alloc_mib"],
        step_ms=meter.step_ms().median,
        weights=digest_of(weights, {}),
        allreduce_gbs=hardware.reduce_rate(ranks.device),
        pipelined=ranks.stats.pipelined(),
        overlap=ranks.stats.overlap,
    )
    return ranks.gather(measured)


def pool_samples(meter: Meter, measures: list[RankMeasures], ranks: ProcessGroup) -> None:
    """Let a meter count the samples of all processes.

    The processes of one replica have all counted the same ones.
    """
    counts = np.sum([each.counts for each in measures], axis=0)
    meter.step_counts = [StepCounts(*of_step) for of_step in counts * ranks.replicas // ranks.world]
    meter.busy_shares = [sample for each in measures for sample in each.samples]


def pooled_joules(measures: list[RankMeasures], ranks: ProcessGroup) -> float | None:
    """Return the joules per sample of all GPUs; None where one was not measured.

    Each replica has worked on as many samples.
    """
    joules = [each.joules for each in measures]
    if None in joules:
        return None
    return sum(joules) / ranks.replicas


def note_ranks(entry: dict, measures: list[RankMeasures], ranks: ProcessGroup) -> None:
    """Put into a record how several processes worked together: how fast, and with which weights."""
    on_gpus = ranks.device.type == "cuda"
    peaks = {str(rank): each.peak_mib for rank, each in enumerate(measures)}
    entry["parallel"] |= {
        "world": ranks.world,
        "replicas": ranks.replicas,
        "backend": ranks.backend,
        "interconnect": hardware.interconnect() if on_gpus else None,
        "allreduce_gbs": measures[ranks.rank].allreduce_gbs,
        "rank_peak_mib": peaks if on_gpus else None,
        "rank_step_ms": {str(rank): each.step_ms for rank, each in enumerate(measures)},
        "weights_equal": len({each.weights for each in measures}) == 1,
    }


def note_pipeline(
    entry: dict, spec: Spec, measures: list[RankMeasures], ranks: ProcessGroup
) -> None:
    """Put into a record how long the stages of a pipeline computed, and how long they waited."""
    stages = [each.pipelined for each in measures]
    computing_ms = {str(rank): 1000 * computing for rank, (computing, _) in enumerate(stages)}
    micro_batches = spec.micro_batches // ranks.replicas
    entry["parallel"] |= {
        "stages": ranks.stages,
        "schedule": spec.settings.schedule,
        "bubble": measured_bubble(stages),
        "bubble_formula": bubble(ranks.stages, micro_batches, spec.settings.chunks),
        "rank_computing_ms": computing_ms,
    }


def note_overlap(entry: dict, measures: list[RankMeasures]) -> None:
    """Put into a record how much of the communication was beside computing, a mean of processes."""
    for name in measures[0].overlap:
        entry["parallel"][name] = np.mean([each.overlap[name] for each in measures]).item()


# Times.


def note_times(entry: dict, spec: Spec, meter: Meter, joules: float | None, speed: Speed) -> None:
    """Put into a record what was timed: speed, step times, compilation, energy."""
    entry["speed"] = dataclasses.asdict(speed)
    entry["time"]["step_ms"] = dataclasses.asdict(meter.step_ms())
    entry["time"]["train_s"] = meter.compiled_before_s + sum(meter.times)
    entry["time"]["data_ms"] = meter.data_ms()
    entry["energy"]["joules_per_sample"] = joules
    if entry["parallel"]["efficiency"] and speed.samples_per_s:
        entry["parallel"]["goodput"] = entry["parallel"]["efficiency"] * speed.samples_per_s
    # Where nothing was compiled, slow first steps have other reasons.
    if spec.settings.compile != "none":
        entry["time"]["compile_s"] = meter.compile_s()
        entry["time"]["compile_cached"] = found_in_cache()


def why_untimed(meter: Meter) -> str | None:
    """Return in words why a run has no samples/s; None where it has."""
    steps = len(meter.times)
    if meter.times[meter.measured]:
        return None
    return (
        f"speed: not measured, too few steps to time: {steps}, of which the first {meter.warm_up} "
        "of a process are warm-up"
    )
