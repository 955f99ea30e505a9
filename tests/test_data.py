"""Every source gives the same examples; every broken one is refused in one line that says where."""

import shutil
from unittest.mock import Mock

import datasets
import pytest

from qa_lib.data.examples import Example, build_examples, flat_rows
from qa_lib.data.files import hash_files
from qa_lib.data.origins import SYNTHETIC_LIMIT
from qa_lib.data.squad import open_source
from tests.material import document, hub_row, question, real_squad, refused, write

CONTEXT = "The Rhine flows north. The Rhône flows south. 🙂 Both rise in the Alps."
GOLD = ("north", CONTEXT.index("north"))
OTHER_CONTEXT = "🙂 “sea” 1,000 the Rhône sea"
OTHER_GOLDS = (("“sea”", 2), ("🙂", 0), ("sea", 24))
GOOD = document(
    (CONTEXT, [question("q1", "Where does the Rhine flow?", GOLD), question("q2", "Why?")]),
    (OTHER_CONTEXT, [question("q3", "What?", *OTHER_GOLDS)]),
)
# The questions of GOOD.
EXPECTED = [
    Example("q1", "Rivers", "Where does the Rhine flow?", CONTEXT, (GOLD,)),
    Example("q2", "Rivers", "Why?", CONTEXT),
    Example("q3", "Rivers", "What?", OTHER_CONTEXT, OTHER_GOLDS),
]


def flat(splits=("train", "validation")) -> datasets.DatasetDict:
    """Return EXPECTED in the hub's layout, as every one of these splits."""
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
    assert examples_of(file, split) == EXPECTED
    assert examples_of(str(tmp_path), split) == EXPECTED
    refused(rf"no {other}\.json or .* in this folder", open_source, tmp_path, other)


def test_a_saved_dataset_with_splits_and_one_without_are_read(tmp_path):
    flat().save_to_disk(tmp_path / "both")
    flat()["train"].save_to_disk(tmp_path / "one")
    assert examples_of(tmp_path / "both", "validation") == EXPECTED
    assert examples_of(tmp_path / "one", "validation") == EXPECTED


def test_a_saved_dataset_without_the_split_is_refused(tmp_path):
    flat(("train",)).save_to_disk(tmp_path / "train-only")
    refused(
        "no data set of save_to_disk with a split 'validation'",
        open_source,
        tmp_path / "train-only",
        "validation",
    )


def test_copies_of_a_saved_dataset_have_one_hash(tmp_path):
    flat()["train"].save_to_disk(tmp_path / "one")
    copy = shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert open_source(tmp_path / "one", "train").sha256 == open_source(copy, "train").sha256


def test_a_damaged_saved_dataset_is_refused(tmp_path):
    flat()["train"].save_to_disk(tmp_path / "damaged")
    next((tmp_path / "damaged").glob("*.arrow")).write_bytes(b"junk")
    refused("damaged", examples_of, tmp_path / "damaged")


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


def test_a_data_set_of_the_hub_without_answers_is_read_where_none_are_needed(monkeypatch):
    table = flat()["train"].remove_columns("answers")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    found = examples_of("someone/asked", labelled=False)
    assert [example.question for example in found] == [example.question for example in EXPECTED]


def test_a_hash_of_the_hub_follows_name_split_and_content(monkeypatch):
    content = {"id": ["a"]}

    def load(*_, **__):
        return datasets.Dataset.from_dict(content)

    monkeypatch.setattr(datasets, "load_dataset", load)

    def digest(name="squad_v2", split="train"):
        return open_source(name, split).sha256

    first = digest()
    assert digest() == first
    assert digest(name="someone/squad") != first
    assert digest(split="validation") != first
    content["id"] = ["b"]
    assert digest() != first


@pytest.mark.parametrize("texts", [["The"], ["The", "north", "Rhine"]])
def test_columns_of_answers_that_are_not_as_long_are_refused(texts):
    answers = {"text": texts, "answer_start": [0, 16]}
    row = {"id": "a", "question": "b", "context": CONTEXT, "answers": answers}
    rows = flat_rows(datasets.Dataset.from_list([row]), "saved")
    refused(
        "1 questions have no gold answers .*'a': no (text|whole)", build_examples, rows, "", True
    )


@pytest.mark.parametrize("missing", ["text", "answer_start"])
def test_one_column_of_answers_alone_is_no_list_of_answers(missing):
    answers = {"text": ["The"], "answer_start": [0]} | {missing: None}
    row = {"id": "a", "question": "b", "context": CONTEXT, "answers": answers}
    rows = flat_rows(datasets.Dataset.from_list([row]), "saved")
    refused("question 'a': no list under 'answers'", build_examples, rows, "", True)


def test_flat_data_of_another_kind_is_refused(tmp_path):
    row = {"id": "a", "question": "b", "context": "c"}
    for name, odd in (("poor", row), ("odd", row | {"answers": "d"})):
        datasets.Dataset.from_list([odd]).save_to_disk(tmp_path / name)
        refused(
            rf"{name}: 1 questions have no gold answers .*: "
            "article .*, question 'a': no list under .answers",
            examples_of,
            tmp_path / name,
        )


def test_synthetic_splits_are_different_questions_of_the_wanted_number():
    train = open_source("synthetic:50", "train")
    validation = open_source("synthetic:50", "validation")
    assert len(train.examples) == 50
    assert len(validation.examples) == 50
    assert train.examples != validation.examples
    assert train.sha256 != validation.sha256


def test_a_synthetic_hash_follows_the_number_of_questions():
    first = open_source("synthetic:50", "train").sha256
    assert open_source("synthetic:50", "train").sha256 == first
    assert open_source("synthetic:51", "train").sha256 != first


@pytest.mark.parametrize("count", ["", "0", "-1", "x", "9" * 5000], ids=lambda count: count[:3])
def test_a_synthetic_source_of_no_number_is_refused(count):
    refused("synthetic:2000", open_source, f"synthetic:{count}", "train")


@pytest.mark.parametrize("count", [SYNTHETIC_LIMIT + 1, 10 * SYNTHETIC_LIMIT])
def test_a_synthetic_source_of_too_many_questions_is_refused(count):
    refused("synthetic:2000", open_source, f"synthetic:{count}", "train")


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


@pytest.mark.parametrize("use", ["examples", "golds"])
def test_a_file_that_changed_after_its_hash_was_taken_is_refused(tmp_path, use):
    path = write(tmp_path / "train.json", GOOD)
    source = open_source(path, "train")
    assert source.sha256
    write(path, document((CONTEXT, [question("q1", "Where does it flow?", GOLD)])))
    refused("train.json: it has changed since it was first looked at", getattr, source, use)


def test_what_is_odd_but_fine(tmp_path):
    """A byte order mark, empty texts, and version 1.1, which has no is_impossible."""
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


# For each fault: the one question of a paragraph, and what the message says.
IMPOSSIBLE = {"id": "q1", "question": "x", "answers": [], "is_impossible": True}


def answered(text, start, **more) -> dict:
    """A question whose one answer may be anything."""
    return {"id": "q1", "question": "x", "answers": [{"text": text, "answer_start": start}], **more}


PLACE = "article 0 'Rivers', question 'q1': "
BAD_QUESTIONS = {
    "no object": (17, "article 0 'Rivers': .*no text under 'id'"),
    "id no text": (IMPOSSIBLE | {"id": 7.5}, "article 0 'Rivers': .*no text under 'id'"),
    "true id": (IMPOSSIBLE | {"id": True}, "article 0 'Rivers': .*no text under 'id'"),
    "no question": (IMPOSSIBLE | {"question": None}, PLACE + ".*no text under 'question'"),
    "half a character": (
        IMPOSSIBLE | {"question": "x \ud83d"},
        PLACE + "the question holds half",
    ),
    "answers no list": (IMPOSSIBLE | {"answers": {}}, PLACE + ".*no list under 'answers'"),
    "no answers": (
        {"id": "q1", "question": "x", "is_impossible": True},
        f"1 questions have no gold answers .*{PLACE}.*no list under 'answers'",
    ),
    "null answers": (
        IMPOSSIBLE | {"answers": None},
        "1 questions have no gold answers .*question 'q1': .*no list under 'answers'",
    ),
    "null start": (
        answered("The", None),
        "1 questions have no gold answers .*question 'q1': .*no whole number under 'answer_start'",
    ),
    "start as text": (
        answered("The", "0"),
        "1 questions have no gold answers .*question 'q1': .*no whole number under 'answer_start'",
    ),
    "no start": (
        {"id": "q1", "question": "x", "answers": [{"text": "The"}], "is_impossible": False},
        PLACE + ".*no whole number under 'answer_start'",
    ),
    "true start": (
        answered("h", True, is_impossible=False),
        PLACE + ".*no whole number under 'answer_start'",
    ),
    "empty answer": (answered("", 3, is_impossible=False), PLACE + "'' at 3"),
    "impossible with answers": (
        answered("north", 16, is_impossible=True),
        PLACE + "1 answers, and is_impossible is true",
    ),
    "possible without answers": (
        IMPOSSIBLE | {"is_impossible": False},
        PLACE + "0 answers, and is_impossible is false",
    ),
    "flag as text": (
        IMPOSSIBLE | {"is_impossible": "no"},
        PLACE + ".*no true or false under 'is_impossible'",
    ),
    "misplaced": (
        answered("north", 3, is_impossible=False),
        f"1 answers are not .*{PLACE}'north' at 3",
    ),
    "from the end": (answered("Alps.", -5, is_impossible=False), PLACE + "'Alps.' at -5"),
    "past the end": (answered("Alps.", 10**30, is_impossible=False), PLACE + "'Alps.' at 1000"),
}
# For each fault: the whole file, and what the message says.
BAD_FILES = {
    "no context": (document((None, [IMPOSSIBLE])), "article 0 'Rivers': .*no text under 'context'"),
    "double id": (
        document((CONTEXT, [IMPOSSIBLE]), ("Other.", [IMPOSSIBLE])),
        PLACE + "the same id",
    ),
    "half in the context": (
        document(("a \udc80", [IMPOSSIBLE])),
        "article 0 'Rivers': the context holds half",
    ),
    "no paragraphs": (document(), "an empty data set"),
    "no questions": (document((CONTEXT, [])), "an empty data set"),
    "list": ([], "no list under 'data'"),
    "data no list": ({"data": {}}, "no list under 'data'"),
    "flat JSON": (
        {"data": [{"id": "q1", "question": "x", "context": "y"}]},
        "article 0: .*no list under 'paragraphs'",
    ),
    "no qas": (
        {"data": [{"title": "A", "paragraphs": [{"context": "x"}]}]},
        "'A', paragraph 0: .*under 'qas'",
    ),
}


@pytest.mark.parametrize("fault", BAD_QUESTIONS)
def test_a_bad_question_is_one_line_that_names_the_place(tmp_path, fault):
    entry, message = BAD_QUESTIONS[fault]
    file = write(tmp_path / "data.json", document((CONTEXT, [entry])))
    assert refused(message, examples_of, file).startswith(f"{file}: ")


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_bad_file_is_one_line_that_names_the_place(tmp_path, fault):
    content, message = BAD_FILES[fault]
    file = write(tmp_path / "data.json", content)
    assert refused(message, examples_of, file).startswith(f"{file}: ")


BROKEN_JSON = [
    b"",
    b"{",
    b'{"data": [}',
    b"[" * 200_000,
    b"1" * 5000,
    b"\xff\xfe\xfa",
    b"\x80",
    b'"\xc3("',
]


@pytest.mark.parametrize("content", BROKEN_JSON, ids=lambda content: ascii(content[:8]))
def test_broken_json_is_refused(tmp_path, content):
    file = tmp_path / "data.json"
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
    for entry in bad:
        assert f"question '{entry['id']}'" in said
    assert "question 'q'" not in said


def test_a_misplaced_answer_that_is_in_the_paragraph_twice_is_placed_by_nobody(tmp_path):
    entries = [question("twice", "x", ("flows", 3)), question("nowhere", "x", ("west", 3))]
    file = write(tmp_path / "data.json", document((CONTEXT, entries)))
    assert "alone" not in refused("'flows' at 3; .*'west' at 3$", examples_of, file)


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


def test_questions_about_one_paragraph_share_its_text(tmp_path):
    flat()["train"].save_to_disk(tmp_path / "saved")
    first, second, other = examples_of(tmp_path / "saved")
    assert first.context is second.context
    assert first.context != other.context


def test_of_two_names_of_a_file_the_short_one_is_read(tmp_path):
    write(tmp_path / "train-v2.0.json", document())
    write(tmp_path / "train.json", GOOD)
    assert examples_of(tmp_path) == EXPECTED


def test_a_hash_of_files_follows_their_names_and_order(tmp_path):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.write_text(path.name.replace("c", "b"))
    first, second, copy_of_second = paths
    assert hash_files([first, second]) != hash_files([second, first])
    assert hash_files([first, second]) != hash_files([first, copy_of_second])


# Digests of 300 questions, by split.
GENERATED = {
    "train": "b629ac5b92d43878",
    "validation": "029eb1c35f50d4f3",
}


@pytest.mark.parametrize("split", GENERATED)
def test_generated_questions_are_what_they_were(split):
    """Records are compared by the data's digest."""
    assert open_source("synthetic:300", split).sha256[:16] == GENERATED[split]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_odd_number_of_questions_is_generated_too(count):
    examples = examples_of(f"synthetic:{count}")
    assert len(examples) == len({example.id for example in examples}) == count
    assert len({example.context for example in examples}) == -(-count // 2)


def test_real_files_hold_what_their_readme_says():
    # For each split: questions, questions without an answer, and paragraphs.
    counts = {"train": (19_017, 4_929, 3_093), "validation": (6_078, 3_168, 646)}
    for split, (questions, impossible, paragraphs) in counts.items():
        examples = real_squad(split)
        assert len(examples) == questions
        assert sum(example.impossible for example in examples) == impossible
        assert len({id(example.context) for example in examples}) == paragraphs
