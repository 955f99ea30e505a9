"""Ask a checkpoint: one thread loads models and answers all that waits for the same one together."""

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import torch

from qa_lib.data.squad import DataError
from qa_lib.data.windows import build_features
from qa_lib.score.decode import LOWEST, decode
from qa_lib.score.predict import answering_device, asked, load_qa_model, predict_logits, window_lengths

LOADED = 4  # models kept in memory
MOST_WINDOWS = 2_000  # of what is answered at once: the longest paragraph and a question of a sentence take some 400
WAITING = 64  # questions that may wait; the next is told that the app is busy
# Questions answered together, and the characters of their paragraphs if they are more than one. 50 askers on two cores
# had 2,800 answers a second from the tiny model instead of 530, and from BERT-base 5.2 instead of 4.6: more only where
# a forward pass holds windows of like length, which few tokens see to (16,384 of them: 3.0).
TOGETHER, TOGETHER_CHARACTERS, BATCH_TOKENS = 16, 40_000, 1_024


class Busy(RuntimeError):
    """As many questions wait as may."""


class QuestionTooLong(DataError):
    """A question that leaves its paragraph no room in a window, or so little that it is cut into very many."""


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint, ready to answer, with the tokens of its windows and of their overlap.

    A `small` one is kept to one thread: beside busy cores the tiny model took 175 ms with two and 2 with one.
    """

    model: torch.nn.Module
    tokenizer: object
    max_length: int
    stride: int
    small: bool


def load(folder: Path) -> Model:
    """The checkpoint in `folder`, warmed up. Raises UserError for what load_qa_model refuses."""
    model, tokenizer = load_qa_model(folder)
    device = answering_device(model)
    small = model.num_parameters() < 10_000_000
    loaded = Model(model.to(device), tokenizer, *window_lengths(folder, model), small)
    for words in (1, 4 * loaded.max_length):  # so that no asker waits for what happens the first time
        answer(loaded, [("who", "she " * words)])
    return loaded


def _written(folder: Path) -> int:
    """When the newest of a checkpoint's weights were written, in ns; 0 if there are none, which is for load to say."""
    return max((path.stat().st_mtime_ns for path in folder.glob("*.safetensors")), default=0)


def answer(loaded: Model, questions: list[tuple[str, str]]) -> list[dict]:
    """Answers to (question, paragraph) pairs, as JSON can hold them, computed together.

    `nbest` is what Answers.entries gives; `margin` the null score minus that of the best span (None if no span was
    allowed); `windows` how many the paragraph was cut into, of at most `window_tokens`; `ms` the milliseconds that
    tokenising, model and decoding took, for all questions `together`.
    Raises QuestionTooLong where one leaves its paragraph no room, DataError for a model whose logits are NaN.
    """
    source = asked(questions)
    examples, clock = source.examples, [time.perf_counter()]
    try:
        features = build_features(source, loaded.tokenizer, loaded.max_length, loaded.stride, cache=False)
    except DataError:
        raise QuestionTooLong(f"too long for this model, which reads {loaded.max_length} tokens at a time") from None
    if len(features) > MOST_WINDOWS:
        raise QuestionTooLong(f"so long that this model would read its paragraph in {len(features):,} pieces")
    clock.append(time.perf_counter())
    logits = predict_logits(loaded.model, features, loaded.model.device, batch_tokens=BATCH_TOKENS)
    if loaded.model.device.type == "cuda":
        torch.cuda.synchronize()
    clock.append(time.perf_counter())
    answers = decode(features, examples, *logits)
    nbest = [answers.entries(i) for i in range(len(examples))]
    clock.append(time.perf_counter())
    spent = [1000 * (end - begin) for begin, end in pairwise(clock)]
    odds = answers.null_odds
    return [
        {
            "answer": answers.predictions[example.id],
            "margin": odds[example.id] if odds[example.id] < -LOWEST else None,
            "nbest": nbest[i],
            "windows": int((features.example == i).sum()),
            "window_tokens": loaded.max_length,
            "ms": dict(zip(("tokenise", "model", "decode"), spent, strict=True)),
            "together": len(questions),
        }
        for i, example in enumerate(examples)
    ]


@dataclass(frozen=True, eq=False)
class _Job:
    folder: Path
    question: str
    context: str
    result: Future
    since: float


class Desk:
    """Takes questions from any thread and answers them in one of its own, which alone calls torch.

    One thread for all models: two that are compared would take each other's cores, and the latency shown with them.
    """

    def __init__(self):
        self._waiting: list[_Job] = []
        self._threads = torch.get_num_threads()
        self._changed = threading.Condition()
        # By the time of its weights as well: a run that is done again overwrites them.
        self._load = lru_cache(LOADED)(lambda folder, _: load(folder))
        threading.Thread(target=self._work, name="desk", daemon=True).start()

    def ask(self, folder: Path, question: str, context: str) -> Future:
        """A future of what `answer` gives for the question, with `wait` in its `ms`; whoever cancels it in time spares
        the work. Raises Busy."""
        job = _Job(folder, question, context, Future(), time.perf_counter())
        with self._changed:
            self._waiting = [other for other in self._waiting if not other.result.cancelled()]  # whose askers have left
            if len(self._waiting) >= WAITING:
                raise Busy(f"busy: {WAITING} questions are waiting already; try again in a moment")
            self._waiting.append(job)
            self._changed.notify()
        return job.result

    def _work(self) -> None:
        while True:
            self._answer(self._next())

    def _next(self) -> list[_Job]:
        """Wait for a question; it and those for the same model that may go with it, no longer waiting."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            jobs = [job for job in self._waiting if job.folder == self._waiting[0].folder][:TOGETHER]
            while len(jobs) > 1 and sum(len(job.context) for job in jobs) > TOGETHER_CHARACTERS:
                jobs.pop()
            self._waiting = [job for job in self._waiting if job not in jobs]
        return [job for job in jobs if job.result.set_running_or_notify_cancel()]

    def _answer(self, jobs: list[_Job]) -> None:
        """Answer these jobs by the model that they ask for. What goes wrong is for the askers to hear; this thread goes
        on."""
        if not jobs:  # whose askers have left
            return
        try:
            loaded = self._load(jobs[0].folder, _written(jobs[0].folder))
        except Exception as problem:  # a refused folder
            for job in jobs:
                job.result.set_exception(problem)
        else:
            torch.set_num_threads(1 if loaded.small else self._threads)
            _answer_by(loaded, jobs)


def _answer_by(loaded: Model, jobs: list[_Job]) -> None:
    """Answer these jobs together; where one of them cannot be answered, each alone."""
    begin = time.perf_counter()  # what loading took is waiting, too
    try:
        results = answer(loaded, [(job.question, job.context) for job in jobs])
    except Exception as problem:  # a question that is too long, no memory
        for job in jobs:
            if len(jobs) > 1:
                _answer_by(loaded, [job])
            else:
                job.result.set_exception(problem)
    else:
        for job, found in zip(jobs, results, strict=True):
            found["ms"]["wait"] = 1000 * (begin - job.since)
            job.result.set_result(found)
