"""Benchmarks of the data path, by hand: python -m tests.bench_data [samples | scale | batch | decode | score]

Every claim is a ratio of two things timed in the same run, or a time next to the limit it has to keep.
"""

import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from qa_lib.data.squad import open_source
from qa_lib.data.windows import build_samples
from qa_lib.score.decode import decode
from qa_lib.score.f1 import score
from tests.material import SQUAD, real_tokenizer
from tests.plain import overflow, plain_answers


def best_of(times: int, call):
    """The fastest of some calls (s), and the last result: other work on the machine only ever adds."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds), result


def line(what: str, value: str, limit: str = "") -> None:
    print(f"{what:58} {value:>12}  {limit}", flush=True)


def bench_features() -> None:
    """All of ../shared/squad/train.json beside datasets.map with the same tokenizer."""
    import datasets

    datasets.disable_progress_bars()
    source, tokenizer = open_source(SQUAD, "train"), real_tokenizer()
    rows = [{"question": e.question.lstrip(), "context": e.context} for e in source.examples]
    table = datasets.Dataset.from_list(rows)
    ours, samples = best_of(5, lambda: build_samples(source, tokenizer, cache=False))

    def windows(batch):
        return overflow(tokenizer, batch["question"], batch["context"], 384, 128)

    def mapped():
        return table.map(windows, batched=True, remove_columns=table.column_names, load_from_cache_file=False)

    theirs, result = best_of(2, mapped)
    assert len(result) == len(samples)
    line(f"samples: {len(rows):,} questions, {len(samples):,} windows", f"{ours:.2f} s")
    line("samples: datasets.map, same questions", f"{theirs:.2f} s")
    line("samples: times faster", f"{theirs / ours:.1f}", ">= 10")


def big_document(questions: int) -> dict:
    """As many questions as asked for, about 6.5 a paragraph as in the whole train set, no two texts alike.

    Real paragraphs and questions with words swapped in from each other, so that neither is found twice.
    """
    draw = random.Random(0)
    articles = json.loads((SQUAD / "train.json").read_text())["data"]
    contexts = [p["context"] for a in articles for p in a["paragraphs"] if len(p["context"]) > 300]
    asked = [q["question"] for a in articles for p in a["paragraphs"] for q in p["qas"]]
    words = " ".join(contexts).split()
    paragraphs = []
    for number in range(questions * 2 // 13):
        text = contexts[number % len(contexts)].split()
        for place in range(0, len(text), 4):
            text[place] = draw.choice(words)
        for place in range(0, len(text), 20):  # a real train set has more distinct words than this part of it
            text[place] += draw.choice(words)[:3]
        context = " ".join(text)
        entries = []
        for k in range(min(7 - number % 2, questions)):
            wording = asked[draw.randrange(len(asked))].split()
            wording[draw.randrange(len(wording))] = draw.choice(words)
            begin = draw.randrange(len(text) - 3)
            start = len(" ".join(text[:begin])) + (begin > 0)
            answer = {"text": " ".join(text[begin : begin + 3]), "answer_start": start}
            gold = [answer] if draw.random() < 2 / 3 else []
            key = f"{number}-{k}"
            entry = {"id": key, "question": f"{' '.join(wording)} {key}", "answers": gold, "is_impossible": not gold}
            entries.append(entry)
        paragraphs.append({"context": context, "qas": entries})
    return {"version": "v2.0", "data": [{"title": "Big", "paragraphs": paragraphs}]}


def bench_scale(questions: int = 130_000) -> None:
    """A train set of full size: time, memory, and the second call from the cache."""
    tokenizer = real_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.json")
        path.write_text(json.dumps(big_document(questions)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        begin = time.perf_counter()
        source = open_source(path, "train")
        samples = build_samples(source, tokenizer, cache=folder)
        first = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        begin = time.perf_counter()
        again = open_source(path, "train")
        build_samples(again, tokenizer, cache=folder)
        second = time.perf_counter() - begin
        n, paragraphs = len(source.examples), len({id(e.context) for e in source.examples})
        line(
            f"scale: {n:,} questions, {paragraphs:,} paragraphs -> {len(samples):,} windows",
            f"{first:.1f} s",
            "< 15 s",
        )
        line("scale: peak memory of the process", f"{peak:.2f} GB", f"< 1.5 GB ({before:.2f} before)")
        line("scale: second call, from the cache", f"{second:.2f} s", "< 1 s")
        assert "examples" not in vars(again)


def bench_batch() -> None:
    samples = build_samples(open_source(SQUAD, "train"), real_tokenizer())
    draw = np.random.default_rng(0)

    def batches():
        for _ in range(200):
            samples.batch(draw.integers(0, len(samples), 32), 384)

    line("batch: 32 windows padded to 384", f"{best_of(5, batches)[0] * 5:.2f} ms", "< 1 ms")


def bench_decode() -> None:
    source, tokenizer = open_source(SQUAD, "train"), real_tokenizer()
    examples = source.examples[:11_850]
    samples = build_samples(_Of(examples), tokenizer, cache=False)
    draw = torch.Generator().manual_seed(0)
    start, end = torch.randn((2, len(samples), 384), generator=draw) * 4
    ids = torch.arange(len(samples))
    ours, answers = best_of(7, lambda: decode(samples, examples, ids, start, end))
    theirs, plain = best_of(1, lambda: plain_answers(samples, examples, start.numpy(), end.numpy()))
    assert answers.predictions == plain[0] and answers.null_odds == plain[1]
    lists, _ = best_of(1, lambda: answers.nbest)
    line(f"decode: {len(samples):,} windows", f"{ours:.3f} s", "<= 0.6 s")
    line("decode: the n-best lists as well", f"{lists:.3f} s")
    line("decode: plain double loop, same windows", f"{theirs:.2f} s")
    line("decode: times faster", f"{theirs / ours:.1f}", ">= 3")


class _Of:
    """A source of some examples, for samples that are not cached."""

    name, fix_spans = "bench", False

    def __init__(self, examples):
        self.examples = examples


def bench_score() -> None:
    examples = open_source(SQUAD, "validation").examples
    predictions = {e.id: e.answers[0][0] if e.answers else "the end" for e in examples}
    odds = {e.id: float(i % 97) for i, e in enumerate(examples)}
    line(f"score: {len(examples):,} questions", f"{best_of(5, lambda: score(examples, predictions, odds))[0]:.2f} s")


if __name__ == "__main__":
    benches = {name.removeprefix("bench_"): call for name, call in globals().items() if name.startswith("bench_")}
    for name in sys.argv[1:] or ("scale", "samples", "batch", "decode", "score"):
        benches[name]()
