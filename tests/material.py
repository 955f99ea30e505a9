"""What several tests share: tokenizers, real data if there is any, small SQuAD files, records."""

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
    """Return the committed runs, read once a process, which a test must not change."""
    return load_runs(ROOT / "runs")


def wait_for(condition, limit_s: float = 120) -> None:
    """Wait until `condition()` is true.

    It takes seconds, or longer beside other work; the limit is for what never becomes true.
    """
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s} s"
        time.sleep(0.05)


def best_of(times: int, call):
    """Return the processor's seconds of the fastest of some calls, and the last one's result.

    Other work on the machine can only add to these seconds, and adds little to the fastest.
    """
    seconds = []
    for _ in range(times):
        begin = time.process_time()
        result = call()
        seconds.append(time.process_time() - begin)
    return min(seconds), result


def real_squad(split: str) -> list[Example]:
    """Return the questions of SQuAD's own files; skip the test where they are not there."""
    if not SQUAD.is_dir():
        pytest.skip("no ../shared/squad beside the repository")
    return open_source(SQUAD, split).examples


def real_tokenizer():
    """Return BERT's tokenizer of 30,522 WordPieces; skip the test where it is not there."""
    if "QA_LIB_TEST_TOKENIZER" not in os.environ:
        pytest.skip(
            "no real vocabulary: "
            "QA_LIB_TEST_TOKENIZER names no folder of bert-base-uncased's tokenizer"
        )
    return AutoTokenizer.from_pretrained(os.environ["QA_LIB_TEST_TOKENIZER"])


def trained_tokenizer(texts, size: int = 2000):
    """Return an uncased BERT-like tokenizer with a vocabulary learnt from `texts`."""
    learner = BertWordPieceTokenizer(lowercase=True)
    learner.train_from_iterator(texts, vocab_size=size, show_progress=False)
    inner = learner._tokenizer
    ends = [(token, inner.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    inner.post_processor = TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_input_names=inputs, **names)


def question(key: str, text: str, *answers: tuple[str, int], **more) -> dict:
    """Return an entry of `qas` with these (text, start) answers; without any, an impossible one."""
    golds = [{"text": answer, "answer_start": start} for answer, start in answers]
    return {"id": key, "question": text, "answers": golds, "is_impossible": not golds, **more}


def document(*paragraphs: tuple[str, list[dict]], title: str = "Rivers") -> dict:
    """Return SQuAD's official layout around (context, qas) pairs, in one article."""
    body = [{"context": context, "qas": list(entries)} for context, entries in paragraphs]
    return {"version": "v2.0", "data": [{"title": title, "paragraphs": body}]}


def squad_folder(folder: Path, text: str, answer: str, asked: str = "who came?") -> Path:
    """Make a folder of data with 40 questions to train on and 40 to validate on; return it.

    All are about `text` and have the same answer; the paragraph to validate on ends otherwise. The
    question `asked` may have a {number} in it.
    """
    folder.mkdir()
    for split, end in (("train", ""), ("validation", " .")):
        gold = (answer, text.index(answer))
        entries = [
            question(f"{split}{number}", asked.format(number=number), gold) for number in range(40)
        ]
        write(folder / f"{split}.json", document((text + end, entries)))
    return folder


def hub_row(key: str, title: str, text: str, context: str, *answers: tuple[str, int]) -> dict:
    """Return a question in the layout of the hub's data sets, whose answers are in columns."""
    columns = {
        "text": [answer for answer, _ in answers],
        "answer_start": [start for _, start in answers],
    }
    return {"id": key, "title": title, "question": text, "context": context, "answers": columns}


def write(path: Path, content: object) -> Path:
    """Write a file of JSON; return its path."""
    path.write_text(json.dumps(content))
    return path


def edited(path: Path, **changes) -> Path:
    """Give a file of JSON other values at its top; return its path."""
    return write(path, json.loads(path.read_text()) | changes)


def flip_a_bit(path: Path, place: int = -100) -> None:
    """Change a bit of the file's byte at that place."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def refused(said: str, call, /, *words, **more) -> str:
    """Return the message of the UserError that `call` raises for these arguments.

    It must be one line in which the pattern `said` is found.
    """
    with pytest.raises(UserError, match=said) as caught:
        call(*words, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def python(
    *words, cwd: Path = ROOT, code: int = 0, **environment: str
) -> subprocess.CompletedProcess:
    """Run a Python with these words in a process of its own; return the ended process.

    It must end with the exit code `code`. `environment` is added to that of this process.
    """
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def without_torch(folder: Path, *words: str) -> str:
    """Run a Python that cannot import torch, nor what needs it; return what it prints.

    Both of its streams are in that text, first the one of output. The modules that stand in for the
    missing ones are written to `folder`.
    """
    for name in ("torch", "transformers", "datasets"):
        (folder / f"{name}.py").write_text("raise ImportError(__name__)\n")
    done = python(*words, PYTHONPATH=str(folder))
    return done.stdout + done.stderr


def leave(
    runs: Path, spec, /, status: str = "ok", error: dict | None = None, env=None, **sections
) -> Path:
    """Make the folder of a run that has ended, and return it.

    Its record has this status and error, and these values in its sections.
    """
    entry = new_record(spec, env or {"gpu": None})
    for name, values in sections.items():
        entry[name] |= values
    finish(runs / spec.run_path, entry, status, error)
    return runs / spec.run_path


def end_of(folder: Path) -> tuple[str, str | None]:
    """Return the status and the error's message of the record in a run's folder."""
    entry = read_record(folder)
    return entry["status"], entry["error"]["message"]


def change_record(folder: Path, **sections: dict) -> dict:
    """Give the record in a run's folder other values in some of its sections; return the record."""
    entry = json.loads((folder / "record.json").read_text())
    for name, values in sections.items():
        entry[name] |= values
    write(folder / "record.json", entry)
    return entry
