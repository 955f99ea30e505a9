"""What the public functions say of a wrong word, type or version: one line that names it."""

import sys
from importlib import metadata

import pytest

import qa_lib
from qa_lib.calls import checked, expect, expect_folder, shown
from qa_lib.data.load import load_data
from qa_lib.errors import UserError
from qa_lib.lab.launch.anywhere import fit
from qa_lib.lab.search.plan import plan
from qa_lib.score.predict import ask
from qa_lib.versions import LEAST, check_versions
from tests.material import ROOT, python, refused, squad_folder, write
from tests.tiny import CPU, planned

WORDS = {"variants": ["A1"], "preset": "smoke", "machine": CPU}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"seed": 0}, "unknown argument of plan 'seed'; did you mean 'seeds'"),
        ({"epoch": 2}, "unknown argument of plan 'epoch'; did you mean 'epochs'"),
        ({"learning_rat": 1e-3}, "did you mean 'learning_rate'"),
        ({"stage": 2}, "did you mean 'stages'"),
        ({"own": {"epochs": 2}}, "unknown argument of plan 'own'"),
        ({"seeds": 0}, r"seeds is 0, and not a list of at least one: write seeds=\[0\]"),
        ({"variants": "A1"}, r"variants is 'A1', and not a list .* write variants=\['A1'\]"),
        ({"variants": ""}, r"variants is '', and not a list of at least one$"),
        ({"variants": [["A1"]]}, r"unknown variant \['A1'\]"),
        ({"variants": [None]}, "unknown variant None"),
        ({"preset": ["smoke"]}, r"unknown preset \['smoke'\]"),
        ({"preset": 3}, "unknown preset 3"),
        ({"preset": None}, "no preset is named: give --preset"),
        ({"machine": "h100"}, "machine is 'h100': give a qa_lib.spec.machine.Machine"),
        ({"machine": {"gpus": 1}}, "machine is the dict"),
        ({"runs": 3}, "runs is 3: give the path of a folder"),
        ({"runs": None}, "runs is None: give the path"),
        ({"runs": b"runs"}, "runs is b'runs': give the path"),
        ({"runs": ""}, "runs is '': give the path"),
        ({"left_out": "x"}, "left_out is 'x': give a list"),
        ({"data": 5}, "data is 5: give a path"),
        ({"data": b"squad"}, "data is b'squad': give a path"),
        ({"data": ["a", "b"]}, "data is the list"),
        ({"model": object()}, "model is a object: give a path"),
        ({"micro_batch": "8"}, "micro_batch is '8'"),
        ({"micro_batch": 8.0}, "micro_batch is '8.0', and not a whole number"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'"),
        ({"batch": {8}}, "batch is '.8.', and not a whole number"),
    ],
)
def test_plan_names_a_wrong_word(words, said):
    refused(said, plan, **WORDS | words)


def test_plan_names_what_lacks_and_what_is_too_much():
    refused("plan: missing a required argument: 'variants'", plan)
    refused("plan: too many positional arguments", plan, *range(20))


def test_data_that_is_a_table_is_no_traceback():
    pandas = pytest.importorskip("pandas")
    refused("data is a DataFrame: give a path", plan, **WORDS, data=pandas.DataFrame({"a": [1]}))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"run": "x"}, "unknown argument of fit 'run'; did you mean 'runs'"),
        ({"forced": True}, "unknown argument of fit 'forced'; did you mean 'force'"),
        ({"runs": ["x"]}, r"runs is the list \['x'\]: give the path of a folder"),
        ({"runs": b"x"}, "runs is b'x'"),
        ({"data": "squad/"}, "data is 'squad/': give what load_data returns"),
        ({"say": None}, "say is None: give a function"),
        ({"say": "loud"}, "say is 'loud': give a function"),
    ],
)
def test_fit_names_a_wrong_word(words, said, tmp_path):
    refused(said, fit, planned(), **{"runs": tmp_path} | words)


@pytest.mark.parametrize("spec", [None, {}, "A1", ["A1"], 3, b"x"])
@pytest.mark.parametrize("function", [fit, load_data])
def test_what_is_no_spec_is_told(function, spec):
    said = r"spec is .*: give one spec that plan has made, as in `\(spec,\) = plan"
    refused(said, function, spec)
    refused(said, function, [planned()])


def test_load_data_names_what_loads_a_text():
    (spec,) = plan(["L1"], "lm-smoke", machine=CPU)
    refused("L1 trains on text: qa_lib.data.load.load_text", load_data, spec)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((None, "q", "c"), "folder is None: give the path of a folder"),
        ((b"my-bert", "q", "c"), "folder is b'my-bert'"),
        ((["my-bert"], "q", "c"), "folder is the list"),
        (("", "q", "c"), "folder is '': give the path"),
        (("nowhere/at/all", "q", "c"), "nowhere/at/all: no such folder"),
        ((__file__, "q", "c"), "no such folder|is no folder"),
        ((".", None, "c"), "question is None: give a text"),
        ((".", "q", b"c"), "context is b'c': give the text of a paragraph"),
        ((".", ["q"], "c"), "question is the list"),
        ((".", "q"), "ask: missing a required argument: 'context'"),
    ],
)
def test_ask_names_a_wrong_word(words, said):
    refused(said, ask, *words)


def test_ask_suggests_the_nearest_argument():
    refused("did you mean 'question'", ask, ".", questions="q", context="c")


def test_a_function_that_takes_any_name_is_only_bound():
    @checked
    def any_name(first, **more):
        return first, more

    assert any_name(1, second=2) == (1, {"second": 2})
    refused("any_name: missing a required argument: 'first'", any_name, second=2)


def test_the_name_of_what_takes_any_number_of_values_is_no_name_of_an_argument():
    @checked
    def many(*values, last=0):
        return values, last

    assert many(1, 2, last=3) == ((1, 2), 3)
    refused(r"unknown argument of many 'values'", many, values=[1, 2])


def test_a_value_is_shown_in_one_short_line():
    assert shown("a\nb") == r"'a\nb'"
    assert shown([1] * 99) == "a list"
    assert shown("x" * 99).endswith("…")
    assert len(shown("x" * 99)) < 70


def test_an_argument_may_be_of_several_kinds():
    expect("one", 1, int | None, "")
    expect("none", None, int | None, "")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("squad.csv", "id,question,context\n1,who?,Alice came.\n", "a .csv file, and --data takes"),
        ("squad.tsv", "id\tquestion\n", "a .tsv file"),
        ("squad.jsonl", '{"id": "1"}\n{"id": "2"}\n', "a .jsonl file"),
        ("SQUAD.JSONL", '{"id": "1"}\n{"id": "2"}\n', "a .jsonl file"),
        ("squad.parquet", "PAR1\0\0", "a .parquet file"),
        ("squad", "who came?", "no JSON file, and"),
        ("squad.json", "", "an empty file"),
        ("squad.csv", "", "an empty file"),
        ("squad.json", "who came?", "not JSON"),
        ("squad.json", '{"data": []}', "an empty data set"),
        ("squad", '\ufeff{"data": []}', "an empty data set"),
        ("squad.json", "[1, 2]", "not the SQuAD layout"),
    ],
)
def test_a_file_that_is_no_data_set_is_told_for_what_it_is(name, content, said, tmp_path):
    (tmp_path / name).write_text(content)
    message = refused(said, plan, **WORDS, data=tmp_path / name)
    assert name in message
    assert "scored by the same" not in message


def test_one_file_of_questions_is_still_refused_for_training_and_scoring(tmp_path):
    folder = squad_folder(tmp_path / "squad", "alice came at nine", "alice")
    file = folder / "train.json"
    refused("trained on and scored by the same questions", plan, **WORDS, data=file)


def test_one_file_of_questions_may_be_trained_on_where_nothing_is_scored(tmp_path):
    file = squad_folder(tmp_path / "squad", "alice came at nine", "alice") / "train.json"
    (spec,) = plan(["A1"], "bench", data=file, model="tiny", machine=CPU)
    assert spec.data["name"] == file.name


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_file_of_a_folder_that_is_empty_is_named(split, tmp_path):
    folder = squad_folder(tmp_path / "squad", "alice came at nine", "alice")
    (folder / f"{split}.json").write_text("")
    refused(f"{split}.json: an empty file", plan, **WORDS, data=folder)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_text_of_a_folder_that_is_empty_is_named(split, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for name in ("train", "validation"):
        (text / f"{name}.txt").write_text("" if name == split else "Alice came.\n")
    refused(f"{split}.txt: an empty text", plan, ["L1"], "lm-smoke", data=text, machine=CPU)


@pytest.mark.parametrize("own", [{}, {"data": "synthetic:40"}, {"model": "tiny"}])
def test_a_preset_asks_at_once_for_all_that_it_has_not(own):
    said = refused("preset 'local' has no ", plan, ["A1"], "local", machine=CPU, **own)
    for name in ("data", "model"):
        assert (f"--{name}" in said) == (name not in own)


def test_data_and_a_model_need_no_preset():
    (spec,) = plan(["A1"], data="synthetic:40", model="tiny", machine=CPU)
    assert spec.preset.name == "local"
    refused("no preset is named", plan, ["A1"], data="synthetic:40", machine=CPU)


@pytest.mark.parametrize("positions", [-89, 0])
def test_a_model_without_a_position_is_told_plainly(positions, tmp_path):
    write(tmp_path / "config.json", {"model_type": "bert", "max_position_embeddings": positions})
    said = refused("no position for a token", plan, **WORDS, model=tmp_path)
    assert "max_position_embeddings" in said and str(positions) not in said.split(":", 1)[1]


def test_the_positions_of_a_roberta_are_said_as_the_tokens_that_it_takes(tmp_path):
    config = {"model_type": "roberta", "max_position_embeddings": 66, "pad_token_id": 1}
    write(tmp_path / "config.json", config)
    refused("takes 64 tokens, and samples of preset smoke have 96", plan, **WORDS, model=tmp_path)
    write(tmp_path / "config.json", config | {"pad_token_id": 100})
    refused("no position for a token", plan, **WORDS, model=tmp_path)


@pytest.fixture
def old(tmp_path):
    """A folder in which transformers has an older version than is needed."""
    place = tmp_path / "transformers-4.57.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.0\n")
    return str(tmp_path)


SAID = "qa_lib needs transformers 5.10 or newer, here 4.57.0: pip install -U"


def test_an_old_version_is_told_when_a_call_is_imported(old):
    code = "import qa_lib\n"
    code += "for name in qa_lib.__all__:\n"
    code += "    try:\n"
    code += "        getattr(qa_lib, name)\n"
    code += "    except ValueError as problem:\n"
    code += "        print(problem)\n"
    said = python("-c", code, PYTHONPATH=old).stdout.splitlines()
    assert len(said) == len(qa_lib.__all__)
    for line in said:
        assert line.startswith(SAID)


def test_an_old_version_is_one_line_of_the_command_line(old):
    done = python("-m", "qa_lib", "run", "A1", "--preset", "smoke", code=2, PYTHONPATH=old)
    assert done.stderr.startswith(f"error: {SAID}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.10.1", False), ("1.99", False), ("2.11.0", True), ("2.11.0a0+git1", True), ("3.0", True)],
)
def test_versions_are_compared_by_number(version, fits, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"torch": version}.get(name))
    if fits:
        check_versions()
    else:
        refused(f"needs torch 2.11 or newer, here {version}", check_versions)


def test_the_least_versions_are_those_of_the_requirements():
    lines = (ROOT / "requirements.txt").read_text().split()
    for package, least in LEAST.items():
        assert any(line.startswith(f"{package}>={'.'.join(map(str, least))},") for line in lines)


def test_the_front_door_is_checked():
    for name in qa_lib.__all__:
        public = getattr(qa_lib, name)
        assert isinstance(public, type) or hasattr(public, "__wrapped__"), name
    assert issubclass(UserError, ValueError) and sys.version_info >= (3, 11)


class PathOfBytes:
    """A path as os.fspath has it, which is bytes and no text."""

    def __fspath__(self):
        return b"runs"


@pytest.mark.parametrize("value", ["", "  ", "\t", PathOfBytes()])
def test_a_blank_path_and_one_of_bytes_are_no_folder(value):
    refused("runs is .*: give the path of a folder", expect_folder, "runs", value)


def test_a_path_object_is_a_folder():
    expect_folder("runs", ROOT)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None"),
        (True, "True"),
        (b"x", "b'x'"),
        ("x" * 58, repr("x" * 58)),
        ("x" * 59, f"'{'x' * 59}…"),
        ([1, 2], "the list [1, 2]"),
        ({"a": 1}, "the dict {'a': 1}"),
        ("x" * 36, repr("x" * 36)),
        (["x" * 36], f"the list ['{'x' * 36}']"),
        (["x" * 37], "a list"),
        (range(3), "a range"),
    ],
)
def test_a_value_is_shown_whole_where_it_is_short(value, said):
    assert shown(value) == said


def test_a_package_that_is_not_there_is_for_whoever_imports_it_to_say(monkeypatch):
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    check_versions()


def test_a_name_that_the_package_does_not_have_is_told_with_those_that_it_has():
    with pytest.raises(AttributeError, match="no attribute 'plann'; it has plan, fit, ask"):
        _ = qa_lib.plann
