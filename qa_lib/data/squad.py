"""Where questions come from: SQuAD files, folders, saved datasets, the hub and the generator, as one in-memory form.

Everything downstream sees a list of `Example` and nothing else, so each format ends here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path

from qa_lib.data.synthetic import synthetic_squad
from qa_lib.errors import UserError, first_line

log = logging.getLogger(__name__)

# The longest paragraph of SQuAD has about 4,000 characters. One of 100,000 is a file that was never cut into
# paragraphs: each of its questions would become hundreds of windows, so it is refused instead of crawled through.
MAX_CONTEXT = 100_000
# Of many bad answers a message shows this many; the count in front of them is always the full one.
MAX_LISTED = 20
OFFICIAL_NAMES = {"train": ("train.json", "train-v2.0.json"), "validation": ("validation.json", "dev-v2.0.json")}
SYNTHETIC_SEEDS = {"train": 0, "validation": 1}


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
    """A data set that is read when first used.

    `name` is what the user asked for (a path, as given), `split` is "train" or "validation". `sha256` is the hash of
    the content as stored (hex) and never parses it; `examples` parses once. Both raise `DataError`. `digest` and `rows`
    (see build_examples) are how.
    """

    name: str
    split: str
    fix_spans: bool
    digest: Callable[[], str]
    rows: Callable[[], Iterable[tuple]]

    @cached_property
    def sha256(self) -> str:
        return self.digest()

    @cached_property
    def examples(self) -> list[Example]:
        _ = self.sha256
        found = build_examples(self.rows(), self.name, self.fix_spans)
        check_same(self)
        return found


def check_same(source) -> None:
    """Raises DataError where a Source or TextSource is no longer what it was when its `sha256` was first asked for, so
    that what was read since then may be of either."""
    if source.digest() != source.sha256:
        raise DataError(f"{source.name}: it has changed since it was first looked at; give the command again")


def unlabelled(source: Source) -> Source:
    """The same questions without their gold answers, which then need be neither there nor right: for prediction."""

    def rows() -> Iterator[tuple]:
        for place, title, context, entry in source.rows():
            blank = {"answers": [], "is_impossible": True}
            yield place, title, context, entry | blank if isinstance(entry, dict) else entry

    return Source(source.name, source.split, False, lambda: f"{source.digest()} unlabelled", rows)


def open_source(source: str | os.PathLike, split: str, fix_spans: bool = False) -> Source:
    """Find the data set `source`; nothing is parsed yet.

    `source` is one of
      - "synthetic:2000": 2,000 generated questions (the two splits use different seeds),
      - a .json file in the official nested layout, v1.1 or v2.0,
      - a folder with train.json / validation.json, or the official train-v2.0.json / dev-v2.0.json,
      - a folder that `datasets` wrote with save_to_disk (a Dataset, or a DatasetDict holding the split),
      - a name on the Hugging Face hub, such as "squad_v2".
    `fix_spans` moves an answer that is not the text at its `answer_start` to that text's only occurrence.
    Raises `DataError` if there is no such data set, and on first use of the result if its content is bad.
    """
    if split not in OFFICIAL_NAMES:
        raise DataError(f"{split!r} is no split: train or validation")
    name, path = os.fspath(source), Path(source)
    try:
        is_file, is_folder = path.is_file(), path.is_dir() and bool(name)
    except (OSError, ValueError):  # a name too long or with a null byte is no path
        is_file = is_folder = False
    # A misspelt file in a folder that is there should not go looking for a data set of that name on the hub.
    local = name.endswith(".json") or ("/" in name and path.parent.is_dir())
    if name.startswith("synthetic:"):
        content = _synthetic(name, split)
    elif is_file:
        name, content = str(path), _nested(path)
    elif is_folder:
        found = next((path / file for file in OFFICIAL_NAMES[split] if (path / file).is_file()), None)
        name, content = (str(found), _nested(found)) if found else (str(path), _saved(path, split))
    elif not local and re.fullmatch(r"[\w-][\w.-]{0,95}(/[\w.-]{1,95})?", name):
        content = _hub(name, split)
    else:
        raise DataError(f"{name!r}: no such file or folder")
    return Source(name, split, fix_spans, *content)


def build_examples(rows: Iterable[tuple[str, str, object, object]], name: str, fix_spans: bool) -> list[Example]:
    """Check raw questions and turn them into examples; `name` is the file named in errors.

    `rows` yields (article, title, context, question entry), the entry as in the official layout; `article` names the
    place in errors. Raises `DataError` at the first bad entry, except for misplaced answers, which are collected
    over the whole data set so that the message can count and list them.
    """
    examples, seen, misplaced, repaired = [], {}, [], 0
    context_checked: object = ...  # not None, which a broken file may hold in its place
    for article, title, context, entry in rows:
        if context is not context_checked:
            _check_text(context, article, "context")
            if len(context) > MAX_CONTEXT:
                raise DataError(f"{article}: a paragraph of {len(context):,} characters; the limit is {MAX_CONTEXT:,}")
            context_checked = context
        if not isinstance(entry, dict):
            raise DataError(f"{article}: a question that is not an object")
        key = entry.get("id")
        _check_text(key, article, "question id")
        place = f"{article}, question {key!r}"
        if key in seen:
            raise DataError(f"{place}: the same id as a question of {seen[key]}")
        seen[key] = article
        _check_text(entry.get("question"), place, "question")
        answers = []
        for text, start in _answers(entry, place):
            # A negative start would count from the end of the paragraph and could even match there.
            if start < 0 or not context.startswith(text, start):
                once = text in context and context.find(text) == context.rfind(text)
                if not (fix_spans and once):
                    misplaced.append((f"{place}: {text[:60]!r} at {start}", once))
                    continue
                start = context.find(text)
                repaired += 1
            answers.append((text, start))
        examples.append(Example(key, title, entry["question"], context, tuple(answers)))
    if misplaced:
        raise DataError(_misplaced_message(misplaced, name))
    if not examples:
        raise DataError(f"{name}: an empty data set, not one question in it")
    if repaired:
        log.warning("%s: moved %d answers to the only place where their text occurs", name, repaired)
    return examples


def _answers(entry: dict, place: str) -> Iterator[tuple[str, int]]:
    """The (text, start) pairs of one entry, which must agree with its is_impossible."""
    answers, impossible = entry.get("answers"), entry.get("is_impossible", False)
    if not isinstance(answers, list):
        raise DataError(f"{place}: no list under 'answers'")
    if not isinstance(impossible, bool):
        raise DataError(f"{place}: is_impossible is neither true nor false")
    if impossible and answers:
        raise DataError(f"{place}: is_impossible is true, but it has {len(answers)} answers")
    if not impossible and not answers:
        raise DataError(f"{place}: no answers, but is_impossible is not true")
    for answer in answers:
        text, start = (answer.get("text"), answer.get("answer_start")) if isinstance(answer, dict) else (None, None)
        if not isinstance(text, str) or type(start) is not int:
            raise DataError(f"{place}: an answer without a text or a whole number as answer_start")
        _check_text(text, place, "answer")
        if not text:
            raise DataError(f"{place}: an answer of no text")
        yield text, start


def _check_text(value: object, place: str, what: str) -> None:
    if not isinstance(value, str):
        raise DataError(f"{place}: no {what}, or one that is not a text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair; no tokenizer takes it
            raise DataError(f"{place}: the {what} holds half a character at {error.start}") from None


def _misplaced_message(misplaced: list[tuple[str, bool]], name: str) -> str:
    once = sum(fixable for _, fixable in misplaced)
    shown = "; ".join(text.removeprefix(f"{name}: ") for text, _ in misplaced[:MAX_LISTED])
    more = f"; and {len(misplaced) - MAX_LISTED} more" if len(misplaced) > MAX_LISTED else ""
    hint = f" ({once} occur exactly once, which `python -m qa_lib score --fix-spans` goes by)" if once else ""
    return f"{name}: {len(misplaced)} answers are not the text at their answer_start{hint}: {shown}{more}"


def read_json(path: str | os.PathLike, **options) -> object:
    """Parse a JSON file; `options` are those of json.loads. Raises `DataError` if it cannot be read or is not JSON."""
    try:
        return json.loads(Path(path).read_bytes(), **options)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except RecursionError:
        raise DataError(f"{path}: not JSON that can be read: nested too deeply") from None
    except ValueError as error:  # broken JSON, broken UTF-8, a number of thousands of digits
        raise DataError(f"{path}: not JSON: {error}") from None


# How the content of a source is hashed, and how its questions are read: the last two arguments of Source.
Content = tuple[Callable[[], str], Callable[[], Iterable]]


def _nested(path: Path) -> Content:
    return lambda: sha256_of(path), lambda: nested_rows(read_json(path), str(path))


def generated(name: str, split: str) -> Callable[[], dict]:
    """What makes the document that a name like "synthetic:2000" asks for. Raises DataError."""
    count = name.removeprefix("synthetic:")
    if not (count.isascii() and count.isdigit() and 0 < int(count[:10]) <= 10_000_000):
        raise DataError(f"{name!r}: write synthetic: and a number of questions, as in synthetic:2000")
    return partial(synthetic_squad, int(count), SYNTHETIC_SEEDS[split])


def _synthetic(name: str, split: str) -> Content:
    document = generated(name, split)

    @cache
    def digest() -> str:
        return hashlib.sha256(json.dumps(document(), sort_keys=True).encode()).hexdigest()

    return digest, lambda: nested_rows(document(), name)


def _saved(folder: Path, split: str) -> Content:
    """A folder of save_to_disk. Hashed is what of it is loaded: the Arrow files that state.json lists, in that order,
    and how it says to read them. Fingerprints differ between copies, and files of `datasets`' own cache may lie beside
    those."""
    part = folder
    if (folder / "dataset_dict.json").is_file():
        part = folder / split
        if not part.is_dir():
            raise DataError(f"{folder}: a saved DatasetDict without the split {split!r}")
    elif not (folder / "state.json").is_file():
        wanted = " or ".join(OFFICIAL_NAMES[split])
        raise DataError(f"{folder}: no {wanted} in this folder, and no data set saved by save_to_disk")

    def rows() -> Iterator[tuple]:
        import datasets

        try:
            table = datasets.load_from_disk(str(part))
            table.data.table.validate(full=True)  # Arrow follows damaged offsets to wherever they lead
            yield from flat_rows(table, str(folder))
        except DataError:
            raise
        except Exception as error:  # whatever Arrow or datasets make of a damaged folder
            raise DataError(f"{folder}: not a data set that datasets can load: {first_line(error)}") from None

    return partial(_saved_digest, part), rows


def _saved_digest(folder: Path) -> str:
    state, info = (read_json(folder / name) for name in ("state.json", "dataset_info.json"))
    try:
        shards = [folder / shard["filename"] for shard in state.pop("_data_files")]
        read_by = {name: value for name, value in state.items() if name != "_fingerprint"}
        features = info.get("features")
    except (AttributeError, KeyError, TypeError):
        raise DataError(f"{folder}: its state.json lists no files, so not a data set that datasets has saved") from None
    if odd := next((shard for shard in shards if shard.parent != folder), None):
        raise DataError(f"{folder}: its state.json lists {odd.name[:80]!r} of another folder")
    told = json.dumps([read_by, features], sort_keys=True)
    return hashlib.sha256((told + hash_files(shards)).encode()).hexdigest()


def _hub(name: str, split: str) -> Content:
    table = hub_table(name, split, "a file or a folder in SQuAD's format")
    return partial(hub_digest, name, split, table), lambda: flat_rows(table(), name)


def hub_table(name: str, split: str, instead: str) -> Callable:
    """What loads a data set of the hub, or its configuration as in "Salesforce/wikitext:wikitext-2-v1", once and never
    with remote code. It raises DataError, which says what --data takes `instead`."""

    @cache
    def table():
        import datasets

        try:
            return datasets.load_dataset(*name.split(":"), split=split)
        except Exception as error:  # offline, unknown, gated, a script: the library says which
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise DataError(
                f"{name!r}: no such file or folder, nor to be had from the hub ({reason}): --data takes {instead}"
            ) from None

    return table


def hub_digest(name: str, split: str, table: Callable) -> str:
    """What stands for the content of a data set of the hub."""
    return hashlib.sha256(f"{name} {split} {table()._fingerprint}".encode()).hexdigest()


def nested_rows(document: object, name: str) -> Iterator[tuple[str, str, object, object]]:
    """The rows for `build_examples` out of the official layout: data[].paragraphs[].qas[]."""
    for a, article in enumerate(_list(document, "data", name)):
        place = f"{name}: article {a}"
        paragraphs = _list(article, "paragraphs", place)
        title = article.get("title", "")
        _check_text(title, place, "title")
        place += f" {title[:80]!r}"
        for p, paragraph in enumerate(paragraphs):
            entries = _list(paragraph, "qas", f"{place}, paragraph {p}")
            for entry in entries:
                yield place, title, paragraph.get("context"), entry


def _list(holder: object, key: str, place: str) -> list:
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, list):
        raise DataError(f"{place}: not the SQuAD layout, no list under {key!r}")
    return value


def flat_rows(table, name: str) -> Iterator[tuple[str, str, object, object]]:
    """The rows for `build_examples` out of the hub's flat layout, one question a row, no answers if impossible.

    `table` is a `datasets.Dataset`. Equal paragraphs come out as one object, as in the nested layout.
    """
    missing = {"id", "question", "context", "answers"} - set(getattr(table, "column_names", ()))
    if missing:
        raise DataError(f"{name}: not the flat SQuAD layout, no column {', '.join(sorted(missing))}")
    contexts: dict[object, object] = {}
    for rows in table.iter(10_000):
        titles = rows.get("title") or [""] * len(rows["id"])
        for title, context, question, key, answers in zip(
            titles, rows["context"], rows["question"], rows["id"], rows["answers"], strict=True
        ):
            _check_text(title, f"{name}: question {key!r}", "title")
            place = f"{name}: article {title[:80]!r}"
            try:
                pairs = zip(answers["text"], answers["answer_start"], strict=True)
                pairs = [{"text": text, "answer_start": start} for text, start in pairs]
                context = contexts.setdefault(context, context)
            except (TypeError, KeyError, ValueError):
                raise DataError(
                    f"{place}, question {key!r}: answers without text and answer_start side by side"
                ) from None
            yield place, title, context, {"id": key, "question": question, "answers": pairs, "is_impossible": not pairs}


def sha256_of(path: Path) -> str:
    """A file's SHA-256 (hex). Raises DataError for one that cannot be read."""
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # a name of half characters
        raise DataError(f"{str(path)!a}: {error}") from None


def hash_files(paths: Iterable[Path]) -> str:
    """SHA-256 (hex) over the digests and names of files, in this order. Raises DataError as sha256_of does."""
    return hashlib.sha256("".join(f"{sha256_of(path)}  {path.name}\n" for path in paths).encode()).hexdigest()
