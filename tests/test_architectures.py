"""Every encoder does what BERT does: trains all kinds of variants, packs, saves, and costs what is counted."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForQuestionAnswering

from qa_lib.data.load import batches_of, load_data
from qa_lib.measure.meter import StepFlops
from qa_lib.model import architectures
from qa_lib.model.build import apply_recipe, build_model, save_model, trainable_summary
from qa_lib.model.fused_blocks import Float8Linear, HashDropout, use_float8
from qa_lib.model.packed import Packed
from qa_lib.spec.recipes import RECIPES
from tests.conftest import slow
from tests.tiny import checkpoint, having, losses_of, planned, resized, trained, without_dropout

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        kind: checkpoint(kind, tmp_path_factory.mktemp(kind)) for kind in architectures.ENCODERS
    }


def spec_of(variant, folder, **settings):
    """A variant at preset smoke with three steps; without Inductor, which is slow: D1 stands for compiled ones."""
    spec = planned(
        variant, sizes={"steps": 3, "measure_from": 1, "checkpoint_every": 0}, model=folder
    )
    assert spec.skip is None
    return resized(spec, {"compile": spec.settings.compile.replace("inductor", "none")} | settings)


def pairs(*variants: str, mark=lambda *pair: pair) -> list:
    """Each variant with every encoder that can have it."""
    return [mark(variant, kind) for variant in variants for kind in having(variant)]


SLOW = pairs("A2", "A4", "B3", "C2", "D1", "E-packed", "E-adamw", mark=slow)


@pytest.mark.parametrize(("variant", "kind"), [*pairs("A0", "A1", "B1", "C1", "E-dropout"), *SLOW])
def test_variants_train(kind, variant, folders, tmp_path):
    spec = spec_of(variant, folders[kind])
    model = build_model(spec)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained(spec, load_data(spec).samples, tmp_path, model)
    losses = losses_of(tmp_path)
    assert len(set(losses)) == 3 and torch.tensor(losses).isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all()
        # Full variants move every matrix but those of tokens and positions that the few steps do not meet.
        moves = re.search(r"\.layers?\.", name) and parameter.ndim > 1 and ".lora_A" not in name
        if moves or not parameter.requires_grad:
            assert torch.equal(parameter, before[name]) != parameter.requires_grad, name


@pytest.mark.parametrize("kind", architectures.ENCODERS)
def test_a_packed_row_has_the_loss_of_padded_ones(kind, folders):
    spec = spec_of("E-packed", folders[kind])
    samples = load_data(spec).samples
    batches, model = batches_of(samples, spec), without_dropout(build_model(spec)).train()
    indices = batches.step(0)[0]
    packed = Packed(model, batches.limits)(**batches.collate(indices, torch.device("cpu"))).loss
    # Row by row and without padding, where the model's own softmax is over the question's own tokens.
    rows = [samples.batch([index], int(samples.lengths[index])) for index in indices]
    padded = [
        model(**{name: torch.from_numpy(array) for name, array in row.items()}).loss for row in rows
    ]
    assert packed.item() == pytest.approx(torch.stack(padded).mean().item(), rel=1e-5)


SAVED = [*pairs("E-norm", "B1-all"), ("E-packed", "distilbert"), ("E-packed", "modernbert")]


@pytest.mark.parametrize(("variant", "kind"), SAVED)
def test_what_is_saved_is_a_plain_checkpoint(kind, variant, folders, tmp_path):
    spec = spec_of(variant, folders[kind])
    data, model = load_data(spec), build_model(spec).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    batch = {
        name: torch.from_numpy(array) for name, array in data.samples.batch([0, 1, 2], 96).items()
    }
    expected = model(**batch).start_logits
    save_model(model, data.tokenizer, tmp_path)
    again, loading = AutoModelForQuestionAnswering.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert torch.allclose(again.eval()(**batch).start_logits, expected, atol=1e-5)


@pytest.mark.parametrize("kind", architectures.ENCODERS)
def test_the_table_of_parameters_has_every_one_once(kind, folders):
    model = build_model(spec_of("A1", folders[kind]))
    table = trainable_summary(model)
    assert (
        table.loc["all", "parameters"] == table["parameters"][:-1].sum() == model.num_parameters()
    )


@pytest.mark.parametrize("kind", having("E-dropout"))
def test_dropouts_and_products_are_the_tables(kind, folders):
    model = build_model(spec_of("E-dropout", folders[kind]))
    plain = {name for name, module in model.named_modules() if type(module) is torch.nn.Dropout}
    assert all(name.endswith("attention.self.dropout") for name in plain)
    state = model.state_dict()
    use_float8(model)
    found = [type(module) for module in model.modules()]
    assert (found.count(HashDropout), found.count(Float8Linear)) == (5, 4)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("recipe", "checkpointing"), [("all", False), ("all", True), ("freeze-bottom-10", False)]
)
@pytest.mark.parametrize("kind", architectures.ENCODERS)
def test_the_cost_of_a_step_is_what_pytorch_counts(kind, recipe, checkpointing, folders):
    """Of the layers' products and of attention. The count has no biases and norms, which the usual formula takes for
    weights; and where layers are frozen, autograd leaves out one product that the formula has: the lowest trained
    layer's query, key and value need no gradient by their input."""
    spec = spec_of("A1", folders[kind], activation_checkpointing=checkpointing)
    model = apply_recipe(build_model(spec), RECIPES[recipe]).train()
    rows, length = (
        3,
        16,
    )  # within ModernBERT's window, beyond which all that is masked is computed as well
    ids = torch.randint(5, 100, (rows, length))
    with FlopCounterMode(display=False) as counter:
        model(
            ids, start_positions=ids[:, 0] % length, end_positions=ids[:, 1] % length
        ).loss.backward()
    found = counter.get_flop_counts().items()
    layers = re.escape(architectures.encoder_of(model).layers)
    counted = sum(
        sum(counts.values()) for name, counts in found if re.search(rf"\.{layers}\.\d+$", name)
    )
    cost, tokens = StepFlops(model), rows * length
    vectors = sum(
        p.numel() for one in architectures.layers_of(model) for p in one.parameters() if p.ndim == 1
    )
    expected = cost.flops(tokens, rows * length**2, recompute=True)
    expected -= 2 * tokens * vectors * (1 + cost.passed + cost.recomputed)
    if recipe != "all" and kind != "modernbert":  # whose norm below these trains
        expected -= 2 * tokens * 3 * model.config.hidden_size**2
    if (
        kind == "modernbert" and checkpointing
    ):  # after a layer's last product comes a sum, which needs no input again
        expected -= (
            2 * tokens * cost.layers * model.config.intermediate_size * model.config.hidden_size
        )
    assert counted == expected


def test_positions_begin_where_the_encoder_has_them(folders):
    bert, roberta = (AutoConfig.from_pretrained(folders[kind]) for kind in ("bert", "roberta"))
    assert [architectures.first_position(config) for config in (bert, roberta)] == [0, 2]
    assert architectures.max_positions(roberta) == 512
