"""The result in a paragraph: minutes of a training, what it costs, whether F1 is kept.

README.md begins with it, and so does the report's notebook. The minutes are those of trainings
that were measured whole, from the command to the end. Without such they are projected from the
speeds of a bench group.
"""

from pathlib import Path

import pandas as pd

from qa_lib.lab.report import evidence
from qa_lib.lab.report.figures import picture_link, speed_finding, timed
from qa_lib.lab.report.format import gain, number
from qa_lib.lab.report.stats import BASELINE, LEVEL, MARGIN, equivalence
from qa_lib.lab.report.summary import summary
from qa_lib.spec.variants import RECOMMENDED, VARIANTS, tagged

PROJECTED = 32  # the micro-batch at whose speed a full training is projected


def headline(runs: pd.DataFrame, group: str, figures: Path = Path()) -> str:
    """Return the result of a group as Markdown, with the picture of the ladder below.

    It says the minutes of a training, what that costs, whether F1 is kept, and what was not shown.
    `runs` are those of all groups. The picture is shown if it lies below the folder `figures`.

    Raises NotMeasured where the recommended variant's speed or memory, or the Trainer's speed, is
    missing.
    """
    chosen = evidence.select(runs, group)
    costs = _costs(timed(chosen), group)
    paragraphs = [
        _minutes(runs, chosen),
        f"{costs} {_kept(runs, group)}",
        _not_shown(runs, chosen),
        picture_link(figures / group / "ladder.png"),
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _costs(lines: pd.DataFrame, group: str) -> str:
    """Return the gain in speed and the memory that it takes, in two sentences.

    `lines` are those of `summary` at one micro-batch.

    Raises NotMeasured where the recommended variant or all memory is missing.
    """
    lines = lines.set_index("variant", drop=False)
    gib = lines["reserved_mib"] / 1024
    gib_of_full = gib[evidence.trains_all(lines["variant"])]
    if RECOMMENDED not in lines.index or gib_of_full.isna().all():
        raise evidence.NotMeasured(
            f"{RECOMMENDED} and its memory have not been measured in {group}"
        )
    return (
        f"{speed_finding(lines)}: {BASELINE} is an unoptimized loop, {RECOMMENDED} the whole stack "
        f"in bf16. Memory reserved falls from {number(gib[BASELINE])} to "
        f"{number(gib[RECOMMENDED])} GiB; the leanest full training takes "
        f"{number(gib_of_full.min())}."
    )


# Minutes of a training.


def _minutes(runs: pd.DataFrame, chosen: pd.DataFrame) -> str:
    """Return the minutes of a whole training, as Markdown.

    They are measured ones where the recommended variant and the Trainer were both measured so, and
    else projected from the speeds of `chosen`, the runs of one group.

    Raises NotMeasured where one of them has not even a speed.
    """
    whole = _whole_trainings(runs, chosen)
    minutes = whole.groupby("spec.variant")["minutes"].mean()
    rivals = _rivals(minutes)
    if RECOMMENDED in minutes and rivals:
        return _measured_minutes(whole, minutes[RECOMMENDED], rivals, chosen["env.gpu"].iloc[0])
    table = projected(summary(chosen))
    rivals = _rivals(table["minutes"])
    if RECOMMENDED not in table.index or not rivals:
        raise evidence.NotMeasured(
            f"{RECOMMENDED} and the Trainer have not both been timed in {chosen['group'].iloc[0]}"
        )
    return _projected_minutes(table, rivals, chosen["env.gpu"].iloc[0])


def _measured_minutes(whole: pd.DataFrame, minutes: float, rivals: str, gpu: str) -> str:
    """Return the minutes of whole trainings, with the conditions under which they were taken."""
    first = whole.iloc[0]
    end = "the score" if whole["quality.f1"].notna().all() else "the last step"
    conditions = [
        f"runs of each: {whole.value_counts('spec.variant').min()}",
        f"data: {first['data.name']}",
        f"SQuAD v2: {evidence.FULL_SAMPLES:,}",
        f"group {first['group']}, code {evidence.commits(whole)}",
    ]
    for name in whole.loc[whole["times"] > 1, "spec.variant"].unique():
        conditions.append(f"{name}: start, {evidence.FULL_EPOCHS} times one epoch")
    return (
        f"**Three epochs of {first['spec.n_train']:,.0f} samples train BERT-base in "
        f"{minutes:.1f} minutes on one {gpu}, where `transformers.Trainer` takes {rivals}.** "
        f"Measured from the command to {end}, with nothing cached ({'; '.join(conditions)})."
    )


def _projected_minutes(table: pd.DataFrame, rivals: str, gpu: str) -> str:
    """Return the minutes of `projected`, and whether the quickest Trainer's compilation counts."""
    trainers = table.index.intersection(tagged("trainer"))
    rival = table.loc[trainers, "speed"].idxmax()
    caveat = ""
    if not table.loc[rival, "cold"]:
        compile_s = table.loc[rival, "compile_s"]
        caveat = f"; {rival} compiles for {compile_s:.0f} s, with a part of the code from a cache"
    return (
        "**Projected from measured speed: three epochs of SQuAD v2 train BERT-base in "
        f"{table.loc[RECOMMENDED, 'minutes']:.1f} minutes on one {gpu}, where "
        f"`transformers.Trainer` takes {rivals}.** "
        f"With compilation, without data and scoring{caveat}."
    )


def projected(lines: pd.DataFrame) -> pd.DataFrame:
    """Return the minutes of a full training at a bench group's speeds, indexed by variant.

    `lines` are those of `summary`. Only variants with the tag `headline` are projected. Columns:

    - speed: samples/s
    - compile_s: seconds of compilation, NaN where they were not measured
    - cold: whether compile_s is of runs that found nothing compiled
    - minutes: those of training and compilation, without data and scoring

    Raises NotMeasured for another task than SQuAD, or where the baseline has no speed at
    micro-batch PROJECTED.
    """
    if len(lines) and lines["task.name"].iloc[0] != "qa":
        raise evidence.NotMeasured(
            "the projection is to SQuAD v2's training questions, and this is another task"
        )
    usual = evidence.usual_conditions(lines)
    usual = usual[(usual["micro_batch"] == PROJECTED) & usual["samples_per_s"].notna()]
    usual = usual.set_index("variant")
    if evidence.baseline(lines) not in usual.index:
        raise evidence.NotMeasured(
            f"the baseline has no measured speed at micro-batch {PROJECTED} to project from"
        )
    usual = usual.loc[[name for name in tagged("headline") if name in usual.index]]
    speed = usual["samples_per_s"]
    compile_s, cold = _compilation(usual)
    train_s = evidence.FULL_SAMPLES * evidence.FULL_EPOCHS / speed
    return pd.DataFrame({
        "speed": speed,
        "compile_s": compile_s,
        "cold": cold,
        "minutes": (train_s + compile_s.fillna(0.0)) / 60,
    })  # fmt: skip


def _compilation(lines: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the seconds that variants compile, and whether they were of runs that found nothing
    compiled.

    `lines` of `summary` are indexed by variant. A variant that does not compile takes 0 s, which
    are such seconds.
    """
    is_eager = pd.Series(
        [VARIANTS[name].settings.compile == "none" for name in lines.index], lines.index
    )
    cold_s = lines["compile_s"].astype(float)
    warm_s = lines["warm_compile_s"].astype(float)
    return cold_s.fillna(warm_s).mask(is_eager, 0.0), is_eager | cold_s.notna()


def _whole_trainings(runs: pd.DataFrame, chosen: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that trained as a user would, whole and with nothing compiled before.

    They are on the hardware and of the model of `chosen`, the runs of one group, and on the most
    samples that any such run had. Each trained for FULL_EPOCHS, or for one epoch, which stands for
    them all.

    Columns beside those of `runs`: times, by which the time after the start is multiplied
    (FULL_EPOCHS for a run of one epoch, else 1), and minutes.
    """
    of_baseline = chosen["spec.variant"] == BASELINE
    is_alike = (
        runs["spec.hardware"].isin(chosen["spec.hardware"])
        & runs["model.params_total"].isin(chosen.loc[of_baseline, "model.params_total"])
    )  # fmt: skip
    is_whole = (
        runs["status"].eq("ok")
        & runs[evidence.EPOCHS].isin([1, evidence.FULL_EPOCHS])
        & runs["spec.search"].eq("")
        & runs["time.resumed_from_step"].isna()
        & ~evidence.found_compiled(runs)
    )
    whole = runs[is_alike & is_whole]
    columns = {"process": "time.notebook_s", "run": "time.wall_s", "start": "time.first_step_s"}
    seconds = evidence.numbers(whole, columns)
    one_run = seconds["process"].fillna(seconds["run"])
    times = evidence.FULL_EPOCHS / whole[evidence.EPOCHS].astype(float)
    # A training starts once, however many epochs it has.
    spent = times * one_run - (times - 1) * seconds["start"].fillna(0.0)
    # Runs of one epoch and of three are compared, so that the axis must not tell them apart.
    whole = whole.assign(times=times, minutes=spent / 60, training="").dropna(subset="minutes")
    most_samples = whole["spec.n_train"] == whole["spec.n_train"].max()
    return evidence.largest_micro_batch(whole[most_samples])


def _rivals(minutes: pd.Series) -> str:
    """Return the minutes of the rivals as '12.0 as it comes, 5.8 with torch.compile, and ...'.

    The rivals are the Trainer as it comes, the Trainer with its compiler, and plain PyTorch at its
    best, those of them that `minutes`, indexed by variant, has. The text is empty where it has no
    Trainer.
    """
    as_it_comes = tagged("default")
    with_compiler = [
        name for name in tagged("trainer") if VARIANTS[name].settings.compile != "none"
    ]
    if not minutes.index.isin([*as_it_comes, *with_compiler]).any():
        return ""
    parts = []
    least = minutes.reindex(as_it_comes).min()
    if pd.notna(least):
        parts.append(f"{least:.1f} as it comes")
    least = minutes.reindex(with_compiler).min()
    if pd.notna(least):
        parts.append(f"{least:.1f} with torch.compile")
    least = minutes.reindex(tagged("plain")).min()
    if pd.notna(least):
        parts.append(f"plain PyTorch {least:.1f} at its best")
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])}, and {parts[-1]}"


# Quality, and what is open.


def _kept(runs: pd.DataFrame, group: str) -> str:
    """Return whether the recommended variant keeps the baseline's F1, in a sentence or two.

    Raises NotMeasured where no variant can be compared.
    """
    judged = evidence.usual_conditions(evidence.judging_runs(runs, group))
    tested = equivalence(judged)
    if RECOMMENDED not in tested.index:
        return f"The F1 of {RECOMMENDED} has not been measured."
    compared = tested.loc[RECOMMENDED]
    if compared["verdict"] == "within":
        finding = f"stays within {MARGIN:g} point of {BASELINE}'s"
    elif compared["verdict"] == "no worse":
        finding = f"does not fall {MARGIN:g} point below {BASELINE}'s"
    else:
        finding = f"is not shown to stay within {MARGIN:g} point of {BASELINE}'s"
    at_best = gain(compared["best_delta"], compared["best_delta±"])
    at_zero = gain(compared["delta"], compared["delta±"])
    run = judged[judged["spec.variant"] == RECOMMENDED].iloc[0]
    return (
        f"F1 {finding}: it changes by {at_best} at the best threshold for "
        f'"no answer", and by {at_zero} at threshold 0. That is of a smaller model '
        f"({run['model.params_total'] / 1e6:.0f} M parameters, {compared['n']} seeds, {LEVEL} % "
        "intervals)."
    )


def _not_shown(runs: pd.DataFrame, chosen: pd.DataFrame) -> str:
    """Return what no record shows: the F1 of the model of `chosen`, and other cards."""
    gpus = sorted(set(runs["env.gpu"].dropna()))
    scored_sizes = runs.loc[runs["quality.f1"].notna(), "model.params_total"]
    sentence = "**Not shown:**"
    if not scored_sizes.isin(chosen["model.params_total"]).any():
        sentence += " the F1 of BERT-base itself; and"
    sentence += f" anything on any card but the {' and '.join(gpus)}"
    if "Tesla T4" in gpus:
        return f"{sentence}."
    return f"{sentence}: no T4 has run anything."
