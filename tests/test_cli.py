"""The command line: every verb explains itself, and a mistake is one line and exit code 2."""

import argparse
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qa_lib import __main__ as cli
from qa_lib import variants
from qa_lib.errors import UserError

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_explains_itself_with_an_example(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([verb, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: python -m qa_lib {verb}")
    assert f"python -m qa_lib {verb} " in out[out.index("example") :]


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_option_says_what_it_is_for(verb):
    parser = argparse.ArgumentParser()
    importlib.import_module(cli.VERBS[verb][0]).add_arguments(parser)
    assert [action.dest for action in parser._actions if not action.help] == []


def test_help_lists_the_verbs_quickly():
    """In a real process, and without torch or pandas."""
    code = (
        "import sys, qa_lib.__main__ as m; m.main(['--help']); sys.exit(bool({'torch', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert all(f"\n  {verb} " in done.stdout for verb in cli.VERBS)


def test_without_a_verb_the_usage_is_shown_and_the_exit_code_is_2(capsys):
    assert cli.main([]) == 2
    assert "usage: python -m qa_lib VERB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["swep"], "unknown verb 'swep'; did you mean 'sweep'?"),
        (["run", "A9", "--scale", "smoke"], "unknown variant 'A9'"),
        (["run", "A1", "--scale", "smok"], "unknown scale 'smok'; did you mean 'smoke'?"),
        (["run", "A1", "--scale", "local"], "scale 'local' has no data of its own: give --data (a path)"),
        (["run", "A1", "--scale", "smoke", "--micro-batch", "5"], "micro-batch 5 does not divide"),
        (["report", "--runs", "nowhere"], "no record below nowhere"),
        (["run", "e-bst", "--scale", "smoke"], "unknown variant 'e-bst'; did you mean 'E-best'?"),
        (["sweep", "--variants", "", "--scale", "smoke"], "--variants '' names no row"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(words, message, capsys):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {message}")


def test_records_do_not_go_into_a_file(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "A1", "--scale", "smoke", "--runs", str(ROOT / "README.md" / "x")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("README.md is no folder that can be written to\n")


@pytest.mark.parametrize(
    ("problem", "code", "message"),
    [
        (UserError("no such thing"), 2, "error: no such thing\n"),
        (KeyboardInterrupt(), 130, "stopped; finished runs are kept\n"),
    ],
)
def test_how_a_verb_may_end(problem, code, message, monkeypatch, capsys):
    def fails(args):
        raise problem

    monkeypatch.setattr(variants, "main", fails)
    assert cli.main(["variants"]) == code
    assert capsys.readouterr().err == message


def test_run_says_what_was_measured_and_no_more(monkeypatch, capsys):
    from qa_lib.__main__ import main
    from qa_lib.run import fit

    entry = {"status": "ok", "speed": {"features_per_s": None}, "quality": {"f1": 81.5}}
    monkeypatch.setattr(fit, "fit", lambda spec, runs: entry)
    assert main(["run", "A1", "--scale", "smoke"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "A1: ok, F1 81.50"
    assert re.fullmatch(r"runs/[a-z0-9-]+/A1-s0-[0-9a-f]{6}/record\.json", second)
