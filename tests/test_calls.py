"""What `plan`, `fit`, `ask` and `load_data` say of a wrong word, type or version: one line that names it."""

import pytest

import qa_lib
from qa_lib.calls import checked, expect, shown
from qa_lib.data.load import load_data
from qa_lib.errors import UserError
from qa_lib.run.fit import fit
from qa_lib.run.plan import plan
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
        ({"seeds": 0}, r"seeds is 0, and not a list of at least one: write seeds=\[0\]"),
        ({"variants": "A1"}, r"variants is 'A1', and not a list .* write variants=\['A1'\]"),
        ({"variants": [["A1"]]}, r"unknown variant \['A1'\]"),
        ({"variants": [None]}, "unknown variant None"),
        ({"preset": ["smoke"]}, r"unknown preset \['smoke'\]"),
        ({"preset": 3}, "unknown preset 3"),
        ({"preset": None}, "no preset is named: give --preset"),
        ({"machine": "h100"}, "machine is 'h100': give a qa_lib.spec.spec.Machine"),
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


def test_plan_names_an_argument_that_lacks():
    refused("plan: missing a required argument: 'variants'", plan)


def test_plan_tells_of_too_many_arguments():
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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        ("a\nb", r"'a\nb'"),
        ("x" * 99, "'" + "x" * 59 + "…"),
        ([1, 2], "the list [1, 2]"),
        ([1] * 99, "a list"),
        (object(), "a object"),
    ],
)
def test_a_value_is_shown_in_one_short_line(value, text):
    assert shown(value) == text


def test_what_is_expected_passes():
    expect("one", 1, int | None, "")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("squad.csv", "id,question,context\n1,who?,Alice came.\n", "a .csv file, and --data takes"),
        ("squad.tsv", "id\tquestion\n", "a .tsv file"),
        ("squad.jsonl", '{"id": "1"}\n{"id": "2"}\n', "a .jsonl file"),
        ("squad.parquet", "PAR1\0\0", "a .parquet file"),
        ("squad", "who came?", "no JSON file, and"),
        ("squad.json", "", "an empty file"),
        ("squad.csv", "", "an empty file"),
        ("squad.json", "who came?", "not JSON"),
        ("squad.json", '{"data": []}', "an empty data set"),
        ("squad.json", "[1, 2]", "not the SQuAD layout"),
    ],
)
def test_a_file_that_is_no_data_set_is_told_for_what_it_is(name, content, said, tmp_path):
    (tmp_path / name).write_text(content)
    message = refused(said, plan, **WORDS, data=tmp_path / name)
    assert name in message
    assert "scored by the same" not in message


@pytest.fixture
def squad(tmp_path):
    """A folder of a few questions to train on, and a few to validate on."""
    return squad_folder(tmp_path / "squad", "alice came at nine", "alice")


def test_one_file_of_questions_is_refused_for_training_and_scoring(squad):
    file = squad / "train.json"
    refused("trained on and scored by the same questions", plan, **WORDS, data=file)


def test_one_file_of_questions_is_enough_where_nothing_is_scored(squad):
    (spec,) = plan(["A1"], "bench", data=squad / "train.json", model="tiny", machine=CPU)
    assert spec.data["name"] == "train.json"


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_file_of_questions_that_is_empty_is_named(split, squad):
    (squad / f"{split}.json").write_text("")
    refused(f"{split}.json: an empty file", plan, **WORDS, data=squad)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_file_of_text_that_is_empty_is_named(split, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for name in ("train", "validation"):
        (text / f"{name}.txt").write_text("" if name == split else "Alice came.\n")
    refused(f"{split}.txt: an empty text", plan, ["L1"], "lm-smoke", data=text, machine=CPU)


@pytest.mark.parametrize("given", [{}, {"data": "synthetic:40"}, {"model": "tiny"}])
def test_a_preset_asks_at_once_for_all_that_it_has_not(given):
    said = refused("preset 'local' has no ", plan, ["A1"], "local", machine=CPU, **given)
    for name in ("data", "model"):
        assert (f"--{name}" in said) == (name not in given)


def test_data_and_a_model_need_no_preset():
    (spec,) = plan(["A1"], data="synthetic:40", model="tiny", machine=CPU)
    assert spec.preset.name == "local"


def test_data_without_a_model_need_a_preset():
    refused("no preset is named", plan, ["A1"], data="synthetic:40", machine=CPU)


@pytest.mark.parametrize("positions", [-89, 0])
def test_a_model_without_a_position_is_told_plainly(positions, tmp_path):
    write(tmp_path / "config.json", {"model_type": "bert", "max_position_embeddings": positions})
    said = refused("no position for a token", plan, **WORDS, model=tmp_path)
    reason = said.split(":", 1)[1]
    assert "max_position_embeddings" in reason
    assert str(positions) not in reason


@pytest.mark.parametrize(
    ("padding_token", "said"),
    [
        (1, "takes 64 tokens, and samples of preset smoke have 96"),
        (100, "no position for a token"),
    ],
)
def test_the_positions_of_a_roberta_are_said_as_the_tokens_that_it_takes(
    padding_token, said, tmp_path
):
    """Its positions begin behind that of the padding token."""
    config = {
        "model_type": "roberta",
        "max_position_embeddings": 66,
        "pad_token_id": padding_token,
    }
    write(tmp_path / "config.json", config)
    refused(said, plan, **WORDS, model=tmp_path)


@pytest.fixture
def old(tmp_path):
    """A folder in front of the path in which transformers has an older version than is needed."""
    place = tmp_path / "transformers-4.57.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.0\n")
    return str(tmp_path)


SAID = "qa_lib needs transformers 5.10 or newer, here 4.57.0: pip install -U"


@pytest.mark.parametrize("name", qa_lib.__all__)
def test_an_old_version_is_told_when_a_call_is_imported(old, name):
    code = f"try:\n    from qa_lib import {name}\nexcept ValueError as problem:\n    print(problem)"
    (said,) = python("-c", code, PYTHONPATH=old).stdout.splitlines()
    assert said.startswith(SAID)


def test_an_old_version_is_one_line_of_the_command_line(old):
    done = python("-m", "qa_lib", "run", "A1", "--preset", "smoke", code=2, PYTHONPATH=old)
    assert done.stderr.startswith(f"error: {SAID}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("version", ["2.10.1", "1.99"])
def test_a_version_of_a_lower_number_is_refused(version, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", {"torch": version}.get)
    refused(f"needs torch 2.11 or newer, here {version}", check_versions)


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+git1", "3.0"])
def test_a_version_of_no_lower_number_passes(version, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", {"torch": version}.get)
    check_versions()


def test_the_least_versions_are_those_of_the_requirements():
    lines = (ROOT / "requirements.txt").read_text().split()
    for package, least in LEAST.items():
        assert any(line.startswith(f"{package}>={'.'.join(map(str, least))},") for line in lines)


@pytest.mark.parametrize("name", qa_lib.__all__)
def test_a_public_function_is_checked(name):
    assert hasattr(getattr(qa_lib, name), "__wrapped__")


def test_a_notebook_may_catch_all_errors_as_value_errors():
    assert issubclass(UserError, ValueError)
