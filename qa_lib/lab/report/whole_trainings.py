"""Trainings that were measured whole, as a user would have them: from the command to the end.

None found anything compiled, and none went on from a checkpoint. A training of one epoch stands for
FULL_EPOCHS, where only that was run.
"""

import pandas as pd

from qa_lib.lab.report import evidence, in_turns
from qa_lib.lab.report.stats import BASELINE
from qa_lib.spec.variants import RECOMMENDED

ENOUGH = 3  # trainings of a variant, for the time that README.md begins with


def are_whole(runs: pd.DataFrame) -> pd.Series:
    """Return which runs trained whole, with nothing compiled before, as booleans."""
    return (
        runs["status"].eq("ok")
        & runs[evidence.EPOCHS].isin([1, evidence.FULL_EPOCHS])
        & runs["spec.search"].eq("")
        & runs["time.resumed_from_step"].isna()
        & ~evidence.found_compiled(runs)
    )


def like(runs: pd.DataFrame, chosen: pd.DataFrame) -> pd.DataFrame:
    """Return the trainings on the hardware and of the model of `chosen`, with their minutes.

    `chosen` are the runs of one group and model. The trainings are on the most samples that any
    such had. See `with_minutes` for the columns that are new.
    """
    trains_all = chosen["spec.variant"].isin([BASELINE, RECOMMENDED])
    is_alike = runs["model.params_total"].isin(chosen.loc[trains_all, "model.params_total"])
    is_alike &= runs["spec.hardware"].isin(chosen["spec.hardware"])
    return with_minutes(runs[is_alike & are_whole(runs)])


def begun_cold(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the trainings that had a process of their own, with their minutes.

    A process that has served another run before has imported everything already. `runs` are of one
    card and model. See `with_minutes` for the columns that are new.
    """
    began_cold = runs["time.compile_cached"].eq(False) & runs["time.first_step_s"].notna()
    return with_minutes(runs[are_whole(runs) & began_cold])


def of_stack(runs: pd.DataFrame) -> pd.DataFrame:
    """Return trainings by the stack and by plain PyTorch, ENOUGH or more of each.

    They began cold, on one card, and are of the largest model that has so many. See `with_minutes`
    for the columns that are new.

    Raises NotMeasured where there is no such model.
    """
    parts = {}
    for _, part in runs.groupby(["spec.hardware", "model.name"]):
        trained = begun_cold(part)
        counts = trained["spec.variant"].value_counts()
        if counts.reindex([in_turns.STACK, in_turns.PLAIN]).min(skipna=False) >= ENOUGH:
            parts[trained["model.params_total"].iloc[0]] = trained
    if not parts:
        raise evidence.NotMeasured(
            f"no model was trained whole by the stack and by plain PyTorch {ENOUGH} times"
        )
    return parts[max(parts)]


def with_minutes(whole: pd.DataFrame) -> pd.DataFrame:
    """Return those runs whose time is known and that had the most samples.

    `whole` are runs that trained whole. Columns beside theirs: times, by which the time after the
    start is multiplied (FULL_EPOCHS for a run of one epoch, else 1), and minutes.
    """
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
