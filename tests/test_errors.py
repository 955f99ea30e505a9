"""How the text of a message is made: in printable lines, with the name that may be meant."""

import io
import os
import sys

import pytest

from qa_lib.errors import (
    find,
    first_line,
    nearest,
    one_line,
    print_anything,
    printable,
    wrapped,
)
from tests.material import refused


def test_a_short_list_of_names_is_shown_beside_a_suggestion_and_a_long_one_is_not():
    assert nearest("verb", "swep", ["sweep", "run"]) == (
        "unknown verb 'swep'; did you mean 'sweep'? (known: sweep, run)"
    )
    long_list = ["sweep", *(f"other{number}" for number in range(20))]
    assert nearest("verb", "swep", long_list) == "unknown verb 'swep'; did you mean 'sweep'?"


def test_all_names_are_listed_where_none_is_like_the_one_asked_for():
    names = [f"other{number}" for number in range(20)]
    assert nearest("verb", "zzz", names) == f"unknown verb 'zzz' (known: {', '.join(names)})"


def test_what_is_no_name_at_all_is_refused_as_an_unknown_one():
    assert refused(r"unknown variant \['A1'\]", find, "variant", ["A1"], {"A1": 1})


def test_a_name_in_other_letters_is_suggested_as_it_is_written():
    assert "did you mean 'ABC'?" in nearest("verb", "abc", ["ABC", "abx"])


def test_a_name_that_is_little_alike_is_suggested_too():
    assert "did you mean 'max-batch'?" in nearest("verb", "batch_size", ["max-batch", "run"])


@pytest.mark.parametrize(
    "sign", ["\x00", "\x08", "\x0b", "\x1b", "\x7f", "\x9b", "\u202e", "\u2066"]
)
def test_a_sign_that_controls_a_terminal_or_turns_writing_around_is_left_out(sign):
    assert printable(f"a{sign}b") == "ab"


def test_lines_tabs_and_letters_of_any_writing_are_kept():
    text = "a\tb\nü 漢 😀 \u200d"
    assert printable(text) == text


def test_half_a_character_is_a_question_mark():
    assert printable("a\ud800b") == "a?b"


def test_one_line_has_single_blanks():
    assert one_line(" two\n\tlines\x1b  here ") == "two lines here"


@pytest.mark.parametrize(
    ("message", "said"), [("\n one\ntwo", "one"), ("", "KeyError"), (" \n", "KeyError")]
)
def test_of_an_error_the_first_line_is_said_or_its_class(message, said):
    error = type("KeyError", (Exception,), {})(message)
    assert first_line(error) == said


def test_a_long_sentence_is_wrapped_for_a_terminal_of_100_columns_and_indented():
    first, *others = wrapped("micro-batch " * 30).splitlines()
    # In front of it stands a time of day: "12:00 ".
    assert 80 < len(first) <= 94
    for line in others:
        assert line.startswith("    micro-batch")
        assert len(line) <= 94
    assert not first.endswith("-")


def test_a_process_without_outputs_prints_nothing_and_does_not_fail(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setenv("PYTHONIOENCODING", "")
    print_anything()


def test_the_outputs_of_a_notebook_which_name_no_encoding_are_left_as_they_are(monkeypatch):
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", output)
    monkeypatch.setenv("PYTHONIOENCODING", "")
    print_anything()
    assert os.environ["PYTHONIOENCODING"] == "utf-8:backslashreplace"
