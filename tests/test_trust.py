"""Whatever files and arguments hold, the end is the right result or a line that names the culprit.

Moreover no path in a file is followed, and what changes a result changes the identity of a run.
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
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
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
from qa_lib.lab.launch.judge import judge
from qa_lib.lab.launch.local import Launcher
from qa_lib.lab.report import cli
from qa_lib.lab.search.plan import plan
from qa_lib.lab.sweep import progress_of
from qa_lib.loaded import file_digests
from qa_lib.model.build import save_model
from qa_lib.model.hf_checkpoint import SUMS
from qa_lib.records.archive import read_runs
from qa_lib.records.schema import PROFILE_SCHEMA
from qa_lib.run.identity import identify_data, identify_model
from qa_lib.score.predict import load_qa_model
from qa_lib.train import checkpoint as checkpoints
from qa_lib.train.checkpoint import Checkpoint
from qa_lib.train.parallel.data_parallel import NoParallel
from qa_lib.train.parallel.process_group import ProcessGroup
from tests.conftest import slow
from tests.material import document, hub_row, leave, question, trained_tokenizer, write
from tests.report_runs import make
from tests.test_loaded import Run, copied_package
from tests.test_windows import same
from tests.tiny import CPU, H200, checkpoint, planned

TIMES = int(os.environ.get("QA_LIB_MUTATIONS", "40"))  # mutations of each kind
SECONDS = 20  # that any of them may take

TEXT = "The river Rhine rises in the Alps and ends near Rotterdam, which is a port."
ENTRIES = [question("q1", "where", ("Rotterdam", TEXT.index("Rotterdam"))), question("q2", "why?")]


@contextmanager
def limited():
    """Raise TimeoutError instead of hanging."""
    signal.signal(signal.SIGALRM, Mock(side_effect=TimeoutError(f"no end within {SECONDS} s")))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


class Lab:
    """Three runs below `place`/lab/runs, with files around them that nothing may touch.

    All are in the archive; the last one is only there.
    """

    def __init__(self, place: Path):
        self.place = place
        self.runs = place / "lab" / "runs"
        for name in ("x", "x.png", "lab/x", "lab/x.png", "keep/record.json"):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text("mine")
        specs = plan(["A1", "A2", "A3"], "smoke", data="synthetic:40", machine=CPU)
        for spec in specs:
            folder = leave(self.runs, spec, env={"gpu": "NVIDIA H200"})
            write(folder / "profile.json", {"schema": PROFILE_SCHEMA, "time": {"busy_ms": 1.0}})
            step = '{"step": 1, "loss": 2.0, "lr": 0.1, "ms": 3.0}\n'
            (folder / "steps.jsonl").write_text(step * 3)
        assert main(["archive", "cpu-smoke", "--runs", str(self.runs)]) == 0
        shutil.rmtree(self.runs / specs[2].run_path)
        self.spec = specs[1]
        self.run = self.runs / specs[1].run_path
        self.files = [
            self.run / "record.json",
            self.run / "profile.json",
            self.run / "steps.jsonl",
            self.runs / "cpu-smoke.jsonl",
        ]
        self.contents = self.read_all()

    def read_all(self) -> dict[Path, bytes]:
        """Return the content of each file below `place`."""
        return {path: path.read_bytes() for path in self.place.rglob("*") if path.is_file()}

    def use(self) -> None:
        """Do all that reads such files.

        What reads many of them must succeed; what reads one may raise a UserError of one line.
        """
        runs = read_runs(self.runs)
        launcher = Launcher(self.runs, CPU, {})
        assert {run.record["group"] for run in runs} == {"cpu-smoke"}
        assert len(runs) >= 2
        running(self.runs)
        progress_of(self.run)
        record = (self.run / "record.json").read_bytes()
        calls = [
            lambda: launcher.is_finished(self.spec),
            lambda: judge(self.spec, self.run, None, 0, 1.0),
        ]
        for run in runs:
            calls += [run.profile, run.quantized, run.steps]
        for call in calls:
            try:
                call()
            except UserError as problem:
                assert "\n" not in str(problem)
        (self.run / "record.json").write_bytes(record)  # which judge may have completed

    def check_and_restore(self, changed: Path) -> None:
        """Check that no other file has changed, and restore the one that was."""
        assert self.read_all() | {changed: b""} == self.contents | {changed: b""}
        changed.write_bytes(self.contents[changed])


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    made = Lab(tmp_path_factory.mktemp("trust"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made.place / "lab")
        yield made


def read(path: Path) -> list | dict:
    """Return the content of a file of JSON, or of JSON lines."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)


def write_back(path: Path, content) -> None:
    """Write what read has returned, and was changed since."""
    lines = [content]
    if path.suffix == ".jsonl" and isinstance(content, list):
        lines = content
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")


def places(value, above: tuple = ()):
    """Yield the place of every item in a JSON document: the keys and indices that lead to it."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return
    for key, inner in items:
        yield (*above, key)
        yield from places(inner, (*above, key))


def parent_of(document, place: tuple):
    """Return the dict or list that holds the item at a place."""
    for key in place[:-1]:
        document = document[key]
    return document


PATHS = [
    "../x",
    "../x.png",
    "../../x",
    "../../x.png",
    "../../../keep",
    "/",
    ".",
    "..",
    "",
    "a\0b.png",
    "a\nb",
    "C:\\x",
    "\\\\host\\x",
    "x" * 5_000,
    "\x1b[2J",
    "\ud800",
    "~/x",
    "file:///x",
    "~",
]
VALUES = [
    None,
    True,
    -1,
    0,
    1.5,
    10**18,
    10**400,
    float("nan"),
    float("inf"),
    "text",
    "\x1b]0;x\x07",
    [],
    [1],
    [[]],
    {},
    {"a": {"b": [1]}},
    *PATHS,
]
# How a file of JSON is spoilt; three in nine times a value is another one.
SPOILT_JSON = ["value", "value", "value", "key", "gone", "bit", "cut", "deep", "huge"]


def mutate(path: Path, chance: random.Random) -> None:
    """Spoil a file of JSON: another value, no value, another key, or other bytes."""
    content = path.read_bytes()
    kind = chance.choice(SPOILT_JSON)
    if kind in ("value", "key", "gone"):
        document = read(path)
        spots = list(places(document))
        if kind == "key":
            spots = [place for place in spots if isinstance(place[-1], str)]
        place = chance.choice(spots)
        parent = parent_of(document, place)
        if kind == "gone":
            del parent[place[-1]]
        elif kind == "value":
            parent[place[-1]] = chance.choice(VALUES)
        else:
            parent[str(chance.choice(VALUES))] = parent.pop(place[-1])
        write_back(path, document)
    elif kind == "deep":
        path.write_bytes(b"[" * 100_000)
    elif kind == "huge":
        path.write_bytes(content.replace(b"0", b"1e999", 1))
    else:
        path.write_bytes(spoilt(content, chance, kind))


def spoilt(content: bytes, chance: random.Random, kind: str) -> bytes:
    """Return the content with another bit, or cut off, at a place that chance draws."""
    place = chance.randrange(len(content))
    if kind == "cut":
        return content[:place]
    changed = bytearray(content)
    changed[place] ^= 1 << chance.randrange(8)
    return bytes(changed)


def result_or_line(call, culprits: list[str]):
    """Return what `call` returns, or None where it raises a UserError.

    The error must be one line and name one of the culprits.
    """
    with limited():
        try:
            return call()
        except UserError as problem:
            message = str(problem)
            assert "\n" not in message
            assert any(culprit in message for culprit in culprits), message


def spoil(path: Path, chance: random.Random) -> bool:
    """Spoil a file of any kind; return whether its bytes differ now."""
    before = path.read_bytes()
    path.unlink()  # it may be mapped into memory
    path.write_bytes(before)
    if path.suffix == ".json" and chance.random() < 0.8:
        mutate(path, chance)
    else:
        path.write_bytes(spoilt(before, chance, chance.choice(["bit", "bit", "cut"])))
    return path.read_bytes() != before


def mutants(whole: Path, place: Path, names: list[str], chance: random.Random):
    """Yield copies of a folder in which one of these files is spoilt, and whether it differs."""
    for number in range(TIMES):
        folder = shutil.copytree(whole, place / str(number) / whole.name)
        yield folder, spoil(folder / chance.choice(names), chance)
        shutil.rmtree(folder)


def check_identity(whole: Path, place: Path, names: list[str], load, identify) -> None:
    """Check that a spoilt folder loads as the whole one, is refused, or has another identity."""
    wanted = load(whole)
    identity = identify(str(whole))
    for folder, _ in mutants(whole, place, names, random.Random(0)):
        loaded = result_or_line(partial(load, folder), [whole.name])
        if loaded not in (None, wanted):
            assert identify(str(folder)) != identity


@pytest.mark.parametrize("number", range(4))
def test_records_and_what_lies_beside_them_may_hold_anything(lab, number, capsys):
    file = lab.files[number]
    chance = random.Random(number)
    for _ in range(TIMES // 2):
        mutate(file, chance)
        with limited():
            lab.use()
        output = "".join(capsys.readouterr())
        assert "\x1b" not in output
        assert "Traceback" not in output
        lab.check_and_restore(file)


class Shelf:
    """Eight runs of two groups, in folders and in archives, one of which is spoilt at a time."""

    def __init__(self):
        for variant, machine, seed in itertools.product(("A1", "A2"), (CPU, H200), (0, 1)):
            make(Path("whole/runs"), variant, machine=machine, seed=seed)
        for group in ("cpu-smoke", "h200-smoke"):
            assert main(["archive", group, "--runs", "whole/runs"]) == 0
        self.outside = sorted(Path().iterdir())

    def spoil(self, chance: random.Random) -> tuple[Path, bytes]:
        """Make a fresh copy, `lab`, and spoil a record or an archive of it.

        Return the file and what it was.
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
        mutate(path, chance)
        return path, before

    def records(self) -> dict:
        """Return the records that can be read, by run."""
        return {run.key: run.record for run in read_runs("lab/runs", left_out=lambda *_: None)}


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "execute", lambda *_: None)  # executing a page takes seconds
    return Shelf()


@pytest.mark.parametrize("part", [0, *map(slow, range(1, 4))])
def test_one_bad_record_costs_one_sentence_wherever_records_are_read(shelf, part, capsys):
    """Report, export, dashboard and archive end well, or in one line.

    No record is lost but those that were spoilt.
    """
    chance = random.Random(part)
    for _ in range(TIMES // 20 if part == 0 else TIMES):
        path, before = shelf.spoil(chance)
        lines = zip_longest(before.splitlines(), path.read_bytes().splitlines())
        spoilt_lines = sum(old != new for old, new in lines)
        # A record is a run, however many of its lines are spoilt; an archive has a run on each.
        spoilt_runs = 1 if path.suffix == ".json" else spoilt_lines
        capsys.readouterr()
        with limited():
            records = shelf.records()
            assert len(records) >= 8 - spoilt_runs
            for words in ("report", "report --group cpu-smoke", "export --csv lab/all.csv"):
                main([*words.split(), "--runs", "lab/runs"])
                output = capsys.readouterr()
                assert "Traceback" not in output.err
                assert "\x1b" not in output.out + output.err
                assert len(re.findall("(?m)^error: ", output.err)) <= 1
                assert len(re.findall("(?m)^left out: ", output.err)) <= max(spoilt_lines, 1)
            groups, _, page = dashboard(Path("lab/runs"), Path("figures"), "h200-smoke")
            assert "h200-smoke" in groups
            assert "<table" in page
            main(["archive", "cpu-smoke", "--runs", "lab/runs"])
            after = shelf.records()
            assert records.items() <= after.items(), "an archive loses none"
        assert sorted({*Path().iterdir()} - {Path("lab"), Path("figures")}) == shelf.outside


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trust") / "model"
    tokenizer = trained_tokenizer([TEXT] * 3, 200)
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=48, **small)
    save_model(BertForQuestionAnswering(config), tokenizer, folder)
    return folder


@pytest.mark.parametrize("digests", [True, False])
def test_a_model_folder_may_hold_anything(model, tmp_path, digests):
    """With digests whatever is changed is refused; without, it loads or is refused by a line."""
    names = sorted(path.name for path in model.iterdir() if path.name != SUMS)
    whole = model
    if not digests:
        whole = shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns(SUMS))
    for folder, differs in mutants(whole, tmp_path, names, random.Random(0)):
        loaded = result_or_line(partial(load_qa_model, folder), [str(folder)])
        if digests and differs:
            assert loaded is None


def test_a_checkpoint_may_hold_anything(tmp_path):
    """One that is changed anywhere is set aside, or loads as before."""
    spec = planned()

    def fresh():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        alone = NoParallel(model, ProcessGroup(torch.device("cpu")), spec.settings)
        return model, Checkpoint(tmp_path, spec, model, optimizer, scaler, alone)

    model, saved = fresh()
    saved.save(7)
    whole = saved.path.read_bytes()
    weights = model.weight.detach().clone()
    chance = random.Random(0)
    for _ in range(4 * TIMES):
        kind = chance.choice(["bit", "bit", "bit", "cut"])
        saved.path.write_bytes(spoilt(whole, chance, kind))
        model, checkpoint = fresh()
        with limited():
            step, refusal = checkpoint.load()
        if refusal:
            assert step == 0
            assert "began anew" in refusal
            assert "\n" not in refusal
            assert not saved.path.exists()
        else:
            assert step == 7
            assert torch.equal(model.weight, weights)
            for loaded, wanted in zip(checkpoint._states(), saved._states(), strict=True):
                for name in wanted:
                    assert torch.equal(loaded[name], wanted[name])


def test_code_may_be_edited_anywhere_at_any_time(tmp_path, monkeypatch):
    """A run whose code was another at its begin, at its end or in between begins anew."""
    monkeypatch.setattr(checkpoints, "code_version", lambda: {"commit": None})  # asks git
    package = copied_package(tmp_path)
    files = sorted(file_digests(package))
    run = Run(tmp_path, package)
    chance = random.Random(0)
    for _ in range(2 * TIMES):
        path = package / chance.choice(files)
        moment = chance.choice(["before", "during", "after"])
        before = path.read_bytes()
        edited = spoilt(before or b"#\n", chance, chance.choice(["bit", "cut"]))
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
            assert "began anew" in note, (path, moment)
        path.write_bytes(before)


def test_a_data_file_may_hold_anything(tmp_path):
    path = tmp_path / "data.json"
    chance = random.Random(0)
    for _ in range(4 * TIMES):
        write(path, document((TEXT, ENTRIES)))
        mutate(path, chance)
        examples = result_or_line(lambda: open_source(path, "train").examples, ["data.json"])
        for example in examples or ():
            for text, start in example.answers:
                assert text
                assert example.context[start:].startswith(text)
        result_or_line(lambda: open_source(path, "train").golds, ["data.json"])


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_tokenizers_files_may_hold_anything(kind, tmp_path):
    """A folder that gives other tokens is another model."""
    whole = Path(checkpoint(kind, tmp_path / "model"))
    write(whole / "added_tokens.json", {"riverbank": 3})
    names = sorted(path.name for path in whole.glob("*.json") if path.name != "config.json")
    # The synthetic vocabulary knows the words of the end alone.
    text = f"{TEXT} [CLS] alice came to the harbour at nine"
    check_identity(
        whole,
        tmp_path,
        names,
        lambda folder: build_tokenizer(folder)(text)["input_ids"],
        identify_model,
    )


def test_a_saved_data_set_may_hold_anything(tmp_path):
    """A folder that gives other questions is other data."""
    rows = [
        hub_row(f"{i}", "", f"where {i}?", TEXT, ("Alps", TEXT.index("Alps"))) for i in range(8)
    ]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "whole", num_shards=2)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    identify = partial(identify_data, with_validation=False)
    check_identity(
        tmp_path / "whole",
        tmp_path,
        names,
        lambda folder: open_source(folder, "train").examples,
        identify,
    )


def test_a_damaged_cache_is_made_anew_with_a_line(tmp_path, caplog):
    """Any array, any value beside them, or any bit may be damaged."""
    source = open_source(write(tmp_path / "data.json", document((TEXT, ENTRIES))), "train")
    tokenizer = build_tokenizer("tiny")
    cache = tmp_path / "cache"

    def samples():
        return windows.build_samples(source, tokenizer, 48, 16, cache)

    whole = windows.build_samples(source, tokenizer, 48, 16, cache=False)
    chance = random.Random(0)
    samples()
    for _ in range(3 * TIMES):
        caplog.clear()
        (entry,) = cache.iterdir()
        path = chance.choice(sorted(entry.iterdir()))
        before = path.read_bytes()
        spoil(path, chance)
        if chance.random() < 0.1:
            path.unlink()
        elif path.suffix == ".npy" and chance.random() < 0.5:
            path.unlink()
            np.save(path, np.zeros_like(np.load(io.BytesIO(before))))
        differs = not path.exists() or path.read_bytes() != before
        assert same(samples(), whole), path
        if not differs:
            assert not caplog.text, path
        caplog.clear()
        samples()
        assert not caplog.text, "it is whole again"


# Values for the arguments of plan, most of them impossible.
GIVEN = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    3.0,
    1.5,
    float("nan"),
    float("inf"),
    2**31,
    2**63,
    10**30,
    1e-4,
    1e-400,
    -1e-4,
    "",
    "8",
    "x",
    b"8",
    [],
    [8],
    [8, True],
    [0.5],
    {},
    {"a": 1},
    object(),
    Path("tiny"),
]
ARGUMENTS = [
    "micro_batch",
    "world",
    "max_length",
    "batch",
    "epochs",
    "learning_rate",
    "stages",
    "seeds",
    "data",
    "model",
    "variants",
]
# What a refusal calls them.
CULPRITS = [*ARGUMENTS, "micro-batch", "seed", "rate", "variant"]


def test_a_plan_is_of_values_that_can_be_or_one_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    chance = random.Random(0)
    for _ in range(5 * TIMES):
        names = chance.sample(ARGUMENTS, chance.choice([1, 1, 2, 3]))
        arguments = {"variants": ["A1"], "preset": "smoke", "machine": CPU}
        arguments |= {name: chance.choice(GIVEN) for name in names}
        specs = result_or_line(partial(plan, **arguments), CULPRITS)
        for spec in specs or ():
            check_values(spec)


def check_values(spec) -> None:
    """Check that the numbers of a spec are of the right type and in their range."""
    preset = spec.preset
    for size in (spec.seed, spec.world, spec.stages, spec.asked.micro_batch, preset.max_length):
        assert type(size) is int
    assert 0 < preset.learning_rate < 1
    assert preset.epochs is None or preset.epochs > 0
