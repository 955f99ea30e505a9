"""The step of one's own loop is the plain loop's; what cannot be captured is refused."""

import copy

import pytest
import torch

from qa_lib.errors import UserError
from qa_lib.own.graphed_step import GraphedStep, check_capture, rates_on_device
from qa_lib.own.packing import PackedCollator, pack
from qa_lib.own.speed_up import speed_up
from qa_lib.train.master_adamw import MasterAdamW
from tests.kernels import DEVICE
from tests.material import refused
from tests.own import drawn_samples, padded_batch, quiet, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
on_a_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU captures no graph")


def batches(count: int) -> list[dict]:
    """Packed batches of one shape."""
    rows = pack(drawn_samples("sequences", 16 * count), samples=16, drop_last=True, say=quiet)
    collate = PackedCollator()
    return [
        {name: tensor.to(DEVICE) for name, tensor in collate(rows[number]).items()}
        for number in range(count)
    ]


def a_model(**options):
    return speed_up(tiny_model(**options), say=quiet).to(DEVICE).train()


def plain_losses(model, optimizer, data) -> list[float]:
    losses = []
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def graphed_losses(model, optimizer, data, capture: bool) -> list[float]:
    step = GraphedStep(model, optimizer, max_norm=1.0, capture=capture)
    return [step(batch).item() for batch in data]


def test_uncaptured_it_is_the_plain_loop():
    data = batches(6)
    model = a_model()
    expected = plain_losses(model, torch.optim.AdamW(model.parameters(), lr=1e-3), data)
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert graphed_losses(model, optimizer, data, capture=False) == expected


def padded_batches(count: int) -> list[dict]:
    """Batches that are padded to one length, one of them without any padding."""
    samples = drawn_samples("sequences", 16 * (count - 1))
    samples += drawn_samples("sequences", 16, lengths=(41,))
    batches = [padded_batch(samples[16 * number :][:16]) for number in range(count)]
    return [{name: t.to(DEVICE) for name, t in batch.items()} for batch in batches]


@on_a_gpu
@pytest.mark.parametrize("made", [batches, padded_batches])
@pytest.mark.parametrize("kind", ["bert", "modernbert", "mpnet"])
def test_captured_it_is_the_plain_loop(kind, made):
    data = made(8)
    model = a_model(kind=kind).bfloat16()
    expected = plain_losses(model, MasterAdamW(model.parameters(), lr=1e-3), data)
    model = a_model(kind=kind).bfloat16()
    optimizer = MasterAdamW(model.parameters(), lr=1e-3)
    losses = graphed_losses(model, optimizer, data, capture=True)
    assert losses == pytest.approx(expected, abs=1e-2)


@on_a_gpu
def test_a_schedule_and_dropout_go_on_after_the_capture():
    model = a_model(drops=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 6))
    step = GraphedStep(model, optimizer)
    (batch,) = batches(1)
    weights = []
    losses = []
    for _ in range(9):
        losses.append(step(batch).item())
        schedule.step()
        weights.append(model.classifier.weight.detach().clone())
    assert len(set(losses)) == 9
    assert not torch.equal(weights[4], weights[5])
    assert torch.equal(weights[6], weights[8]), "the rate is 0"


@on_a_gpu
def test_a_state_that_is_loaded_after_the_capture_is_what_the_graph_goes_on_from():
    model = a_model().bfloat16()
    optimizer = MasterAdamW(model.parameters(), lr=1e-3)
    step = GraphedStep(model, optimizer)
    data = batches(8)
    for batch in data[:5]:
        step(batch)
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    expected = [step(batch).item() for batch in data[5:]]
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    again = [step(batch).item() for batch in data[5:]]
    assert again == pytest.approx(expected, abs=1e-3)


def test_a_loss_of_ones_own_is_taken():
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    (batch,) = batches(1)
    step = GraphedStep(model, optimizer, loss=lambda m, b: m(**b).loss * 0 + 7, capture=False)
    assert step(batch) == 7


def test_capturing_on_a_cpu_is_refused_in_one_line():
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    refused(
        r"a step is captured on CUDA alone, and the model is on cpu: .*\(capture=False\)",
        GraphedStep,
        model,
        optimizer,
    )


PARAMETERS = [torch.nn.Parameter(torch.ones(2))]
UNCAPTURABLE = [
    (
        torch.optim.AdamW(PARAMETERS),
        r"AdamW counts its steps on the host, .*: AdamW\(\.\.\., capturable=True\), or MasterAdamW",
    ),
    (torch.optim.SGD(PARAMETERS), "SGD cannot be captured: take AdamW"),
]


@pytest.mark.parametrize(("optimizer", "said"), UNCAPTURABLE)
def test_an_optimizer_that_cannot_be_captured_is_refused(optimizer, said):
    refused(said, check_capture, torch.device("cuda"), optimizer)


def test_an_optimizer_of_which_one_group_cannot_be_captured_is_refused():
    groups = [{"params": PARAMETERS, "capturable": True}, {"params": [torch.ones(2)]}]
    said = r"AdamW counts its steps on the host, "
    refused(said, check_capture, torch.device("cuda"), torch.optim.AdamW(groups))


def test_optimizers_that_can_be_captured_are_taken():
    halves = [torch.nn.Parameter(torch.ones(2).bfloat16())]
    check_capture(torch.device("cuda"), MasterAdamW(halves))
    check_capture(torch.device("cuda"), torch.optim.AdamW(PARAMETERS, capturable=True))


def test_rates_become_tensors_that_schedulers_write_into():
    optimizer = torch.optim.AdamW(PARAMETERS, lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    (rate,) = rates_on_device(optimizer, torch.device("cpu"))
    PARAMETERS[0].grad = torch.ones(2)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.25


def a_step():
    model = a_model()
    return GraphedStep(model, torch.optim.AdamW(model.parameters()), capture=False)


def a_captured_step():
    """A step that takes batches as a captured one does; a CPU captures none."""
    step = a_step()
    step.captures = True
    return step


def test_a_batch_of_another_shape_is_refused():
    step = a_captured_step()
    (batch,) = batches(1)
    step(batch)
    other = batch | {"labels": batch["labels"][:3]}
    refused(r"labels of the batch has shape \(3,\), and in the first batch \(16,\)", step, other)


def test_a_batch_that_lacks_what_the_first_one_had_is_refused():
    step = a_captured_step()
    (batch,) = batches(1)
    step(batch)
    del batch["labels"]
    refused("labels of the batch has shape None, and in the first batch", step, batch)


def test_an_uncaptured_step_takes_a_smaller_last_batch():
    rows = pack(drawn_samples("sequences", 40), samples=16, say=quiet)
    data = [{n: t.to(DEVICE) for n, t in PackedCollator()(row).items()} for row in rows]
    assert [len(batch["labels"]) for batch in data] == [16, 16, 8]
    model = a_model()
    expected = plain_losses(model, torch.optim.AdamW(model.parameters(), lr=1e-3), data)
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert graphed_losses(model, optimizer, data, capture=False) == expected


def test_an_optimizer_without_parameters_is_refused():
    optimizer = torch.optim.AdamW([{"params": []}])
    refused("the AdamW holds no parameters: ", GraphedStep, a_model(), optimizer, capture=False)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, batch: model(**batch).logits, r"the loss has shape \(16, 2\): "),
        (lambda model, batch: model(**batch).loss.item(), "the loss is 0.*: "),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(loss, said):
    step = a_step()
    step.loss = loss
    refused(said + ".*its mean", step, batches(1)[0])


def test_a_batch_without_labels_is_refused():
    (batch,) = batches(1)
    del batch["labels"]
    refused("the model returns no loss for input_ids, .*: give the batch labels", a_step(), batch)


def test_a_batch_that_is_no_dict_is_refused():
    refused(r"the batch is the list \[\]: give a dict of tensors", a_step(), [])


def test_an_optimizer_in_the_models_place_is_refused():
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    said = r"optimizer is a BertForSequenceClassification: GraphedStep\(model, optimizer\)"
    refused(said, GraphedStep, optimizer, model)


def test_a_batch_that_has_no_tensors_is_refused():
    (batch,) = batches(1)
    refused("texts of the batch is a list, and the model is on", a_step(), batch | {"texts": []})


@pytest.mark.parametrize(
    ("problem", "raised"),
    [
        (RuntimeError("operation not permitted"), UserError),
        (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError),
    ],
)
def test_what_stops_a_capture_is_told_from_a_lack_of_memory(problem, raised):
    def fail(_):
        raise problem

    step = a_step()
    step.rates = rates_on_device(step.optimizer, DEVICE)
    step.take_step = fail
    with pytest.raises(raised, match=str(problem)):
        step(batches(1)[0])


def test_a_rate_that_was_set_by_hand_is_written_into_the_captured_one():
    step = a_step()
    step.rates = rates_on_device(step.optimizer, DEVICE)
    step.optimizer.param_groups[0]["lr"] = 0.25
    step(batches(1)[0])
    assert step.optimizer.param_groups[0]["lr"] is step.rates[0]
    assert step.rates[0] == 0.25


def test_an_optimizer_of_another_model_is_refused():
    other = torch.optim.AdamW(tiny_model().parameters())
    said = "the AdamW holds no parameter of this model, "
    refused(said, GraphedStep, tiny_model(), other, capture=False)


def test_a_model_without_a_head_returns_no_loss():
    model = tiny_model().base_model
    optimizer = torch.optim.AdamW(model.parameters())
    step = GraphedStep(model, optimizer, capture=False)
    refused("the model returns no loss for input_ids", step, {"input_ids": torch.ones(1, 4).long()})
