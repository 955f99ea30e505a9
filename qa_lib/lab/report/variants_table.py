"""The table of the variants that matter most, with a caption that says where its numbers come from.

README.md shows it, and so do the notebooks.
"""

import contextlib
from collections.abc import Iterable

import pandas as pd

from qa_lib.lab.report import curves, evidence
from qa_lib.lab.report.format import factor, gain, number, percent, points
from qa_lib.lab.report.stats import BASELINE, LEVEL, equivalence
from qa_lib.lab.report.summary import summary
from qa_lib.lab.report.tables import Column, render
from qa_lib.spec.variants import RECOMMENDED, VARIANTS, tagged

# A speed is steady whose half interval is at most this share of it. A busy host makes others.
STEADY = 0.05


def headline_table(
    runs: pd.DataFrame, judged: pd.DataFrame, names: Iterable[str] = ()
) -> pd.DataFrame:
    """Return variants of a group at its largest micro-batch, as a table of text.

    It shows what each is, n, speed, memory, and the score at the best threshold against the
    baseline's. `runs` are those of the group that count, and `judged` those whose scores speak for
    it (`evidence.judging_runs`). The variants are those of `names`, without names those with the
    tag `headline`, and all where none of them ran.

    The memory is what PyTorch reserved, since what it counts as allocated leaves out that of
    torch.compile's own CUDA graphs.
    """
    wanted = list(names) or tagged("headline")
    lines = evidence.largest_micro_batch(summary(runs)).set_index("variant", drop=False)
    is_wanted = lines["variant"].isin(wanted)
    if is_wanted.any():
        lines = lines[is_wanted]
    reasons = {name: variant.why for name, variant in VARIANTS.items()}
    lines = lines.drop(columns="ratio±").assign(
        gib=lines["reserved_mib"] / 1024, why=lines["variant"].map(reasons)
    )
    columns = [
        Column("variant"),
        Column("why", "what it is"),
        Column("n", "timed runs"),
        Column("samples_per_s", "samples/s"),
        Column("ratio", f"× {evidence.baseline(lines)}"),
        Column("gib", "GiB reserved"),
    ]
    # Without scores the column is left out.
    with contextlib.suppress(evidence.NotMeasured):
        tested = equivalence(evidence.usual_conditions(judged)).dropna(subset="delta±")
        lines = lines.join(tested[["best_delta", "best_delta±"]])
        columns.append(Column("best_delta", f"ΔF1 to {BASELINE}", gain))
    return render(lines, columns)


def caption(runs: pd.DataFrame, judged: pd.DataFrame) -> str:
    """Return where all numbers of `headline_table` come from, in sentences."""
    sentences = [source(runs)]
    # Without scores the table has none to explain.
    with contextlib.suppress(evidence.NotMeasured):
        usual = evidence.usual_conditions(judged)
        shown = usual[usual["spec.variant"].isin([BASELINE, *runs["spec.variant"]])]
        sentences.append(_source_of_scores(shown))
        if across_cards(shown):
            sentences.append(f"{across_cards(shown)}.")
    return " ".join(sentences)


def across_cards(judged: pd.DataFrame) -> str:
    """Return which variants were scored on another card than the baseline, in words.

    `judged` are alike in all axes but the micro-batch. The text is empty where there are none.
    """
    base = judged[judged["spec.variant"] == BASELINE]
    elsewhere = judged[~judged["spec.hardware"].isin(base["spec.hardware"])]
    if base.empty or elsewhere.empty:
        return ""
    names = ", ".join(name for name in VARIANTS if name in set(elsewhere["spec.variant"]))
    with_other_code = "" if elsewhere["code"].isin(base["code"]).any() else " and with other code"
    return (
        f"Scored on another card{with_other_code} than {BASELINE}: {names} "
        f"({evidence.groups_of(elsewhere)})"
    )


def source(runs: pd.DataFrame) -> str:
    """Return where the speed and memory of `headline_table` come from, in a sentence or two."""
    shown = evidence.largest_micro_batch(runs)
    first = shown.iloc[0]
    if evidence.on_cpu(runs):
        hardware = "a CPU"
    elif first["world"] == 1:
        hardware = f"one {first['env.gpu']}"
    else:
        hardware = f"{first['world']} {first['env.gpu']}"
    sentence = (
        f"Speed and memory: group {first['group']}, code {evidence.commits(shown)}, on {hardware}, "
        f"{first['micro_batch']} samples in a forward pass, means over the timed runs; ± is half a "
        f"{LEVEL} % interval."
    )
    on_other_days = [
        name for name in evidence.timed_in_other_sittings(shown) if name in tagged("headline")
    ]
    if on_other_days:
        names = ", ".join(on_other_days)
        sentence += (
            f" {names} ran in another sitting than {evidence.baseline(runs)}, so that no ratio is "
            "shown."
        )
    if evidence.on_other_data(runs):
        sentence += f" {evidence.on_other_data(runs)}."
    return sentence


def _source_of_scores(judged: pd.DataFrame) -> str:
    """Return where the differences of scores in `headline_table` come from, in two sentences.

    Raises NotMeasured where the baseline has no F1.
    """
    base = judged[(judged["spec.variant"] == BASELINE) & (judged["status"] == "ok")]
    columns = {
        "best": "quality.best_f1",
        "never_answering": "quality.always_null_f1",
        "questions": "quality.n",
    }
    means = evidence.numbers(base, columns).mean()
    if means.isna().any():
        raise evidence.NotMeasured(f"{BASELINE} has no F1")
    above = means["best"] - means["never_answering"]
    return (
        f'ΔF1: against {BASELINE} over equal seeds, at the best threshold for "no answer"; '
        f"{judged['model.name'].iloc[0]} on {judged['spec.n_train'].max():,.0f} samples, scored on "
        f"{means['questions']:,.0f} questions ({evidence.groups_of(judged)}). {BASELINE} "
        f"scores {points(means['best'])} there, which is {number(above)} above never answering "
        f"({points(means['never_answering'])}); 1 F1 is {percent(1 / above)} of that difference."
    )


def lead(runs: pd.DataFrame, group: str) -> str:
    """Return how the lead over the strongest rival changes with the micro-batch, in a sentence.

    The lead is that of the recommended variant over the best of the Trainer and plain PyTorch (see
    `curves.lead`). Speeds that are not STEADY are left out.

    Raises NotMeasured where fewer than two micro-batches have a lead.
    """
    lines = summary(evidence.select(runs, group)).rename(columns={"samples_per_s": "speed"})
    # The effective batch follows the micro-batch here, and is no condition of its own.
    lines = evidence.usual_conditions(lines.drop(columns="batch"))
    lines = lines.drop_duplicates(["variant", "micro_batch"])
    # A speed without an interval counts.
    scatters = lines["samples_per_s±"] > STEADY * lines["speed"]
    compared = [RECOMMENDED, *tagged("trainer"), *tagged("plain")]
    name, rival, leads = curves.lead(lines[~scatters & lines["variant"].isin(compared)])
    if len(leads) < 2:
        raise evidence.NotMeasured(f"{rival} has a speed at one micro-batch alone")
    by_size = ", ".join(f"{factor(ratio)} at {size}" for size, ratio in leads.items())
    return f"{name} leads {rival} by {by_size} samples in a forward pass."
