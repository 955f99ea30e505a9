"""The command line: every verb explains itself, and a mistake is one line and exit code 2."""

import argparse
import errno
import gc
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distributions
from unittest.mock import Mock

import huggingface_hub as hub
import pytest

from qa_lib.__main__ import check_utf8, end_of_os_error, main
from qa_lib.errors import UserError
from qa_lib.lab import run
from qa_lib.lab.cli import values
from qa_lib.lab.cli.options import SHOWN_PRESETS, overrides_of, variants_of
from qa_lib.lab.cli.verbs import GROUPS, VERBS, help_text, parser_of
from qa_lib.lab.search.plan import plan
from qa_lib.lab.tools import variants
from qa_lib.packages import how_to_get_module
from qa_lib.records.record import new_record
from qa_lib.run.identity import go_offline_without_network
from qa_lib.spec.machine import Machine
from qa_lib.spec.presets import PRESETS
from tests.conftest import slow
from tests.material import ROOT, python, refused


def help_of(verb, capsys) -> str:
    """Return what a verb's --help prints."""
    with pytest.raises(SystemExit, match="0"):
        main([verb, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_begins_with_its_usage(verb, capsys):
    assert help_of(verb, capsys).startswith(f"usage: python -m qa_lib {verb} ")


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_ends_in_an_example_of_it(verb, capsys):
    _, examples = help_of(verb, capsys).split("\nexamples:\n")
    assert f"  python -m qa_lib {verb} " in examples


def commands_of_help() -> list[str]:
    """Return every command among the examples of all verbs, continued lines joined."""
    epilogs = "\n".join(parser_of(verb).epilog for verb in VERBS)
    lines = epilogs.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.startswith("  python -m qa_lib ")]


@pytest.mark.parametrize("command", commands_of_help())
def test_an_example_of_the_help_can_be_typed(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command = command.partition(" | ")[0].removesuffix(" ...")
    words = shlex.split(command, comments=True)[3:]
    parser_of(words[0]).parse_args(words[1:])


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_has_a_help(verb):
    without = [action.dest for action in parser_of(verb)._actions if not action.help]
    assert without == []


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_reads_all_of_its_options_and_no_others(verb):
    # A name that argparse does not know would be an AttributeError, hours later.
    parser = parser_of(verb)
    verb_main = parser.load_main()
    source = inspect.getsource(inspect.getmodule(verb_main))
    for shared in (overrides_of, variants_of):
        if f"{shared.__name__}(args)" in source:
            source += inspect.getsource(shared)
    read = set(re.findall(r"\bargs\.(\w+)", source))
    assert read == {action.dest for action in parser._actions} - {"help"}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_typed_as_it_is_listed(verb):
    assert parser_of(verb).prog == f"python -m qa_lib {verb}"


def test_help_lists_all_verbs_in_groups_without_importing_what_they_need():
    code = (
        "import sys\n"
        "from qa_lib.__main__ import main\n"
        "main(['--help'])\n"
        "sys.exit(len({'torch', 'pandas', 'numpy'} & set(sys.modules)))"
    )
    printed = python("-c", code).stdout
    listed = re.findall(r"^(?:(\S+):|  (\S+) +\S.*)$", printed, flags=re.MULTILINE)
    expected = []
    for group, verbs in GROUPS.items():
        expected.append((group, ""))
        expected += [("", verb) for verb in verbs]
    assert [row for row in listed if row[0] not in ("usage", "example")] == expected


def test_without_a_verb_the_help_is_shown_and_the_exit_code_is_2(capsys):
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("usage: python -m qa_lib VERB ...\n")


@pytest.mark.parametrize("verb", ["run", "sweep", "tune", "profile", "memory"])
def test_the_help_shows_four_presets_and_the_page_of_all(verb, capsys):
    shown = help_of(verb, capsys)
    assert len(SHOWN_PRESETS) == 4
    assert set(SHOWN_PRESETS) <= set(PRESETS)
    assert ", ".join(SHOWN_PRESETS) in shown
    assert "docs/presets.md" in shown


def test_the_page_of_presets_has_all_of_them():
    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| [^|]+ \| [^|]+ \|$", page, flags=re.MULTILINE)
    assert set(PRESETS) - {"test"} == set(rows)  # that one is of tests/small.py


def test_a_command_without_a_preset_lists_all_of_them(typed):
    complaint = typed("run A1", code=2)
    assert f"give --preset ({', '.join(PRESETS)})" in complaint


def test_a_python_without_the_requirements_says_what_to_type():
    complaint = python("-S", "-m", "qa_lib", "run", "A1", "--preset", "smoke", code=2).stderr
    assert re.fullmatch(
        r"error: No module named '\w+': type \. \.venv/bin/activate, or pip install .*\n",
        complaint,
    )


# What is typed, and how the complaint begins.
MISTAKES = [
    # verbs and options
    ("swep", "unknown verb 'swep'; did you mean 'sweep'?"),
    ("run A1 --presett smoke", "unrecognized arguments: --presett smoke (python -m qa_lib run "),
    ("run A1 --pre smoke", "unrecognized arguments: --pre smoke"),
    ("run --preset smoke", "the following arguments are required: VARIANT"),
    ("predict dev.json", "the following arguments are required: --model"),
    ("export", "one of the arguments --csv --tensorboard --wandb --trackio is required"),
    ("report --readme --check", "argument --check: not allowed with argument --readme"),
    ("sweep --preset smoke --launcher k8s", "argument --launcher: invalid choice: 'k8s'"),
    ("predict --model m --question who", "predict takes either DATA.json and --out, or --question"),
    ("predict d.json --model m --out o --question who", "predict takes either DATA.json and --out"),
    (
        "score a.json b.json --na-threshold 0",
        "--na-threshold is for the probabilities of --na-prob",
    ),
    # names
    ("run A9 --preset smoke", "argument VARIANT: unknown variant 'A9'"),
    (
        "run e-mments --preset smoke",
        "argument VARIANT: unknown variant 'e-mments'; did you mean 'E-moments'?",
    ),
    ("sweep --variants '' --preset smoke", "argument --variants: it is empty"),
    ("memory --preset bench", "no variant is named"),
    ("tune --family Z --preset smoke", "unknown family 'Z'"),
    (
        "run A1 --preset smok",
        "argument --preset: unknown preset 'smok'; did you mean 'smoke'?",
    ),
    ("run A1", "no preset is named: give --preset (smoke,"),
    ("run A1 --data squad/", "no preset is named: give --preset"),
    ("memory A1 --model bert/", "no preset is named: give --preset"),
    # files
    ("run A1 --preset smoke --model qa_lib/bert", "model folder qa_lib/bert does not exist"),
    (
        "run A1 --preset local",
        "preset 'local' has no data and no model of its own: give --data and --model (a path, "
        "or a name of",
    ),
    (
        "run A1 --preset quality --data squad/",
        "preset 'quality' has no model of its own: give --model (a path",
    ),
    ("run A1 --data nowhere/ --model nowhere/", "model folder nowhere/ does not exist"),
    ("run A1 --data nowhere/ --model tiny", "'nowhere/': no such file or folder"),
    ("report --runs nowhere", "no record below nowhere"),
    ("run A1 --preset smoke --runs a\udcff", r"'a\udcff' is not UTF-8"),
    ("report --group a\udcff", r"'a\udcff' is not UTF-8"),
    # numbers
    ("run A1 --preset smoke --micro-batch 5", "micro-batch 5 does not divide"),
    ("run E-dropout --preset full --micro-batch 24", "micro-batch 24 does not divide"),
    ("run A1 --preset smoke --data nowhere.json --micro-batch 5", "micro-batch 5 does not"),
    ("run A1 --preset smoke --micro-batch=0", "argument --micro-batch: '0' is not a whole"),
    (
        "sweep --preset smoke --micro-batch=1.5",
        "argument --micro-batch: '1.5' is not a whole number",
    ),
    (
        "run A1 --preset smoke --learning-rate 1",
        "argument --learning-rate: '1' is not a learning",
    ),
    (
        "run A1 --preset quality --data nowhere.json --model no/such/model --seed -1",
        "argument --seed: '-1' is not a whole number from 0 to",
    ),
    (
        "run A1 --preset smoke --seed 99999999999999999999",
        "argument --seed: '99999999999999999999' is not a whole number from 0 to "
        "9223372036854775807",
    ),
    (
        "memory A1 --preset smoke --max-length 2048",
        "tiny takes 512 tokens, and samples of preset smoke have 2048",
    ),
    (
        "sweep --plan --variants A1 --preset smoke --max-length 2048",
        "tiny takes 512 tokens",
    ),
]


@pytest.mark.parametrize(("command", "beginning"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(command, beginning, capsys):
    exit_code = main(shlex.split(command))
    out, err = capsys.readouterr()
    assert exit_code == 2
    assert out == ""
    assert err.startswith(f"error: {beginning}")
    assert err.count("\n") == 1


def test_the_help_has_a_line_for_every_verb_below_its_group():
    lines = help_text().splitlines()
    for group, verbs in GROUPS.items():
        at = lines.index(f"{group}:") + 1
        expected = [f"  {verb:12}{parser_of(verb).summary}" for verb in verbs]
        assert lines[at : at + len(verbs)] == expected


def test_a_link_to_a_folder_is_a_folder_and_one_that_leads_nowhere_is_none(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    (tmp_path / "lost").symlink_to("nowhere")
    assert values.folder(str(tmp_path / "link")) == tmp_path / "link"
    with pytest.raises(argparse.ArgumentTypeError, match="is a link that leads nowhere"):
        values.folder(str(tmp_path / "lost"))


def test_a_sweep_runs_on_this_machine_unless_it_is_told_otherwise():
    assert parser_of("sweep").parse_args(["--preset", "smoke"]).launcher == "local"


def test_a_folder_that_cannot_be_written_to_is_refused_where_it_is_the_default(
    tmp_path, monkeypatch, typed
):
    (tmp_path / "runs").write_text("a file")
    monkeypatch.chdir(tmp_path)
    assert "is no folder that can be written to" in typed("run A1 --preset smoke", code=2)


@pytest.mark.parametrize(
    "words",
    [
        "--variants A1,A4 --seeds 0,1 --micro-batch 1,8",
        "--variants A1 A4 --seeds 0 1 --micro-batch 1 8",
        "--variants A1, A4 --seeds 0 ,1 --micro-batch 1 , 8",
        "--variants A1 --variants A4 --seeds 0 --seeds 1 --micro-batch 1 --micro-batch 8",
    ],
)
def test_a_list_takes_commas_and_spaces_and_repeated_options(words):
    words = words.replace(" , ", " ,")
    args = parser_of("sweep").parse_args(["--preset", "smoke", *words.split()])
    assert args.variants == ["A1", "A4"]
    assert args.seeds == [0, 1]
    assert args.micro_batch == [1, 8]


def test_a_list_that_is_not_given_keeps_its_default():
    args = parser_of("sweep").parse_args(["--preset", "smoke"])
    assert args.seeds == [0]
    assert args.micro_batch is None


def test_a_negative_number_is_a_value_and_no_option():
    words = ["data.json", "predictions.json", "--na-prob", "odds.json", "--na-threshold", "-1e-3"]
    assert parser_of("score").parse_args(words).na_threshold == -0.001


def test_a_compute_capability_is_kept_times_ten():
    words = ["A1", "--preset", "smoke", "--compute-capability", "7.5"]
    assert parser_of("memory").parse_args(words).compute_capability == 75


def test_data_and_a_model_without_a_preset_mean_local():
    args = parser_of("run").parse_args(["A1", "--data", "squad/", "--model", "bert/"])
    assert args.preset == "local"


@pytest.mark.parametrize(
    "words", [["A1,C1", "--family", "C"], ["A1", "C1", "--family", "C"]], ids=" ".join
)
@pytest.mark.parametrize(
    "verb_and_options",
    [
        ["memory", "--preset", "smoke"],
        ["max-batch", "--limit-gib", "9"],
        ["tune", "--preset", "smoke"],
        ["sweep", "--preset", "smoke", "--variants"],
    ],
    ids=lambda words: words[0],
)
def test_every_verb_of_several_variants_takes_them_in_the_same_ways(verb_and_options, words):
    verb, *others = verb_and_options
    args = parser_of(verb).parse_args([*others, *words])
    assert variants_of(args) == ["A1", "C1", "C1", "C2-8", "C2"]


TYPED_WORDS = [
    *["", " ", ",", "-", "/", "..", "x", "a b", "\0", "\33[2J", "True", "None", "tiny"],
    *["nan", "inf", "-inf", "-1", "0", "1", "+1", "1.5", "3e-5", "1e400", "0x10", "1_0", "1,,2"],
    *["9999999999999999999", "999999999999999999999999999999", "-999999999999999999999999999999"],
    "\u0663",  # an Arabic digit, which int() takes
    *["gpt2:L1H64", "gpt2:L99999999999H64", "synthetic:0", "synthetic:99999999999"],
]


def lenient_parser_of(verb: str):
    """Return the parser of a verb, without requirements: what is not given is no mistake."""
    parser = parser_of(verb)
    for action in parser._actions:
        action.required = False
    return parser


def actions_with_a_value(parser) -> list:
    """Return the options and arguments of a parser that take a value."""
    return [action for action in parser._actions if action.nargs != 0]


def parsed_value(parser, action, word: str) -> object:
    """Return the value of an option or argument that was typed as this word; None where the word
    was refused, which must be in one line that names the verb or the argument."""
    words = [f"{action.option_strings[0]}={word}"] if action.option_strings else [word]
    try:
        args, _ = parser.parse_known_args(words)
    except UserError as problem:
        message = str(problem)
        assert "\n" not in message
        assert "argument" in message or parser.prog in message
        return None
    return getattr(args, action.dest)


@pytest.mark.parametrize("word", TYPED_WORDS, ids=json.dumps)
def test_a_typed_word_is_a_value_that_can_be_or_one_line(word, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for parser in map(lenient_parser_of, VERBS):
        for action in actions_with_a_value(parser):
            value = parsed_value(parser, action, word)
            for one in value if isinstance(value, list) else [value]:
                assert one is None or one == one, "NaN, which is not equal to itself"
                if isinstance(one, int):
                    assert -(2**63) <= one < 2**63
    assert list(tmp_path.iterdir()) == []


# The words of a question and of a paragraph are free, and an address is checked where it is used.
FREE = {"question", "context", "host"}


@pytest.mark.parametrize("word", ["", " "], ids=repr)
@pytest.mark.parametrize("verb", VERBS)
def test_an_empty_word_is_refused(verb, word):
    parser = lenient_parser_of(verb)
    for action in actions_with_a_value(parser):
        if action.dest not in FREE:
            assert parsed_value(parser, action, word) is None


@pytest.fixture
def no_hub(monkeypatch):
    """Refuses connections to the hub; the list grows by one with every try."""
    tries = []
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "get_session", lambda: tries.append(0))  # an AttributeError follows
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return tries


def test_without_the_hub_a_data_set_of_it_is_one_line_and_no_retries(no_hub, typed):
    complaint = typed("run A1 --preset bench", code=2)
    assert "'squad_v2': no such file or folder, nor to be had from the hub" in complaint
    assert complaint.count("\n") == 1
    assert len(no_hub) == 1
    assert hub.constants.HF_HUB_OFFLINE


def test_the_hub_is_not_asked_for_what_is_here(no_hub):
    plan(["A1"], "smoke", machine=Machine())
    assert not no_hub


def test_the_hub_is_asked_for_a_model_whose_name_begins_as_the_generated_one(no_hub):
    go_offline_without_network("synthetic:40", "tiny-models/bert")
    assert len(no_hub) == 1


def test_the_hub_is_not_asked_before_the_arithmetic(no_hub):
    refused("does not divide", plan, ["A1"], "full", micro_batch=24, machine=Machine())
    assert not no_hub


@pytest.mark.slow
# By what is installed: looking for the module pip lets setuptools change this process's distutils.
@pytest.mark.skipif(
    not all(any(distributions(name=name)) for name in ("pip", "setuptools")), reason="cannot build"
)
def test_an_installed_checkout_works_from_any_folder(tmp_path):
    """Without network: in an environment of its own, with the setuptools that is here."""
    venv.create(tmp_path / "venv", system_site_packages=True)
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    for words in (f"pip install --no-deps --no-build-isolation -q -e {ROOT}", "qa_lib variants"):
        command = [tmp_path / "venv" / "bin" / "python", "-m", *words.split()]
        done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("variant ")


@pytest.mark.parametrize(
    ("redirection", "exit_code", "complaint"),
    [("| true", 0, ""), ("> /dev/full", 2, "error: No space left on device\n")],
    ids=["nobody reads", "disk full"],
)
@pytest.mark.parametrize("words", [slow(""), slow("--help"), slow("sweep --help"), "variants"])
def test_output_that_cannot_be_written_is_no_traceback(words, redirection, exit_code, complaint):
    command = f"{shlex.quote(sys.executable)} -m qa_lib {words} {redirection}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == exit_code
    assert done.stderr == complaint


@pytest.mark.parametrize(
    ("raised", "exit_code", "complaint"),
    [
        (UserError("no such thing"), 2, "error: no such thing\n"),
        (
            PermissionError(13, "Permission denied", "runs/x"),
            2,
            "error: runs/x: Permission denied\n",
        ),
        (OSError("two\nlines"), 2, "error: two\n"),
        (KeyboardInterrupt(), 130, "stopped by SIGINT (Ctrl-C); finished runs are kept\n"),
    ],
)
def test_a_verb_that_is_ended_early_says_why_in_one_line(
    raised, exit_code, complaint, monkeypatch, typed
):
    monkeypatch.setattr(variants, "main", Mock(side_effect=raised))
    assert typed("variants", code=exit_code) == complaint


def test_a_fault_of_the_code_keeps_its_traceback(monkeypatch, typed):
    monkeypatch.setattr(variants, "main", Mock(side_effect=OSError(5000, "odd")))
    with pytest.raises(OSError, match="odd"):
        typed("variants")


def test_a_missing_package_is_one_line_that_says_what_to_type(monkeypatch, typed):
    missing = ModuleNotFoundError("No module named 'gradio'", name="gradio")
    parser = parser_of("app")
    parser.load_main = Mock(side_effect=missing)
    monkeypatch.setitem(VERBS, "app", lambda: parser)
    complaint = typed("app", code=2)
    assert complaint == f"error: No module named 'gradio': {how_to_get_module('gradio')}\n"


def test_run_prints_what_was_measured_and_where_the_record_is(monkeypatch, tmp_path, typed):
    monkeypatch.chdir(tmp_path)  # where nothing is finished yet

    def trained(spec, runs, force):
        record = new_record(spec, {}) | {"status": "ok"}
        record["quality"] |= {"f1": 81.5, "always_null_f1": 90.0}
        return record

    monkeypatch.setattr(run, "fit", trained)
    result, path = typed("run A1 --preset smoke").splitlines()
    assert result == "A1: ok, F1 81.50, never answering 90.00"
    assert re.fullmatch(r"runs/[a-z0-9-]+/A1-s0-[0-9a-f]{6}/record\.json", path)


# How a command ends.


@pytest.mark.parametrize(("argv", "code"), [([], 2), (["-h"], 0), (["--help"], 0)], ids=str)
def test_help_that_was_asked_for_is_no_mistake(argv, code, capsys):
    assert main(argv) == code
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize("word", ["\ud800", "a\udcff", "\udfff"], ids=ascii)
def test_a_word_that_is_no_utf_8_is_refused(word):
    refused("is not UTF-8", check_utf8, word)


@pytest.mark.parametrize("word", ["\ud7ff", "\ue000", "ü", "😀"], ids=ascii)
def test_a_word_of_any_writing_is_taken(word):
    check_utf8(word)


def test_what_a_verb_returns_is_the_exit_code(monkeypatch, typed):
    monkeypatch.setattr(variants, "main", Mock(return_value=1))
    typed("variants", code=1)


def test_garbage_is_looked_for_again_once_a_verb_is_imported(monkeypatch, typed):
    seen = []
    monkeypatch.setattr(variants, "main", lambda args: seen.append(gc.isenabled()) or 0)
    typed("variants")
    gc.unfreeze()
    assert seen == [True]


def test_a_complaint_has_no_sign_that_controls_a_terminal(monkeypatch, typed):
    monkeypatch.setattr(variants, "main", Mock(side_effect=UserError("a\x1b[2Jb")))
    assert typed("variants", code=2) == "error: a[2Jb\n"


@pytest.mark.parametrize(
    ("number", "exit_code", "complaint"),
    [
        (errno.EPIPE, 0, ""),
        (errno.ENOSPC, 2, "error: full\n"),
        (errno.EIO, 130, "error: full\n"),
    ],
    ids=errno.errorcode.get,
)
def test_an_output_that_fails_ends_a_command_by_its_own_code(
    number, exit_code, complaint, monkeypatch, capsys, tmp_path
):
    with (tmp_path / "out").open("w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert end_of_os_error(OSError(number, "full")) == exit_code
        stream.write("what is left to print")
    assert (tmp_path / "out").read_text() == ""
    assert capsys.readouterr().err == complaint


@pytest.mark.parametrize("number", [errno.EACCES, errno.EAGAIN], ids=errno.errorcode.get)
def test_another_fault_of_the_system_that_names_no_file_is_raised(number):
    with pytest.raises(OSError, match="odd"):
        end_of_os_error(OSError(number, "odd"))


def test_an_output_that_fails_at_the_end_is_told_as_one_that_fails_before(monkeypatch):
    # What a verb has printed may still be on its way when it returns.
    monkeypatch.setattr(variants, "main", Mock(return_value=0))
    full = Mock(flush=Mock(side_effect=OSError(errno.ENOSPC, "full", "the output")))
    monkeypatch.setattr(sys, "stdout", full)
    assert main(["variants"]) == 2


@pytest.mark.parametrize(
    ("f1", "never", "said"),
    [
        (81.5, 50.0, "A1: ok, samples/s 80.25, F1 81.50"),
        (50.0, 50.0, "A1: ok, samples/s 80.25, F1 50.00"),
        (49.99, 50.0, "A1: ok, samples/s 80.25, F1 49.99, never answering 50.00"),
        (0.0, 0.0, "A1: ok, samples/s 80.25, F1 0.00"),
        (None, 50.0, "A1: ok, samples/s 80.25"),
    ],
)
def test_a_run_is_summed_up_in_a_line(f1, never, said):
    record = {
        "spec": {"variant": "A1"},
        "status": "ok",
        "speed": {"samples_per_s": 80.25},
        "task": {"metric": "f1", "label": "F1"},
        "quality": {"f1": f1, "always_null_f1": never},
    }
    assert run.summary_of(record) == said


def test_a_process_that_is_not_the_first_prints_nothing(monkeypatch, tmp_path, typed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "fit", lambda spec, *_, **__: new_record(spec, {}))
    assert typed("run A1 --preset smoke") == ""


# Options and their values.


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_tells_the_default_that_an_option_has(verb):
    for action in parser_of(verb)._actions:
        told = re.search(r"default: ([^,;)]+)", action.help)
        has_value = action.nargs != 0 and action.default not in (None, [])
        if told and has_value:
            convert = action.type or str
            default = action.default
            if isinstance(default, str):
                default = convert(default)  # as argparse does
            assert convert(told[1]) == default, action.dest


KINDS = [
    (values.count, "1 2147483647", "0 -1 2147483648"),
    (values.seed, "0 9223372036854775807", "-1 9223372036854775808"),
    (values.gpu_index, "0 1023", "-1 1024"),
    (values.port, "0 65535", "-1 65536"),
    (values.number, "-1e308 0 1e308 inf", "nan"),
    (values.positive_number, "5e-324 1e308", "0 -1 inf nan"),
    (values.learning_rate, "1e-9 0.999", "0 1 -0.1 nan"),
    (values.compute_capability, "5 7.5 20", "4.9 20.1 75"),
]


@pytest.mark.parametrize(("kind", "taken", "not_taken"), KINDS)
def test_a_number_is_taken_within_its_bounds_alone(kind, taken, not_taken):
    for word in taken.split():
        kind(word)
    for word in not_taken.split():
        with pytest.raises(argparse.ArgumentTypeError):
            kind(word)


def test_a_folder_to_write_to_may_be_missing_and_may_not_be_a_file_or_a_broken_link(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    assert values.folder(str(tmp_path / "new" / "runs")) == tmp_path / "new" / "runs"
    for name, said in (("file", "no folder"), ("file/runs", "no folder"), ("link", "a link that")):
        with pytest.raises(argparse.ArgumentTypeError, match=said):
            values.folder(str(tmp_path / name))


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(argparse.ArgumentTypeError, match="no folder that can be written to"):
        values.folder(str(tmp_path))


@pytest.mark.parametrize("word", ["-5", "-.5", "-1.", "-1E+3"])
def test_every_way_to_write_a_negative_number_is_a_value(word):
    words = ["data.json", "predictions.json", "--na-prob", "odds.json", "--na-threshold", word]
    assert parser_of("score").parse_args(words).na_threshold == float(word)


def test_what_was_typed_replaces_the_presets_value_of_that_name():
    typed_values = {
        "world": 2,
        "stages": 3,
        "batch": 4,
        "epochs": 5,
        "learning_rate": 0.6,
        "max_length": 7,
        "max_answer_length": 8,
    }
    words = [f"--{name.replace('_', '-')}={value}" for name, value in typed_values.items()]
    args = parser_of("run").parse_args(["A1", "--preset", "smoke", *words])
    assert overrides_of(args) == typed_values


def test_a_model_may_be_named_more_than_once_for_the_app():
    args = parser_of("app").parse_args(["--model", "one", "--model", "two"])
    assert args.model == ["one", "two"]
