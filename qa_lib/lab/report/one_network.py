"""One network with pretrained weights: its speed, time of a training, and F1, in a table.

README.md has it below the table of BERT-base, whose weights are random. Each column says what was
measured so far: speeds are of runs in turns, times of trainings that began with nothing compiled,
and scores of trainings at preset quality. All are of one card.
"""

from pathlib import Path

import pandas as pd

from qa_lib.lab.report import evidence, in_turns, spoken, whole_trainings
from qa_lib.lab.report.facts import published
from qa_lib.lab.report.format import MISSING, factor, gain, number, points
from qa_lib.lab.report.stats import (
    BASELINE,
    BEST_EXACT,
    BEST_F1,
    F1,
    LEVEL,
    by_seed,
    compare,
    interval,
)
from qa_lib.lab.report.tables import markdown

NOT_SCORED = "No model has been timed in turns and scored so far."
MASKED = "A1-masked"  # the baseline with padding left out of its loss
# What plain PyTorch is called while peers/search.py has not run for this network: its attention is
# a guess, and a lead over it says nothing.
UNSEARCHED = {
    in_turns.PLAIN: f"plain PyTorch by what pays for BERT, not searched here ({in_turns.PLAIN})"
}


def one_network(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Return as Markdown what is known of the largest model that was timed in turns and scored.

    A block of readme.py. `runs` are those of all committed groups.
    """
    model = _shown_model(runs)
    if model is None:
        return NOT_SCORED
    of_model = runs[runs["model.name"] == model]
    timed = in_turns.largest_part(in_turns.blocks_with_rivals(of_model))
    on_card = of_model[of_model["spec.hardware"] == timed["spec.hardware"].iloc[0]]
    trained = whole_trainings.begun_cold(on_card)
    scored = _scored(on_card)
    table = _table(in_turns.lead_table(timed), trained, scored)
    first = timed.iloc[0]
    both = pd.concat([timed, scored])
    card = spoken.card(first["env.gpu"])
    source = (
        f"{spoken.model(model)} with its pretrained weights on one {card}, "
        f"{first['micro_batch']} samples of {spoken.training_set(first['data'])} in a forward "
        "pass. Speeds are of runs in turns. A training has three epochs of "
        f"{scored['spec.n_train'].iloc[0]:,.0f} samples; its seconds are from the command to the "
        "official score, with nothing compiled before; those of training have compilation in "
        "them. F1 and exact match are of v2's dev set, at "
        "the best threshold where nothing else is said. In brackets: how many runs; "
        f"{LEVEL} % intervals from three on. Records: {evidence.groups_of(both)}, code "
        f"{evidence.commits(both)}."
    )
    parts = [markdown(table), source, *_sentences(scored)]
    return "\n\n".join(parts)


def _shown_model(runs: pd.DataFrame) -> str | None:
    """Return the largest model of which the stack in 8 bits was timed in turns and scored."""
    scored = runs[_is_scored(runs) & runs["spec.variant"].eq(in_turns.STACK)]
    sizes = scored.groupby("model.name")["model.params_total"].max().sort_values()
    for model in reversed(sizes.index):
        try:
            in_turns.blocks_with_rivals(runs[runs["model.name"] == model])
        except evidence.NotMeasured:
            continue
        return model
    return None


def _is_scored(runs: pd.DataFrame) -> pd.Series:
    """Return which runs are trainings that were scored, as booleans."""
    f1 = runs.reindex(columns=[BEST_F1])[BEST_F1]
    return (
        runs["spec.preset.name"].eq("quality")
        & runs["spec.search"].eq("")
        & runs["status"].eq("ok")
        & f1.notna()
    )


def _scored(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the scored runs of one data set and training: of those that are most."""
    parts = [part for _, part in runs[_is_scored(runs)].groupby(["data", "training"], dropna=False)]
    return max(parts, key=len)


def _table(leads: pd.DataFrame, trained: pd.DataFrame, scored: pd.DataFrame) -> pd.DataFrame:
    """Return a row as text for each variant that was timed or scored; see `in_turns.lead_table`."""
    f1 = by_seed(scored, BEST_F1)
    f1_at_zero = by_seed(scored, F1)
    exact = by_seed(scored, BEST_EXACT)
    seconds = (60 * trained["minutes"]).groupby(trained["spec.variant"])
    of_training = trained["time.train_s"].astype(float).groupby(trained["spec.variant"])
    of_compiler = trained["time.compile_s"].astype(float).groupby(trained["spec.variant"])
    has_no_lead = {in_turns.STACK, *UNSEARCHED}
    rows = []
    for name in in_turns.SHOWN:
        if name not in leads.index and name not in f1:
            continue
        lead = leads.reindex([name]).iloc[0]
        rows.append({
            "training": UNSEARCHED.get(name, spoken.variant(name)),
            "samples/s": _counted(number(lead["samples_per_s"]), lead["n"]),
            "ms of its kernels": number(lead["kernel_ms"]),
            "the 8-bit stack over this row": (
                MISSING if name in has_no_lead else factor(lead["lead"], lead["lead±"])
            ),
            "s to the score": _mean(seconds, name, number),
            "s of it training": _mean(of_training, name, number),
            "s of that compiling": _mean(of_compiler, name, number),
            "F1": _score(f1, name),
            "F1 at threshold 0": _score(f1_at_zero, name),
            "exact match": _score(exact, name),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _counted(text: str, count: float) -> str:
    return MISSING if pd.isna(count) else f"{text} ({count:.0f})"


def _mean(values, name: str, form) -> str:
    """Return the mean of a variant's group of values as text, with how many they are."""
    of_variant = values.get_group(name).dropna() if name in values.groups else pd.Series()
    if of_variant.empty:
        return MISSING
    return _counted(form(of_variant.mean()), len(of_variant))


def _score(scores: pd.DataFrame, name: str) -> str:
    """Return a variant's mean score over seeds as text, with how many they are."""
    if name not in scores:
        return MISSING
    of_variant = scores[name].dropna()
    return _counted(points(of_variant.mean(), interval(of_variant)), len(of_variant))


def _sentences(scored: pd.DataFrame) -> list[str]:
    """Return what else is known of the scores: of the loss, and what others report."""
    found = []
    scores = by_seed(scored, BEST_F1)
    if {BASELINE, MASKED} <= set(scores) and len(scores[[BASELINE, MASKED]].dropna()):
        change = gain(*compare(scored, MASKED, BASELINE, BEST_F1))
        found.append(
            f"**Padding in the loss:** left out of its softmax, as in packed training, F1 changes "
            f"by {change} ({MASKED} against {BASELINE})."
        )
    theirs = published().loc[BASELINE]
    found.append(
        f"The reference project reports F1 {theirs['score']:.2f} and exact match "
        f"{theirs['exact']:.2f} for its {BASELINE}: three epochs of BERT-base on all of SQuAD v2, "
        "at threshold 0. That is another model on twice the data, so that neither number says "
        "which training is better."
    )
    return found
