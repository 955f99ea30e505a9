"""CapturedStep around stand-ins for PyTorch's graphs: what is captured, and what each call does.

That a captured step is the eager one is tested on a GPU, in test_packing.py.
"""

import contextlib

import pytest
import torch

from qa_lib.train.cuda_graph import WARM_UP, CapturedStep


class Graph:
    """A graph that does the captured work whenever it is replayed."""

    def __init__(self):
        self.work = None

    def replay(self):
        self.work()


class Recorder:
    """A step that adds up its input; while it is captured, it does nothing and is kept."""

    def __init__(self, monkeypatch):
        self.graph = None
        self.done = []  # inputs of the steps that were done
        stand_ins = {"Stream": MockStream, "current_stream": MockStream, "CUDAGraph": Graph}
        for name, value in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    @contextlib.contextmanager
    def capture(self, graph, **_):
        self.graph = graph
        yield
        self.graph = None

    def __call__(self, inputs, factor):
        loss = torch.zeros(())

        def work():
            self.done.append([part["x"].item() for part in inputs])
            loss.fill_(factor * sum(part["x"].item() for part in inputs))

        if self.graph:
            self.graph.work = work
        else:
            work()
        return loss


class MockStream:
    """A stream for which nobody has to wait."""

    def wait_stream(self, other):
        pass


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


@pytest.fixture
def calls(recorder):
    """The inputs of seven calls, each on two micro-batches of its own, and the losses."""
    step = CapturedStep(recorder)
    inputs = []
    losses = []
    for number in range(1, 8):
        inputs.append([{"x": torch.tensor(1.0 * number)}, {"x": torch.tensor(10.0 + number)}])
        losses.append(step(inputs[-1], 2))
    return inputs, losses


VALUES = [[float(number), 10.0 + number] for number in range(1, 8)]


def test_each_call_is_one_step_on_its_own_inputs(recorder, calls):
    assert recorder.done == VALUES


def test_each_call_returns_its_own_loss(calls):
    _, losses = calls
    assert [loss.item() for loss in losses] == [2 * sum(values) for values in VALUES]


def test_no_call_writes_over_the_inputs_of_another(calls):
    inputs, _ = calls
    assert [[part["x"].item() for part in parts] for parts in inputs] == VALUES


def test_inputs_in_another_order_are_taken_by_their_names(recorder):
    step = CapturedStep(recorder)
    for _ in range(WARM_UP + 1):
        step([{"x": torch.tensor(1.0), "y": torch.tensor(2.0)}], 1)
    step([{"y": torch.tensor(4.0), "x": torch.tensor(3.0)}], 1)
    assert recorder.done[-1] == [3.0]


def test_the_first_steps_are_not_captured(recorder):
    step = CapturedStep(recorder)
    for _ in range(WARM_UP):
        step([{"x": torch.ones(())}], 1)
        assert not hasattr(step, "graph")
    step([{"x": torch.ones(())}], 1)
    assert step.graph.work
