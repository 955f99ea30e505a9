"""Where questions come from: SQuAD files, folders, saved datasets, the hub and the generator, as one in-memory form.

Everything downstream sees a list of `Example` and nothing else, so each format ends here.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import zip_longest
from pathlib import Path

from qa_lib.data.synthetic import synthetic_squad
from qa_lib.errors import UserError, first_line

log = logging.getLogger(__name__)

# The longest paragraph of SQuAD has about 4,000 characters. One of 100,000 is a file that was never cut into
# paragraphs: each of its questions would become hundreds of windows, so it is refused instead of crawled through.
MAX_CONTEXT = 100_000
# Of many bad answers a message shows this many; the count in front of them is always the full one.
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
    raise DataError. With `fix_spans` a gold answer is moved to its text's only occurrence where it is not at its place;
    without `labelled` gold answers are left out, and need be neither there nor right.
    """

    name: str
    digest: Callable[[], str]
    rows: Callable[[], Iterable]
    fix_spans: bool = False
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
        return build_examples(self.read(), self.name, self.fix_spans, self.labelled)


def open_source(
    source: str | os.PathLike, split: str, fix_spans: bool = False, labelled: bool = True
) -> Source:
    """Find the data set `source`; nothing is parsed yet.

    `source` is one of
      - "synthetic:2000": 2,000 generated questions (the two splits use different seeds),
      - a .json file in the official nested layout, v1.1 or v2.0,
      - a folder with train.json / validation.json, or the official train-v2.0.json / dev-v2.0.json,
      - a folder that `datasets` wrote with save_to_disk (a Dataset, or a DatasetDict holding the split),
      - a name on the Hugging Face hub, such as "squad_v2".
    `fix_spans` and `labelled` are those of Source.
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
    return Source(name, *content, fix_spans, labelled)


def find_file(name: str, names: Iterable[str]) -> Path | None:
    """The file of that name, or the first of `names` in the folder of that name; None where there is none."""
    paths = [Path(name, other) for other in names] if os.path.isdir(name) else [Path(name)]
    return next((path for path in paths if os.path.isfile(path)), None)


def is_hub_name(name: str) -> bool:
    """Whether the hub may have it: a data set, and perhaps a configuration, as in Salesforce/wikitext:wikitext-2-v1."""
    return re.fullmatch(r"[\w-][\w.-]{0,95}(/[\w.-]{1,95})?(:[\w.-]+)?", name) is not None


def build_examples(
    rows: Iterable[tuple], name: str, fix_spans: bool, labelled: bool
) -> list[Example]:
    """Check raw questions and turn them into examples; `name` is the file named in errors.

    `rows` yields (article, title, paragraph, question), the last two as in the official layout; `article` names the
    place in errors. Raises `DataError` at the first bad question, except for misplaced answers, which are collected
    over the whole data set so that the message can count and list them.
    """
    examples, seen, misplaced, repaired = [], {}, [], 0
    for article, title, paragraph, entry in rows:
        context = _held(paragraph, "context", str, article)
        if len(context) > MAX_CONTEXT:
            raise DataError(
                f"{article}: a paragraph of {len(context):,} characters; the limit is {MAX_CONTEXT:,}"
            )
        key = _held(entry, "id", str, article)
        place = f"{article}, question {key!r}"
        if key in seen:
            raise DataError(f"{place}: the same id as a question of {seen[key]}")
        seen[key] = article
        question = _held(entry, "question", str, place)
        answers = []
        for text, start in _answers(entry, place) if labelled else ():
            # A negative start would count from the end of the paragraph and could even match there.
            if not text or start < 0 or not context.startswith(text, start):
                once = bool(text) and context.find(text) == context.rfind(text) >= 0
                if not (fix_spans and once):
                    misplaced.append(
                        (f"{place.removeprefix(f'{name}: ')}: {text[:60]!r} at {start}", once)
                    )
                    continue
                start = context.find(text)
                repaired += 1
            answers.append((text, start))
        examples.append(Example(key, title, question, context, tuple(answers)))
    if misplaced:
        raise DataError(_misplaced_message(misplaced, name))
    if not examples:
        raise DataError(f"{name}: an empty data set, not one question in it")
    if repaired:
        log.warning(
            "%s: moved %d answers to the only place where their text occurs", name, repaired
        )
    return examples


def _held(holder: object, key: str, kind: type, place: str, default: object = None):
    """`holder[key]`, or the default. Raises DataError unless it is of that kind, and for half a character."""
    value = holder.get(key, default) if isinstance(holder, dict) else None
    if type(value) is not kind:
        raise DataError(f"{place}: not the SQuAD layout, no {KINDS[kind]} under {key!r}")
    if kind is str and not value.isascii():
        try:
            value.encode()
        except (
            UnicodeEncodeError
        ) as error:  # JSON can spell half of a surrogate pair; no tokenizer takes it
            raise DataError(f"{place}: the {key} holds half a character at {error.start}") from None
    return value


def _answers(entry: dict, place: str) -> Iterator[tuple[str, int]]:
    """The (text, start) pairs of one entry, which must agree with its is_impossible."""
    answers, impossible = (
        _held(entry, "answers", list, place),
        _held(entry, "is_impossible", bool, place, False),
    )
    if impossible == bool(answers):
        said = str(entry.get("is_impossible", "not there")).lower()
        raise DataError(f"{place}: {len(answers)} answers, and is_impossible is {said}")
    for answer in answers:
        yield _held(answer, "text", str, place), _held(answer, "answer_start", int, place)


def _misplaced_message(misplaced: list[tuple[str, bool]], name: str) -> str:
    once = sum(fixable for _, fixable in misplaced)
    shown = "; ".join(text for text, _ in misplaced[:MAX_LISTED])
    more = f"; and {len(misplaced) - MAX_LISTED} more" if len(misplaced) > MAX_LISTED else ""
    hint = (
        f" ({once} occur exactly once: `score --fix-spans` takes them there, training does not)"
        if once
        else ""
    )
    return f"{name}: {len(misplaced)} answers are not the text at their answer_start{hint}: {shown}{more}"


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
        paragraphs, title = (
            _held(article, "paragraphs", list, place),
            _held(article, "title", str, place, ""),
        )
        place += f" {title[:80]!r}"
        for p, paragraph in enumerate(paragraphs):
            for entry in _held(paragraph, "qas", list, f"{place}, paragraph {p}"):
                yield place, title, paragraph, entry


def flat_rows(table, name: str) -> Iterator[tuple]:
    """The rows for `build_examples` out of the hub's flat layout, one question a row, no answers if impossible.

    `table` is a `datasets.Dataset`. Equal paragraphs come out as one object, as in the nested layout.
    """
    contexts: dict[str, str] = {}
    for part in table.with_format("arrow").iter(10_000):
        for row in part.to_pylist():
            title = _held(row, "title", str, f"{name}: question {row.get('id')!r}", "")
            article = f"{name}: article {title[:80]!r}"
            place = f"{article}, question {row.get('id')!r}"
            context, answers = _held(row, "context", str, place), _held(row, "answers", dict, place)
            pairs = zip_longest(
                *(_held(answers, key, list, place) for key in ("text", "answer_start"))
            )
            answers = [{"text": text, "answer_start": start} for text, start in pairs]
            found = {
                "context": contexts.setdefault(context, context),
                "answers": answers,
                "is_impossible": not answers,
            }
            yield article, title, found, row | found


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
