"""The notebook `explore` on data that lacks one kind of question; all else of it is in test_notebooks."""

import matplotlib
import nbformat
import pytest

from tests.material import document, question, write

TEXT = "The river Rhine rises in the Alps and ends near Rotterdam."
GOLD = ("Rhine", TEXT.index("Rhine"))


def entries(split, kind):
    """200 questions: the first version of SQuAD knows no unanswerable ones, and has no field that says so."""
    found = [question(f"{split}{i}", f"who {i}", *([] if kind == "unanswerable" else [GOLD])) for i in range(200)]
    return [{key: entry[key] for key in entry if kind != "v1.1" or key != "is_impossible"} for entry in found]


@pytest.mark.parametrize(("kind", "absent"), [("unanswerable", "F1 where there is an answer"),
                                              ("answerable", "F1 where there is none"),
                                              ("v1.1", "F1 where there is none")])  # fmt: skip
def test_explore_takes_questions_of_one_kind_alone(tmp_path, kind, absent):
    matplotlib.use("Agg")
    for split in ("train", "validation"):
        write(tmp_path / f"{split}.json", document((TEXT, entries(split, kind))))
    names = {}
    for cell in nbformat.read("notebooks/explore.ipynb", 4).cells:
        source = cell.source.replace("check_parameters(In)", "")
        if "parameters" in cell.metadata.get("tags", ()):
            source = f"scale, seed, data, model, micro_batch = 'smoke', 0, {str(tmp_path)!r}, 'tiny', 0"
        if cell.cell_type == "code" and "bootstrap" not in cell.metadata.get("tags", ()):
            exec(source, names)
    scores = names["scores"]
    assert scores[absent].isna().all() and scores.loc["the gold answers", "F1"] == 100
    assert list(names["padding"]["text in %"]) == sorted(names["padding"]["text in %"])
