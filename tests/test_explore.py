"""The notebook `explore` on data that lacks one kind of question; all else of it is in test_notebooks."""

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests.material import document, question, write
from tests.test_notebooks import ROOT, run_here

TEXT = "The river Rhine rises in the Alps and ends near Rotterdam."
GOLD = ("Rhine", TEXT.index("Rhine"))


def entries(split, kind):
    """200 questions: the first version of SQuAD knows no unanswerable ones, and has no field that says so."""
    found = [question(f"{split}{i}", f"who {i}", *([] if kind == "unanswerable" else [GOLD])) for i in range(200)]
    return [{key: entry[key] for key in entry if kind != "v1.1" or key != "is_impossible"} for entry in found]


@pytest.mark.parametrize(("kind", "absent"), [("unanswerable", "F1 where there is an answer"),
                                              ("answerable", "F1 where there is none"),
                                              ("v1.1", "F1 where there is none")])  # fmt: skip
def test_explore_takes_questions_of_one_kind_alone(tmp_path, monkeypatch, kind, absent):
    for split in ("train", "validation"):
        write(tmp_path / f"{split}.json", document((TEXT, entries(split, kind))))
    monkeypatch.chdir(ROOT)
    run_here("notebooks/explore.ipynb", preset="smoke", data=str(tmp_path), model="tiny")
    scores = InteractiveShell.instance().user_ns["scores"]
    assert scores[absent].isna().all() and scores.loc["the gold answers", "F1"] == 100
