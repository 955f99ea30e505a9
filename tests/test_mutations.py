"""Whatever a tokenizer's files, a saved data set, a cache of samples and a typed word hold, the end is the right
result or one line; what changes a result changes the identity of a run.

Some hundred mutations run here; QA_LIB_MUTATIONS=5000 pytest tests/test_mutations.py runs so many of each kind.
"""

import io
import random
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest

from qa_lib.cli import VERBS, parser_of
from qa_lib.data import windows
from qa_lib.data.squad import open_source
from qa_lib.data.tokenize import build_tokenizer
from qa_lib.run.plan import identify_data, identify_model, plan
from qa_lib.spec import Machine
from tests.material import document, question, write
from tests.test_trust import TEXT, TIMES, change, one_line
from tests.tiny import checkpoint

ENTRIES = [question("q1", "where", ("Rotterdam", TEXT.index("Rotterdam"))), question("q2", "why?")]
ARRAYS = ("tokens", "offsets", "starts", "example", "context", "start_positions", "end_positions")


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_tokenizers_files_may_hold_anything(kind, tmp_path):
    """What gives other tokens is another model."""
    whole, chance = Path(checkpoint(kind, tmp_path / "model")), random.Random(0)
    write(whole / "added_tokens.json", {"riverbank": 3})
    names = sorted(path.name for path in whole.glob("*.json") if path.name != "config.json")
    text = f"{TEXT} [CLS] alice came to the harbour at nine"  # of which the synthetic vocabulary knows the end
    tokens = build_tokenizer(whole)(text)["input_ids"]
    identity = identify_model(str(whole))
    for number in range(TIMES):
        folder = shutil.copytree(whole, tmp_path / str(number) / "model")
        change(folder / chance.choice(names), chance)
        found = one_line(lambda folder=folder: build_tokenizer(folder)(text)["input_ids"], "model")
        if found not in (None, tokens):
            assert identify_model(str(folder)) != identity
        shutil.rmtree(folder)


def test_a_saved_data_set_may_hold_anything(tmp_path):
    """What gives other questions is other data."""
    rows = [{"id": f"{i}", "title": "", "context": TEXT, "question": f"where {i}?",
             "answers": {"text": ["Alps"], "answer_start": [TEXT.index("Alps")]}} for i in range(8)]  # fmt: skip
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "whole", num_shards=2)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    examples = open_source(tmp_path / "whole", "train").examples
    identity, chance = identify_data(str(tmp_path / "whole"), with_validation=False), random.Random(0)
    for number in range(TIMES):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / str(number) / "whole")
        change(folder / chance.choice(names), chance)
        found = one_line(lambda folder=folder: open_source(folder, "train").examples, "whole")
        if found not in (None, examples):
            assert identify_data(str(folder), with_validation=False) != identity
        shutil.rmtree(folder)


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
        differs = change(path, chance)
        if chance.random() < 0.1:
            path.unlink()
            differs = True
        elif path.suffix == ".npy" and chance.random() < 0.5:
            path.unlink()
            np.save(path, np.zeros_like(np.load(io.BytesIO(before))))
            differs = path.read_bytes() != before
        found = samples()
        assert all(np.array_equal(getattr(found, name), getattr(whole, name)) for name in ARRAYS), path
        assert (found.pad_token, found.n_examples, found.examples_sha256) == (
            whole.pad_token, whole.n_examples, whole.examples_sha256
        )  # fmt: skip
        assert differs or not caplog.text
        caplog.clear()
        samples()
        assert not caplog.text


WORDS = ["", " ", ",", "nan", "inf", "-inf", "-1", "0", "1", "1.5", "1e400", "0x10", "9" * 19, "9" * 30, "-" + "9" * 30,
         "٣", "x", "1_0", "+1", "\x00", "\x1b[2J", "a b", "1,,2", "3e-5", "True", "None", "tiny", "/", "..", "-",
         "gpt2:L1H64", "gpt2:L99999999999H64", "synthetic:0", "synthetic:99999999999"]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_a_typed_word_is_a_value_or_one_line(verb, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    parser = parser_of(verb)
    takes = [action for action in parser._actions if action.nargs != 0]
    for action in takes:
        for word in WORDS:
            words = [f"{action.option_strings[0]}={word}"] if action.option_strings else [word]
            parsed = one_line(lambda words=words: parser.parse_known_args(words), f"{verb} argument")
            value = parsed and getattr(parsed[0], action.dest)
            for one in value if isinstance(value, list) else [value]:
                assert one is None or one == one, f"{action.dest} is none at all"  # NaN is not equal to itself
                assert not isinstance(one, int) or isinstance(one, bool) or -(2**63) <= one < 2**63
            assert word.strip() or not parsed or value is None or isinstance(action.default, str), action.dest
    assert list(tmp_path.iterdir()) == []


VALUES = [None, True, False, -1, 0, 1, 2, 3.0, 1.5, float("nan"), float("inf"), 2**31, 2**63, 10**30, "", "8", "x", [],
          [8], [8, True], [0.5], {}, {"a": 1}, b"8", object(), Path("tiny"), 1e-4, 1e-400, -1e-4]  # fmt: skip
NAMES = "micro_batch world max_length batch epochs learning_rate stages seeds data model variants".split()


def test_a_plan_is_of_values_that_can_be_or_one_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    chance = random.Random(0)
    for _ in range(5 * TIMES):
        given = {name: chance.choice(VALUES) for name in chance.sample(NAMES, chance.choice([1, 1, 2, 3]))}
        rest = {"variants": ["A1"], "preset": "smoke", "machine": Machine()}
        specs = one_line(lambda: plan(**rest | given), " ".join([*NAMES, "micro-batch", "seed", "rate", "A1"]))  # noqa: B023
        for spec in specs or ():
            sizes = spec.seed, spec.world, spec.stages, spec.asked.micro_batch, spec.preset.max_length
            assert all(type(size) is int for size in sizes) and 0 < spec.preset.learning_rate < 1, given
            assert spec.preset.epochs is None or spec.preset.epochs > 0
