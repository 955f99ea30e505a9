"""Where questions come from: SQuAD files, folders, saved datasets, the hub and the generator, as one in-memory form.

Everything downstream sees a list of `Example` and nothing else, so each format ends here.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import zip_longest
from pathlib import Path

from qa_lib.data.synthetic import synthetic_squad
from qa_lib.errors import UserError, first_line

# A message lists this many bad questions of a kind; the count in front of them is always the full one.
MAX_LISTED = 20
OFFICIAL_NAMES = {
    "train": ("train.json", "train-v2.0.json"),
    "validation": ("validation.json", "dev-v2.0.json"),
}
SYNTHETIC_SEEDS = {"train": 0, "validation": 1}
KINDS = {
    str: "text",
    int: "whole number",
    bool: "true or false",
    list: "list",
    dict: "object",
}  # as JSON has them


class DataError(UserError):
    """A data set that cannot be used; the message names file, article and question id."""


@dataclass(frozen=True, slots=True)
class Example:
    """One question about one paragraph.

    `answers` holds (text, first character in `context`) for each gold answer; none means that it has no answer.
    Questions about the same paragraph share one `context` object.
    """

    id: str
    title: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] = ()

    @property
    def impossible(self) -> bool:
        return not self.answers


@dataclass
class Source:
    """A data set, of questions or of text, that is read when first used.

    `name` is what the user asked for (a path, as given). `digest` computes the hash of the content as stored (hex),
    without parsing it. `rows` reads from the start: questions as `build_examples` takes them, or lines of text. Both
    raise DataError. Without `labelled` gold answers are left out, and need be neither there nor right.
    """

    name: str
    digest: Callable[[], str]
    rows: Callable[[], Iterable]
    labelled: bool = True

    @cached_property
    def sha256(self) -> str:
        return self.digest()

    def read(self) -> Iterator:
        """All `rows`. Raises DataError after the last one where the source is no longer what it was when its `sha256`
        was first asked for, so that what was read may be of either."""
        _ = self.sha256
        yield from self.rows()
        if self.digest() != self.sha256:
            raise DataError(
                f"{self.name}: it has changed since it was first looked at; give the command again"
            )

    @cached_property
    def examples(self) -> list[Example]:
        """The questions to train on or to answer, each with its paragraph."""
        return build_examples(self.read(), self.name, self.labelled)

    @cached_property
    def golds(self) -> list[Example]:
        """The questions to score by, without their paragraphs."""
        return build_golds(self.read(), self.name)


def open_source(source: str | os.PathLike, split: str, labelled: bool = True) -> Source:
    """Find the data set `source`; nothing is parsed yet.

    `source` is one of
      - "synthetic:2000": 2,000 generated questions (the two splits use different seeds),
      - a .json file in the official nested layout, v1.1 or v2.0,
      - a folder with train.json / validation.json, or the official train-v2.0.json / dev-v2.0.json,
      - a folder that `datasets` wrote with save_to_disk (a Dataset, or a DatasetDict holding the split),
      - a name on the Hugging Face hub, such as "squad_v2".
    `labelled` is that of Source.
    Raises `DataError` if there is no such data set, and on first use of the result if its content is bad.
    """
    name = os.fspath(source)
    path = find_file(name, OFFICIAL_NAMES[split])
    if name.startswith("synthetic:"):
        digest, document = generated(name, split)
        content = digest, lambda: nested_rows(document(), name)
    elif path:
        name = str(path)
        content = partial(sha256_of, path), lambda: nested_rows(read_json(path), name)
    elif os.path.isdir(name):
        name = str(Path(name))
        content = _saved(Path(name), split)
    # A misspelt file in a folder that is there should not go looking for a data set of that name on the hub.
    elif is_hub_name(name) and not (name.endswith(".json") or os.path.isdir(os.path.dirname(name))):
        digest, table = hub_table(name, split, "train.json and validation.json in SQuAD's format")
        content = digest, lambda: flat_rows(table(), name)
    else:
        raise DataError(f"{name!r}: no such file or folder")
    return Source(name, *content, labelled)


def find_file(name: str, names: Iterable[str]) -> Path | None:
    """The file of that name, or the first of `names` in the folder of that name; None where there is none."""
    paths = [Path(name, other) for other in names] if os.path.isdir(name) else [Path(name)]
    return next((path for path in paths if os.path.isfile(path)), None)


def is_hub_name(name: str) -> bool:
    """Whether the hub may have it: a data set, and perhaps a configuration, as in Salesforce/wikitext:wikitext-2-v1."""
    return re.fullmatch(r"[\w-][\w.-]{0,95}(/[\w.-]{1,95})?(:[\w.-]+)?", name) is not None


# What can be wrong with the gold answers of a question, as headings over the questions that are listed.
LAYOUT = "questions have no gold answers in the SQuAD layout"
CONTRADICTION = "questions contradict their is_impossible"
MISPLACED = "answers are not the text at their answer_start"


def build_examples(rows: Iterable[tuple], name: str, labelled: bool) -> list[Example]:
    """Check raw questions and turn them into examples; `name` is the file named in errors.

    `rows` yields (article, title, paragraph, question), the last two as in the official layout; `article` names the
    place in errors. Raises `DataError` at the first question that nobody could read; what is wrong with gold answers,
    which training alone needs, is collected over the whole data set so that the message can count and list it.
    """
    examples: list[Example] = []
    article_of: dict[str, str] = {}
    faults: dict[str, list[str]] = {LAYOUT: [], CONTRADICTION: [], MISPLACED: []}
    for article, title, paragraph, entry in rows:
        context = _text(paragraph, "context", article)
        key = _id(entry, article)
        place = f"{article}, question {key!r}"
        if key in article_of:
            raise DataError(f"{place}: the same id as a question of {article_of[key]}")
        article_of[key] = article
        question = _text(entry, "question", place)
        answers = ()
        if labelled:
            listed = place.removeprefix(f"{name}: ")
            answers = _placed_answers(entry, context, listed, faults)
        examples.append(Example(key, title, question, context, answers))
    if any(faults.values()):
        raise DataError(f"{name}: {_counted(faults)}")
    if not examples:
        raise DataError(f"{name}: an empty data set, not one question in it")
    return examples


def build_golds(rows: Iterable[tuple], name: str) -> list[Example]:
    """The ids and gold answers' texts of raw questions, without paragraphs, questions and places: what the official
    script reads, and what it takes for the same. It looks at no flag, a question has an answer where its list of
    answers is not empty, and of two questions with one id the last counts.

    `rows` is that of build_examples. Raises `DataError` where the official script would end in an exception.
    """
    golds: dict[str, Example] = {}
    for article, title, _, entry in rows:
        key = _id(entry, article)
        place = f"{article}, question {key!r}"
        answers = _held(entry, "answers", list, place)
        texts = tuple((_held(answer, "text", str, place), 0) for answer in answers)
        golds[key] = Example(key, title, "", "", texts)
    if not golds:
        raise DataError(f"{name}: an empty data set, not one question in it")
    return list(golds.values())


def _held(holder: object, key: str, kind: type, place: str, default: object = None):
    """`holder[key]`, or the default. Raises DataError unless it is of that kind."""
    value = holder.get(key, default) if isinstance(holder, dict) else None
    if type(value) is not kind:
        raise DataError(f"{place}: not the SQuAD layout, no {KINDS[kind]} under {key!r}")
    return value


def _text(holder: object, key: str, place: str) -> str:
    """The text `holder[key]`. Raises DataError unless it is one, and for half a character."""
    value = _held(holder, key, str, place)
    if not value.isascii():
        try:
            value.encode()
        except (
            UnicodeEncodeError
        ) as error:  # JSON can spell half of a surrogate pair; no tokenizer takes it
            raise DataError(f"{place}: the {key} holds half a character at {error.start}") from None
    return value


def _id(entry: object, article: str) -> str:
    """The id of a question: a text, or the digits of a whole number, which is how JSON's keys spell it. Raises
    DataError."""
    value = entry.get("id") if isinstance(entry, dict) else None
    if type(value) is int:
        return str(value)
    return _text(entry, "id", article)


def _title(value: object) -> str:
    """A title, which only names the place in messages; empty where it is no text."""
    return value if isinstance(value, str) else ""


def _placed_answers(
    entry: dict, context: str, place: str, faults: dict[str, list[str]]
) -> tuple[tuple[str, int], ...]:
    """The gold answers of a question, each with its place in the paragraph; what is wrong with them goes to `faults`.
    A flag that is null or not there says nothing against answers."""
    try:
        answers = _held(entry, "answers", list, place)
        flag = entry.get("is_impossible")
        impossible = False if flag is None else _held(entry, "is_impossible", bool, place)
        golds = [
            (_held(answer, "text", str, place), _held(answer, "answer_start", int, place))
            for answer in answers
        ]
    except DataError as fault:
        faults[LAYOUT].append(str(fault).replace("not the SQuAD layout, ", ""))
        return ()
    if impossible == bool(answers):
        said = str(entry.get("is_impossible", "not there")).lower()
        faults[CONTRADICTION].append(
            f"{place}: {len(answers)} answers, and is_impossible is {said}"
        )
        return ()
    for text, start in golds:
        # A negative start would count from the end of the paragraph and could even match there.
        if not text or start < 0 or not context.startswith(text, start):
            only = context.find(text) if text else -1
            once = only >= 0 and only == context.rfind(text)
            hint = f", and it is at {only} alone" if once else ""
            faults[MISPLACED].append(f"{place}: {text[:60]!r} at {start}{hint}")
    return tuple(golds)


def _counted(faults: dict[str, list[str]]) -> str:
    """'2 answers are not ...: article 0, question 'q1': 'north' at 3; ...', a part for each kind of fault."""
    parts = []
    for heading, places in faults.items():
        if places:
            shown = "; ".join(places[:MAX_LISTED])
            more = f"; and {len(places) - MAX_LISTED} more" if len(places) > MAX_LISTED else ""
            parts.append(f"{len(places)} {heading}: {shown}{more}")
    return "; ".join(parts)


def read_json(path: str | os.PathLike) -> object:
    """Parse a JSON file. Raises `DataError` if it cannot be read or is not JSON; a pipe or a device, which may never
    end, is not read."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise DataError(f"{path}: not a regular file")
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # also broken UTF-8, a number of thousands of digits, deep nesting
        raise DataError(f"{path}: not JSON: {error}") from None


def generated(
    name: str, split: str, mark: str = ""
) -> tuple[Callable[[], str], Callable[[], dict]]:
    """What hashes, and what makes, the document that a name like "synthetic:2000" asks for; `mark` tells apart what is
    made of it. Raises DataError."""
    count = name.removeprefix("synthetic:")
    if not (count.isascii() and count.isdigit() and 0 < int(count[:10]) <= 10_000_000):
        raise DataError(
            f"{name!r}: write synthetic: and a number of questions, as in synthetic:2000"
        )
    document = partial(synthetic_squad, int(count), SYNTHETIC_SEEDS[split])

    @cache
    def digest() -> str:
        return hashlib.sha256(
            f"{mark}{json.dumps(document(), sort_keys=True)}".encode()
        ).hexdigest()

    return digest, document


def _saved(folder: Path, split: str) -> tuple[Callable[[], str], Callable]:
    """What hashes, and what reads, a folder of save_to_disk. Hashed are the Arrow files that it is loaded from, in that
    order: files of `datasets`' own cache may lie beside them, and its fingerprints differ between copies."""
    part = folder / split if (folder / "dataset_dict.json").is_file() else folder
    if not (part / "state.json").is_file():
        wanted = " or ".join(OFFICIAL_NAMES[split])
        raise DataError(
            f"{folder}: no {wanted} in this folder, and no data set of save_to_disk with a split {split!r}"
        )

    def load():
        import datasets

        try:
            table = datasets.load_from_disk(str(part), keep_in_memory=False)
            table.data.table.validate(
                full=True
            )  # Arrow follows damaged offsets to wherever they lead
            return table
        except Exception as error:  # whatever Arrow or datasets make of a damaged folder
            raise DataError(
                f"{folder}: not a data set that datasets can load: {first_line(error)}"
            ) from None

    def digest() -> str:
        files = [Path(file["filename"]) for file in load().cache_files]
        if odd := next((file for file in files if file.parent != part), None):
            raise DataError(f"{folder}: its state.json lists {odd.name[:80]!r} of another folder")
        return hash_files(files)

    return digest, lambda: flat_rows(load(), str(folder))


def hub_table(name: str, split: str, files: str) -> tuple[Callable[[], str], Callable]:
    """What hashes, and what loads, a data set of the hub, once and never with remote code. Both raise DataError, which
    says what `files` a folder may have in its place."""

    @cache
    def table():
        import datasets

        try:
            if (
                Path(datasets.__file__)
                .with_name("packaged_modules")
                .joinpath(name.split(":")[0])
                .is_dir()
            ):
                raise ValueError(
                    "a format's name, by which datasets reads the files of the working directory"
                )
            return datasets.load_dataset(*name.split(":"), split=split)
        except Exception as error:  # offline, unknown, gated, a script: the library says which
            raise DataError(
                f"{name!r}: no such file or folder, nor to be had from the hub ({type(error).__name__}: "
                f"{first_line(error)}): give --data FOLDER, a folder with {files}"
            ) from None

    return lambda: hashlib.sha256(
        f"{name} {split} {table()._fingerprint}".encode()
    ).hexdigest(), table


def nested_rows(document: object, name: str) -> Iterator[tuple]:
    """The rows for `build_examples` out of the official layout: data[].paragraphs[].qas[]."""
    for a, article in enumerate(_held(document, "data", list, name)):
        place = f"{name}: article {a}"
        paragraphs = _held(article, "paragraphs", list, place)
        title = _title(article.get("title"))
        place += f" {title[:80]!r}"
        for p, paragraph in enumerate(paragraphs):
            for entry in _held(paragraph, "qas", list, f"{place}, paragraph {p}"):
                yield place, title, paragraph, entry


def flat_rows(table, name: str) -> Iterator[tuple]:
    """The rows for `build_examples` out of the hub's flat layout, one question a row, no answers if impossible.

    `table` is a `datasets.Dataset`; where it has no column of answers, its rows have none either. Equal paragraphs come
    out as one object, as in the nested layout.
    """
    contexts: dict[str, str] = {}
    for part in table.with_format("arrow").iter(10_000):
        for row in part.to_pylist():
            title = _title(row.get("title"))
            article = f"{name}: article {title[:80]!r}"
            context = _held(row, "context", str, f"{article}, question {row.get('id')!r}")
            answers = _rows_of_answers(row.get("answers"))
            golds = {"answers": answers, "is_impossible": answers == []}
            yield article, title, {"context": contexts.setdefault(context, context)}, row | golds


def _rows_of_answers(answers: object) -> object:
    """Answers as the nested layout lists them, out of the hub's two columns; anything else as it is."""
    if not isinstance(answers, dict):
        return answers
    columns = [answers.get(key) for key in ("text", "answer_start")]
    if not all(isinstance(column, list) for column in columns):
        return None
    return [{"text": text, "answer_start": start} for text, start in zip_longest(*columns)]


def sha256_of(path: Path) -> str:
    """A file's SHA-256 (hex). Raises DataError for one that cannot be read."""
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def hash_files(paths: Iterable[Path]) -> str:
    """SHA-256 (hex) over the digests and names of files, in this order. Raises DataError as sha256_of does."""
    return hashlib.sha256(
        "".join(f"{sha256_of(path)}  {path.name}\n" for path in paths).encode()
    ).hexdigest()
