"""Questions to the app: the answer, its place in the paragraph, and what cannot be asked."""

import html
import json
import math
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from qa_lib.lab.app import asking, gate
from qa_lib.lab.app.asking import MAX_CONTEXT, Kept, answer, decided, typed_number
from qa_lib.lab.app.choices import Choice, Choices
from qa_lib.score import predict
from tests.app.server import folder_of, key_of
from tests.material import refused

# Frames around a paragraph, with characters of several code units, bytes or widths.
ODD_FRAMES = [
    "😀 {} 👩\u200d👩\u200d👧",
    "e\u0301 İ ß {} ﬁ",
    "\u200b\u202e{}\u202c\ufeff",
    "東京 {}。中文",
    "a\r\n\n\t  {}\u00a0\x00 .",
    "<b>&amp; {} $&",
]


@pytest.fixture(params=ODD_FRAMES)
def odd_questions(questions, request) -> list[tuple[str, str]]:
    """(question, paragraph) of four questions, each paragraph within odd characters."""
    frame = request.param
    return [
        (example.question, frame.format(example.context) + " " + frame.format("x"))
        for example in questions[:4]
    ]


def test_answers_and_their_places_are_those_of_the_paragraph_as_it_was_typed(
    server, runs, odd_questions
):
    for question, context in odd_questions:
        kept, card = server.ask(key_of(runs), question, context)
        span = context[kept["begin"] : kept["end"]]
        asked = predict.ask(folder_of(runs), question, context)
        best = next(entry["text"] for entry in asked["nbest"] if entry["text"])
        assert kept["context"] == context
        assert span == best
        assert kept["margin"] == pytest.approx(asked["margin"], abs=1e-3)
        shown, threshold = card[1]["value"], card[3]["value"]
        assert shown == ("No answer" if kept["margin"] > threshold else span)


@pytest.mark.parametrize("frame", ODD_FRAMES)
def test_the_answer_is_marked_where_it_is_in_the_paragraph(frame):
    before, span, after = frame.format("she"), "alice & bob", frame.format("came")
    begin = len(before)
    kept = Kept(before + span + after, begin, begin + len(span), margin=-1.0)
    text, paragraph = decided(kept, threshold=0.0)
    pieces = re.fullmatch(
        r'<div class="text">(.*)<mark>(.*)</mark>(.*)</div>', paragraph, re.DOTALL
    )
    assert text == span
    assert [html.unescape(piece) for piece in pieces.groups()] == [before, span, after]


def test_most_answers_are_right(server, runs, questions):
    right = 0
    for example in questions[:30]:
        _, card = server.ask(key_of(runs), example.question, example.context)
        golds = [text for text, _ in example.answers] or ["No answer"]
        right += card[1]["value"] in golds
    assert right >= 24


def test_long_paragraphs_are_read_in_windows(server, runs, questions):
    long = " ".join(example.context for example in questions[:20])
    _, card = server.ask(key_of(runs), "who came ?", long)
    details = card[4]["value"]
    assert int(re.search(r"(\d+) windows", details)[1]) > 5
    for part in ("tokenize", "model", "decode"):
        assert f"{part} " in details


@pytest.mark.parametrize(
    ("question", "context", "said"),
    [
        ("  ", "text", "Write or paste a question."),
        ("who ?", "\n", "Write or paste a paragraph."),
        ("who ?", "a" * 100_001, "The paragraph is longer than 100,000 characters, the limit."),
        ("w" * 1_001, "text", "The question is longer than 1,000 characters, the limit."),
        ("who " * 200, "text", "too long for this model, which reads"),
    ],
    ids=["no question", "no paragraph", "long paragraph", "long question", "many tokens"],
)
def test_what_cannot_be_asked_is_said_in_place_of_the_answer(server, runs, question, context, said):
    kept, card = server.ask(key_of(runs), question, context)
    shown, paragraph = card[1:3]
    assert kept is None
    assert said in shown["value"]
    assert paragraph["visible"] is False


def test_half_a_character_is_refused():
    refused("The question holds half a character", answer, None, "who \ud83d ?", "text")


def test_the_largest_paragraph_fits_into_a_request(server, runs):
    body = json.dumps(server.question(key_of(runs), "who ?", "\U0001f600" * MAX_CONTEXT))
    assert body.isascii()
    assert 12 * MAX_CONTEXT < len(body) <= gate.MAX_BODY


def test_the_largest_paragraph_is_answered(server, runs):
    _, card = server.ask(key_of(runs), "who ?", "😀 " * (MAX_CONTEXT // 2))
    assert " windows of " in card[4]["value"]


def test_an_answer_is_as_long_as_the_page_says(server, runs):
    context = "then alice baker came . bob cook came"
    words = {}
    for longest in ("", " 1 "):
        kept, _ = server.ask(key_of(runs), "who came ?", context, longest=longest)
        words[longest] = len(context[kept["begin"] : kept["end"]].split())
    assert words[" 1 "] == 1
    assert words[""] >= 1


@pytest.mark.parametrize("longest", ["0", "-1", "1.5", "x", "9" * 12, "9" * 30])
def test_a_longest_answer_that_is_none_is_refused(server, runs, longest):
    kept, card = server.ask(key_of(runs), "who came ?", "alice came", longest=longest)
    assert kept is None
    assert card[1]["value"].startswith("The longest answer is ")


@pytest.mark.parametrize(
    ("text", "number"),
    [("", None), ("  ", None), (None, None), (" 12 ", 12), ("1.5", "1.5"), ("9" * 20, "9" * 20)],
)
def test_a_number_may_be_typed_with_blanks_around_it(text, number):
    assert typed_number(text) == number


def test_a_model_is_called_by_its_key_alone(server, runs):
    for wrong_key in ("../../etc", str(folder_of(runs)), "cpu-smoke/A9-s0-000000"):
        with pytest.raises(AssertionError, match="'success': False"):
            server.ask(wrong_key, "who ?", "text")


def test_a_model_that_is_gone_is_told():
    refused("no such model", answer, None, "who ?", "text")


def test_the_page_names_no_folder(server, runs):
    assert str(runs.parent) not in server.client.get("/").text


def test_a_model_with_code_of_its_own_is_refused_without_its_path(runs, tmp_path):
    run = shutil.copytree(folder_of(runs).parent, tmp_path / "cpu-smoke" / "A1-s0-aaaaaa")
    (choice,) = Choices([], tmp_path).listed()
    (run / "model" / "config.json").write_text(
        '{"architectures": ["X"], "auto_map": {"AutoModel": "evil.Model"}}'
    )
    assert str(tmp_path) not in refused("cannot be asked", answer, choice, "who ?", "text")


def test_no_place_on_this_machine_is_told(runs, monkeypatch):
    choice = Choices([], runs).listed()[0]
    problem = OSError(f"{runs}/model.safetensors and /secret/place/of/mine.bin cannot be read")
    monkeypatch.setattr("qa_lib.lab.app.asking._ask", Mock(side_effect=problem))
    said = refused("…/mine.bin cannot be read", answer, choice, "who ?", "text")
    assert str(runs) not in said
    assert "secret" not in said


def test_a_checkpoint_that_is_written_again_is_loaded_again(runs, tmp_path):
    margins = []
    for variant in ("A1", "A2"):
        folder = shutil.copytree(folder_of(runs, variant), tmp_path / "model")
        margins.append(predict.ask(folder, "who", "it was she")["margin"])
        # Weights in memory are those of the file, which is not to be written over.
        shutil.rmtree(folder)
    assert margins[0] != margins[1]
    assert margins[1] == predict.ask(folder_of(runs, "A2"), "who", "it was she")["margin"]


def test_a_question_that_would_cut_its_paragraph_into_very_many_pieces_is_refused(runs):
    loaded = predict._loaded(folder_of(runs), 0)
    # It leaves a window one token more than the overlap.
    length = loaded.max_length - loaded.stride - 4
    refused(r"in \d,\d{3} pieces", predict.answer, loaded, "who " * length, "she " * 3_000)


@pytest.mark.slow
def test_a_hundred_askers_get_their_own_answers(server, runs, questions):
    """Their paragraphs have any length; all ask at once, and once more."""
    asked = []
    for number, example in enumerate(questions[:100]):
        paragraphs = (1, 1, 1, 4, 30)[number % 5]
        several = questions[number : number + paragraphs]
        text = " ".join(each.context for each in several)
        asked.append((key_of(runs), example.question, text))

    def place(question: tuple[str, str, str]) -> tuple:
        kept, _ = server.ask(*question)
        return kept["context"], kept["begin"], kept["end"]

    wanted = [place(question) for question in asked]
    assert [context for context, _, _ in wanted] == [context for _, _, context in asked]
    process = psutil.Process(server.process.pid)
    mebibytes = []
    with ThreadPoolExecutor(100) as pool:
        for _ in range(2):
            assert list(pool.map(place, asked)) == wanted
            mebibytes.append(process.memory_info().rss / 2**20)
    assert mebibytes[1] - mebibytes[0] < 50


# What is shown of an answer, without a model.


def an_answer(*texts, margin=-1.5, **more):
    """What `answer` returns for a paragraph whose best answers are these."""
    nbest = []
    for number, text in enumerate(texts):
        entry = {"text": text, "score": 3.0 - number, "probability": 0.5 ** (number + 1)}
        nbest.append(entry | ({"begin": 3, "end": 6} if text else {}))
    usual = {
        "context": "so she came",
        "margin": margin,
        "nbest": nbest,
        "ms": {"tokenize": 0.26, "model": 12.0},
        "windows": 1,
        "window_tokens": 384,
    }
    return usual | more


@pytest.mark.parametrize(
    ("texts", "kept"),
    [
        (["she", "so"], Kept("so she came", 3, 6, -1.5)),
        (["", "she"], Kept("so she came", 3, 6, -1.5)),
        ([""], Kept("so she came", None, None, -1.5)),
    ],
)
def test_the_best_answer_that_is_none_of_silence_is_kept(texts, kept):
    assert asking.keep(an_answer(*texts)) == kept


@pytest.mark.parametrize(
    ("kept", "threshold", "shown"),
    [
        (Kept("so she came", 3, 6, 1.0), 1.0, "she"),
        (Kept("so she came", 3, 6, 1.0), 0.9, "No answer"),
        (Kept("so she came", 0, 2, -1.0), 0.0, "so"),
        (Kept("so she came", None, None, -1.0), 0.0, "No answer"),
        (Kept("so she came", 3, 6, None), 0.0, "No answer"),
    ],
)
def test_there_is_no_answer_above_the_threshold(kept, threshold, shown):
    assert decided(kept, threshold)[0] == shown


def test_a_moved_threshold_takes_places_that_are_floats():
    text, paragraph = asking.decided_again("so she came", 3.0, 6.0, -1.0, 0.0)
    assert text == "she"
    assert "<mark>she</mark>" in paragraph


@pytest.mark.parametrize(
    ("margin", "sentence"),
    [
        (2.0, "“No answer” scores 2.00 above the best answer."),
        (-1.5, "“No answer” scores 1.50 below the best answer."),
        (None, "No part of the paragraph can be the answer."),
    ],
)
def test_the_margin_of_no_answer_is_a_sentence(margin, sentence):
    assert asking.details(an_answer("she", margin=margin)).startswith(f"<p>{sentence}</p>")


def test_details_have_the_best_answers_and_the_times():
    text = asking.details(an_answer("she", ""))
    assert re.findall("<td>(.*?)</td>", text) == [
        *("she", "3.00", "50.0%"),
        *("no answer", "2.00", "25.0%"),
    ]
    assert text.endswith("<p>tokenize 0.3 ms · model 12.0 ms</p>")
    several = asking.details(an_answer("she", windows=2))
    assert several.endswith("model 12.0 ms · 2 windows of up to 384 tokens</p>")


def a_choice(threshold=2.0):
    return Choice("key", "A1", Path("model"), threshold=threshold)


@pytest.fixture
def card_of(monkeypatch):
    """Return a function that asks a choice, which gives this answer, and returns the card."""

    def ask(choice, **result):
        models = SimpleNamespace(find=lambda key: choice)
        monkeypatch.setattr(asking, "_ask", lambda *_: an_answer("she", **result))
        return asking._card_of_answer(models, "key", "so she came", "who ?", "")

    return ask


@pytest.mark.parametrize(
    ("threshold", "margin", "value", "reach"),
    [
        (2.0004, -1.5, 2.0, 10),
        (math.nan, -1.5, 0.0, 10),
        (-12.0, -1.5, -12.0, 13),
        (2.0, -20.5, 2.0, 22),
        (2.0, None, 2.0, 10),
    ],
)
def test_the_slider_begins_at_the_models_threshold_and_reaches_beyond_the_margin(
    card_of, threshold, margin, value, reach
):
    slider = card_of(a_choice(threshold), margin=margin).threshold
    assert (slider["value"], slider["minimum"], slider["maximum"]) == (value, -reach, reach)


def test_a_card_decides_by_the_models_threshold_and_names_it_and_its_milliseconds(card_of):
    assert card_of(a_choice(0.0), margin=1.0).answer["value"] == "No answer"
    card = card_of(a_choice(2.0), margin=1.0)
    assert card.answer["value"] == "she"
    assert card.answer["label"] == "A1 · 12 ms"
    assert card[5:] == ("so she came", 3, 6, 1.0)


def test_the_page_says_what_it_is_and_how_many_words_its_smoke_model_knows(server):
    texts = [component["props"].get("value") for component in server.config["components"]]
    introductions = [text for text in texts if str(text).startswith("**Fine-tuned models answer")]
    assert introductions == [asking.INTRODUCTION + " The first one knows 144 words."]


def test_the_page_asks_its_example_when_it_is_loaded(server):
    asked_by = [event for _, event in server.ask_event["targets"]]
    assert sorted(asked_by) == ["click", "load", "submit"]


def test_the_second_menu_begins_with_the_second_model_that_was_named():
    def menus(*keys):
        choices = [Choice(key, f"name of {key}", Path()) for key in keys]
        return asking._menus(SimpleNamespace(listed=lambda: choices))

    first, second = menus("model 1", "model 2")
    assert (first["value"], second["value"]) == ("model 1", "model 2")
    assert second["choices"][0] == ("nothing", "")
    assert second["choices"][1] == ("name of model 1", "model 1")
    first, second = menus("cpu-smoke/A1", "cpu-smoke/A2")
    assert (first["value"], second["value"]) == ("cpu-smoke/A1", "")
    assert menus()[0]["value"] is None


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [("question", 1_000, "1,000"), ("paragraph", 100_000, "100,000")],
)
def test_a_text_may_be_as_long_as_the_limit(name, size, said):
    texts = {"question": "who ?", "paragraph": "text"}
    for length, message in ((size, "no such model"), (size + 1, f"longer than {said} characters")):
        text = texts | {name: "a" * length}
        refused(message, answer, None, text["question"], text["paragraph"])
