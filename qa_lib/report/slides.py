"""What a student's slides on parallel training claim, and seven hypotheses about how their numbers came to be.

The slides (slides.csv) compare data parallelism with "pipelines" of two and four GPUs and find that pipelines are
faster and lose 99 % of their *statistical efficiency*. That cannot be: progress by feature belongs to weights, data and
batch, and how a batch is spread over GPUs does not change it (measure/goodput.py). Each hypothesis says what would have
led to such numbers, and is checked on logs (losses.py) and records of our own.
"""

import contextlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from qa_lib.measure.goodput import REFERENCE
from qa_lib.report.claims import reasons, told, verdicts
from qa_lib.report.losses import PLAIN, SCALED, logs_of, one_log, predicted, reached, reference_phi
from qa_lib.report.runs import NotMeasured
from qa_lib.report.scaling import at, is_pipeline, one_gpu, projection, scaling
from qa_lib.report.tables import interval
from qa_lib.report.text import say
from qa_lib.variants import VARIANTS

DEEPSPEED, POLLED = "P0-deepspeed", "P0-polled"  # PLAIN with DeepSpeed, and asking nvidia-smi
SPREAD = ("P-one-bucket", "P-zero1", "P-1f1b")  # rows that spread one batch in different ways
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


@dataclass(frozen=True)
class Facts:
    """What the hypotheses are checked against: runs of preset `parallel` and of preset `slides`."""

    speed: pd.DataFrame
    slides: pd.DataFrame

    @cached_property
    def logs(self) -> pd.DataFrame:
        """The logs of preset slides."""
        return logs_of(self.slides)

    @cached_property
    def lines(self) -> pd.DataFrame:
        """scaling() of the runs of preset parallel."""
        return scaling(self.speed)

    def imitated(self, row: str = PLAIN) -> pd.DataFrame:
        """By number of GPUs, a row with one number of features a GPU: world, steps (planned; mean over seeds). Raises
        NotMeasured below two numbers of GPUs."""
        runs = self.slides[(self.slides["spec.variant"] == row) & (self.slides["status"] == "ok")]
        share = runs["batch"] / runs["world"]
        runs = runs[share == share.mode().min()]
        if runs["world"].nunique() < 2:
            raise NotMeasured(f"{row} was not run on different numbers of GPUs with one batch a GPU")
        return runs.groupby("world")["spec.planned_steps"].mean().astype(float).rename("steps").reset_index()

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
        """PLAIN at its batches, on however many GPUs a batch was spread: table, a line a batch, with the means over
        seeds of steps, loss (over the training) and held_out; end and extra of the least-squares fit loss = end +
        extra / steps; and (mean, half) over seeds of miss, a loss's largest distance from its seed's fit, as a share of
        the range of its losses; of rise, from the loss of the smallest batch to that of the largest; and of
        held_out_rise, that of held_out as a share of it. Of the seeds that were run at all batches. Raises NotMeasured
        below three batches, which two unknowns take to be checked."""
        runs = self.slides[(self.slides["spec.variant"] == PLAIN) & (self.slides["status"] == "ok")]
        if runs["batch"].nunique() < 3:
            raise NotMeasured(f"{PLAIN} was not run at three batches, which two unknowns take to be checked")
        values = runs.reindex(columns=["spec.planned_steps", "quality.loss"]).astype(float)
        values = values.set_axis(["steps", "held_out"], axis="columns")
        values["loss"] = runs["run_id"].map(self.logs.set_index("run_id")["loss"])
        table = values.groupby([runs["spec.seed"], runs["batch"]]).mean().unstack()
        loss = table["loss"].dropna()
        if loss.empty:
            raise NotMeasured(f"no seed of {PLAIN} was run at all of its batches and kept its logs")
        means = table.loc[loss.index].mean().unstack(0)
        fits = np.polyfit(1 / means["steps"], loss.T, 1)
        held_out, fitted = table["held_out"].loc[loss.index], np.vander(1 / means["steps"], 2) @ fits
        rise = loss.iloc[:, -1] - loss.iloc[:, 0]
        told = {
            "miss": (loss - fitted.T).abs().max(axis="columns") / np.ptp(loss, axis=1),
            "rise": rise,
            "held_out_rise": (held_out.iloc[:, -1] - held_out.iloc[:, 0]) / rise,
        }
        extra, end = fits.mean(axis=1)
        spread = {name: (float(values.mean()), float(interval(values))) for name, values in told.items()}
        return {"table": means.reset_index(), "end": end, "extra": extra, "seeds": len(loss), **spread}

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
        columns = {"ms": "time.step_ms.median", "busy": "speed.gpu_busy", "said": "speed.gpu_busy_polled"}
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
        mean) and difference, log(phi) minus that of the first (mean, half), over equal seeds of one code, which says
        what phi is a mean over; rows without such a pair are left out. Raises NotMeasured."""
        done = self.slides[self.slides["spec.variant"].isin(SPREAD) & (self.slides["status"] == "ok")]
        noise = done.reindex(columns=["parallel.noise.sqr", "parallel.noise.var"]).astype(float)
        phi = (noise["parallel.noise.var"] / noise["parallel.noise.sqr"]).where((noise > 0).all(axis="columns"))
        pairs = [done.reindex(columns=["code.commit"])["code.commit"].fillna(""), done["spec.seed"]]
        table = phi.groupby([done["batch"], *pairs, done["spec.variant"]]).mean().unstack()
        counts = table.notna().groupby(level="batch").any().sum(axis="columns")
        if counts.empty or counts.max() < 2:
            raise NotMeasured(f"no two of {', '.join(SPREAD)} have a noise scale at one batch")
        batch = counts.idxmax()
        part = table.loc[batch].dropna(axis="columns", how="all")
        first = next(row for row in SPREAD if row in part)
        logs = np.log(part).sub(np.log(part[first]), axis="index")
        rows = {
            row: {"phi": part[row].mean(), "difference": (logs[row].mean(), float(interval(logs[row])))}
            for row in SPREAD if row in part and logs[row].notna().any()
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
