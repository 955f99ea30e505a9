"""The official SQuAD v2.0 figures, to the last digit."""

import json
import os
import random
import re
import string
from types import SimpleNamespace

import pytest

from qa_lib.data.examples import Example
from qa_lib.lab.cli.verbs import parser_of
from qa_lib.lab.tools.score import main
from qa_lib.score.f1 import f1, normalise, score, squad_metric
from tests.conftest import slow
from tests.material import document, hub_row, python, question, real_squad, refused, write


def asked(key: str, *golds: str) -> Example:
    """A question with these gold answers, as scoring sees it."""
    return Example(key, "A", "", "", tuple((gold, 0) for gold in golds))


EXAMPLES = [
    asked("one", "the Rhine", "Rhine river", "Rhine"),
    asked("two", "a b c d"),
    asked("bare", "The", "--"),
]
EXAMPLES += [asked("none"), asked("void")]
PREDICTIONS = {"one": "The Rhine.", "two": "b d d x", "bare": "", "none": "", "void": "something"}


def test_ties_of_probabilities_keep_their_files_order():
    examples = [asked("yes", "x"), asked("no"), asked("also", "y")]
    texts = {"yes": "x", "no": "z", "also": "y"}
    for order, best in ((["yes", "also", "no"], 300.0 / 3), (["no", "yes", "also"], 200.0 / 3)):
        assert score(examples, texts, dict.fromkeys(order, 0.5))["best_exact"] == best


@pytest.mark.parametrize("value", [None, ["x"]])
def test_predictions_that_are_no_text(value):
    said = f"article 'A', question 'none': {re.escape(repr(value))} is no prediction"
    refused(said, score, EXAMPLES, PREDICTIONS | {"none": value})


@pytest.mark.parametrize("value", ["0.5", float("nan"), float("inf"), -float("inf"), True])
def test_probabilities_that_are_no_finite_numbers(value):
    given = dict.fromkeys(PREDICTIONS, 0.5) | {"two": value}
    refused("is no no-answer probability", score, EXAMPLES, PREDICTIONS, given)
    refused("no questions", score, [], {})


def test_a_number_of_any_size_is_one():
    huge = dict.fromkeys(PREDICTIONS, 0.5) | {"two": 10**400}
    assert score(EXAMPLES, PREDICTIONS, huge) == score(EXAMPLES, PREDICTIONS, huge | {"two": 1e300})


def test_sums_run_in_the_datas_order():
    """The predictions go from right to wrong to empty, in an order of their own."""
    examples = real_squad("validation")
    texts = {}
    values = []
    for number, example in enumerate(reversed(examples)):
        gold = [text for text, _ in example.answers[:1]]
        texts[example.id] = " ".join([*gold, *example.context.split()[: number % 5]])
    for example in examples:
        golds = [words for text, _ in example.answers if (words := normalise(text).split())] or [[]]
        values.append(max(f1(gold, normalise(texts[example.id]).split()) for gold in golds))
    assert score(examples, texts)["f1"] == 100.0 * sum(values) / len(examples)


def official_normal(text: str) -> str:
    """Lower case, without ASCII punctuation, articles and more than single blanks; here by whole
    runs of letters."""
    runs = re.split(
        r"(\w+)", "".join(letter for letter in text.lower() if letter not in string.punctuation)
    )
    return " ".join("".join(" " if run in ("a", "an", "the") else run for run in runs).split())


def official_f1(gold: str, predicted: str) -> float:
    left = official_normal(gold).split()
    found = official_normal(predicted).split()
    if not left or not found:
        return float(left == found)
    shared = 0
    for word in found:
        if word in left:
            left.remove(word)
            shared += 1
    precision = shared / len(found)
    recall = shared / len(official_normal(gold).split())
    return 2 * precision * recall / (precision + recall) if shared else 0.0


def official(examples, texts, odds, threshold) -> dict[str, float]:
    """The official script's figures from their description (Rajpurkar, Jia, Liang 2018; worksheet
    and script of SQuAD v2.0), with nothing of qa_lib; for odds that differ."""
    raw = {"exact": {}, "f1": {}}
    found = {}
    for example in examples:
        golds = [text for text, _ in example.answers if official_normal(text)] or [""]
        said = texts[example.id]
        raw["exact"][example.id] = max(
            float(official_normal(gold) == official_normal(said)) for gold in golds
        )
        raw["f1"][example.id] = max(official_f1(gold, said) for gold in golds)
    has = {example.id: bool(example.answers) for example in examples}
    groups = {
        "": [*has],
        "HasAns_": [key for key in has if has[key]],
        "NoAns_": [key for key in has if not has[key]],
    }
    for prefix, group in groups.items():
        for name, values in raw.items():
            # Above the threshold it counts as silent, which is right where there is no answer.
            final = [float(not has[key]) if odds[key] > threshold else values[key] for key in group]
            if group:
                found[f"{prefix}{name}"], found[f"{prefix}total"] = (
                    100 * sum(final) / len(group),
                    len(group),
                )
    for name, values in raw.items():
        # Silence on all, then each threshold. A text for a question without an answer is wrong
        # here, whatever it is.
        tries = [(sum(not answered for answered in has.values()), 0.0)]
        for at in sorted(odds.values()):
            gains = [values[key] if has[key] else not texts[key] for key in has if odds[key] <= at]
            tries.append((sum(gains) + sum(not has[key] for key in has if odds[key] > at), at))
        best = max(score for score, _ in tries)
        found[f"best_{name}"] = 100 * best / len(has)
        found[f"best_{name}_thresh"] = next(at for score, at in tries if score > best - 1e-9)
    return found


WORDS = (
    "the a An THE Rhine's rhine river, “north” – ½ . -- U.S. $1,000 a.b theatre an-other "
    "Café \u00a0 \t the–sea"
)


def fuzzed(seed: int) -> tuple[list[Example], dict[str, str], dict[str, float]]:
    """Questions with up to three gold answers, predictions and odds, all drawn."""
    draw = random.Random(seed)

    def text(most):
        return " ".join(draw.choice(WORDS.split(" ")) for _ in range(draw.randint(0, most)))

    examples = []
    texts = {}
    for number in range(draw.randint(1, 12)):
        golds = [text(4) for _ in range(draw.choice([0, 0, 1, 2, 3]))]
        examples.append(asked(str(number), *golds))
        near = draw.choice(golds) if golds else ""
        texts[str(number)] = draw.choice(["", near, near.upper(), f"{near} {text(2)}", text(3)])
    odds = draw.sample(range(-40, 40), len(examples))
    return examples, texts, {key: value / 8 for key, value in zip(texts, odds, strict=True)}


def test_fuzzed_predictions_have_the_figures_of_the_official_rules():
    for seed in range(500):
        examples, texts, odds = fuzzed(seed)
        threshold = random.Random(seed).choice([-1.0, 0.0, 0.5, 5.0])
        found = score(examples, texts, odds, threshold)
        wanted = official(examples, texts, odds, threshold)
        assert found == pytest.approx(wanted, abs=1e-9), seed
        assert score(examples, texts, odds) == pytest.approx(
            official(examples, texts, odds, 1.0), abs=1e-9
        ), seed


def as_the_hub_has_it(examples, texts, odds) -> dict:
    """Predictions and references, as the hub's metric takes them."""
    names = ("id", "prediction_text", "no_answer_probability")
    given = [dict(zip(names, (key, text, odds[key]), strict=True)) for key, text in texts.items()]
    rows = [hub_row(e.id, e.title, e.question, e.context, *e.answers) for e in examples]
    return {
        "predictions": given,
        "references": [{name: row[name] for name in ("id", "answers")} for row in rows],
    }


def test_the_hubs_own_metric_agrees():
    """Where its script is in the cache: tests ask no network."""
    import evaluate

    try:
        metric = evaluate.load("squad_v2")
    except Exception as problem:
        pytest.skip(f"evaluate has no squad_v2 here ({type(problem).__name__})")
    for seed in range(100):
        examples, texts, odds = fuzzed(seed)
        wanted = metric.compute(**as_the_hub_has_it(examples, texts, odds), no_answer_threshold=0.5)
        assert score(examples, texts, odds, 0.5) == pytest.approx(wanted, abs=1e-9), seed


def run(*words):
    return main(parser_of("score").parse_args([*map(str, words)]))


@pytest.fixture
def files(tmp_path):
    data = document(("The Rhine flows", [question("q1", "x", ("Rhine", 4)), question("q2", "y")]))
    contents = {
        "data": data,
        "predictions": {"q1": "the Rhine", "q2": "north"},
        "odds": {"q1": -3, "q2": 4.5},
    }
    return SimpleNamespace(
        **{name: write(tmp_path / f"{name}.json", content) for name, content in contents.items()}
    )


def test_command_line(files, capsys):
    assert run(files.data, files.predictions) == 0
    expected = {
        "exact": 50.0,
        "f1": 50.0,
        "total": 2,
        "HasAns_exact": 100.0,
        "HasAns_f1": 100.0,
        "HasAns_total": 1,
    }
    expected |= {"NoAns_exact": 0.0, "NoAns_f1": 0.0, "NoAns_total": 1}
    assert [*json.loads(capsys.readouterr().out).items()] == [*expected.items()], "in that order"
    assert run(files.data, files.predictions, "--na-prob", files.odds, "--na-threshold", "4") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["exact"], found["best_f1"], found["best_f1_thresh"]) == (100.0, 100.0, -3)
    assert list(found)[-4:] == ["best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"]


WRONG = {": not an object": '["q1"]', ": not JSON": '{"q1": '}
WRONG[
    " for .*data.json: no prediction for 1 of 2 questions, .*: article 'Rivers', question 'q2'"
] = '{"q1": ""}'
WRONG[" for .*data.json: article 'Rivers', question 'q1': None is no prediction"] = (
    '{"q1": null, "q2": ""}'
)


def test_command_line_errors_name_the_file(files):
    refused("none.json: No such file", run, files.data, files.data.with_name("none.json"))
    refused("Is a directory", run, files.data, files.data.parent)
    os.mkfifo(files.data.with_name("pipe.json"))
    refused("pipe.json: not a regular file", run, files.data, files.data.with_name("pipe.json"))
    words = "--na-prob", write(files.odds, {"q1": float("inf"), "q2": 0})
    refused(
        "question 'q1': inf is no no-answer probability", run, files.data, files.predictions, *words
    )
    for said, text in WRONG.items():
        files.predictions.write_text(text)
        refused(rf"predictions\.json{said}", run, files.data, files.predictions)


# The official script (evaluate-v2.0.py), step by step, over the data's JSON: what it looks at, and
# in which order.


def official_figures(data: dict, texts: dict, odds: dict | None, threshold: float) -> dict:
    has_answer = {}
    exact = {}
    overlap = {}
    for article in data["data"]:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                key = str(entry["id"])  # a number as JSON's keys spell it
                has_answer[key] = bool(entry["answers"])
                golds = [a["text"] for a in entry["answers"] if official_normal(a["text"])] or [""]
                said = texts[key]
                exact[key] = max(int(official_normal(g) == official_normal(said)) for g in golds)
                overlap[key] = max(official_f1(gold, said) for gold in golds)
    silent = {key for key in exact if odds and odds[key] > threshold}
    figures = {}
    answered = [key for key, has in has_answer.items() if has]
    silence = [key for key, has in has_answer.items() if not has]
    for prefix, keys in (("", [*exact]), ("HasAns_", answered), ("NoAns_", silence)):
        if not keys:
            continue
        for name, values in (("exact", exact), ("f1", overlap)):
            final = [float(not has_answer[k]) if k in silent else values[k] for k in keys]
            figures[f"{prefix}{name}"] = 100.0 * sum(final) / len(keys)
        figures[f"{prefix}total"] = len(keys)
    for name, values in (("exact", exact), ("f1", overlap)) if odds else ():
        best = current = len(silence)
        best_threshold = 0.0
        for key in sorted(odds, key=odds.get):
            if key not in values:
                continue
            current += values[key] if has_answer[key] else -1 if texts[key] else 0
            if current > best:
                best = current
                best_threshold = odds[key]
        figures[f"best_{name}"] = 100.0 * best / len(values)
        figures[f"best_{name}_thresh"] = best_threshold
    return figures


def odd_files(seed: int) -> tuple[dict, dict, dict]:
    """A data file as people have them, with predictions and odds: flags that contradict, places
    that are wrong, null or text, titles of any kind, empty texts, ids that are numbers or come
    twice, and predictions for further questions."""
    draw = random.Random(seed)
    examples, texts, odds = fuzzed(seed)
    entries = []
    for number, example in enumerate(examples):
        answers = []
        for text, start in example.answers:
            answer = {"text": text, "answer_start": draw.choice([start, -1, 10**9, None, "0"])}
            answers.append(draw.choice([answer, {"text": text}, answer | {"answer_id": 3}]))
        entry = {"id": draw.choice([example.id, number]), "question": draw.choice(["x", None, 3])}
        entry |= draw.choice([{}, {"is_impossible": draw.choice([True, False, None, "no"])}])
        entries.append(entry | {"answers": answers})
    if draw.random() < 0.3:
        entries.append(draw.choice(entries) | {"answers": [{"text": "north"}]})
    for further in range(draw.randint(0, 3)):
        texts[f"further {further}"] = draw.choice(["north", ""])
        odds[f"further {further}"] = draw.choice([-100.0, 0.0, 100.0])
    title = draw.choice([{}, {"title": None}, {"title": 3}, {"title": "Rivers"}])
    paragraph = draw.choice([{"context": None}, {}, {"context": "The Rhine"}])
    cut = draw.randint(0, len(entries))
    parts = [paragraph | {"qas": part} for part in (entries[:cut], entries[cut:])]
    return {"data": [title | {"paragraphs": parts}]}, texts, odds


@pytest.mark.parametrize("count", [150, slow(3000)])
def test_odd_files_have_the_figures_of_the_official_script_to_the_last_digit(
    tmp_path, capsys, count
):
    data, predictions, odds = (tmp_path / f"{name}.json" for name in ("data", "texts", "odds"))
    for seed in range(count):
        contents = odd_files(seed)
        for path, content in zip((data, predictions, odds), contents, strict=True):
            write(path, content)
        threshold = random.Random(seed).choice([-1.0, 0.0, 0.5, 5.0])
        run(data, predictions, "--na-prob", odds, "--na-threshold", threshold)
        assert json.loads(capsys.readouterr().out) == official_figures(*contents, threshold), seed
        run(data, predictions)
        found = json.loads(capsys.readouterr().out)
        assert found == official_figures(*contents[:2], None, 1.0), seed


@pytest.mark.parametrize("answers", [None, 3, [{"text": None}], [{}], "x"])
def test_golds_by_which_nobody_can_score_are_one_line(files, answers):
    write(files.data, document(("The Rhine", [question("q1", "x", answers=answers)])))
    refused("article 0 'Rivers', question 'q1': not the SQuAD layout", run, files.data, files.odds)


def test_a_byte_order_mark_is_no_part_of_a_file(files, capsys):
    for path in (files.data, files.predictions):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert run(files.data, files.predictions) == 0
    assert json.loads(capsys.readouterr().out)["exact"] == 50.0


def test_metric_needs_no_network():
    odds = {"one": 0.25, "two": 0.75, "bare": 0.125, "none": 0.625, "void": 0.5}
    given = as_the_hub_has_it(EXAMPLES, PREDICTIONS, odds)
    metric = squad_metric()
    assert metric.compute(**given) == score(EXAMPLES, PREDICTIONS, odds)
    texts, references = given.values()
    for text, reference in zip(texts, references, strict=True):
        metric.add(prediction=text, reference=reference)
    assert metric.compute(no_answer_threshold=0.3) == score(EXAMPLES, PREDICTIONS, odds, 0.3)
    refused(
        "no prediction for 1 of 5",
        metric.compute,
        predictions=[*texts[1:], texts[1]],
        references=references,
    )


def test_scoring_imports_neither_evaluate_nor_torch():
    heavy = "'evaluate', 'datasets', 'torch', 'numpy'"
    code = f"import sys, qa_lib.score.f1; print([m for m in ({heavy}) if m in sys.modules])"
    assert python("-c", code).stdout.strip() == "[]"
