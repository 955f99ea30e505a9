"""Seven hypotheses on what may have led to a student's slides' numbers, each with a verdict.

The slides (slides.csv) find that pipelines lose 99 % of their "statistical efficiency". They
compute it as the mean difference of two successive losses over the batch. Their first script noted
the loss of each step. The second noted the mean of fifty steps and told it again in each of the
fifty that followed, so that 49 of 50 differences are 0. Both are applied here to our own logs.

The hypotheses and their bounds were written down before our runs were made.
notebooks/multi_gpu.ipynb shows the table, and says why the hypotheses were made.
"""

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

from qa_lib.lab.report import evidence, noise_scale, one_stack
from qa_lib.lab.report.claims import Found
from qa_lib.lab.report.evidence import NotMeasured
from qa_lib.lab.report.format import gain, number, percent, points
from qa_lib.lab.report.stats import between, interval

DDP = "P0"  # transformers.Trainer on several GPUs: data parallelism, as in the slides
DEEPSPEED = "P0-deepspeed"  # what the slides call a pipeline
POLLED = "P0-polled"  # which asks nvidia-smi in every step, as the slides' scripts do
# Variants that spread a batch differently over GPUs and log the noise scale. The others are
# compared with the first.
FIRST_SPREAD = "P-one-bucket"
OTHER_SPREADS = ("P-zero1", "P-1f1b")

NOTED_STEPS = 50  # whose mean the slides' second script noted at a time

# What is asserted in a hypothesis -> what was measured.
Parts = dict[str, Found]


def hypotheses_table(every: pd.DataFrame, learning: str, speed: str) -> pd.DataFrame:
    """Return the hypotheses as text, a line for each of their parts.

    `every` are the runs of all groups, `learning` the group of trainings at several batches, and
    `speed` that of speeds. Columns: hypothesis, in the first of its lines; "of it", the part with
    its bound; "measured here"; holds, a sign.

    Raises NotMeasured for a group without records, and where what is compared did not run.
    """
    learnt = evidence.select(every, learning)
    timed = evidence.select(every, speed)
    logs = with_slides_efficiency(noise_scale.logs_of(learnt))
    timed_logs = with_slides_efficiency(noise_scale.logs_of(timed))
    learnt = learnt[learnt["status"] == "ok"]
    timed = timed[timed["status"] == "ok"]
    whole_logs = noise_scale.logs_of(noise_scale.trained_by_epochs(learnt))
    found = {
        "H1: Their “pipelines” were data parallelism": steps_halve(learnt),
        "H2: Their loss of statistical efficiency is one of logging": logging_lowers_it(logs),
        "H3: Their formula knows nothing of the GPUs, and is noise": (
            same_on_other_gpus(pd.concat([timed_logs, logs])) | falls_as_noise(logs)
        ),
        "H4: Their validation loss was the mean training loss": mean_training_loss(learnt, logs),
        "H5: Asking nvidia-smi took most of their time": polling_takes_time(timed),
        "H6: How a batch is spread does not change the noise scale": same_noise_scale(learnt),
        "H7: The noise scale tells what a batch costs": batches_cost_as_predicted(whole_logs),
    }
    lines = []
    for hypothesis, parts in found.items():
        for part, (text, sign) in parts.items():
            lines.append((hypothesis, part, text, sign))
    table = pd.DataFrame(lines, columns=["hypothesis", "of it", "measured here", "holds"])
    is_repeated = table["hypothesis"].duplicated()
    return table.assign(hypothesis=table["hypothesis"].mask(is_repeated, ""))


# The slides' formula.


def slides_efficiency(loss: pd.Series, batch: int) -> float:
    """Return what the slides call statistical efficiency, from the losses of successive steps."""
    return float((loss.diff().abs() / batch).mean())


def told_again(loss: pd.Series, noted: int = NOTED_STEPS) -> pd.Series:
    """Return the losses that the slides' second script saw, of those of successive steps.

    A mean of so many steps stands in each of as many that follow; the first ones have none, and are
    left out.
    """
    of_the_same_mean = np.arange(len(loss)) // noted
    means = loss.groupby(of_the_same_mean).transform("mean")
    return means.shift(noted).dropna()


def with_slides_efficiency(logs: pd.DataFrame) -> pd.DataFrame:
    """Return logs of `noise_scale.logs_of` with the slides' efficiency by either script.

    Columns that are new: by_steps, of each log as it is, and by_means, of what `told_again` makes
    of it.
    """
    by_steps = []
    by_means = []
    for log, batch in zip(logs["log"], logs["batch"], strict=True):
        by_steps.append(slides_efficiency(log["loss"], batch))
        by_means.append(slides_efficiency(told_again(log["loss"]), batch))
    return logs.assign(
        by_steps=pd.Series(by_steps, logs.index, dtype=float),
        by_means=pd.Series(by_means, logs.index, dtype=float),
    )


# H1 and H2: what their scripts did.


def steps_halve(runs: pd.DataFrame) -> Parts:
    """Return whether as many samples a GPU make steps times GPUs equal on any number of GPUs.

    Raises NotMeasured where DDP or DEEPSPEED did not run.
    """
    parts = {}
    for variant in (DDP, DEEPSPEED):
        of_variant = _runs_of(runs, variant)
        samples_a_gpu = of_variant["batch"] / of_variant["world"]
        usual = samples_a_gpu == samples_a_gpu.mode().min()
        steps = of_variant[usual].groupby("world")["spec.planned_steps"].mean()
        steps_times_gpus = steps * steps.index
        ratio = steps_times_gpus.iloc[-1] / steps_times_gpus.iloc[0]
        parts[f"{variant}: steps × GPUs within 1 %"] = Found(
            f"{variant}: {_listed(steps, '{:,.0f} on {}')} GPUs",
            between((ratio, 0.0), 0.99, 1.01),
        )
    return parts


def logging_lowers_it(logs: pd.DataFrame) -> Parts:
    """Return whether the two scripts make as much of one training as the slides' numbers differ.

    The one log is the longest of DDP. Then the first script on the fewest GPUs at the smallest
    batch is set against the second with DEEPSPEED on several, as the slides have it.

    Raises NotMeasured where DDP or DEEPSPEED has no log.
    """
    ddp = _logs_of_variant(logs, DDP)
    deepspeed = _logs_of_variant(logs, DEEPSPEED)
    longest = ddp.loc[ddp["log"].map(len).idxmax()]
    ratio = longest["by_steps"] / longest["by_means"]
    ratios = logs["by_steps"] / logs["by_means"]
    text = (
        f"One log, two formulas: {longest['by_steps']:.2g} from each step, "
        f"{longest['by_means']:.2g} from {NOTED_STEPS}-step means ({number(ratio)}-fold; "
        f"{number(ratios.min())} to {number(ratios.max())} over all logs)"
    )
    sign = between((ratio, 0.0), 100, 250)
    parts = {"one log gives two values 100- to 250-fold apart": Found(text, sign)}

    is_first = (ddp["world"] == ddp["world"].min()) & (ddp["batch"] == ddp["batch"].min())
    by_steps = ddp.loc[is_first, "by_steps"].mean()
    first, *others = one_stack.theirs().to_dict("records")
    for experiment in others:
        world = experiment["gpus"]
        by_means = deepspeed.loc[deepspeed["world"] == world, "by_means"].mean()
        ratio = by_steps / by_means
        theirs = first["stats_efficiency"] / experiment["stats_efficiency"]
        parts[f"as theirs on {world} GPUs, within a factor of 2"] = Found(
            f"{number(ratio)}-fold, theirs {number(theirs)}",
            between((ratio / theirs, 0.0), 0.5, 2),
        )
    return parts


# H3: the formula is noise.


def same_on_other_gpus(logs: pd.DataFrame) -> Parts:
    """Return whether by_steps is equal on other numbers of GPUs at one batch, over equal seeds.

    It is told of the group, variant and batch with the most pairs of equal seed.

    Raises NotMeasured where none ran on two numbers of GPUs with one seed.
    """
    most = pd.Series(dtype=float)
    where = ""
    for (_, variant, batch), part in logs.groupby(["group", "variant", "batch"]):
        by_gpus = np.log(part.groupby(["seed", "world"])["by_steps"].mean().unstack())
        fewest, *others = by_gpus.columns
        pairs = by_gpus[others].sub(by_gpus[fewest], axis="index").stack().dropna()
        if len(pairs) > len(most):
            most = pairs
            where = f"{variant} at batch {batch} on {', '.join(map(str, by_gpus))} GPUs"
    if most.empty:
        raise NotMeasured("no variant has logs of one batch and seed on two numbers of GPUs")
    difference = _mean_and_half(most)
    text = f"{where}: {_percent_off(*difference)} ({len(most)} pairs of equal seed)"
    sign = between(difference, -0.1, 0.1)
    return {"equal on other numbers of GPUs at one batch, within 10 %": Found(text, sign)}


def falls_as_noise(logs: pd.DataFrame) -> Parts:
    """Return whether by_steps falls with the batch as noise does.

    A batch's loss scatters as its size to the power of −1/2, and the formula divides by the size.

    Raises NotMeasured without logs.
    """
    of_variant = noise_scale.most_batches(logs)
    by_batch = of_variant.groupby(["seed", "batch"])["by_steps"].mean().unstack()
    by_batch = np.log(by_batch).dropna()
    log_batches = np.log(by_batch.columns.astype(float))
    powers, _ = np.polyfit(log_batches, by_batch.T, 1)  # one of each seed
    power = _mean_and_half(powers)
    text = f"batches {', '.join(map(str, by_batch))}: {points(*power)}"
    sign = between(power, -1.75, -1.25)
    return {"falls as the batch to the power of −1.5, within 0.25": Found(text, sign)}


# H4 and H5: what else they measured.


def mean_training_loss(runs: pd.DataFrame, logs: pd.DataFrame) -> Parts:
    """Return whether DDP's mean training loss is end + extra / steps, and held-out loss is not.

    The mean counts the beginning of a training, which is a larger part of fewer steps, as a larger
    batch has them. Held-out loss should rise less with the batch.

    Raises NotMeasured where DDP did not run or has no log.
    """
    of_ddp = _runs_of(runs, DDP)
    mean_losses = _logs_of_variant(logs, DDP).set_index("run_id")["loss"]
    values = evidence.numbers(of_ddp, {"steps": "spec.planned_steps", "held_out": "quality.loss"})
    values["training"] = of_ddp["run_id"].map(mean_losses)
    # A row for each seed, and a column for each value and batch.
    table = values.groupby([of_ddp["spec.seed"], of_ddp["batch"]]).mean().unstack()
    is_whole = table["training"].notna().all(axis="columns")
    training = table.loc[is_whole, "training"]
    held_out = table.loc[is_whole, "held_out"]
    inverse_steps = 1 / table.loc[is_whole, "steps"].mean()

    fits = np.polyfit(inverse_steps, training.T, 1)  # extra and end of each seed
    fitted = (np.vander(inverse_steps, 2) @ fits).T
    extra, end = fits.mean(axis=1)
    largest_miss = (training - fitted).abs().max(axis="columns")
    reach = training.max(axis="columns") - training.min(axis="columns")
    miss = _mean_and_half(largest_miss / reach)
    rises = training.iloc[:, -1] - training.iloc[:, 0]
    rise = _mean_and_half(rises)
    held_out_rise = _mean_and_half((held_out.iloc[:, -1] - held_out.iloc[:, 0]) / rises)
    by_batch = "{:.3f} at batch {}"
    return {
        "the mean training loss is end + extra / steps, within 10 % of its range": Found(
            f"{_listed(training.mean(), by_batch)}: {points(end)} + {number(extra)} / steps, off "
            f"by {percent(*miss)}",
            between(miss, -math.inf, 0.1),
        ),
        "it rises with the batch": Found(gain(*rise), between(rise, 0, math.inf)),
        "held-out loss rises less than half as much": Found(
            _listed(held_out.mean(), by_batch), between(held_out_rise, -math.inf, 0.5)
        ),
    }


def polling_takes_time(runs: pd.DataFrame) -> Parts:
    """Return whether asking nvidia-smi in every step takes most of the time.

    DDP is compared with POLLED on the most GPUs on which both ran at one batch.

    Raises NotMeasured where there are none.
    """
    columns = {
        "step_ms": "time.step_ms.median",
        "busy": "speed.gpu_busy",
        "answered": "speed.gpu_busy_polled",
    }
    keys = [runs["spec.variant"], runs["world"], runs["batch"]]
    means = evidence.numbers(runs, columns).groupby(keys).mean()
    variants = means.index.get_level_values("spec.variant")
    ddp = means[variants == DDP].droplevel("spec.variant")
    polled = means[variants == POLLED].droplevel("spec.variant")
    places = ddp.index.intersection(polled.index)
    if places.empty:
        raise NotMeasured(f"{DDP} and {POLLED} ran at no batch on as many GPUs")
    world, batch = max(places)
    without = ddp.loc[(world, batch)]
    asking = polled.loc[(world, batch)]
    longer = asking["step_ms"] / without["step_ms"]
    busier = asking["busy"] / without["busy"]
    return {
        "a step takes twice as long or longer": Found(
            f"{number(without['step_ms'])} ms without, {number(asking['step_ms'])} with it, on "
            f"{world} GPUs",
            between((longer, 0.0), 2, math.inf),
        ),
        "the GPUs are busy for less than half as much of the time": Found(
            f"{percent(without['busy'])} without, {percent(asking['busy'])} with it",
            between((busier, 0.0), -math.inf, 0.5),
        ),
        "what nvidia-smi answers is below 15 %, as theirs": Found(
            percent(asking["answered"]),
            between((asking["answered"], 0.0), -math.inf, 0.15),
        ),
    }


# H6 and H7: what the gradients' noise tells.


def same_noise_scale(runs: pd.DataFrame) -> Parts:
    """Return whether the noise scale is the same however a batch is spread over GPUs.

    OTHER_SPREADS are compared with FIRST_SPREAD, over equal seeds of the same code, at the batch at
    which most of them have a noise scale. A run counts whose noise and gradient both are above 0.

    Raises NotMeasured where one of them has no such run.
    """
    compared = runs[runs["spec.variant"].isin([FIRST_SPREAD, *OTHER_SPREADS])]
    measured = evidence.numbers(
        compared, {"gradient": "parallel.noise.sqr", "noise": "parallel.noise.var"}
    )
    is_above_0 = (measured > 0).all(axis="columns")
    phi = (measured["noise"] / measured["gradient"]).where(is_above_0)
    keys = [
        compared["batch"],
        compared["code.commit"].fillna(""),
        compared["spec.seed"],
        compared["spec.variant"],
    ]
    table = phi.groupby(keys).mean().unstack()
    for variant in (FIRST_SPREAD, *OTHER_SPREADS):
        if variant not in table or table[variant].isna().all():
            raise NotMeasured(f"{variant} has no noise scale")
    variants_at = table.notna().groupby(level="batch").any().sum(axis="columns")
    batch = variants_at.idxmax()
    at_batch = table.loc[batch]
    means = at_batch.mean().map(number)
    parts = {}
    for variant in OTHER_SPREADS:
        difference = _mean_and_half(np.log(at_batch[variant] / at_batch[FIRST_SPREAD]))
        parts[f"{variant} within 25 % of {FIRST_SPREAD} at batch {batch}"] = Found(
            f"{means[variant]} against {means[FIRST_SPREAD]} samples: {_percent_off(*difference)}",
            between(difference, -0.25, 0.25),
        )
    return parts


def batches_cost_as_predicted(logs: pd.DataFrame) -> Parts:
    """Return whether a sample teaches in larger batches what the noise scale predicts.

    `logs` are those of whole trainings.

    Raises NotMeasured where the reference batch and a larger one were not both run.
    """
    worth, _ = noise_scale.batch_worth(logs)
    parts = {}
    for batch, line in worth.iterrows():
        measured = line["measured"]
        half = line["measured±"]
        off = (math.log(measured / line["predicted"]), half / measured)
        parts[f"batch {batch} within 20 % of the prediction"] = Found(
            f"predicted {points(line['predicted'])}, measured {points(measured, half)}",
            between(off, -0.2, 0.2),
        )
    return parts


# What the above share.


def _runs_of(runs: pd.DataFrame, variant: str) -> pd.DataFrame:
    """Return a variant's runs; raises NotMeasured where there are none."""
    of_variant = runs[runs["spec.variant"] == variant]
    if of_variant.empty:
        raise NotMeasured(f"no run of {variant} has ended ok")
    return of_variant


def _logs_of_variant(logs: pd.DataFrame, variant: str) -> pd.DataFrame:
    """Return a variant's logs; raises NotMeasured where there are none."""
    of_variant = logs[logs["variant"] == variant]
    if of_variant.empty:
        raise NotMeasured(f"no run of {variant} has a log of more than 100 steps")
    return of_variant


def _mean_and_half(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean of values, and half its interval."""
    series = pd.Series(values)
    return float(series.mean()), float(interval(series))


def _listed(values: pd.Series, form: str) -> str:
    """Return values with the keys that they stand at, by a form for both: '3,612 on 1'."""
    return ", ".join(form.format(value, key) for key, value in values.items())


def _percent_off(log_ratio: float, half: float) -> str:
    """Return the logarithm of a ratio, which is small, as percent: '+1.2 ± 3.4 %'."""
    return f"{gain(100 * log_ratio, 100 * half, decimals=1)} %"
