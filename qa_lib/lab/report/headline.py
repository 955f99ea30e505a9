"""The result on one screen: minutes of a training, the lead over rivals, whether F1 is kept.

README.md begins with it, and so does the report's notebook, which shows one group's. The minutes
are those of trainings that were measured whole, from the command to the end. Without such they are
projected from the speeds of a bench group.
"""

import contextlib
from pathlib import Path

import pandas as pd

from qa_lib.lab.report import evidence, in_turns, rivals, spoken, whole_trainings
from qa_lib.lab.report.figures import picture_link, timed
from qa_lib.lab.report.format import gain, number
from qa_lib.lab.report.stats import (
    BASELINE,
    BEST_F1,
    F1,
    LEVEL,
    MARGIN,
    by_seed,
    compare,
    equivalence,
)
from qa_lib.lab.report.summary import summary
from qa_lib.spec.variants import RECOMMENDED, VARIANTS, tagged

FEW_MINUTES = 2
PROJECTED = 32  # the micro-batch at whose speed a full training is projected


def first_screen(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Return what README.md begins with, as Markdown.

    Where runs in turns have the stack in 8 bits beside plain PyTorch, its lead and its F1 are
    theirs, on whichever card that was. The minutes are of the stack beside plain PyTorch, too, or
    else those of the group. The lead is of the model that the minutes are of, if it has one.
    Without runs in turns it is what `headline` returns, which also says what the arguments are.

    Raises NotMeasured where the minutes are not known.
    """
    try:
        blocks = in_turns.enough_blocks(runs)
    except evidence.NotMeasured:
        return headline(runs, group, figures)
    chosen = evidence.select(runs, group)
    model = blocks["model.name"].iloc[0]
    timed = blocks
    lead = in_turns.finding(blocks)
    try:
        whole = whole_trainings.of_stack(runs)
    except evidence.NotMeasured:
        minutes, source_of_minutes = _minutes(runs, chosen[chosen["model.name"] == model])
    else:
        minutes, source_of_minutes = _minutes_of_stack(whole), _source_of_measured(whole)
        with contextlib.suppress(evidence.NotMeasured):
            of_trained = runs["model.name"] == whole["model.name"].iloc[0]
            timed = in_turns.enough_blocks(runs[of_trained])
            lead = in_turns.finding_beside(timed, blocks)
    f1, source_of_f1 = _f1_of_stack(runs, timed)
    speed = f"*Speed:* runs in turns, {evidence.groups_of(timed)}; [more](#results)."
    return _screen(
        [minutes, lead, f1],
        figures / blocks["group"].iloc[0] / "rivals.png",
        _not_shown(runs, chosen, model),
        [source_of_minutes, speed, *source_of_f1],
    )


def headline(runs: pd.DataFrame, group: str, figures: Path = Path()) -> str:
    """Return the result of a group as Markdown, with the picture of the rivals below.

    Two numbers and F1 come first, then the picture, what was not shown, and, folded, where the
    numbers come from. `runs` are those of all groups. The picture is shown if it lies below the
    folder `figures`.

    Raises NotMeasured where the speed or memory of the recommended variant, or the speed of a
    rival, is missing.
    """
    chosen = evidence.select(runs, group)
    model = shown_model(runs, group)
    minutes, source_of_minutes = _minutes(runs, chosen[chosen["model.name"] == model])
    kept, source_of_f1 = _kept(runs, group)
    return _screen(
        [minutes, _lead(chosen, model), kept],
        figures / group / "rivals.png",
        _not_shown(runs, chosen, model),
        [source_of_minutes, *source_of_f1, _costs(timed(chosen), chosen)],
    )


def _screen(findings: list[str], picture: Path, not_shown: str, sources: list[str]) -> str:
    """Return the findings as a list, the picture if it was drawn, and the sources, folded."""
    paragraphs = [
        "\n".join(f"- {finding}" for finding in findings),
        picture_link(picture),
        not_shown,
        folded("Where these numbers come from", "\n".join(f"- {part}" for part in sources)),
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def folded(title: str, text: str) -> str:
    """Return Markdown that GitHub and Jupyter show as a title until it is opened."""
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


# Which model, and which scores.


def shown_model(runs: pd.DataFrame, group: str) -> str:
    """Return the name of the model that the headline of a group is of.

    It is the largest on which the recommended variant was timed, scored and trained whole. Without
    such it is the model on which the baseline was timed most often.
    """
    chosen = evidence.select(runs, group)
    is_recommended = chosen["spec.variant"] == RECOMMENDED
    on_card = runs["spec.hardware"].isin(chosen["spec.hardware"])
    whole = runs[whole_trainings.are_whole(runs) & on_card & (runs["spec.variant"] == RECOMMENDED)]
    complete = chosen[
        is_recommended
        & chosen["model.name"].isin(_scored(runs, group)["model.name"])
        & chosen["model.name"].isin(whole["model.name"])
    ]
    if len(complete):
        return complete.sort_values("model.params_total")["model.name"].iloc[-1]
    of_baseline = chosen["spec.variant"] == BASELINE
    models = chosen.loc[of_baseline if of_baseline.any() else slice(None), "model.name"]
    return models.mode()[0]


def _scored(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """Return those runs of the recommended variant whose scores speak for a group."""
    judging = evidence.judging_runs(runs, group)
    has_score = evidence.numbers(judging, {"f1": BEST_F1})["f1"].notna()
    return judging[has_score & judging["spec.variant"].eq(RECOMMENDED)]


def judged(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """Return the runs whose scores stand beside the speeds of a group.

    They are those of the model that the headline is of, or else of the model with the most runs.
    """
    judging = evidence.judging_runs(runs, group)
    model = shown_model(runs, group)
    if model in set(_scored(runs, group)["model.name"]):
        judging = judging[judging["model.name"] == model]
    return evidence.usual_conditions(judging)


# The lead over rivals, and memory.


def _lead(chosen: pd.DataFrame, model: str) -> str:
    """Return the lead over the strongest rival, and over the strongest Trainer where that is none.

    `chosen` are the runs of one group. Its runs in turns count, or else the means of all runs.

    Raises NotMeasured where the recommended variant or all rivals are missing.
    """
    with contextlib.suppress(evidence.NotMeasured):
        return in_turns.finding(in_turns.enough_blocks(chosen[chosen["model.name"] == model]))
    factors = rivals.leads(rivals.compared(chosen, model))
    strongest = min(factors, key=factors.get)
    text = (
        f"{spoken.capital(spoken.variant(RECOMMENDED))} trains **{number(factors.pop(strongest))} "
        f"times as fast as {spoken.VARIANTS[strongest]}** ({strongest})"
    )
    if factors:
        rival = min(factors, key=factors.get)
        text += f", and {number(factors[rival])} times as fast as {spoken.variant(rival)}"
    return f"{text}."


def _costs(lines: pd.DataFrame, chosen: pd.DataFrame) -> str:
    """Return the gain in speed over the baseline and the memory that it takes, in two sentences.

    `lines` are those of `summary` at one micro-batch, and `chosen` the runs of their group.

    Raises NotMeasured where the recommended variant or all memory is missing.
    """
    lines = lines.set_index("variant", drop=False)
    gib = lines["reserved_mib"] / 1024
    gib_of_full = gib[evidence.trains_all(lines["variant"])]
    ratio = lines["ratio"].get(RECOMMENDED)
    if pd.isna(ratio) or gib_of_full.isna().all():
        raise evidence.NotMeasured(
            f"{RECOMMENDED} and its memory have not been measured beside {BASELINE} in "
            f"{chosen['group'].iloc[0]}"
        )
    shown = evidence.usual_conditions(chosen)
    shown = shown[shown["micro_batch"].isin(lines["micro_batch"])]
    return (
        f"*Speed and memory:* steady steps of {lines['micro_batch'].iloc[0]} samples in a forward "
        f"pass, group {chosen['group'].iloc[0]}, code {evidence.commits(shown)}. "
        f"{spoken.capital(spoken.variant(RECOMMENDED))} trains {number(ratio)} times as fast as "
        f"{spoken.variant(BASELINE)}, and reserves {number(gib[RECOMMENDED])} GiB where that takes "
        f"{number(gib[BASELINE])}; "
        f"{spoken.variant(gib_of_full.idxmin())} takes {number(gib_of_full.min())}."
    )


# Minutes of a training.


def _minutes(runs: pd.DataFrame, chosen: pd.DataFrame) -> tuple[str, str]:
    """Return the minutes of a whole training in a sentence, and where they come from.

    They are measured ones where the recommended variant and a Trainer were both measured so, and
    else projected from the speeds of `chosen`, the runs of one group and model.

    Raises NotMeasured where one of them has not even a speed.
    """
    whole = whole_trainings.like(runs, chosen)
    minutes = whole.groupby("spec.variant")["minutes"].mean()
    if RECOMMENDED in minutes and _has_trainer(minutes):
        sentence = _minutes_sentence(minutes, chosen)
        if whole["spec.variant"].is_unique:
            sentence += " Each was timed once."
        shortened = whole.loc[whole["times"] > 1, "spec.variant"].unique()
        if len(shortened):
            sentence += f" The minutes of {' and '.join(shortened)} are projected from one epoch."
        return sentence, _source_of_measured(whole)
    table = projected(summary(chosen))
    minutes = table["minutes"]
    if RECOMMENDED not in minutes or not _has_trainer(minutes):
        raise evidence.NotMeasured(
            f"{RECOMMENDED} and the Trainer have not both been timed in {chosen['group'].iloc[0]}"
        )
    return f"{_minutes_sentence(minutes, chosen)} Projected.", _source_of_projected(table)


def _minutes_of_stack(whole: pd.DataFrame) -> str:
    """Return how long the stack in 8 bits and plain PyTorch train, in a sentence.

    `whole` is what `whole_trainings.of_stack` returns.
    """
    first = whole.iloc[0]
    minutes = whole.groupby("spec.variant")["minutes"].mean()
    others = [name for name in (in_turns.STACK_16_BITS, in_turns.PLAIN) if name in minutes]
    beside = [f"with {spoken.variant(name)} {_duration(minutes[name])}" for name in others]
    return (
        f"Three epochs of {spoken.model(first['model.name'])} on {first['spec.n_train']:,.0f} "
        f"samples take **{_duration(minutes[in_turns.STACK])}** on one "
        f"{spoken.card(first['env.gpu'])} with {spoken.variant(in_turns.STACK)}, "
        f"{' and '.join(beside)}."
    )


def _duration(minutes: float) -> str:
    """Return minutes as people say them, and few of them as seconds."""
    return f"{60 * minutes:.0f} seconds" if minutes < FEW_MINUTES else f"{minutes:.1f} minutes"


def _has_trainer(minutes: pd.Series) -> bool:
    """Return whether a Trainer is among the rivals of `rivals.quickest`."""
    return bool(set(rivals.quickest(1 / minutes)) & set(tagged("trainer")))


def _minutes_sentence(minutes: pd.Series, chosen: pd.DataFrame) -> str:
    """Return the minutes of the recommended variant and of its rivals, indexed by variant."""
    with_rivals = [
        f"with {spoken.variant(name)} {minutes[name]:.1f}" for name in rivals.quickest(1 / minutes)
    ]
    return (
        f"Three epochs of {spoken.model(chosen['model.name'].iloc[0])} take "
        f"**{minutes[RECOMMENDED]:.1f} minutes** on one {spoken.card(chosen['env.gpu'].iloc[0])} "
        f"with {spoken.variant(RECOMMENDED)}, {' and '.join(with_rivals)}."
    )


def _source_of_measured(whole: pd.DataFrame) -> str:
    """Return the conditions under which whole trainings were taken."""
    first = whole.iloc[0]
    end = "the score" if whole["quality.f1"].notna().all() else "the last step"
    return (
        f"*Minutes:* measured from the command to {end}, with nothing cached, on "
        f"{first['spec.n_train']:,.0f} samples ({spoken.training_set(first['data.name'])}; all of "
        f"SQuAD v2 makes {evidence.FULL_SAMPLES:,}); runs of each: "
        f"{whole.value_counts('spec.variant').min()}; "
        f"group {first['group']}, code {evidence.commits(whole)}."
    )


def _source_of_projected(table: pd.DataFrame) -> str:
    """Return what `projected` counts, and whether the quickest Trainer's compilation does."""
    trainers = table.index.intersection(tagged("trainer"))
    rival = table.loc[trainers, "speed"].idxmax()
    caveat = ""
    if not table.loc[rival, "cold"]:
        compile_s = table.loc[rival, "compile_s"]
        caveat = f"; {rival} compiles for {compile_s:.0f} s, with a part of the code from a cache"
    return (
        f"*Minutes:* projected from measured speed to {evidence.FULL_SAMPLES:,} samples, with "
        f"compilation, without data and scoring{caveat}."
    )


def projected(lines: pd.DataFrame) -> pd.DataFrame:
    """Return the minutes of a full training at a bench group's speeds, indexed by variant.

    `lines` are those of `summary`. Only variants with the tag `headline` are projected. Columns:

    - speed: samples/s
    - compile_s: seconds of compilation, NaN where they were not measured
    - cold: whether compile_s is of runs that found nothing compiled
    - minutes: those of training and compilation, without data and scoring
    - share: of the baseline's minutes, NaN where the two share no sitting

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
    minutes = (train_s + compile_s.fillna(0.0)) / 60
    return pd.DataFrame({
        "speed": speed,
        "compile_s": compile_s,
        "cold": cold,
        "minutes": minutes,
        "share": (minutes / minutes[evidence.baseline(lines)]).where(usual["ratio"].notna()),
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


# Quality, and what is open.


def _kept(runs: pd.DataFrame, group: str) -> tuple[str, list[str]]:
    """Return whether the recommended variant keeps the baseline's F1 in a sentence, and where that
    comes from, of which there is nothing where it was not measured.

    Raises NotMeasured where no variant can be compared.
    """
    judging = judged(runs, group)
    tested = equivalence(judging)
    if RECOMMENDED not in tested.index:
        return f"The F1 of {spoken.variant(RECOMMENDED)} has not been measured.", []
    compared = tested.loc[RECOMMENDED]
    baseline = spoken.variant(BASELINE)
    if compared["verdict"] == "within":
        finding = f"stays within {MARGIN:g} point of that of {baseline}"
    elif compared["verdict"] == "no worse":
        finding = f"does not fall {MARGIN:g} point below that of {baseline}"
    else:
        finding = f"is not shown to stay within {MARGIN:g} point of that of {baseline}"
    both = judging[judging["spec.variant"].isin([BASELINE, RECOMMENDED])]
    of_recommended = both[both["spec.variant"] == RECOMMENDED]
    on_which = _on_which(of_recommended, shown_model(runs, group))
    at_best = gain(compared["best_delta"], compared["best_delta±"])
    at_zero = gain(compared["delta"], compared["delta±"])
    source = (
        f'*F1:* its change at the best threshold for "no answer"; at threshold 0 it is {at_zero}. '
        f"Both are means over {compared['n']} seeds with {LEVEL} % intervals, "
        f"{evidence.groups_of(both)}."
    )
    recommended = spoken.variant(RECOMMENDED)
    return f"The F1 of {recommended} {finding}: **{at_best}**, measured {on_which}.", [source]


def _f1_of_stack(runs: pd.DataFrame, timed: pd.DataFrame) -> tuple[str, list[str]]:
    """Return the F1 of the stack in 8 bits against plain PyTorch in a sentence, and its source, if
    it has one.

    `timed` are the runs whose speed stands beside.
    """
    stack = spoken.variant(in_turns.STACK)
    scored = in_turns.scored_part(runs)
    if in_turns.PLAIN not in set(scored["spec.variant"]):
        return f"The F1 of {stack} has not been measured beside plain PyTorch's.", []
    pair = (in_turns.STACK, in_turns.PLAIN)
    difference, half = compare(scored, *pair, BEST_F1)
    at_zero = gain(*compare(scored, *pair, F1))
    seeds = len(by_seed(scored, BEST_F1)[list(pair)].dropna())
    source = (
        f'*F1:* at the best threshold for "no answer"; at threshold 0 it is {at_zero}. Both are '
        f"means over {seeds} seeds with {LEVEL} % intervals, group {scored['group'].iloc[0]}."
    )
    model = timed["model.name"].iloc[0]
    mean = ""
    if scored["model.name"].iloc[0] == model:
        mean = f"is **{by_seed(scored, BEST_F1)[in_turns.STACK].mean():.1f}** and "
    finding = (
        f"Its F1 {mean}differs by **{gain(difference, half)}** from that of "
        f"{spoken.variant(in_turns.PLAIN)}, measured {_on_which(scored, model)}"
    )
    lost = half - difference
    if lost > 0:
        finding += f": the interval of {LEVEL} % reaches −{lost:.2f}"
    return f"{finding}.", [source]


def _on_which(scored: pd.DataFrame, model: str) -> str:
    """Return whether runs that were scored are of the model whose speed is shown, in words."""
    first = scored.iloc[0]
    if first["model.name"] == model:
        return "on the same model"
    millions = first["model.params_total"] / 1e6
    return f"on a smaller model ({spoken.model(first['model.name'])}, {millions:.0f} M parameters)"


def _not_shown(runs: pd.DataFrame, chosen: pd.DataFrame, model: str) -> str:
    """Return what no record shows: the F1 of the model that is shown, and other cards.

    `chosen` are the runs of the group that is shown.
    """
    gpus = sorted(set(runs["env.gpu"].dropna()))
    scored_sizes = runs.loc[runs["quality.f1"].notna(), "model.params_total"]
    sizes = chosen.loc[chosen["model.name"] == model, "model.params_total"]
    missing = []
    if not scored_sizes.isin(sizes).any():
        missing.append(f"the F1 of {spoken.model(model)} itself")
    if in_turns.TUNED_TRAINER not in set(runs["spec.variant"]):
        missing.append(
            f"{spoken.variant(in_turns.TUNED_TRAINER)}, which a search found quicker than the "
            "compiled one"
        )
    missing.append(f"anything on another card than the {' and '.join(map(spoken.card, gpus))}")
    sentence = f"**Not shown:** {'; '.join(missing)}"
    return f"{sentence}." if "Tesla T4" in gpus else f"{sentence}; no T4 has run anything."
