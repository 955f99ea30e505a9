"""What several tests and the benchmarks share: tokenizers, real data where there is any, and small SQuAD files."""

import csv
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import BertWordPieceTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from qa_lib.data.examples import Example
from qa_lib.data.squad import open_source
from qa_lib.errors import UserError
from qa_lib.lab.report.evidence import load_runs
from qa_lib.records.record import finish, new_record, read_record

ROOT = Path(__file__).parent.parent
SQUAD = Path(__file__).resolve().parents[2] / "shared" / "squad"


@functools.cache
def committed():
    """The committed records, read once a process; not to be changed."""
    return load_runs(ROOT / "runs")


def table(name: str) -> list[list[str]]:
    """The rows of a table beside the tests."""
    with (ROOT / "tests" / f"{name}.csv").open(encoding="utf-8", newline="") as stream:
        return [*csv.reader(stream)][1:]


def cases(name: str) -> list | dict:
    """The cases of a test that are data alone."""
    return json.loads((ROOT / "tests" / "cases.json").read_text(encoding="utf-8"))[name]


def wait_for(condition, most: float = 120) -> None:
    """Wait for what takes seconds, or longer beside other work; the limit (s) is for what never comes."""
    end = time.monotonic() + most
    while not condition():
        assert time.monotonic() < end, f"not within {most} s"
        time.sleep(0.05)


def best_of(times: int, call):
    """The fastest of some calls (s of a busy processor), and the last result: other work only ever adds, and little."""
    seconds = []
    for _ in range(times):
        begin = time.process_time()
        result = call()
        seconds.append(time.process_time() - begin)
    return min(seconds), result


def real_squad(split: str) -> list[Example]:
    """The questions of SQuAD's own files, or a skipped test."""
    if not SQUAD.is_dir():
        pytest.skip("no ../shared/squad beside the repository")
    return open_source(SQUAD, split).examples


def real_tokenizer():
    """BERT's own vocabulary of 30,522 WordPieces, or a skipped test."""
    if "QA_LIB_TEST_TOKENIZER" not in os.environ:
        pytest.skip(
            "no real vocabulary: QA_LIB_TEST_TOKENIZER names no folder of bert-base-uncased's tokenizer"
        )
    return AutoTokenizer.from_pretrained(os.environ["QA_LIB_TEST_TOKENIZER"])


def trained_tokenizer(texts, size: int = 2000):
    """An uncased BERT-like tokenizer with a vocabulary learnt from `texts`."""
    learner = BertWordPieceTokenizer(lowercase=True)
    learner.train_from_iterator(texts, vocab_size=size, show_progress=False)
    inner = learner._tokenizer
    ends = [(token, inner.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    inner.post_processor = TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_input_names=inputs, **names)


def question(key: str, text: str, *answers: tuple[str, int], **more) -> dict:
    """An entry of `qas`; without answers an impossible one."""
    golds = [{"text": answer, "answer_start": start} for answer, start in answers]
    return {"id": key, "question": text, "answers": golds, "is_impossible": not golds, **more}


def document(*paragraphs: tuple[str, list[dict]], title: str = "Rivers") -> dict:
    """The official layout around (context, qas) pairs, in one article."""
    body = [{"context": context, "qas": list(entries)} for context, entries in paragraphs]
    return {"version": "v2.0", "data": [{"title": title, "paragraphs": body}]}


def squad_folder(folder: Path, text: str, answer: str, asked: str = "who came?") -> Path:
    """A folder of 40 questions of one answer to train on, and as many about a paragraph that ends otherwise to validate
    on; `asked` may have a {number}."""
    folder.mkdir()
    for split, end in (("train", ""), ("validation", " .")):
        gold = (answer, text.index(answer))
        entries = [
            question(f"{split}{number}", asked.format(number=number), gold) for number in range(40)
        ]
        write(folder / f"{split}.json", document((text + end, entries)))
    return folder


def hub_row(key: str, title: str, text: str, context: str, *answers: tuple[str, int]) -> dict:
    """A question in the hub's layout, whose answers are in columns."""
    columns = {
        "text": [answer for answer, _ in answers],
        "answer_start": [start for _, start in answers],
    }
    return {"id": key, "title": title, "question": text, "context": context, "answers": columns}


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def edited(path: Path, **changes) -> Path:
    """Give a file of JSON other values."""
    return write(path, json.loads(path.read_text()) | changes)


def flip_a_bit(path: Path, place: int = -100) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def refused(said: str, call, /, *words, **more) -> str:
    """The one line, in which `said` is found, with which `call` refuses these words."""
    with pytest.raises(UserError, match=said) as caught:
        call(*words, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def python(
    *words, cwd: Path = ROOT, code: int = 0, **environment: str
) -> subprocess.CompletedProcess:
    """What a Python of its own has said, which must end with that exit code."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def without_torch(folder: Path, *words: str) -> str:
    """What a Python says in which neither torch nor what takes it can be imported, both streams together."""
    for name in ("torch", "transformers", "datasets"):
        (folder / f"{name}.py").write_text("raise ImportError(__name__)\n")
    done = python(*words, PYTHONPATH=str(folder))
    return done.stdout + done.stderr


def leave(
    runs: Path, spec, /, status: str = "ok", error: dict | None = None, env=None, **sections
) -> Path:
    """The folder of a run that has ended so, with a record that has these values in its sections."""
    entry = new_record(spec, env or {"gpu": None})
    for name, values in sections.items():
        entry[name] |= values
    finish(runs / spec.run_path, entry, status, error)
    return runs / spec.run_path


def end_of(folder: Path) -> tuple[str, str | None]:
    """The status of a run and what is said of it, by the record in its folder."""
    entry = read_record(folder)
    return entry["status"], entry["error"]["message"]


def change_record(folder: Path, **sections: dict) -> dict:
    """Give the record in a run's folder other values in some of its sections; the record."""
    entry = json.loads((folder / "record.json").read_text())
    for name, values in sections.items():
        entry[name] |= values
    write(folder / "record.json", entry)
    return entry
