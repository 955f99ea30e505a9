"""Every encoder does what BERT does: trains all kinds of variants, packs, saves, and is counted."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForQuestionAnswering

from qa_lib.data.load import batches_of, load_data
from qa_lib.measure.meter import StepFlops
from qa_lib.model import architectures
from qa_lib.model.build import apply_recipe, build_model, save_model, trainable_summary
from qa_lib.model.float8_layers import Float8Linear, use_float8
from qa_lib.model.hash_dropout import HashDropout
from qa_lib.model.packed import Packed
from qa_lib.spec.recipes import RECIPES
from tests.conftest import slow
from tests.material import refused
from tests.tiny import (
    H200,
    checkpoint,
    having,
    losses_of,
    planned,
    resized,
    trained,
    without_dropout,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        kind: checkpoint(kind, tmp_path_factory.mktemp(kind)) for kind in architectures.ENCODERS
    }


def spec_of(variant, folder, **settings):
    """Return a variant's spec at preset smoke with three steps, without Inductor, which is slow.

    D1 stands for the variants that are compiled.
    """
    sizes = {"steps": 3, "measure_from": 1, "checkpoint_every": 0}
    spec = planned(variant, sizes=sizes, model=folder)
    assert spec.skip is None
    if spec.settings.compile == "inductor":
        settings = {"compile": "none"} | settings
    return resized(spec, settings)


def with_each_encoder(*variants: str) -> list[tuple[str, str]]:
    """Return each variant with every encoder that can have it."""
    return [(variant, kind) for variant in variants for kind in having(variant)]


TRAINED = with_each_encoder("A0", "A1", "B1", "C1", "E-dropout")
TRAINED_SLOWLY = with_each_encoder("A2", "A4", "B3", "C2", "D1", "E-packed", "E-adamw")


@pytest.mark.parametrize(("variant", "kind"), [*TRAINED, *(slow(*pair) for pair in TRAINED_SLOWLY)])
def test_variants_train(kind, variant, folders, tmp_path):
    spec = spec_of(variant, folders[kind])
    model = build_model(spec)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained(spec, load_data(spec).samples, tmp_path, model)
    losses = losses_of(tmp_path)
    assert len(set(losses)) == 3
    assert torch.tensor(losses).isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all()
        moved = not torch.equal(parameter, before[name])
        # Not all tokens and positions are met in a few steps, and the first step moves no lora_A.
        is_matrix_of_a_layer = re.search(r"\.layers?\.", name) and parameter.ndim > 1
        if not parameter.requires_grad:
            assert not moved, name
        elif is_matrix_of_a_layer and ".lora_A" not in name:
            assert moved, name


@pytest.mark.parametrize("kind", architectures.ENCODERS)
def test_a_packed_row_has_the_loss_of_padded_ones(kind, folders):
    spec = spec_of("E-packed", folders[kind])
    samples = load_data(spec).samples
    batches = batches_of(samples, spec)
    model = without_dropout(build_model(spec)).train()
    indices = batches.step(0)[0]
    packed = Packed(model, batches.limits)(**batches.collate(indices, torch.device("cpu"))).loss
    # Row by row and without padding, where the model's softmax is over the question's tokens alone.
    losses = []
    for index in indices:
        arrays = samples.batch([index], int(samples.lengths[index]))
        row = {name: torch.from_numpy(array) for name, array in arrays.items()}
        losses.append(model(**row).loss)
    assert packed.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


SAVED = [
    *with_each_encoder("E-norm", "B1-all"),
    ("E-packed", "modernbert"),
]


@pytest.mark.parametrize(("variant", "kind"), SAVED)
def test_what_is_saved_is_a_plain_checkpoint(kind, variant, folders, tmp_path):
    spec = spec_of(variant, folders[kind])
    data = load_data(spec)
    model = build_model(spec).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    arrays = data.samples.batch([0, 1, 2], 96)
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    expected = model(**batch).start_logits
    save_model(model, data.tokenizer, tmp_path)
    again, loading = AutoModelForQuestionAnswering.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert torch.allclose(again.eval()(**batch).start_logits, expected, atol=1e-5)


@pytest.mark.parametrize("kind", architectures.ENCODERS)
def test_the_table_of_parameters_has_every_one_once(kind, folders):
    model = build_model(spec_of("A1", folders[kind]))
    counts = trainable_summary(model)["parameters"]
    assert counts["all"] == model.num_parameters()
    assert counts.drop("all").sum() == model.num_parameters()


@pytest.mark.parametrize("kind", having("E-dropout"))
def test_the_dropouts_of_hidden_states_are_those_of_the_table(kind, folders):
    model = build_model(spec_of("E-dropout", folders[kind]))
    plain = {name for name, module in model.named_modules() if type(module) is torch.nn.Dropout}
    plain -= {*architectures.ENCODERS[kind].below_head}
    assert all(name.endswith("attention.self.dropout") for name in plain)
    hashed = [module for module in model.modules() if isinstance(module, HashDropout)]
    assert len(hashed) == 5


@pytest.mark.parametrize("kind", having("E-dropout"))
def test_the_linear_layers_of_feed_forward_blocks_are_those_of_the_table(kind, folders):
    model = build_model(spec_of("E-dropout", folders[kind]))
    before = model.state_dict()
    use_float8(model)
    in_8_bits = [module for module in model.modules() if isinstance(module, Float8Linear)]
    assert len(in_8_bits) == 4
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("recipe", "checkpointing"), [("all", False), ("all", True), ("freeze-bottom-10", False)]
)
@pytest.mark.parametrize("kind", architectures.ENCODERS)
def test_the_cost_of_a_step_is_what_pytorch_counts(kind, recipe, checkpointing, folders):
    """Held to what it counts in the layers, products and attention, less what it does not count.

    Biases and norms, which the usual formula takes for weights, are not counted. Where layers are
    frozen, autograd leaves out one product that the formula has: the query, key and value of the
    lowest layer that trains need no gradient by their input.
    """
    spec = spec_of("A1", folders[kind], activation_checkpointing=checkpointing)
    model = apply_recipe(build_model(spec), RECIPES[recipe]).train()
    hidden = model.config.hidden_size
    # Within ModernBERT's window, beyond which what is masked is computed as well.
    rows = 3
    length = 16
    tokens = rows * length
    ids = torch.randint(5, 100, (rows, length))
    with FlopCounterMode(display=False) as counter:
        output = model(ids, start_positions=ids[:, 0] % length, end_positions=ids[:, 1] % length)
        output.loss.backward()
    counts = counter.get_flop_counts()
    # All layers are given: what they share gets gradients from each, counted with any of them.
    around = f"{type(model).__name__}.{architectures.encoder_of(model).layers.rpartition('.')[0]}"
    counted = sum(counts[around].values())
    # ModernBERT's rotary angles are computed beside the layers. transformers 5.17 multiplies
    # frequencies and positions as matrices, which PyTorch counts; 5.23 does so elementwise.
    counted -= sum(counts.get(f"{around}.rotary_emb", {}).values())

    cost = StepFlops(model)
    expected = cost.flops(tokens, rows * length**2, recompute=True)
    vectors = sum(
        parameter.numel()
        for layer in architectures.layers_of(model)
        for parameter in layer.parameters()
        if parameter.ndim == 1
    )
    expected -= 2 * tokens * vectors * (1 + cost.passed + cost.recomputed)
    if recipe != "all" and kind != "modernbert":  # whose norm below these trains
        expected -= 2 * tokens * 3 * hidden**2
    if kind == "modernbert" and checkpointing:
        # After a layer's last product comes a sum, which needs no input again.
        expected -= 2 * tokens * cost.layers * model.config.intermediate_size * hidden
    assert counted == expected


def test_positions_begin_where_the_encoder_has_them(folders):
    bert = AutoConfig.from_pretrained(folders["bert"])
    roberta = AutoConfig.from_pretrained(folders["roberta"])
    assert architectures.first_position(bert) == 0
    assert architectures.first_position(roberta) == 2
    assert architectures.max_positions(roberta) == 512


POSITIONS = [
    ({"max_position_embeddings": 512}, 512),
    ({"max_position_embeddings": "512"}, None),
    ({}, None),
    ({"model_type": "bert", "max_position_embeddings": 512, "pad_token_id": 0}, 512),
    ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
    ({"model_type": "roberta", "max_position_embeddings": 514}, 512),
    ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": None}, 514),
]


@pytest.mark.parametrize(("config", "positions"), POSITIONS)
def test_positions_are_read_of_a_configuration_that_may_hold_anything(config, positions):
    assert architectures.positions_in(config) == positions


REFUSED = [
    ("deberta", "a model of type 'deberta': its disentangled attention .*; this lab knows bert, "),
    ("t5", "a model of type 't5'; this lab knows bert, roberta, .* for task qa"),
    ([], r"a model of type \[\]; this lab knows"),
]


@pytest.mark.parametrize(("model_type", "message"), REFUSED)
def test_an_architecture_that_is_not_in_the_table_is_refused(model_type, message):
    refused(f"own/model: {message}", architectures.find_encoder, model_type, "own/model")


LAYER_TYPES = [
    ([], 0, 0),
    (["full_attention"] * 3, 0, 0),
    (["full_attention", *["sliding_attention"] * 3], 0.75, 17),
]


@pytest.mark.parametrize(("kinds", "share", "window"), LAYER_TYPES)
def test_a_window_has_tokens_on_both_sides_and_the_token_itself(kinds, share, window):
    config = SimpleNamespace(layer_types=kinds, sliding_window=8)
    assert architectures.local_layers(config) == (share, window)


def test_gradients_pass_layers_down_to_the_lowest_that_trains(folders):
    model = build_model(spec_of("A1", folders["bert"]))
    lower, upper = architectures.layers_of(model)
    passed = [architectures.layers_passed(model)]
    for module in (model.bert.embeddings, lower, upper):
        module.requires_grad_(False)
        passed.append(architectures.layers_passed(model))
    assert passed == [2, 2, 1, 0]


@pytest.mark.parametrize("kind", having("B1-all"))
def test_adapters_by_berts_names_are_beside_every_linear_layer_of_an_encoder(kind, folders):
    model = build_model(spec_of("B1-all", folders[kind]))
    encoder = architectures.ENCODERS[kind]
    layers = [name for name, _ in model.named_modules() if name.endswith(f"{encoder.layers}.0")]
    layer = model.get_submodule(layers[0])
    # An adapter's own two matrices are below the layer that has it.
    linears = {name for name, module in layer.named_modules() if hasattr(module, "in_features")}
    with_adapters = {name for name, module in layer.named_modules() if hasattr(module, "lora_A")}
    own = {name for name in linears if ".lora_" not in name and not name.endswith("base_layer")}
    assert own == with_adapters
    attention = layer.get_submodule(encoder.self_attention)
    assert all(attention.get_submodule(name).out_features for name in encoder.projections)


def test_a_run_that_an_encoder_cannot_have_is_skipped_by_a_plan(folders):
    spec = planned("E-qkv", model=folders["modernbert"], machine=H200)
    assert spec.skip.startswith("does not fit modernbert: ")
