"""What the losses that steps logged tell: the slides' formula, the noise scale, and what a batch teaches.

Logs are the steps.jsonl beside records: a line a step, whose loss is the mean over the step's features.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from qa_lib.measure.goodput import REFERENCE, efficiency
from qa_lib.record import Noise
from qa_lib.report.runs import NotMeasured
from qa_lib.report.tables import interval
from qa_lib.report.text import say

EVERY = 50  # steps between two losses of the slides' log (logging_steps)
PLAIN = "P0"  # transformers.Trainer under torchrun
SCALED = "P-one-bucket"  # the row that was run at several batches
SMOOTH = 0.1  # share of a training that a smoothed loss is the mean of


def formula(loss: pd.Series, batch: int) -> pd.Series:
    """The slides' “statistical efficiency”: |loss(i-1) - loss(i)| / batch."""
    return loss.diff().abs().dropna() / batch


def repeated(loss: pd.Series) -> pd.Series:
    """The losses as the slides' second script saw them: the mean of each EVERY steps, told again in each of the EVERY
    steps that follow."""
    return loss.groupby(np.arange(len(loss)) // EVERY).transform("mean").shift(EVERY).dropna()


def logs_of(runs: pd.DataFrame) -> pd.DataFrame:
    """A line for each run that ended ok and has a log of more than two EVERY steps: variant, seed, world, batch, group,
    log; loss, its mean over the run; raw and again, means of `formula` over the log as it is and `repeated`."""
    columns, lines = ["group", "world", "batch", "run_id", "variant", "seed", "log", "loss", "raw", "again"], []
    for run in runs[runs["status"] == "ok"].to_dict("records"):
        log = run["run"].steps().dropna(subset="loss")
        if len(log) <= 2 * EVERY or not run["batch"]:
            continue
        values = {"raw": log["loss"], "again": repeated(log["loss"])}
        lines.append(
            {name: run[name] for name in ("group", "world", "batch", "run_id")}
            | {"variant": run["spec.variant"], "seed": run["spec.seed"], "log": log, "loss": log["loss"].mean()}
            | {name: formula(loss, run["batch"]).mean() for name, loss in values.items()}
        )
    return pd.DataFrame(lines, columns=columns).astype({"loss": float, "raw": float, "again": float})


def one_log(logs: pd.DataFrame) -> dict:
    """The log that stands for the others: the longest of PLAIN, or else of all. Raises NotMeasured."""
    if logs.empty:
        raise NotMeasured(f"no run has a steps.jsonl of more than {2 * EVERY} steps beside its record")
    plain = logs[logs["variant"] == PLAIN]
    candidates = plain if len(plain) else logs
    return candidates.loc[candidates["log"].map(len).idxmax()].to_dict()


def phi_of(logs: pd.DataFrame) -> pd.DataFrame:
    """The running noise scale in features, a line for each of SCALED's logged steps (see logs_of) that has one: batch,
    seed, step, done (the share of the training), phi. Raises NotMeasured."""
    parts = [pd.DataFrame(columns=["step", "phi", "done", "batch", "seed"], dtype=float)]
    for log in logs[logs["variant"] == SCALED].to_dict("records"):
        steps = log["log"].reindex(columns=["step", "phi"]).dropna()
        done = steps["step"] / log["log"]["step"].max()
        parts.append(steps.assign(done=done, batch=log["batch"], seed=log["seed"]))
    found = pd.concat(parts)
    found = found[found["phi"] > 0].reset_index(drop=True)  # noise may hide the gradient, and phi then is no number
    if found.empty:
        raise NotMeasured(f"no log of {SCALED} has a noise scale (phi)")
    return found


def reference_phi(logs: pd.DataFrame) -> pd.DataFrame:
    """Of `phi_of` the lines from which predictions are made: of batch REFERENCE, or of the smallest that has any."""
    phi = phi_of(logs)
    return phi[phi["batch"] == (REFERENCE if REFERENCE in set(phi["batch"]) else phi["batch"].min())]


def predicted(logs: pd.DataFrame, batches) -> pd.Series:
    """The efficiency of batches by the noise scale: the mean over the training of SCALED at batch REFERENCE, or at the
    smallest that has one. Raises NotMeasured."""
    phi = reference_phi(logs)["phi"]
    means = [np.mean([efficiency(Noise(sqr=1.0, var=value), int(batch)) for value in phi]) for batch in batches]
    return pd.Series(means, index=list(batches))


def smoothed(log: pd.DataFrame) -> pd.Series:
    """The mean loss around each step, over SMOOTH of the training; by the share of the training that is done."""
    window = max(1, round(SMOOTH * len(log)))
    loss = log["loss"].rolling(window, center=True).mean()
    return loss.set_axis(log["step"] / log["step"].max()).dropna()


@dataclass(frozen=True)
class Reached:
    """The loss that all runs of SCALED reach, and when: `features` has a line a seed, a column a batch."""

    loss: float
    features: pd.DataFrame

    @property
    def efficiency(self) -> pd.DataFrame:
        """Progress by feature relative to batch REFERENCE, as measured: by batch, mean and half its interval."""
        share = self.features[[REFERENCE]].to_numpy() / self.features
        return pd.DataFrame({"mean": share.mean(), "half": interval(share)})


def reached(logs: pd.DataFrame) -> Reached:
    """Features until the smoothed loss of SCALED is down to the one that the worst of its runs ends with. Raises
    NotMeasured where REFERENCE and a larger batch were not both run."""
    logs = logs[logs["variant"] == SCALED]
    if REFERENCE not in set(logs["batch"]) or logs["batch"].max() == REFERENCE:
        raise NotMeasured(f"{SCALED} was not run at batch {REFERENCE} and at a larger one")
    curves = [smoothed(log) for log in logs["log"]]
    loss = max(curve.min() for curve in curves)
    last = [log["step"].max() * batch for log, batch in zip(logs["log"], logs["batch"], strict=True)]
    features = [(curve <= loss).idxmax() * n for curve, n in zip(curves, last, strict=True)]
    table = logs.assign(features=features).groupby(["seed", "batch"])["features"].mean().unstack()
    return Reached(loss, table)


def noise_finding(logs: pd.DataFrame) -> str:
    """The noise scale, and the efficiency of the largest batch that was run beside the one that follows from it."""
    phi, batch = reference_phi(logs)["phi"].median(), None
    try:
        measured = reached(logs).efficiency["mean"]
        batch = measured.index.max()
        found = {"measured": measured[batch], "predicted": predicted(logs, [batch])[batch]}
    except NotMeasured:
        found = {"measured": None, "predicted": None}
    return say("slides.noise_title", phi=phi, batch=batch, reference=REFERENCE, **found)
