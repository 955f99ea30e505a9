"""Files, arguments and code that hold anything at all.

The end is the right result, or one line that names the culprit. No name in files is followed, and
what changes a result changes the identity of a run.

Some hundred mutations run here; QA_LIB_MUTATIONS=5000 pytest tests/test_trust.py runs so many of
each kind.
"""

import io
import itertools
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForQuestionAnswering

from qa_lib.__main__ import main
from qa_lib.data import windows
from qa_lib.data.squad import open_source
from qa_lib.data.tokenize import build_tokenizer
from qa_lib.errors import UserError
from qa_lib.lab.app.dashboard import dashboard, running
from qa_lib.lab.launch.local import Launcher, judge
from qa_lib.lab.report import cli
from qa_lib.lab.sweep import progress_of
from qa_lib.loaded import file_digests
from qa_lib.model.build import save_model
from qa_lib.model.hf_checkpoint import SUMS
from qa_lib.records import record
from qa_lib.records.archive import read_runs
from qa_lib.run.plan import identify_data, identify_model, plan
from qa_lib.score.predict import load_qa_model
from qa_lib.train import checkpoint as checkpoints
from qa_lib.train.checkpoint import Checkpoint
from qa_lib.train.parallel.data_parallel import NoParallel
from qa_lib.train.parallel.process_group import ProcessGroup
from tests.conftest import slow
from tests.material import document, hub_row, leave, question, trained_tokenizer, write
from tests.test_loaded import Run, copied_package
from tests.test_report import make
from tests.test_windows import same
from tests.tiny import CPU, H200, checkpoint, planned

TIMES = int(os.environ.get("QA_LIB_MUTATIONS", "40"))  # mutations of each kind
SECONDS = 20  # that any of them may take

TEXT = "The river Rhine rises in the Alps and ends near Rotterdam, which is a port."
ENTRIES = [question("q1", "where", ("Rotterdam", TEXT.index("Rotterdam"))), question("q2", "why?")]


@contextmanager
def limited():
    """Raise TimeoutError, inside the block, instead of a hang."""
    signal.signal(signal.SIGALRM, Mock(side_effect=TimeoutError(f"no end within {SECONDS} s")))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


class Lab:
    """Three runs below `place`/lab/runs, the last of them archived.

    Around them are files that nobody may touch.
    """

    def __init__(self, place: Path):
        self.place, self.runs = place, place / "lab" / "runs"
        for name in ("x", "x.png", "lab/x", "lab/x.png", "keep/record.json"):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text("mine")
        specs = plan(["A1", "A2", "A3"], "smoke", data="synthetic:40", machine=CPU)
        for spec in specs:
            folder = leave(self.runs, spec, env={"gpu": "NVIDIA H200"})
            write(
                folder / "profile.json", {"schema": record.PROFILE_SCHEMA, "time": {"busy_ms": 1.0}}
            )
            (folder / "steps.jsonl").write_text(
                '{"step": 1, "loss": 2.0, "lr": 0.1, "ms": 3.0}\n' * 3
            )
        assert main(["archive", "cpu-smoke", "--runs", str(self.runs)]) == 0
        shutil.rmtree(self.runs / specs[2].run_path)
        self.spec, self.run = specs[1], self.runs / specs[1].run_path
        names = "record.json", "profile.json", "steps.jsonl"
        self.files, self.kept = (
            [*map(self.run.joinpath, names), self.runs / "cpu-smoke.jsonl"],
            self.content(),
        )

    def content(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.place.rglob("*") if path.is_file()}

    def use(self) -> None:
        """Call all that reads such files.

        What reads all runs raises nothing; what reads one file may raise UserError.
        """
        runs = read_runs(self.runs)
        launcher = Launcher(self.runs, CPU, {})
        assert {run.record["group"] for run in runs} == {"cpu-smoke"}
        assert len(runs) >= 2
        running(self.runs)
        progress_of(self.run)
        record_file = self.run / "record.json"
        spoilt_record = record_file.read_bytes()
        reads = [
            lambda: launcher.is_finished(self.spec),
            lambda: judge(self.spec, self.run, None, 0, 1.0),
        ]
        for run in runs:
            reads += [run.profile, run.quantized, run.steps]
        for read_one in reads:
            try:
                read_one()
            except UserError as problem:
                assert "\n" not in str(problem)
        record_file.write_bytes(spoilt_record)  # `judge` writes it

    def check_and_restore(self, changed: Path) -> None:
        """Check that all other files are as they were, and restore the one that was changed."""
        assert self.content() | {changed: b""} == self.kept | {changed: b""}
        changed.write_bytes(self.kept[changed])


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    made = Lab(tmp_path_factory.mktemp("trust"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made.place / "lab")
        yield made


# Mutations of files


def read(path: Path) -> list | dict:
    """Return the content of a file of JSON, or of one with a document a line."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)


def write_back(path: Path, content: object) -> None:
    """Write what `read` has returned, or what has become of it."""
    is_list_of_lines = path.suffix == ".jsonl" and isinstance(content, list)
    documents = content if is_list_of_lines else [content]
    path.write_text("\n".join(json.dumps(document) for document in documents) + "\n")


class Spot(NamedTuple):
    """A place in a JSON document: that of a value, or of the key in front of one."""

    # The keys and indices that lead to what holds it.
    above: tuple
    last: str | int
    is_key: bool


def spots(value: object, above: tuple = ()) -> Iterator[Spot]:
    """Yield the place of every value in a JSON document, and of every key."""
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    else:
        return
    for key, inner in pairs:
        yield Spot(above, key, is_key=False)
        if isinstance(key, str):
            yield Spot(above, key, is_key=True)
        yield from spots(inner, (*above, key))


GONE = object()


def change_spot(document: list | dict, spot: Spot, new: object) -> None:
    """Replace the value or the key at a place in a document; GONE removes it."""
    holder = document
    for key in spot.above:
        holder = holder[key]
    if new is GONE:
        del holder[spot.last]
    elif spot.is_key:
        holder[str(new)] = holder.pop(spot.last)
    else:
        holder[spot.last] = new


# fmt: off
PATHS = [
    "../x", "../x.png", "../../x", "../../x.png", "../../../keep", "/", ".", "..", "", "a\0b.png",
    "a\nb", "C:\\x", "\\\\host\\x", "x" * 5_000, "\x1b[2J", "\ud800", "~/x", "file:///x", "~",
]
VALUES = [
    None, True, -1, 0, 1.5, 10**18, "text", [], {}, [1], [[]], {"a": {"b": [1]}}, "\x1b]0;x\x07",
    float("nan"), float("inf"), 10**400, *PATHS,
]
# fmt: on


def mutate_json(path: Path, chance: random.Random) -> None:
    """Put another value, or none, into a file of JSON, or spoil its bytes."""
    content = bytearray(path.read_bytes())
    kind = chance.choice(["value", "value", "value", "key", "gone", "bit", "cut", "deep", "huge"])
    if kind in ("value", "key", "gone"):
        document = read(path)
        places = [spot for spot in spots(document) if spot.is_key == (kind == "key")]
        spot = chance.choice(places)
        change_spot(document, spot, GONE if kind == "gone" else chance.choice(VALUES))
        write_back(path, document)
    elif kind == "deep":
        path.write_bytes(b"[" * 100_000)
    elif kind == "huge":
        path.write_bytes(content.replace(b"0", b"1e999", 1))
    else:
        path.write_bytes(spoilt(content, chance, kind))


def spoilt(content: bytearray, chance: random.Random, kind: str) -> bytes:
    """Return bytes that are cut somewhere ("cut"), or of which one bit is another ("bit")."""
    place = chance.randrange(len(content))
    if kind == "cut":
        return bytes(content[:place])
    content[place] ^= 1 << chance.randrange(8)
    return bytes(content)


def spoil_file(path: Path, chance: random.Random) -> bool:
    """Spoil a file of any kind, and tell whether its bytes are others now."""
    before = path.read_bytes()
    path.unlink()  # it may be mapped into memory
    path.write_bytes(before)
    if path.suffix == ".json" and chance.random() < 0.8:
        mutate_json(path, chance)
    else:
        kind = chance.choice(["bit", "bit", "cut"])
        path.write_bytes(spoilt(bytearray(before), chance, kind))
    return path.read_bytes() != before


def spoilt_copies(
    whole: Path, place: Path, names: list[str], chance: random.Random
) -> Iterator[tuple[Path, bool]]:
    """Yield copies of a folder in which one of these files is spoilt.

    The second value tells whether the bytes of that file are others now.
    """
    for number in range(TIMES):
        folder = shutil.copytree(whole, place / str(number) / whole.name)
        differs = spoil_file(folder / chance.choice(names), chance)
        yield folder, differs
        shutil.rmtree(folder)


def result_or_line(call: Callable[[], Any], names: list[str]) -> Any:
    """Return what a call returns, or None where it ends in a UserError.

    The error's message has to be one line in which one of `names` stands.
    """
    with limited():
        try:
            return call()
        except UserError as problem:
            message = str(problem)
    assert "\n" not in message
    assert any(name in message for name in names), message
    return None


def check_identity(
    whole: Path,
    place: Path,
    names: list[str],
    read_folder: Callable[[Path], Any],
    identify: Callable[[str], Any],
) -> None:
    """Check what is read from copies of a folder in which one of these files is spoilt.

    It is the same, or a line, or the copy has another identity than the folder.
    """
    wanted = read_folder(whole)
    identity = identify(str(whole))
    for folder, _ in spoilt_copies(whole, place, names, random.Random(0)):
        result = result_or_line(partial(read_folder, folder), [whole.name])
        if result not in (None, wanted):
            assert identify(str(folder)) != identity


# Records


@pytest.mark.parametrize("number", range(4))
def test_records_and_what_lies_beside_them_may_hold_anything(lab, number, capsys):
    file = lab.files[number]
    chance = random.Random(number)
    for _ in range(TIMES // 2):
        mutate_json(file, chance)
        with limited():
            lab.use()
        printed = "".join(capsys.readouterr())
        assert "\x1b" not in printed
        assert "Traceback" not in printed
        lab.check_and_restore(file)


class Shelf:
    """A folder with eight runs of two groups, in folders and archived; one is spoilt at a time."""

    def __init__(self):
        for variant, machine, seed in itertools.product(("A1", "A2"), (CPU, H200), (0, 1)):
            make(Path("whole/runs"), variant, machine=machine, seed=seed)
        for group in ("cpu-smoke", "h200-smoke"):
            assert main(["archive", group, "--runs", "whole/runs"]) == 0
        self.outside = sorted(Path().iterdir())

    def spoil(self, chance: random.Random) -> tuple[Path, bytes]:
        """Make a fresh copy, `lab`, in which a record or a line of an archive is another.

        Returns the file that was changed, and what it held.
        """
        shutil.rmtree("lab", ignore_errors=True)
        shutil.copytree("whole", "lab")
        archive = Path("lab/runs/cpu-smoke.jsonl")
        folder = Path("lab/runs/cpu-smoke")
        if chance.random() < 0.5:
            shutil.rmtree(folder)
            path = archive
        else:
            archive.unlink()
            path = chance.choice(sorted(folder.glob("*/record.json")))
        before = path.read_bytes()
        mutate_json(path, chance)
        return path, before

    def entries(self) -> dict:
        return {run.key: run.record for run in read_runs("lab/runs", left_out=lambda *_: None)}


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        cli, "execute", lambda *_: None
    )  # of a page as a notebook, which takes seconds
    return Shelf()


@pytest.mark.parametrize("part", [0, *map(slow, range(1, 4))])
def test_one_bad_record_costs_one_sentence_wherever_records_are_read(shelf, part, capsys):
    """Report, export, dashboard and archive end well, or in one line.

    No record is lost but those that were spoilt.
    """
    chance = random.Random(part)
    times = TIMES // 8 if part == 0 else TIMES
    for _ in range(times):
        path, before = shelf.spoil(chance)
        line_pairs = zip_longest(before.splitlines(), path.read_bytes().splitlines())
        changed_lines = sum(old != new for old, new in line_pairs)
        # An archive has a record a line.
        spoilt_records = changed_lines if path.suffix == ".jsonl" else 1
        capsys.readouterr()
        with limited():
            entries = shelf.entries()
            assert len(entries) >= 8 - spoilt_records
            for words in ("report", "report --group cpu-smoke", "export --csv lab/all.csv"):
                main([*words.split(), "--runs", "lab/runs"])
                printed = capsys.readouterr()
                assert "Traceback" not in printed.err
                assert "\x1b" not in printed.out + printed.err
                assert len(re.findall("(?m)^error: ", printed.err)) <= 1
                assert len(re.findall("(?m)^left out: ", printed.err)) <= max(spoilt_records, 1)
            shown = dashboard(Path("lab/runs"), Path("figures"), "h200-smoke")
            assert "h200-smoke" in shown.groups
            assert "<table" in shown.report
            main(["archive", "cpu-smoke", "--runs", "lab/runs"])
            after = shelf.entries()
            assert after | entries == after, "an archive loses none"
        outside = {*Path().iterdir()} - {Path("lab"), Path("figures")}
        assert sorted(outside) == shelf.outside


# Models, checkpoints and code


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model of one layer, with its tokenizer and digests."""
    folder = tmp_path_factory.mktemp("trust") / "model"
    tokenizer = trained_tokenizer([TEXT] * 3, 200)
    config = BertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=48,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    save_model(BertForQuestionAnswering(config), tokenizer, folder)
    return folder


def files_of_model(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != SUMS)


def test_whatever_is_changed_in_a_model_folder_with_digests_is_refused(model, tmp_path):
    for folder, differs in spoilt_copies(model, tmp_path, files_of_model(model), random.Random(0)):
        loaded = result_or_line(partial(load_qa_model, folder), [str(folder)])
        assert loaded is None or not differs


def test_a_model_folder_without_digests_may_hold_anything(model, tmp_path):
    """What loads answers without a traceback."""
    whole = shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns(SUMS))
    for folder, _ in spoilt_copies(whole, tmp_path, files_of_model(whole), random.Random(0)):
        result_or_line(partial(load_qa_model, folder), [str(folder)])


def begun_training(folder: Path, spec) -> tuple[torch.nn.Module, Checkpoint]:
    """Return a model of a few weights after one step, and the checkpoint of its training."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    alone = NoParallel(model, ProcessGroup(torch.device("cpu")), spec.settings)
    return model, Checkpoint(folder, spec, model, optimizer, scaler, alone)


def test_a_checkpoint_may_hold_anything(tmp_path):
    """One that is changed anywhere is set aside, or says the same."""
    spec = planned()
    chance = random.Random(0)
    model, saved = begun_training(tmp_path, spec)
    saved.save(7)
    content = saved.path.read_bytes()
    weights = model.weight.detach().clone()
    for _ in range(4 * TIMES):
        kind = chance.choice(["bit", "bit", "bit", "cut"])
        saved.path.write_bytes(spoilt(bytearray(content), chance, kind))
        model, checkpoint = begun_training(tmp_path, spec)
        with limited():
            step, note = checkpoint.load()
        if note:
            assert step == 0
            assert "began anew" in note
            assert "\n" not in note
            assert not saved.path.exists()
            continue
        assert step == 7
        assert torch.equal(model.weight, weights)
        for loaded, wanted in zip(checkpoint._states(), saved._states(), strict=True):
            for name in wanted:
                assert torch.equal(loaded[name], wanted[name])


def test_code_may_be_edited_anywhere_at_any_time(tmp_path, monkeypatch):
    """A run begins anew if its code is not at its end what it was at its begin, or was not once."""
    monkeypatch.setattr(checkpoints, "code_version", lambda: {"commit": None})  # asks git
    package = copied_package(tmp_path)
    chance = random.Random(0)
    run = Run(tmp_path, package)
    places = sorted(file_digests(package))
    for _ in range(2 * TIMES):
        path = package / chance.choice(places)
        moment = chance.choice(["before", "during", "after"])
        before = path.read_bytes()
        edited = spoilt(bytearray(before or b"#\n"), chance, chance.choice(["bit", "cut"]))
        if moment == "before":
            path.write_bytes(edited)
        process = run.begin()
        if moment == "during":
            path.write_bytes(edited)
        process.save(7)
        path.write_bytes(edited if moment == "after" else before)
        step, note = run.begin().load()
        if edited != before:
            assert step == 0, (path, moment)
            assert "began anew" in note
        path.write_bytes(before)


# Data, tokenizers and caches


def test_a_data_file_may_hold_anything(tmp_path):
    path = tmp_path / "data.json"
    chance = random.Random(0)
    for _ in range(4 * TIMES):
        mutate_json(write(path, document((TEXT, ENTRIES))), chance)
        examples = result_or_line(lambda: open_source(path, "train").examples, [path.name])
        for example in examples or ():
            for text, start in example.answers:
                assert text
                assert example.context[start:].startswith(text)
        result_or_line(lambda: open_source(path, "train").golds, [path.name])


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_tokenizers_files_may_hold_anything(kind, tmp_path):
    """What gives other tokens is another model."""
    whole = Path(checkpoint(kind, tmp_path / "model"))
    write(whole / "added_tokens.json", {"riverbank": 3})
    names = sorted(path.name for path in whole.glob("*.json") if path.name != "config.json")
    # The synthetic vocabulary knows the end of it.
    text = f"{TEXT} [CLS] alice came to the harbour at nine"

    def tokens(folder: Path) -> list[int]:
        return build_tokenizer(folder)(text)["input_ids"]

    check_identity(whole, tmp_path, names, tokens, identify_model)


def test_a_saved_data_set_may_hold_anything(tmp_path):
    """What gives other questions is other data."""
    whole = tmp_path / "whole"
    answer = ("Alps", TEXT.index("Alps"))
    rows = [hub_row(f"{number}", "", f"where {number}?", TEXT, answer) for number in range(8)]
    datasets.Dataset.from_list(rows).save_to_disk(whole, num_shards=2)
    names = sorted(path.name for path in whole.iterdir())

    def questions(folder: Path) -> list:
        return open_source(folder, "train").examples

    identify = partial(identify_data, with_validation=False)
    check_identity(whole, tmp_path, names, questions, identify)


def spoil_cache(path: Path, chance: random.Random) -> bool:
    """Spoil or remove a file of a cache, or zero an array; tell whether it is another now."""
    before = path.read_bytes()
    spoil_file(path, chance)
    if chance.random() < 0.1:
        path.unlink()
    elif path.suffix == ".npy" and chance.random() < 0.5:
        path.unlink()
        np.save(path, np.zeros_like(np.load(io.BytesIO(before))))
    return not path.exists() or path.read_bytes() != before


def test_a_damaged_cache_is_made_anew_with_a_line(tmp_path, caplog):
    """Any array, any value beside them, any bit."""
    source = open_source(write(tmp_path / "data.json", document((TEXT, ENTRIES))), "train")
    tokenizer = build_tokenizer("tiny")
    cache = tmp_path / "cache"
    chance = random.Random(0)
    uncached = windows.build_samples(source, tokenizer, 48, 16, False)
    windows.build_samples(source, tokenizer, 48, 16, cache)
    for _ in range(3 * TIMES):
        caplog.clear()
        (entry,) = cache.iterdir()
        path = chance.choice(sorted(entry.iterdir()))
        differs = spoil_cache(path, chance)
        assert same(windows.build_samples(source, tokenizer, 48, 16, cache), uncached), path
        if not differs:
            assert not caplog.text, path
        caplog.clear()
        windows.build_samples(source, tokenizer, 48, 16, cache)
        assert not caplog.text


# Arguments

# fmt: off
GIVEN = [
    None, True, False, -1, 0, 1, 2, 3.0, 1.5, float("nan"), float("inf"), 2**31, 2**63, 10**30, "",
    "8", "x", [], [8], [8, True], [0.5], {}, {"a": 1}, b"8", object(), Path("tiny"), 1e-4, 1e-400,
    -1e-4,
]
ARGUMENTS = [
    "micro_batch", "world", "max_length", "batch", "epochs", "learning_rate", "stages", "seeds",
    "data", "model", "variants",
]
# fmt: on
# What a message may call one of them as well.
OTHER_WORDS = ["micro-batch", "seed", "rate", "variant"]


def test_a_plan_is_of_values_that_can_be_or_one_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    chance = random.Random(0)
    for _ in range(5 * TIMES):
        arguments = {"variants": ["A1"], "preset": "smoke", "machine": CPU}
        for name in chance.sample(ARGUMENTS, chance.choice([1, 1, 2, 3])):
            arguments[name] = chance.choice(GIVEN)
        specs = result_or_line(partial(plan, **arguments), [*ARGUMENTS, *OTHER_WORDS])
        for spec in specs or ():
            sizes = [
                spec.seed,
                spec.world,
                spec.stages,
                spec.asked.micro_batch,
                spec.preset.max_length,
            ]
            assert {type(size) for size in sizes} == {int}, arguments
            assert 0 < spec.preset.learning_rate < 1, arguments
            assert spec.preset.epochs is None or spec.preset.epochs > 0, arguments
