"""What a student's slides on parallel training claim, and seven hypotheses about how their numbers came to be.

The slides (slides.csv) compare data parallelism with "pipelines" of two and four GPUs and find that pipelines are
faster and lose 99 % of their *statistical efficiency*. That cannot be: progress by feature belongs to weights, data and
batch, and how a batch is spread over GPUs does not change it (measure/goodput.py). Each hypothesis says what would have
led to such numbers, and is checked on logs and records of our own.

Logs are the steps.jsonl beside records: a line a step, whose loss is the mean over the step's features.
"""

import contextlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from qa_lib.measure.goodput import REFERENCE, efficiency
from qa_lib.record import Noise
from qa_lib.report.claims import reasons, told, verdicts
from qa_lib.report.runs import NotMeasured, read_steps
from qa_lib.report.scaling import at, is_pipeline, one_gpu, projection, scaling
from qa_lib.report.tables import interval
from qa_lib.report.text import say
from qa_lib.variants import VARIANTS

EVERY = 50  # steps between two losses of the slides' log (logging_steps)
# The rows that imitate the slides: transformers.Trainer under torchrun, with DeepSpeed, and asking nvidia-smi.
PLAIN, DEEPSPEED, POLLED = "P0", "P0-ds", "P0-polled"
SCALED = "P-fast"  # the row that was run at several batches
SPREAD = ("P-fast", "P-sharded", "P-1f1b")  # rows that spread one batch in different ways
SMOOTH = 0.1  # share of a training that a smoothed loss is the mean of
DIVIDES = ("pipeline", "tensor")  # ways to share a step in which no GPU has the whole model
CONCLUSIONS = ("data_first", "pipeline_pays", "batch_costs", "in_a_minute")  # macros of texts/slides.md.j2
HYPOTHESES = {  # macro of texts/slides.md.j2, which says what was measured -> the hypothesis
    "steps": "H1: Their “pipelines” were data parallelism",
    "artefact": "H2: Their loss of statistical efficiency is one of logging",
    "spread": "H3: Their formula knows nothing of the GPUs",
    "scatter": "H3: It falls with the batch as noise does",
    "held_out": "H4: Their validation loss was the mean training loss",
    "polling": "H5: Asking nvidia-smi took most of their time",
    "noise": "H6: How a batch is spread does not change the noise scale",
    "batch": "H7: The noise scale tells what a batch costs",
}


def _transcribed(**types) -> pd.DataFrame:
    return pd.read_csv(Path(__file__).with_name("slides.csv"), comment="#", **types)


def theirs() -> pd.DataFrame:
    """The slides' table as text, with headings that say whose it is."""
    table = _transcribed(dtype=str)
    heads = ("their experiment", "GPUs", "steps", "runtime s", "“samples/s”", "“validation loss”", "“GPU busy” %",
             "“statistical efficiency”", "“goodput”")  # fmt: skip
    return table.set_axis(heads, axis="columns")


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
        log = read_steps(run["path"])
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


@dataclass(frozen=True)
class Facts:
    """What the hypotheses are checked against: runs of scale `parallel` and of scale `slides`."""

    speed: pd.DataFrame
    slides: pd.DataFrame

    @cached_property
    def logs(self) -> pd.DataFrame:
        """The logs of scale slides."""
        return logs_of(self.slides)

    @cached_property
    def lines(self) -> pd.DataFrame:
        """scaling() of the runs of scale parallel."""
        return scaling(self.speed)

    def imitated(self, row: str = PLAIN) -> pd.DataFrame:
        """By number of GPUs, a row with one number of features a GPU: world, steps (planned), loss (mean over the
        training), held_out; means over seeds. Raises NotMeasured below two numbers of GPUs."""
        runs = self.slides[(self.slides["spec.variant"] == row) & (self.slides["status"] == "ok")]
        share = runs["batch"] / runs["world"]
        runs = runs[share == share.mode().min()]
        if runs["world"].nunique() < 2:
            raise NotMeasured(f"{row} was not run on different numbers of GPUs with one batch a GPU")
        logs = self.logs.set_index("run_id")["loss"]
        table = pd.DataFrame({
            "world": runs["world"],
            "steps": runs["spec.planned_steps"].astype(float),
            "loss": runs["run_id"].map(logs),
            "held_out": runs.reindex(columns=["quality.loss"])["quality.loss"].astype(float),
        })  # fmt: skip
        return table.groupby("world").mean().reset_index()

    def steps(self) -> dict[str, list[dict]]:
        """`imitated` of PLAIN, and of DEEPSPEED where it was run on different numbers of GPUs."""
        found = {PLAIN: self.imitated().to_dict("records")}
        with contextlib.suppress(NotMeasured):  # DeepSpeed is an optional package
            found[DEEPSPEED] = self.imitated(DEEPSPEED).to_dict("records")
        return found

    def wrappers(self) -> dict[str, str]:
        """The class in which PLAIN and DEEPSPEED were trained, by row; only rows whose records name it."""
        done = self.slides[self.slides["spec.variant"].isin((PLAIN, DEEPSPEED)) & (self.slides["status"] == "ok")]
        named = done.reindex(columns=["spec.variant", "parallel.wrapper"]).dropna()
        return {row: " or ".join(sorted(set(part))) for row, part in named.groupby("spec.variant")["parallel.wrapper"]}

    def fit(self) -> dict:
        """`imitated`, and the least-squares fit of loss = end + extra / steps to it: end, extra, miss (the largest
        difference, as a share of the largest between losses) and the room that seeds leave it, half of itself where
        there is one alone. Raises NotMeasured below three numbers of GPUs."""
        table = self.imitated().dropna(subset=["loss"])
        if len(table) < 3:
            raise NotMeasured(f"{PLAIN} was not run on three numbers of GPUs, which two unknowns take to be checked")
        extra, end = np.polyfit(1 / table["steps"], table["loss"], 1)
        miss = (end + extra / table["steps"] - table["loss"]).abs().max() / np.ptp(table["loss"])
        seeds = self.slides.loc[self.slides["spec.variant"] == PLAIN, "spec.seed"].nunique()
        return {"table": table, "end": end, "extra": extra, "miss": miss, "room": miss / 2 if seeds == 1 else 0.0}

    def pair(self) -> list[dict]:
        """The formula's value in PLAIN's log, step by step on the fewest GPUs, over that in DEEPSPEED's logs, told
        again: by number of GPUs, `world` and `ratio`, and `theirs`, the slides' baseline over their pipeline; nothing
        where DeepSpeed, an optional package, was not run."""
        logs = self.logs
        plain = logs[(logs["variant"] == PLAIN) & (logs["world"] == logs["world"].min())]
        repeated = logs[logs["variant"] == DEEPSPEED]
        raw = plain.loc[plain["batch"] == plain["batch"].min(), "raw"].mean()
        baseline, *pipelines = _transcribed().to_dict("records")
        told = pd.Series({line["gpus"]: baseline["stats_efficiency"] / line["stats_efficiency"] for line in pipelines})
        return [
            {"world": world, "ratio": raw / again, "theirs": told[world]}
            for world, again in repeated.groupby("world")["again"].mean().items()
            if world in told.index
        ]

    def artefact(self) -> dict:
        """The ratio of the two averages of `formula` in one log, and its range over all: log, ratio, low, high."""
        log, ratios = one_log(self.logs), self.logs["raw"] / self.logs["again"]
        return {"log": log, "ratio": log["raw"] / log["again"], "low": ratios.min(), "high": ratios.max()}

    def over_worlds(self) -> dict:
        """The formula's value on more GPUs over that on the fewest, at one batch and seed, as a log ratio: variant,
        batch, worlds, difference (mean, half), n. Of the row and batch with the most such pairs; raises NotMeasured."""
        logs = pd.concat([logs_of(self.speed), self.logs])
        best = None
        for (_, variant, batch), part in logs.groupby(["group", "variant", "batch"]):
            table = np.log(part.groupby(["seed", "world"])["raw"].mean().unstack())
            pairs = table.iloc[:, 1:].sub(table.iloc[:, 0], axis="index").stack().dropna()
            if len(pairs) > (best["n"] if best else 0):
                best = {"variant": variant, "batch": batch, "worlds": list(table), "n": len(pairs)}
                best["difference"] = float(pairs.mean()), float(interval(pairs))
        if best is None:
            raise NotMeasured("no row was run at one batch and seed on different numbers of GPUs, and kept its log")
        return best

    def exponent(self) -> dict:
        """The power of the batch that the formula falls with: power (mean, half; over the seeds of SCALED), batches."""
        logs = self.logs[self.logs["variant"] == SCALED]
        table = np.log(logs.groupby(["seed", "batch"])["raw"].mean().unstack()).dropna()
        if table.shape[1] < 2 or table.empty:
            raise NotMeasured(f"{SCALED} has no logs of different batches at one seed")
        powers = pd.Series(np.polyfit(np.log(table.columns.astype(float)), table.T, 1)[0])
        return {"power": (float(powers.mean()), float(interval(powers))), "batches": list(table)}

    def polling(self) -> dict:
        """PLAIN and POLLED at the most GPUs that both ran on: world, and of each a dict of ms, busy and said (shares,
        the mean of what nvidia-smi answered). Raises NotMeasured."""
        columns = {"ms": "time.step_ms.median", "busy": "speed.utilisation", "said": "speed.utilisation_polled"}
        for runs in (self.speed, self.slides):  # which are of two models
            done = runs[runs["status"] == "ok"]
            values = done.reindex(columns=columns.values()).set_axis([*columns], axis="columns").astype(float)
            means = values.groupby([done["spec.variant"], done["world"], done["batch"]]).mean()
            rows = [means.loc[name] if name in means.index else means[:0].droplevel(0) for name in (PLAIN, POLLED)]
            both = rows[0].index.intersection(rows[1].index)
            if len(both):
                world, _ = where = max(both)
                return {"world": world, "plain": rows[0].loc[where].to_dict(), "polled": rows[1].loc[where].to_dict()}
        raise NotMeasured(f"{POLLED} and {PLAIN} were not run on the same number of GPUs")

    def phis(self) -> dict:
        """The noise scale of each of SPREAD at the batch at which most of them have one: batch, and by row phi (its
        mean) and difference, log(phi) minus that of the first over equal seeds (mean, half). Raises NotMeasured."""
        done = self.slides[self.slides["spec.variant"].isin(SPREAD) & (self.slides["status"] == "ok")]
        noise = done.reindex(columns=["parallel.noise.sqr", "parallel.noise.var"]).astype(float)
        phi = (noise["parallel.noise.var"] / noise["parallel.noise.sqr"]).where((noise > 0).all(axis="columns"))
        table = phi.groupby([done["batch"], done["spec.seed"], done["spec.variant"]]).mean().unstack()
        counts = table.notna().groupby(level="batch").any().sum(axis="columns")
        if counts.empty or counts.max() < 2:
            raise NotMeasured(f"no two of {', '.join(SPREAD)} have a noise scale at one batch")
        batch = counts.idxmax()
        part = table.loc[batch].dropna(axis="columns", how="all")
        first = next(row for row in SPREAD if row in part)
        logs = np.log(part).sub(np.log(part[first]), axis="index")
        rows = {
            row: {"phi": part[row].mean(), "difference": (logs[row].mean(), float(interval(logs[row])))}
            for row in SPREAD if row in part
        }  # fmt: skip
        return {"batch": batch, "rows": rows, "first": first}

    def pipeline(self) -> dict:
        """The quickest pipeline on the fewest GPUs that one ran on: `line` of scaling, and alone_mib, the peak of one
        GPU that makes the same step (None if not measured). Raises NotMeasured."""
        lines = self.lines
        pipelines = lines[lines["variant"].map(is_pipeline) & (lines["world"] > 1)].dropna(subset=["rate", "peak_mib"])
        if pipelines.empty:
            raise NotMeasured("no pipeline has its speed and memory measured")
        line = pipelines.sort_values(["world", "rate"], ascending=[True, False]).iloc[0]
        alone = lines[(lines["variant"] == one_gpu(line["variant"])) & (lines["world"] == 1)]
        peaks = alone.loc[alone["batch"] == line["batch"], "peak_mib"].dropna()
        return {"line": line.to_dict(), "alone_mib": peaks.min() if len(peaks) else None}

    def fastest(self) -> dict:
        """At one effective batch, on the most GPUs that both kinds ran on: the quickest row that has the whole model on
        each GPU, and the quickest that divides it: batch (of several the smallest), world, whole, divided (lines of
        scaling), and `only`, whether no other that divides it ran there. Raises NotMeasured."""
        lines, found = self.lines, []
        for batch in sorted(set(lines["batch"])):
            timed = at(lines, strong=batch)
            timed = timed[timed["world"] > 1]
            divides = timed["variant"].map(lambda name: VARIANTS[name].settings.parallel in DIVIDES)
            quickest = timed.loc[timed.groupby(["world", divides])["rate"].idxmax()]
            both = quickest.groupby("world").filter(lambda part: len(part) == 2)
            if len(both):
                whole, divided = both[both["world"] == both["world"].max()].to_dict("records")
                others = timed[divides & (timed["world"] == whole["world"])]
                found.append({"batch": batch, "world": whole["world"], "whole": whole, "divided": divided,
                              "only": others["variant"].nunique() == 1})  # fmt: skip
        if not found:
            raise NotMeasured(
                "no row that divides the model ran beside one that does not, at one batch and as many GPUs"
            )
        return max(found, key=lambda pair: pair["world"])

    def shortest(self) -> dict:
        """scaling.projection, and `learnt`: the efficiency of its batch, `predicted` by the noise scale and `measured`
        (mean, half), None where these are not known. Raises NotMeasured."""
        found = projection(self.speed)
        with contextlib.suppress(NotMeasured, KeyError):
            return found | {"learnt": self.batches()["rows"][found["batch"]]}
        return found | {"learnt": None}

    def batches(self) -> dict:
        """By batch larger than REFERENCE the efficiency by the noise scale and as measured: phi (the median of
        reference_phi) and its batch, loss, rows {batch: (predicted, (log ratio measured over predicted, half),
        measured)}."""
        found, phi = reached(self.logs), reference_phi(self.logs)
        measured = found.efficiency.query(f"batch > {REFERENCE}")
        told_by_phi = predicted(self.logs, measured.index)
        rows = {
            batch: {"predicted": told_by_phi[batch], "measured": (line.mean, line.half),
                    "ratio": (math.log(line.mean / told_by_phi[batch]), line.half / line.mean)}
            for batch, line in zip(measured.index, measured.itertuples(), strict=True)
        }  # fmt: skip
        return {"phi": phi["phi"].median(), "batch": int(phi["batch"].iloc[0]), "loss": found.loss, "rows": rows}


def hypotheses_table(facts: Facts) -> pd.DataFrame:
    """A line for each part of each hypothesis: what was measured and the verdict."""
    return verdicts(told("slides", HYPOTHESES, facts), "hypothesis")


def reasons_table(facts: Facts) -> pd.DataFrame:
    """What explains the verdicts on each hypothesis."""
    return reasons(told("slides", HYPOTHESES, facts), "hypothesis")


def conclusions(facts: Facts) -> str:
    """What to take from all this, as a Markdown list; each point says so where its numbers are not measured."""
    said = []
    for macro in CONCLUSIONS:
        try:
            measured = say(f"slides.{macro}_measured", facts=facts)
        except NotMeasured as reason:
            measured = f"Not measured yet: {reason}."
        said.append(f"- {say(f'slides.{macro}')} {measured}")
    return "\n".join(said)
