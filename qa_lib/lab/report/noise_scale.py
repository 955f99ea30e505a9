"""What a sample teaches in a larger batch: as measured, and as the noise scale predicts it.

The noise scale phi of a step says how large a batch its gradient bears (train/grad_noise.py logs
it). Progress by sample is relative to that of batch REFERENCE. notebooks/multi_gpu.ipynb shows all
of it.
"""

from collections.abc import Iterable

import pandas as pd

from qa_lib.lab.report import evidence
from qa_lib.lab.report.stats import interval
from qa_lib.spec.presets import Preset

# Samples of the batch whose efficiency is 1, as in train/grad_noise.py.
REFERENCE = Preset.effective_batch
# Runs of no more steps say nothing of how training goes on.
FEW_STEPS = 100


def trained_by_epochs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs whose training was so many epochs; others measure speed, and learn little."""
    epochs = evidence.numbers(runs, {"epochs": evidence.EPOCHS})["epochs"]
    return runs[epochs.notna()]


def logs_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the logs of a group's runs that ended ok, a line for each of more than FEW_STEPS.

    Columns: variant, seed, world, batch, group, run_id; log, the steps that have a loss (see
    `Run.steps`), and loss, its mean.
    """
    done = runs[(runs["status"] == "ok") & (runs["batch"] > 0)]
    done = done.rename(columns={"spec.variant": "variant", "spec.seed": "seed"})
    logs = done[["variant", "seed", "world", "batch", "group", "run_id"]]
    logs = logs.assign(log=[run.steps().dropna(subset="loss") for run in done["run"]])
    logs = logs[logs["log"].map(len) > FEW_STEPS].reset_index(drop=True)
    mean_loss = logs["log"].map(lambda log: log["loss"].mean())
    return logs.assign(loss=mean_loss.astype(float))


def most_batches(logs: pd.DataFrame) -> pd.DataFrame:
    """Return the logs of the variant that was run at the most batches.

    Raises NotMeasured without logs.
    """
    if logs.empty:
        raise evidence.NotMeasured(
            "no run has a steps.jsonl of more than 100 steps beside its record"
        )
    batches = logs.groupby("variant")["batch"].nunique()
    return logs[logs["variant"] == batches.idxmax()]


def noise_scales(logs: pd.DataFrame) -> pd.DataFrame:
    """Return the running noise scale of `most_batches`, a line for each logged step that has one.

    Columns: batch, seed, step, done (the share of the training that is over) and phi, in samples.

    Raises NotMeasured where no step has one.
    """
    parts = []
    for run in most_batches(logs).itertuples():
        steps = run.log["step"]
        part = run.log.reindex(columns=["step", "phi"])
        parts.append(part.assign(batch=run.batch, seed=run.seed, done=steps / steps.max()))
    scales = pd.concat(parts).dropna()
    # Noise may hide the gradient, and phi then is no number of samples.
    scales = scales[scales["phi"] > 0].reset_index(drop=True)
    if scales.empty:
        raise evidence.NotMeasured("no log has a noise scale (phi)")
    return scales


def reference_phi(logs: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of `noise_scales` at batch REFERENCE, or at the smallest that has any.

    Raises NotMeasured where no step has a noise scale.
    """
    scales = noise_scales(logs)
    batches = scales["batch"]
    has_reference = batches.eq(REFERENCE).any()
    return scales[batches == (REFERENCE if has_reference else batches.min())]


def efficiencies(logs: pd.DataFrame, batches: Iterable[int]) -> pd.Series:
    """Return the progress by sample of batches relative to batch REFERENCE, as predicted.

    It is (phi + REFERENCE) / (phi + batch), equation 7 of Pollux (Qiao et al. 2021), in the mean
    over the training that `reference_phi` returns.

    Raises NotMeasured where no step has a noise scale.
    """
    phi = reference_phi(logs)["phi"].to_numpy()
    return pd.Series({batch: ((phi + REFERENCE) / (phi + batch)).mean() for batch in batches})


def batch_worth(logs: pd.DataFrame) -> tuple[pd.DataFrame, float]:
    """Return how much a sample teaches in batches larger than REFERENCE, relative to it.

    The table is indexed by batch. Columns: measured and measured±, by the samples that it took
    until the smoothed training loss was down to a given one; predicted, by `efficiencies`. The
    given loss, which the worst run ends with, is returned beside the table.

    Raises NotMeasured where REFERENCE and a larger batch were not both run.
    """
    logs = most_batches(logs)
    if REFERENCE not in set(logs["batch"]) or logs["batch"].max() == REFERENCE:
        raise evidence.NotMeasured(f"no variant was run at batch {REFERENCE} and at a larger one")
    curves = [_smoothed(log) for log in logs["log"]]
    loss = max(curve.min() for curve in curves)
    samples = []
    for curve, log, batch in zip(curves, logs["log"], logs["batch"], strict=True):
        share_of_training = (curve <= loss).idxmax()
        samples.append(share_of_training * log["step"].max() * batch)
    by_batch = logs.assign(samples=samples).groupby(["seed", "batch"])["samples"].mean().unstack()
    shares = by_batch[[REFERENCE]].to_numpy() / by_batch
    worth = pd.DataFrame({"measured": shares.mean(), "measured±": interval(shares)})
    worth = worth[worth.index > REFERENCE]
    return worth.assign(predicted=efficiencies(logs, worth.index)), loss


def _smoothed(log: pd.DataFrame) -> pd.Series:
    """Return the mean loss around each step, over a tenth of the training.

    The index is the share of the training that is done.
    """
    window = max(1, round(0.1 * len(log)))
    loss = log["loss"].rolling(window, center=True).mean()
    return loss.set_axis(log["step"] / log["step"].max()).dropna()
