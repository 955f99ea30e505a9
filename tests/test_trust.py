"""Whatever files and typed words hold, an end is the right result or one line that names the culprit; no name in files
is followed, and what changes a result changes the identity of a run.

Some hundred mutations run here; QA_LIB_MUTATIONS=5000 pytest tests/test_trust.py runs so many of each kind.
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
    """An error instead of a hang."""
    signal.signal(signal.SIGALRM, Mock(side_effect=TimeoutError(f"no end within {SECONDS} s")))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


class Lab:
    """Three runs below `place`/lab/runs, the last of them archived, with files around them that nobody may touch."""

    def __init__(self, place: Path):
        self.place, self.runs = place, place / "lab" / "runs"
        for name in ("x", "x.png", "lab/x", "lab/x.png", "keep/record.json"):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text("mine")
        specs = plan(["A1", "A2", "A3"], "smoke", data="synthetic:40", machine=CPU)
        for spec in specs:
            folder = leave(self.runs, spec, env={"gpu": "NVIDIA H200"})
            write(folder / "profile.json", {"schema": PROFILE_SCHEMA, "time": {"busy_ms": 1.0}})
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
        """All that reads such files. Only UserErrors may come of it, and only of those that have one thing to read."""
        found, launcher = read_runs(self.runs), Launcher(self.runs, CPU, {})
        assert {run.record["group"] for run in found} == {"cpu-smoke"} and len(found) >= 2
        running(self.runs)
        progress_of(self.run)
        after = (self.run / "record.json").read_bytes()
        asks = [
            lambda: launcher.is_finished(self.spec),
            lambda: judge(self.spec, self.run, None, 0, 1.0),
        ]
        for ask in [
            *asks,
            *(ask for run in found for ask in (run.profile, run.quantized, run.steps)),
        ]:
            try:
                ask()
            except UserError as problem:
                assert "\n" not in str(problem)
        (self.run / "record.json").write_bytes(after)

    def check_and_restore(self, changed: Path) -> None:
        """Nothing but the file that was changed is other than it was."""
        assert self.content() | {changed: b""} == self.kept | {changed: b""}
        changed.write_bytes(self.kept[changed])


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    made = Lab(tmp_path_factory.mktemp("trust"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made.place / "lab")
        yield made


def read(path: Path) -> list | dict:
    text = path.read_text()
    return (
        [json.loads(line) for line in text.splitlines()]
        if path.suffix == ".jsonl"
        else json.loads(text)
    )


def written(path: Path, content) -> None:
    lines = content if path.suffix == ".jsonl" and isinstance(content, list) else [content]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")


def spots(value, way=()):
    """The ways to every value in a JSON document, and to every key (with True at the end)."""
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in pairs:
        yield (*way, key, False)
        if isinstance(key, str):
            yield (*way, key, True)
        yield from spots(inner, (*way, key))


GONE = object()


def changed(document, way, new):
    """The document with the value, or the key, at the end of a way replaced, or GONE."""
    *above, last, is_key = way
    inside = document
    for key in above:
        inside = inside[key]
    if new is GONE:
        del inside[last]
    elif is_key:
        inside[str(new)] = inside.pop(last)
    else:
        inside[last] = new
    return document


PATHS = ["../x", "../x.png", "../../x", "../../x.png", "../../../keep", "/", ".", "..", "", "a\0b.png",
         "a\nb", "C:\\x", "\\\\host\\x", "x" * 5_000, "\x1b[2J", "\ud800", "~/x", "file:///x", "~"]  # fmt: skip
VALUES = [None, True, -1, 0, 1.5, 10**18, "text", [], {}, [1], [[]], {"a": {"b": [1]}}, "\x1b]0;x\x07", float("nan"),
          float("inf"), 10**400, *PATHS]  # fmt: skip


def mutated(path: Path, chance: random.Random) -> None:
    """Another value, no value, or spoilt bytes, in a file of JSON."""
    content = bytearray(path.read_bytes())
    kind = chance.choice(["value", "value", "value", "key", "gone", "bit", "cut", "deep", "huge"])
    if kind in ("value", "key", "gone"):
        document = read(path)
        way = chance.choice([way for way in spots(document) if way[-1] == (kind == "key")])
        written(path, changed(document, way, GONE if kind == "gone" else chance.choice(VALUES)))
    else:
        others = {"deep": b"[" * 100_000, "huge": content.replace(b"0", b"1e999", 1)}
        path.write_bytes(others.get(kind) or spoilt(content, chance, kind))


def spoilt(content: bytearray, chance: random.Random, kind: str) -> bytes:
    place = chance.randrange(len(content))
    if kind == "cut":
        return bytes(content[:place])
    content[place] ^= 1 << chance.randrange(8)
    return bytes(content)


def one_line(ask, names: str):
    """What `ask` gives; None where it ends in a UserError, of one line that has one of `names` in it."""
    with limited():
        try:
            return ask()
        except UserError as problem:
            assert "\n" not in str(problem) and any(
                name in str(problem) for name in names.split()
            ), problem


def change(path: Path, chance: random.Random) -> bool:
    """Spoil a file; whether its bytes are others now."""
    before = path.read_bytes()
    path.unlink()  # it may be mapped into memory
    path.write_bytes(before)
    if path.suffix == ".json" and chance.random() < 0.8:
        mutated(path, chance)
    else:
        path.write_bytes(spoilt(bytearray(before), chance, chance.choice(["bit", "bit", "cut"])))
    return path.read_bytes() != before


def mutants(whole: Path, place: Path, names: list[str], chance: random.Random):
    """Copies of a folder in which one of these files is spoilt; and whether its bytes are others now."""
    for number in range(TIMES):
        folder = shutil.copytree(whole, place / str(number) / whole.name)
        yield folder, change(folder / chance.choice(names), chance)
        shutil.rmtree(folder)


def check_identity(whole: Path, place: Path, names: list[str], ask, identify) -> None:
    """What a spoilt folder gives is the same, or a line, or the folder has another identity."""
    wanted, identity = ask(whole), identify(str(whole))
    for folder, _ in mutants(whole, place, names, random.Random(0)):
        found = one_line(lambda folder=folder: ask(folder), whole.name)
        assert found in (None, wanted) or identify(str(folder)) != identity


@pytest.mark.parametrize("number", range(4))
def test_records_and_what_lies_beside_them_may_hold_anything(lab, number, capsys):
    file, chance = lab.files[number], random.Random(number)
    for _ in range(TIMES // 2):
        mutated(file, chance)
        with limited():
            lab.use()
        assert "\x1b" not in (said := "".join(capsys.readouterr())) and "Traceback" not in said
        lab.check_and_restore(file)


class Shelf:
    """A folder with eight runs of two groups, in folders and archived, one of which is spoilt at a time."""

    def __init__(self):
        for variant, machine, seed in itertools.product(("A1", "A2"), (CPU, H200), (0, 1)):
            make(Path("whole/runs"), variant, machine=machine, seed=seed)
        for group in ("cpu-smoke", "h200-smoke"):
            assert main(["archive", group, "--runs", "whole/runs"]) == 0
        self.outside = sorted(Path().iterdir())

    def spoil(self, chance: random.Random) -> tuple[Path, bytes]:
        """A fresh copy as `lab`, in which a record or a line is another; the file, and what it was."""
        shutil.rmtree("lab", ignore_errors=True)
        shutil.copytree("whole", "lab")
        archive, folder = Path("lab/runs/cpu-smoke.jsonl"), Path("lab/runs/cpu-smoke")
        if chance.random() < 0.5:
            shutil.rmtree(folder)
            path = archive
        else:
            archive.unlink()
            path = chance.choice(sorted(folder.glob("*/record.json")))
        before = path.read_bytes()
        mutated(path, chance)
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
    """Report, export, dashboard and archive end well, or in one line; no record is lost but those that were spoilt."""
    chance = random.Random(part)
    for _ in range(TIMES // 8 if part == 0 else TIMES):
        path, before = shelf.spoil(chance)
        lines = zip_longest(before.splitlines(), path.read_bytes().splitlines())
        spoilt = sum(old != new for old, new in lines)
        capsys.readouterr()
        with limited():
            entries = shelf.entries()
            assert len(entries) >= 8 - spoilt or (path.suffix == ".json" and len(entries) >= 7)
            for words in ("report", "report --group cpu-smoke", "export --csv lab/all.csv"):
                main([*words.split(), "--runs", "lab/runs"])
                said = capsys.readouterr()
                assert "Traceback" not in said.err and "\x1b" not in said.out + said.err
                assert len(re.findall("(?m)^error: ", said.err)) <= 1
                assert len(re.findall("(?m)^left out: ", said.err)) <= max(spoilt, 1)
            groups, _, page = dashboard(Path("lab/runs"), Path("figures"), "h200-smoke")
            assert "h200-smoke" in groups and "<table" in page
            main(["archive", "cpu-smoke", "--runs", "lab/runs"])
            assert {**shelf.entries(), **entries} == shelf.entries(), "an archive loses none"
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
    """With digests whatever is changed is refused; without, what loads answers without a traceback."""
    names, whole = sorted(path.name for path in model.iterdir() if path.name != SUMS), model
    if not digests:
        whole = shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns(SUMS))
    for folder, differs in mutants(whole, tmp_path, names, random.Random(0)):
        loaded = one_line(lambda folder=folder: load_qa_model(folder), str(folder))
        assert not (loaded and digests and differs)


def test_a_checkpoint_may_hold_anything(tmp_path):
    """One that is changed anywhere is set aside, or says the same."""
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

    model, kept = fresh()
    kept.save(7)
    whole, weights, chance = kept.path.read_bytes(), model.weight.detach().clone(), random.Random(0)
    for _ in range(4 * TIMES):
        spoiled = spoilt(bytearray(whole), chance, chance.choice(["bit", "bit", "bit", "cut"]))
        kept.path.write_bytes(spoiled)
        model, checkpoint = fresh()
        with limited():
            step, refused = checkpoint.load()
        if refused:
            assert (
                step == 0
                and "began anew" in refused
                and "\n" not in refused
                and not kept.path.exists()
            )
        else:
            assert step == 7 and torch.equal(model.weight, weights)
            for found, wanted in zip(checkpoint._states(), kept._states(), strict=True):
                assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_code_may_be_edited_anywhere_at_any_time(tmp_path, monkeypatch):
    """A run whose code is not at its end what it was at its begin, or was not all the while, begins anew."""
    monkeypatch.setattr(checkpoints, "code_version", lambda: {"commit": None})  # asks git
    package, chance = copied_package(tmp_path), random.Random(0)
    run, places = Run(tmp_path, package), sorted(file_digests(package))
    for _ in range(2 * TIMES):
        path, moment = package / chance.choice(places), chance.choice(["before", "during", "after"])
        before = path.read_bytes()
        spoiled = spoilt(bytearray(before or b"#\n"), chance, chance.choice(["bit", "cut"]))
        if moment == "before":
            path.write_bytes(spoiled)
        process = run.begin()
        if moment == "during":
            path.write_bytes(spoiled)
        process.save(7)
        path.write_bytes(spoiled if moment == "after" else before)
        step, note = run.begin().load()
        assert spoiled == before or (step == 0 and "began anew" in note), (path, moment)
        path.write_bytes(before)


def test_a_data_file_may_hold_anything(tmp_path):
    path, chance = tmp_path / "data.json", random.Random(0)
    for _ in range(4 * TIMES):
        mutated(write(path, document((TEXT, ENTRIES))), chance)
        for example in one_line(lambda: open_source(path, "train").examples, "data.json") or ():
            assert all(
                text and example.context[start:].startswith(text) for text, start in example.answers
            )
        one_line(lambda: open_source(path, "train").golds, "data.json")


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_tokenizers_files_may_hold_anything(kind, tmp_path):
    """What gives other tokens is another model."""
    whole = Path(checkpoint(kind, tmp_path / "model"))
    write(whole / "added_tokens.json", {"riverbank": 3})
    names = sorted(path.name for path in whole.glob("*.json") if path.name != "config.json")
    text = f"{TEXT} [CLS] alice came to the harbour at nine"  # of which the synthetic vocabulary knows the end
    check_identity(
        whole,
        tmp_path,
        names,
        lambda folder: build_tokenizer(folder)(text)["input_ids"],
        identify_model,
    )


def test_a_saved_data_set_may_hold_anything(tmp_path):
    """What gives other questions is other data."""
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
    """Any array, any value beside them, any bit."""
    source = open_source(write(tmp_path / "data.json", document((TEXT, ENTRIES))), "train")
    tokenizer, cache = build_tokenizer("tiny"), tmp_path / "cache"

    def samples():
        return windows.build_samples(source, tokenizer, 48, 16, cache)

    whole, chance = windows.build_samples(source, tokenizer, 48, 16, False), random.Random(0)
    samples()
    for _ in range(3 * TIMES):
        caplog.clear()
        (entry,) = cache.iterdir()
        path = chance.choice(sorted(entry.iterdir()))
        before = path.read_bytes()
        change(path, chance)
        if chance.random() < 0.1:
            path.unlink()
        elif path.suffix == ".npy" and chance.random() < 0.5:
            path.unlink()
            np.save(path, np.zeros_like(np.load(io.BytesIO(before))))
        differs = not path.exists() or path.read_bytes() != before
        found = samples()
        assert same(found, whole) and (differs or not caplog.text), path
        caplog.clear()
        samples()
        assert not caplog.text


GIVEN = [None, True, False, -1, 0, 1, 2, 3.0, 1.5, float("nan"), float("inf"), 2**31, 2**63, 10**30, "", "8", "x", [],
          [8], [8, True], [0.5], {}, {"a": 1}, b"8", object(), Path("tiny"), 1e-4, 1e-400, -1e-4]  # fmt: skip
NAMES = "micro_batch world max_length batch epochs learning_rate stages seeds data model variants".split()


def test_a_plan_is_of_values_that_can_be_or_one_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    chance = random.Random(0)
    for _ in range(5 * TIMES):
        given = {
            name: chance.choice(GIVEN) for name in chance.sample(NAMES, chance.choice([1, 1, 2, 3]))
        }
        rest = {"variants": ["A1"], "preset": "smoke", "machine": CPU}
        specs = one_line(
            lambda: plan(**rest | given),  # noqa: B023
            " ".join([*NAMES, "micro-batch", "seed", "rate", "variant"]),
        )
        for spec in specs or ():
            sizes = (
                spec.seed,
                spec.world,
                spec.stages,
                spec.asked.micro_batch,
                spec.preset.max_length,
            )
            assert all(type(size) is int for size in sizes) and 0 < spec.preset.learning_rate < 1, (
                given
            )
            assert spec.preset.epochs is None or spec.preset.epochs > 0
