"""Questions as files have them, checked and turned into examples.

Two layouts come in: SQuAD's own, nested by article and paragraph, and the hub's, a question a row
with its answers in columns. Both are read as rows, which nobody has checked. `build_examples`
checks them for training and answering, `build_golds` for scoring, which believes what the official
script believes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from qa_lib.data.files import DataError

# A message lists this many bad questions of a kind; the count in front of them is the full one.
MAX_LISTED = 20
# Kinds of values, as JSON has them.
KINDS = {str: "text", int: "whole number", bool: "true or false", list: "list", dict: "object"}

# What can be wrong with the gold answers of a question, as headings over the questions of a
# message.
LAYOUT = "questions have no gold answers in the SQuAD layout"
CONTRADICTION = "questions contradict their is_impossible"
MISPLACED = "answers are not the text at their answer_start"


@dataclass(frozen=True, slots=True)
class Example:
    """A question about a paragraph. Questions about one paragraph share one `context` object."""

    id: str
    title: str  # of the article; it only names the place in messages
    question: str
    context: str  # the paragraph
    # The text of each gold answer, and its first character in `context`; () if there is no answer.
    answers: tuple[tuple[str, int], ...] = ()

    @property
    def impossible(self) -> bool:
        """Whether the question has no answer."""
        return not self.answers


class Row(NamedTuple):
    """A question as a file has it. What is typed `object` may be anything."""

    article: str  # file and article, which messages begin with
    title: str
    paragraph: object  # {"context": text} in a good file
    question: object  # {"id", "question", "answers", "is_impossible"} in a good file


def nested_rows(document: object, name: str) -> Iterator[Row]:
    """Yield the questions of the official layout, data[].paragraphs[].qas[].

    `name` is the file that messages name. Raises DataError where a list is missing on the way.
    """
    for article_number, article in enumerate(_value(document, "data", list, name)):
        place = f"{name}: article {article_number}"
        paragraphs = _value(article, "paragraphs", list, place)
        title = _title(article.get("title"))
        place = f"{place} {title[:80]!r}"
        for number, paragraph in enumerate(paragraphs):
            for question in _value(paragraph, "qas", list, f"{place}, paragraph {number}"):
                yield Row(place, title, paragraph, question)


def flat_rows(table, name: str) -> Iterator[Row]:
    """Yield the questions of the hub's layout, one a row, without answers if it is impossible.

    `table` is a `datasets.Dataset`; where it has no column of answers, its rows have none either.
    Equal paragraphs come out as one object, as in the nested layout. Raises DataError for a row
    without a paragraph.
    """
    contexts: dict[str, str] = {}
    for part in table.with_format("arrow").iter(10_000):
        for row in part.to_pylist():
            title = _title(row.get("title"))
            article = f"{name}: article {title[:80]!r}"
            context = _value(row, "context", str, f"{article}, question {row.get('id')!r}")
            answers = _answers_of_columns(row.get("answers"))
            paragraph = {"context": contexts.setdefault(context, context)}
            question = row | {"answers": answers, "is_impossible": answers == []}
            yield Row(article, title, paragraph, question)


def _answers_of_columns(answers: object) -> object:
    """Return the answers as the nested layout lists them, out of the hub's two columns.

    Anything that is not in columns is returned as it is, and columns that are not lists as None.
    """
    if not isinstance(answers, dict):
        return answers
    texts = answers.get("text")
    starts = answers.get("answer_start")
    if not isinstance(texts, list) or not isinstance(starts, list):
        return None
    return [{"text": text, "answer_start": start} for text, start in zip_longest(texts, starts)]


def build_examples(rows: Iterable[Row], name: str, labelled: bool) -> list[Example]:
    """Check questions and turn them into examples; `name` is the file that messages name.

    Without `labelled` gold answers are left out, and need be neither there nor right.
    Raises DataError at the first question that nobody could read. What is wrong with gold answers,
    which training alone needs, is collected first, so that the message can count and list it.
    """
    examples: list[Example] = []
    article_of: dict[str, str] = {}
    faults: dict[str, list[str]] = {LAYOUT: [], CONTRADICTION: [], MISPLACED: []}
    for row in rows:
        context = _text(row.paragraph, "context", row.article)
        key = _id(row.question, row.article)
        place = f"{row.article}, question {key!r}"
        if key in article_of:
            raise DataError(f"{place}: the same id as a question of {article_of[key]}")
        article_of[key] = row.article
        question = _text(row.question, "question", place)
        answers = ()
        if labelled:
            answers = _gold_answers(row.question, context, place.removeprefix(f"{name}: "), faults)
        examples.append(Example(key, row.title, question, context, answers))
    if any(faults.values()):
        raise DataError(f"{name}: {_fault_list(faults)}")
    if not examples:
        raise DataError(f"{name}: an empty data set, not one question in it")
    return examples


def build_golds(rows: Iterable[Row], name: str) -> list[Example]:
    """Return the ids and gold answers' texts of questions, without paragraphs and places.

    This is what the official script reads, and what it takes for the same: it looks at no flag, a
    question has an answer where its list of answers is not empty, and of two questions with one id
    the last counts. Raises DataError where the official script would end in an exception.
    """
    golds: dict[str, Example] = {}
    for row in rows:
        key = _id(row.question, row.article)
        place = f"{row.article}, question {key!r}"
        answers = _value(row.question, "answers", list, place)
        texts = tuple((_value(answer, "text", str, place), 0) for answer in answers)
        golds[key] = Example(key, row.title, question="", context="", answers=texts)
    if not golds:
        raise DataError(f"{name}: an empty data set, not one question in it")
    return list(golds.values())


def _value(holder: object, key: str, kind: type, place: str):
    """Return `holder[key]`. Raises DataError unless it is there and of that kind."""
    value = holder.get(key) if isinstance(holder, dict) else None
    if type(value) is not kind:
        raise DataError(f"{place}: not the SQuAD layout, no {KINDS[kind]} under {key!r}")
    return value


def _text(holder: object, key: str, place: str) -> str:
    """Return the text `holder[key]`. Raises DataError unless it is a text that can be encoded.

    JSON can spell half of a surrogate pair, which no tokenizer takes.
    """
    value = _value(holder, key, str, place)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{place}: the {key} holds half a character at {error.start}") from None
    return value


def _id(question: object, article: str) -> str:
    """Return the id of a question: a text, or the digits of a whole number, which is how JSON's
    keys spell it. Raises DataError for any other."""
    value = question.get("id") if isinstance(question, dict) else None
    if type(value) is int:
        return str(value)
    return _text(question, "id", article)


def _title(value: object) -> str:
    """Return a title, or "" for a value that is no text: it only names the place in messages."""
    return value if isinstance(value, str) else ""


def _gold_answers(
    question: dict, context: str, place: str, faults: dict[str, list[str]]
) -> tuple[tuple[str, int], ...]:
    """Return the gold answers of a question, each with its first character in the paragraph.

    What is wrong with them is added to `faults`, under its heading.
    """
    try:
        answers = _value(question, "answers", list, place)
        impossible = False  # a flag that is null or not there says nothing against answers
        if question.get("is_impossible") is not None:
            impossible = _value(question, "is_impossible", bool, place)
        golds = []
        for answer in answers:
            text = _value(answer, "text", str, place)
            golds.append((text, _value(answer, "answer_start", int, place)))
    except DataError as error:
        faults[LAYOUT].append(str(error).replace("not the SQuAD layout, ", ""))
        return ()
    if impossible == bool(answers):
        flag = str(question.get("is_impossible", "not there")).lower()
        faults[CONTRADICTION].append(
            f"{place}: {len(answers)} answers, and is_impossible is {flag}"
        )
        return ()
    for text, start in golds:
        # A negative start would count from the end of the paragraph and could even match there.
        if not text or start < 0 or not context.startswith(text, start):
            hint = _place_hint(context, text)
            faults[MISPLACED].append(f"{place}: {text[:60]!r} at {start}{hint}")
    return tuple(golds)


def _place_hint(context: str, text: str) -> str:
    """Return the end of a message that says where `text` is, if it is in `context` just once."""
    first = context.find(text) if text else -1
    if first < 0 or first != context.rfind(text):
        return ""
    return f", and it is at {first} alone"


def _fault_list(faults: dict[str, list[str]]) -> str:
    """Return the text of a message: for each kind of fault how many questions have it, and which.

    '2 answers are not ...: article 0, question 'q1': 'north' at 3; ...'
    """
    parts = []
    for heading, places in faults.items():
        if not places:
            continue
        part = f"{len(places)} {heading}: {'; '.join(places[:MAX_LISTED])}"
        if len(places) > MAX_LISTED:
            part += f"; and {len(places) - MAX_LISTED} more"
        parts.append(part)
    return "; ".join(parts)
