"""The command line: every verb explains itself, and a mistake is one line and exit code 2."""

import importlib
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distributions
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub as hub
import pytest

from qa_lib import __main__ as cli
from qa_lib.errors import UserError
from qa_lib.lab.cli import VERBS, parser_of, variants_of
from qa_lib.lab.launch import anywhere
from qa_lib.lab.search.plan import plan
from qa_lib.records.record import new_record
from qa_lib.spec import variants
from qa_lib.spec.spec import Machine
from tests.conftest import slow
from tests.material import ROOT, python, refused, table


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_option_explains_itself_with_an_example_and_is_what_its_module_reads(
    verb, capsys
):
    with pytest.raises(SystemExit, match="0"):
        cli.main([verb, "--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: python -m qa_lib {verb}")
    assert f"python -m qa_lib {verb} " in out[out.index("example") :]
    # A name that argparse does not know would be an AttributeError, hours later.
    options = {action.dest: action.help for action in parser_of(verb)._actions}
    source = Path(importlib.import_module(VERBS[verb]["module"]).__file__).read_text()
    assert set(re.findall(r"\bargs\.(\w+)", source)) <= set(options) and all(options.values())


def test_help_lists_the_verbs_quickly():
    """In a real process, and without torch or pandas."""
    code = "import sys, qa_lib.__main__ as m; m.main(['--help']); sys.exit(len({'torch', 'pandas'} & {*sys.modules}))"
    said = python("-c", code).stdout
    assert all(f"\n  {verb} " in said for verb in VERBS)


def test_a_python_without_the_requirements_says_what_to_type():
    said = python("-S", "-m", "qa_lib", "run", "A1", "--preset", "smoke", code=2).stderr
    assert re.fullmatch(
        r"error: No module named '\w+': type \. \.venv/bin/activate, or pip install .*\n", said
    )


MISTAKES = table("mistakes") + [
    (f"{words} a\udcff", "'a\\udcff' is not UTF-8")
    for words in ("run A1 --preset smoke --runs", "report --group")
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_one_line(words, message, capsys):
    assert cli.main(shlex.split(words)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.startswith(f"error: {message}")


def test_a_folder_that_cannot_be_written_to_is_refused_where_it_is_the_default(
    tmp_path, monkeypatch, typed
):
    (tmp_path / "runs").write_text("a file")
    monkeypatch.chdir(tmp_path)
    assert "is no folder that can be written to" in typed("run A1 --preset smoke", code=2)


@pytest.mark.parametrize("words", [["A1,A4", "0,1"], ["A1 A4", "0 1"], ["A1, A4", "0 ,1"]])
def test_a_list_takes_commas_and_spaces(words):
    variants, seeds = (text.split(" ") for text in words)
    words = [
        "--preset",
        "smoke",
        "--variants",
        *variants,
        "--seeds",
        *seeds,
        "--micro-batch",
        "1,8",
    ]
    args = parser_of("sweep").parse_args(words)
    assert (args.variants, args.seeds, args.micro_batch) == (["A1", "A4"], [0, 1], [1, 8])


@pytest.mark.parametrize("verb", ["memory", "max-batch", "tune", "sweep"])
@pytest.mark.parametrize(
    "words", [["A1,C1", "--family", "C"], ["A1", "C1", "--family", "C"]], ids=" ".join
)
def test_every_verb_of_several_variants_takes_them_in_the_same_ways(verb, words):
    first = ["--variants"] if verb == "sweep" else []
    more = ["--limit-gib", "9"] if verb == "max-batch" else ["--preset", "smoke"]
    assert variants_of(parser_of(verb).parse_args([*first, *words, *more])) == [
        "A1",
        "C1",
        "C1",
        "C2-8",
        "C2",
    ]


@pytest.fixture
def no_hub(monkeypatch):
    """A hub that refuses connections; the number of times that somebody has tried."""
    tries = []
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "get_session", lambda: tries.append(0))  # an AttributeError follows
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return tries


def test_without_the_hub_a_data_set_of_it_is_one_line_and_no_retries(no_hub, typed):
    err = typed("run A1 --preset bench", code=2)
    assert (
        err.count("\n") == 1
        and "'squad_v2': no such file or folder, nor to be had from the hub" in err
    )
    assert len(no_hub) == 1 and hub.constants.HF_HUB_OFFLINE


def test_the_hub_is_not_asked_for_what_is_here_nor_before_the_arithmetic(no_hub, tmp_path):
    plan(["A1"], "smoke", machine=Machine())
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


@pytest.mark.parametrize("words", [slow(""), slow("--help"), slow("sweep --help"), "variants"])
def test_output_that_nobody_reads_or_no_disk_takes_is_no_traceback(words):
    for end, code, said in (
        ("| true", 0, ""),
        ("> /dev/full", 2, "error: No space left on device\n"),
    ):
        command = f"{shlex.quote(sys.executable)} -m qa_lib {words} {end}"
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (code, said)


def test_how_a_verb_may_end(monkeypatch, typed):
    denied = PermissionError(13, "Permission denied", "runs/x")
    monkeypatch.setattr(
        variants, "main", Mock(side_effect=[UserError("no such thing"), denied, KeyboardInterrupt])
    )
    assert typed("variants", code=2) == "error: no such thing\n"
    assert typed("variants", code=2) == "error: runs/x: Permission denied\n"
    assert typed("variants", code=130) == "stopped by SIGINT (Ctrl-C); finished runs are kept\n"


def test_run_says_what_was_measured_and_no_more(monkeypatch, tmp_path, typed):
    monkeypatch.chdir(tmp_path)  # where nothing is finished yet

    def trained(spec, runs, force):
        entry = new_record(spec, {}) | {"status": "ok"}
        entry["quality"] |= {"f1": 81.5, "always_null_f1": 90.0}
        return entry

    monkeypatch.setattr(anywhere, "fit", trained)
    said = r"A1: ok, F1 81\.50, never answering 90\.00\nruns/[a-z0-9-]+/A1-s0-[0-9a-f]{6}/record\.json\n"
    assert re.fullmatch(said, typed("run A1 --preset smoke"))
