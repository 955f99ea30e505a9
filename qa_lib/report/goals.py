"""The goals that were set for the speed of a language model on one GPU, and how far its records reach them."""

import pandas as pd

from qa_lib.report.quality import largest_batch
from qa_lib.report.readme import LANGUAGE
from qa_lib.report.runs import NotMeasured, commits, select
from qa_lib.report.tables import summarise
from qa_lib.report.text import say

SHAPE, LENGTH = "gpt2:L12H768", 1024  # GPT-2 small's; what the goals are set for
TOKENS_PER_S, TIMES, MFU = 500_000, 2.0, 0.45


def reached(every: pd.DataFrame, group: str) -> str:
    """Each goal, what the recommended row of a group has reached of it, and by how much it is missed, in a sentence.
    Raises NotMeasured."""
    runs = select(every, group)
    runs = runs[(runs["model.name"] == SHAPE) & (runs["length"] == LENGTH) & (runs["world"] == 1)]
    if runs.empty:
        raise NotMeasured(f"group {group} has no run of {SHAPE} at {LENGTH:,} tokens on one GPU")
    lines = largest_batch(summarise(runs)).set_index("variant", drop=False)
    _, best, peer = LANGUAGE
    if absent := [name for name in (best, peer) if name not in lines.index]:
        raise NotMeasured(f"group {group} has no run of {', '.join(absent)}")
    best, peer = lines.loc[best], lines.loc[peer]
    return say("goals.reached", best=best, peer=peer, tokens=TOKENS_PER_S, times=TIMES, mfu=MFU, length=LENGTH,
               ratio=best["tokens_per_s_padded"] / peer["tokens_per_s_padded"], gpu=runs["env.gpu"].iloc[0], group=group,
               code=commits(runs[runs["spec.variant"].isin([best["variant"], peer["variant"]])]))  # fmt: skip
