"""Every source gives the same examples; every broken one a single line that names file, article and question."""

import shutil
from unittest.mock import Mock

import datasets
import pytest

from qa_lib.data.squad import Example, open_source
from tests.material import cases, document, hub_row, question, real_squad, refused, write

CONTEXT = "The Rhine flows north. The Rhône flows south. 🙂 Both rise in the Alps."
GOLD = ("north", CONTEXT.index("north"))
OTHER = "🙂 “sea” 1,000 the Rhône sea"
GOLDS = (("“sea”", 2), ("🙂", 0), ("sea", 24))
SECOND = (OTHER, [question("q3", "What?", *GOLDS)])
GOOD = document(
    (CONTEXT, [question("q1", "Where does the Rhine flow?", GOLD), question("q2", "Why?")]), SECOND
)
FIRST = Example("q1", "Rivers", "Where does the Rhine flow?", CONTEXT, (GOLD,))
EXPECTED = [
    FIRST,
    Example("q2", "Rivers", "Why?", CONTEXT),
    Example("q3", "Rivers", "What?", OTHER, GOLDS),
]


def flat(splits=("train", "validation")):
    """The hub's layout of EXPECTED."""
    rows = [hub_row(e.id, e.title, e.question, e.context, *e.answers) for e in EXPECTED]
    answers = {
        "text": datasets.List(datasets.Value("string")),
        "answer_start": datasets.List(datasets.Value("int32")),
    }
    columns = {name: datasets.Value("string") for name in ("id", "title", "context", "question")}
    table = datasets.Dataset.from_list(
        rows, features=datasets.Features({**columns, "answers": answers})
    )
    return datasets.DatasetDict(dict.fromkeys(splits, table))


def examples_of(source, split="train", **more) -> list[Example]:
    return open_source(source, split, **more).examples


@pytest.mark.parametrize("name", "train.json train-v2.0.json validation.json dev-v2.0.json".split())
def test_files_and_folders_in_the_nested_layout(tmp_path, name):
    split, other = ("train", "validation") if name.startswith("train") else ("validation", "train")
    file = write(tmp_path / name, GOOD)
    assert examples_of(file, split) == examples_of(str(tmp_path), split) == EXPECTED
    refused(rf"no {other}\.json or .* in this folder", open_source, tmp_path, other)


def test_saved_datasets(tmp_path):
    for name, data in (
        ("both", flat()),
        ("one", flat()["train"]),
        ("train-only", flat(("train",))),
    ):
        data.save_to_disk(tmp_path / name)
    assert (
        examples_of(tmp_path / "both", "validation")
        == examples_of(tmp_path / "one", "validation")
        == EXPECTED
    )
    refused(
        "no data set of save_to_disk with a split 'validation'",
        open_source,
        tmp_path / "train-only",
        "validation",
    )
    copy = shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert open_source(tmp_path / "one", "train").sha256 == open_source(copy, "train").sha256
    next(copy.glob("*.arrow")).write_bytes(b"junk")
    refused("copy", examples_of, copy)


def test_hub_is_asked_for_data_and_never_for_code(monkeypatch):
    load = Mock(side_effect=lambda name, split: flat()[split])
    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_source("squad_v2", "validation")
    assert not load.called
    assert source.examples == EXPECTED
    assert len(source.sha256) == 64
    load.assert_called_once_with("squad_v2", split="validation")
    assert examples_of("someone/squad") == EXPECTED
    load.side_effect = ConnectionError("no network\nat all")
    refused(
        r"^'squad_v2': no such file .*no network\): give --data FOLDER, a folder",
        examples_of,
        "squad_v2",
    )


def test_flat_data_of_another_kind_is_refused(tmp_path):
    row = {"id": "a", "question": "b", "context": "c"}
    for name, odd in (("poor", row), ("odd", row | {"answers": "d"})):
        datasets.Dataset.from_list([odd]).save_to_disk(tmp_path / name)
        refused(
            rf"{name}: 1 questions have no gold answers .*: article .*, question 'a': no list under .answers",
            examples_of,
            tmp_path / name,
        )


def test_synthetic_source():
    train = open_source("synthetic:50", "train")
    validation = open_source("synthetic:50", "validation")
    assert len(train.examples) == len(validation.examples) == 50
    assert train.examples != validation.examples
    assert train.sha256 != validation.sha256
    assert (
        train.sha256
        == open_source("synthetic:50", "train").sha256
        != open_source("synthetic:51", "train").sha256
    )
    for wrong in ("", "0", "-1", "x", "9" * 5000):
        refused("synthetic:2000", open_source, f"synthetic:{wrong}", "train")


@pytest.mark.parametrize(
    "name", ["missing.json", "a/b/c", "/no/such/folder", "tests/mistyped", "", "\0", "x" * 5000]
)
def test_a_source_that_is_not_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    refused(r"no such file or folder$", examples_of, name)


def test_hash_is_of_the_content_and_parses_nothing(tmp_path):
    source = open_source(write(tmp_path / "a.json", GOOD), "train")
    copy = open_source(write(tmp_path / "b.json", GOOD), "validation")
    assert source.sha256 == copy.sha256
    assert "examples" not in vars(source)
    (tmp_path / "b.json").write_text("{broken")
    assert open_source(tmp_path / "b.json", "train").sha256 != source.sha256


def test_what_is_odd_but_fine(tmp_path):
    """Of version 1, for one, which has no is_impossible."""
    old = {"id": "c", "question": "old", "answers": [{"text": GOLD[0], "answer_start": GOLD[1]}]}
    odd = document(
        ("", [question("a", "")]),
        (CONTEXT, [old]),
        ("x", []),
        ("  ", [question("b", "  x", id="b")]),
    )
    file = write(tmp_path / "bom.json", odd)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert {e.question: e.answers for e in examples_of(file)} == {"": (), "old": (GOLD,), "  x": ()}


# The one entry of a paragraph, and what is said of it; and a whole file.
BAD = {
    name: (document((CONTEXT, [entry])), said)
    for name, (entry, said) in cases("bad entries").items()
}
BAD |= cases("bad files")


@pytest.mark.parametrize("name", BAD)
def test_bad_layout_is_one_line_that_names_the_place(tmp_path, name):
    content, message = BAD[name]
    file = write(tmp_path / "data.json", content)
    assert refused(message, examples_of, file).encode().startswith(f"{file}: ".encode())


def test_broken_json(tmp_path):
    file = tmp_path / "data.json"
    for content in (
        b"",
        b"{",
        b'{"data": [}',
        b"[" * 200_000,
        b"1" * 5000,
        b"\xff\xfe\xfa",
        b"\x80",
        b'"\xc3("',
    ):
        file.write_bytes(content)
        refused(r"data\.json: not JSON", examples_of, file)


def test_all_that_training_cannot_take_is_counted_and_listed_by_kind(tmp_path):
    start = CONTEXT.index("south")
    bad = [question("once", "x", ("south", start - 1), GOLD), question("never", "x", ("west", 4))]
    bad += [question("flag", "x", GOLD, is_impossible=True)]
    bad += [question("place", "x", ("north", "17")), question("null", "x", answers=None)]
    file = write(tmp_path / "data.json", document((CONTEXT, [question("q", "x", GOLD), *bad])))
    said = refused(
        "^.*data.json: 2 questions have no gold answers in the SQuAD layout: ", examples_of, file
    )
    assert (
        "; 1 questions contradict their is_impossible: article 0 'Rivers', question 'flag'" in said
    )
    assert (
        "; 2 answers are not the text at their answer_start: article 0 'Rivers', question 'once'"
        in said
    )
    assert f"'south' at {start - 1}, and it is at {start} alone; " in said
    assert all(f"question '{entry['id']}'" in said for entry in bad)
    assert "question 'q'" not in said


def test_unlabelled_files_are_refused_by_training_with_how_many_they_are(tmp_path):
    entries = [{"id": f"q{i}", "question": "x"} for i in range(30)]
    file = write(tmp_path / "data.json", document((CONTEXT, entries)))
    refused("30 questions have no gold answers .*; and 10 more$", examples_of, file)
    assert len(examples_of(file, labelled=False)) == 30


@pytest.mark.parametrize("key", [0, 262, -3, 10**30])
def test_a_whole_number_is_an_id_by_its_digits(tmp_path, key):
    file = write(tmp_path / "data.json", document((CONTEXT, [question(key, "x", GOLD)])))
    source = open_source(file, "train")
    assert [e.id for e in (*source.examples, *source.golds)] == [str(key)] * 2


def test_a_whole_number_and_its_digits_are_one_id(tmp_path):
    entries = [question(7, "x", GOLD), question("7", "y", GOLD)]
    refused("the same id", examples_of, write(tmp_path / "data.json", document((CONTEXT, entries))))


@pytest.mark.parametrize("title", [None, 3, ["a"], "\ud83d"])
def test_a_title_is_never_needed(tmp_path, title):
    entries = [question("q", "x", GOLD)]
    file = write(tmp_path / "data.json", document((CONTEXT, entries), title=title))
    assert [e.answers for e in examples_of(file)] == [(GOLD,)]


@pytest.mark.parametrize("flag", [{}, {"is_impossible": None}])
def test_a_flag_that_is_null_or_not_there_leaves_it_to_the_answers(tmp_path, flag):
    golds = [{"text": GOLD[0], "answer_start": GOLD[1]}]
    entries = [{"id": "q", "question": "x", "answers": golds} | flag]
    file = write(tmp_path / "data.json", document((CONTEXT, entries)))
    assert examples_of(file)[0].answers == (GOLD,)
    entries[0]["answers"] = []
    refused("question 'q': 0 answers", examples_of, write(file, document((CONTEXT, entries))))


def test_a_paragraph_may_be_of_any_length(tmp_path):
    text = "word " * 200_000 + "north"
    file = write(
        tmp_path / "data.json", document((text, [question("q", "x", ("north", 1_000_000))]))
    )
    assert len(examples_of(file)[0].context) == 1_000_005


COLUMNS = {"id": ["a", "b"], "context": [CONTEXT] * 2, "question": ["where?", "why?"]}
UNLABELLED = {
    "no column": {},
    "null": {"answers": [None, None]},
    "null columns": {"answers": [{"text": None, "answer_start": None}] * 2},
    "null texts": {"answers": [{"text": [None], "answer_start": [None]}] * 2},
    "empty": {"answers": [{"text": [], "answer_start": []}] * 2},
    "numbers": {"id": [1, 2]},
    "null titles": {"title": [None, None]},
}


@pytest.mark.parametrize("name", UNLABELLED)
def test_a_data_set_without_answers_is_read_where_none_are_needed(tmp_path, name):
    columns = COLUMNS | UNLABELLED[name]
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    found = examples_of(tmp_path / "saved", "validation", labelled=False)
    assert [e.question for e in found] == COLUMNS["question"]
    assert [e.id for e in found] == [*map(str, columns["id"])]
    assert not any(e.answers for e in found)
    if name != "empty":
        refused("2 questions have no gold answers", examples_of, tmp_path / "saved")


def test_answers_of_a_data_set_may_be_a_list_of_rows(tmp_path):
    rows = [[{"text": GOLD[0], "answer_start": GOLD[1]}], []]
    datasets.Dataset.from_dict(COLUMNS | {"answers": rows}).save_to_disk(tmp_path / "saved")
    assert [e.answers for e in examples_of(tmp_path / "saved")] == [(GOLD,), ()]


def test_many_misplaced_answers_stay_one_readable_line(tmp_path):
    entries = [question(f"q{i}", "x", ("north", 1)) for i in range(500)]
    file = write(tmp_path / "data.json", document((CONTEXT, entries)))
    assert len(refused(r"500 answers .*; and 480 more$", examples_of, file)) < 3_000


def test_real_files_hold_what_their_readme_says():
    train, validation = (real_squad(split) for split in ("train", "validation"))
    assert [len(part) for part in (train, validation)] == [19_017, 6_078]
    assert [sum(e.impossible for e in part) for part in (train, validation)] == [4_929, 3_168]
    assert [len({id(e.context) for e in part}) for part in (train, validation)] == [3_093, 646]
