"""Any dataset packed: what a model answers for each sample, full sequences, and what is refused."""

import copy
import multiprocessing
import pickle
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import BertForSequenceClassification

from qa_lib.own import packed_model
from qa_lib.own.packing import PackedCollator, pack
from qa_lib.own.samples import perhaps_cut
from qa_lib.own.speed_up import KINDS, speed_up
from tests.material import refused
from tests.own import HEADS, LENGTHS, drawn_samples, quiet, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


def packed(dataset, say=quiet, **options):
    return pack(dataset, say=say, **{"tokens": 256} | options)


def outputs_of(model, samples: list[dict]) -> list[torch.Tensor]:
    """What a model returns for each sample alone, padded by nothing."""
    outputs = []
    for sample in samples:
        output = model(input_ids=torch.tensor([sample["input_ids"]]))
        outputs.append([output[name][0] for name in PER_SAMPLE if output.get(name) is not None])
    return outputs


PER_SAMPLE = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", HEADS)
def test_a_model_returns_for_each_sample_what_it_would_alone(kind, head):
    """One of the samples is one token, and the last packed sequence is half full."""
    model = tiny_model(kind, head)
    samples = drawn_samples(head, 25)
    expected = outputs_of(model, samples)
    rows = packed(samples)
    speed_up(model, say=quiet)
    seen = 0
    for row, numbers in enumerate(rows.rows):
        output = model(**PackedCollator()(rows[row]))
        found = [output[name] for name in PER_SAMPLE if output.get(name) is not None]
        for place, number in enumerate(numbers):
            for tensor, wanted in zip(found, expected[number], strict=True):
                is_by_token = head != "sequences" and len(wanted) == len(
                    samples[number]["input_ids"]
                )
                one = tensor[place, : len(wanted)] if is_by_token else tensor[place]
                torch.testing.assert_close(one, wanted, atol=1e-5, rtol=0)
            seen += 1
    assert seen == len(samples)


def test_the_hidden_states_of_all_layers_are_laid_out_for_each_sample():
    model = speed_up(tiny_model(), say=quiet)
    batch = PackedCollator()(drawn_samples("sequences", 5))
    output = model(**batch, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert {hidden.shape for hidden in output.hidden_states} == {(5, max(LENGTHS), 32)}


def test_batches_of_a_dataset_of_a_list_and_of_a_loader_are_equal():
    samples = drawn_samples("tokens")
    rows = packed(samples)
    of_a_dataset = packed(Dataset.from_list(samples))
    loader = DataLoader(rows, batch_size=None, collate_fn=PackedCollator())
    for number, batch in enumerate(loader):
        again = PackedCollator()([of_a_dataset[number]])
        assert batch.keys() == again.keys()
        assert all(torch.equal(batch[name], again[name]) for name in batch)


def test_samples_of_a_dataset_that_gives_several_at_once_are_looked_up_together():
    class Looked(list):
        def __getitems__(self, numbers):
            return [self[number] | {"together": len(numbers)} for number in numbers]

    rows = packed(Looked(drawn_samples("tokens", 20)), samples=5, tokens=None)
    assert [sample["together"] for sample in rows[0].samples] == [5] * 5


# Shapes.


def shapes_of(batch) -> dict[str, tuple]:
    return {name: tuple(tensor.shape) for name, tensor in batch.items()}


def test_what_is_laid_out_again_has_zeros_for_padding():
    hidden = torch.arange(1.0, 11.0).view(1, 5, 2)
    cu_seqlens = torch.tensor([0, 2, 5])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    laid_out = packed_model.padded(hidden, cu_seqlens, mask)
    assert laid_out.tolist() == [
        [[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]],
        [[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]],
    ]


def test_full_sequences_have_one_shape_in_all_epochs():
    rows = packed(drawn_samples("tokens", 200), drop_last=True)
    seen = []
    for epoch in range(3):
        rows.set_epoch(epoch)
        seen += [shapes_of(PackedCollator()(rows[number])) for number in range(len(rows))]
    assert all(shapes == seen[0] for shapes in seen)


def test_samples_that_fill_a_sequence_to_the_last_token_share_it():
    samples = [{"input_ids": [7] * 64, "labels": 0}] * 8
    rows = packed(samples, tokens=256)
    assert (rows.samples, rows.tokens, rows.fill, len(rows)) == (4, 256, 1.0, 2)


def test_sequences_are_full():
    rows = packed(drawn_samples("tokens", 420), tokens=1024)
    assert rows.fill > 0.97
    assert rows.tokens == 1024
    assert rows.samples == 70


def test_a_number_of_samples_may_be_asked_for():
    rows = pack(drawn_samples("tokens", 64), samples=16, say=quiet)
    assert [len(row.samples) for row in rows] == [16] * 4
    assert rows.tokens % 64 == 0
    assert rows.fill > 0.85


def test_more_samples_than_there_are_make_one_sequence_of_all():
    rows = pack(drawn_samples("tokens", 10), samples=16, drop_last=True, say=quiet)
    assert [len(row.samples) for row in rows] == [10]
    assert rows.samples == 10


def test_an_epoch_is_dealt_again_until_it_fits_and_else_as_the_first_was(monkeypatch):
    rows = packed(drawn_samples("tokens", 101))
    first = [row.tolist() for row in rows.rows]
    attempts = []

    def fits(_, tokens):
        assert tokens == rows.tokens
        attempts.append(tokens)
        return len(attempts) == fitting

    monkeypatch.setattr(rows, "_fits", fits)
    fitting = 4
    rows.set_epoch(1)
    assert len(attempts) == 4
    assert [row.tolist() for row in rows.rows] != first
    fitting = 9
    rows.set_epoch(2)
    assert len(attempts) == 8
    assert [row.tolist() for row in rows.rows] == first


def test_every_sample_is_in_each_epoch_once():
    rows = packed(drawn_samples("tokens", 101))
    seen = []
    for epoch in range(2):
        rows.set_epoch(epoch)
        numbers = [number for row in rows.rows for number in row.tolist()]
        assert sorted(numbers) == list(range(101))
        seen.append(numbers)
    assert seen[0] != seen[1]


def test_what_is_left_over_may_be_left_out():
    rows = packed(drawn_samples("tokens", 101), drop_last=True)
    assert {len(row.samples) for row in rows} == {rows.samples}


def test_a_sequence_that_is_as_long_as_its_only_sample():
    rows = packed(drawn_samples("tokens", 3, lengths=(41,)), tokens=41)
    assert [len(row.samples) for row in rows] == [1, 1, 1]
    assert PackedCollator()(rows[0])["cu_seqlens"].tolist() == [0, 41, 41]


def test_segments_are_no_longer_than_the_longest_sample():
    batch = PackedCollator(tokens=256)(drawn_samples("tokens", 5))
    lengths = batch["cu_seqlens"].diff()
    assert lengths.sum() == 256
    assert lengths.max() <= max(LENGTHS)


# Epochs in workers and copies.


def ids_of(batches) -> list[list[int]]:
    return [batch["input_ids"].flatten().tolist() for batch in batches]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_stay_have_the_samples_of_each_epoch(start):
    samples = drawn_samples("tokens", 101)
    rows = packed(samples)
    again = packed(samples)
    loader = DataLoader(
        rows,
        batch_size=None,
        collate_fn=PackedCollator(),
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=start,
    )
    seen = []
    for epoch in (0, 1, 2):
        rows.set_epoch(epoch)
        again.set_epoch(epoch)
        seen.append(ids_of(loader))
        assert seen[-1] == ids_of(map(PackedCollator(), again))
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda rows: pickle.loads(pickle.dumps(rows))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_has_an_epoch_of_its_own_which_its_workers_see(copied):
    rows = packed(drawn_samples("tokens", 101))
    rows.set_epoch(1)
    first = ids_of(map(PackedCollator(), rows))
    twin = copied(rows)
    loader = DataLoader(
        twin,
        batch_size=None,
        collate_fn=PackedCollator(),
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    assert ids_of(loader) == first
    twin.set_epoch(2)
    second = ids_of(loader)
    assert second == ids_of(map(PackedCollator(), twin)) != first
    assert ids_of(map(PackedCollator(), rows)) == first


def test_a_process_that_got_the_dataset_has_an_epoch_of_its_own():
    rows = packed(drawn_samples("tokens", 101))
    rows.set_epoch(1)
    other = multiprocessing.get_context("fork").Process(target=rows.set_epoch, args=(2,))
    other.start()
    other.join()
    assert other.exitcode == 0
    loader = DataLoader(
        rows,
        batch_size=None,
        collate_fn=PackedCollator(),
        num_workers=1,
        multiprocessing_context="fork",
    )
    assert ids_of(loader) == ids_of(map(PackedCollator(), rows))


# Labels.


def test_labels_of_a_sample_may_be_several_real_numbers():
    samples = [{"input_ids": [5, 6, 7], "labels": [0.0, 1.0, 1.0]} for _ in range(2)]
    labels = PackedCollator()(samples)["labels"]
    assert labels.tolist() == [[0.0, 1.0, 1.0]] * 2
    assert labels.dtype == torch.float32


def test_a_label_by_its_other_name_is_taken_and_other_columns_are_not():
    batch = PackedCollator()([{"input_ids": [5, 6], "label": 1, "idx": 7, "text": "a b"}])
    assert batch["labels"].tolist() == [1]
    assert batch.keys() == {
        "input_ids",
        "position_ids",
        "cu_seqlens",
        "attention_mask",
        "labels",
    }


def test_an_answer_beyond_its_sample_is_ignored():
    model = speed_up(tiny_model("bert", "questions"), say=quiet)
    samples = drawn_samples("questions", 3)
    expected = model(**PackedCollator()(samples)).loss
    beyond = {"input_ids": samples[2]["input_ids"], "start_positions": 9, "end_positions": 9}
    loss = model(**PackedCollator()([*samples, beyond])).loss
    assert loss.item() == pytest.approx(expected.item())


# What is said.


def test_a_line_says_what_came_out():
    said = []
    packed(drawn_samples("tokens", 420), say=said.append, tokens=1024)
    assert said[0] == "420 samples in 6 packed sequences of 1,024 tokens, 70 in each, 98% full"


def long_and_short(every: int) -> list[dict]:
    """600 samples of 12 tokens, of which each so-manieth has 400."""
    return [
        {"input_ids": [1, *range(5, 403 if number % every == 0 else 15), 2], "labels": 0}
        for number in range(600)
    ]


@pytest.mark.parametrize(
    ("samples", "options"),
    [
        (long_and_short(50), {"tokens": 512}),
        (long_and_short(600), {"tokens": 512}),
        (long_and_short(50), {"samples": 8}),
        (long_and_short(50), {"samples": 8, "drop_last": True}),
        (drawn_samples("tokens", 33), {"samples": 32}),
        (drawn_samples("tokens", 100, lengths=(20, 40)), {"tokens": 64 * 46}),
        (drawn_samples("tokens", 38, lengths=(4, 6)), {"samples": 2}),
    ],
)
def test_where_much_is_padding_the_line_says_what_helps(samples, options):
    said = []
    options = {"say": said.append} | options
    rows = pack(samples, **options)
    assert rows.fill < 0.8
    line, advised = said[0].rsplit(": ", 1)
    name, number = advised.split("=")
    assert name in options
    full = int(line.split()[-2].removesuffix("%")) / 100
    fuller = pack(samples, **options | {name: int(number)})
    assert fuller.fill > rows.fill + 0.1
    assert fuller.fill >= full - 0.01
    assert full >= 0.8
    assert said[1].endswith("% full")


def test_the_advice_is_a_number_to_type():
    said = []
    pack(long_and_short(50), tokens=512, say=said.append)
    pack(long_and_short(50), samples=8, say=said.append)
    assert said == [
        "600 samples in 60 packed sequences of 512 tokens, 10 in each, 39% full; "
        "longer ones would be 88% full: tokens=896",
        "600 samples in 75 packed sequences of 512 tokens, 8 in each, 31% full; "
        "128 in each would make them 86% full: samples=128",
    ]


def test_no_sequences_are_recommended_that_are_far_longer():
    """Of 600 samples one is long: only all of them together fill a sequence."""
    said = []
    rows = pack(long_and_short(600), samples=32, say=said.append)
    fuller = pack(long_and_short(600), samples=int(said[0].rpartition("=")[2]), say=quiet)
    assert rows.fill < fuller.fill < 0.8
    assert fuller.tokens <= 8 * rows.tokens


def test_where_nothing_helps_no_advice_is_given():
    said = []
    packed(drawn_samples("tokens", 3, lengths=(5,)), samples=3, tokens=None, say=said.append)
    assert said == ["3 samples in 1 packed sequences of 64 tokens, 3 in each, 23% full"]


def test_samples_that_may_have_been_cut_are_told():
    said = []
    samples = [{"input_ids": [5] * min(length, 60)} for length in range(10, 110)]
    packed(samples, say=said.append)
    assert said[1] == (
        "50 of 100 samples have exactly 60 tokens, many more than have any number just below: "
        "the tokenizer may have cut them"
    )


@pytest.mark.parametrize(
    ("at_most", "below", "others", "cut"),
    [
        (6, 0, 500, 6),
        (5, 0, 400, 0),  # at the fifth, chance may have made them
        (30, 5, 500, 30),
        (25, 5, 500, 0),
        (10, 1, 900, 10),
        (10, 1, 1100, 0),  # less than 1 % of all
    ],
)
def test_samples_count_as_cut_where_far_more_have_the_longest_length_than_any_below(
    at_most, below, others, cut
):
    """`below` samples have each of the ten lengths below the longest, 50; others are shorter."""
    lengths = [50] * at_most + list(range(40, 50)) * below
    lengths += [10 + number % 20 for number in range(others - len(lengths))]
    assert perhaps_cut(np.array(lengths)) == cut


@pytest.mark.parametrize("longest", [100, 128, 384, 512])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.95])
def test_samples_that_were_cut_at_any_length_count_as_cut(longest, share):
    """Lengths are as texts' are: their logarithms have a normal distribution."""
    draw = np.random.default_rng(0)
    lengths = np.exp(draw.normal(0.0, 0.6, 1000))
    lengths = (lengths * longest / np.quantile(lengths, 1 - share)).astype(int) + 1
    assert perhaps_cut(lengths) == 0
    cut = perhaps_cut(np.minimum(lengths, longest))
    assert cut == pytest.approx(1000 * share, abs=5)


@pytest.mark.parametrize("lengths", [(6, 4), (60, 40), tuple(range(4, 13)), (31, *range(3, 20))])
def test_texts_that_are_short_or_repeated_are_not_taken_for_cut(lengths):
    said = []
    samples = drawn_samples("sequences", 60, lengths) + drawn_samples("sequences", 60, lengths[:1])
    packed(samples, say=said.append)
    assert len(said) == 1


def in_batches(samples: list[dict], size: int, padding: int, multiple: int = 1) -> list[dict]:
    """The samples padded to the longest of each batch, without a mask, as some lists of ids are."""
    padded = []
    for begin in range(0, len(samples), size):
        ids = [sample["input_ids"] for sample in samples[begin : begin + size]]
        longest = -(-max(map(len, ids)) // multiple) * multiple
        padded += [{"input_ids": one + [padding] * (longest - len(one))} for one in ids]
    return padded


def texts(count: int, ends: tuple[int, ...] = (2,)) -> list[dict]:
    """Samples as of a tokenizer: of many lengths, which begin with 1 and have these ends.

    Token 3 stands for a full stop, of which several may end a text.
    """
    draw = random.Random(0)
    samples = []
    for _ in range(count):
        words = [draw.randrange(3, 3000) for _ in range(draw.randrange(2, 60))]
        stops = [3] * draw.choice([0, 1, 1, 1, 3])
        samples.append({"input_ids": [1, *words, *stops, *ends], "labels": 0})
    return samples


PADDED = [
    (in_batches(texts(200), 200, 0), 0),
    (in_batches(texts(200), 200, 2), 2),  # text and padding end alike
    (in_batches(texts(1000), 100, 0), 0),
    (in_batches(texts(200), 200, 0, multiple=128), 0),  # not even the longest is without
    (in_batches([{"input_ids": [1, 5, 6, 7, 8, 2]}, {"input_ids": [1, 5, 6, 2]}], 2, 0) * 9, 0),
]


@pytest.mark.parametrize(("samples", "token"), PADDED)
def test_samples_that_may_be_padded_are_told(samples, token):
    said = []
    packed(samples, say=said.append)
    count = sum(sample["input_ids"][-2:] == [token, token] for sample in samples)
    assert count > len(samples) / 3
    assert said[1:] == [
        f"{count} of {len(samples):,} samples end in token {token} repeated: they seem to be "
        "padded, and padding is trained as text: tokenize without padding=..."
    ]


def test_padded_columns_of_any_type_are_told():
    lists = in_batches(texts(20), 20, 0)
    for form in (None, "numpy", "torch"):
        said = []
        packed(Dataset.from_list(lists).with_format(form), say=said.append)
        assert "samples end in token 0 repeated" in said[1]


UNPADDED = [
    texts(1000),
    texts(1000, ends=()),  # without special tokens
    texts(1000, ends=(2, 2)),
    drawn_samples("tokens", 1000),
    [{"input_ids": [5] * 40}] * 30,
]


@pytest.mark.parametrize("samples", UNPADDED)
def test_texts_are_not_taken_for_padded(samples):
    said = []
    packed(samples, say=said.append)
    assert len(said) == 1


def test_one_sample_that_ends_in_a_repeated_token_is_not_taken_for_padded():
    said = []
    packed([*texts(20), {"input_ids": [1, 5, 4000, 4000], "labels": 0}], say=said.append)
    assert len(said) == 1


def test_samples_of_one_length_are_not_taken_for_cut():
    said = []
    packed([{"input_ids": [5] * 20} for _ in range(30)], say=said.append)
    assert len(said) == 1


GOOD = {"input_ids": [5, 6, 7], "labels": 1}
UNPACKABLE = [
    ([GOOD] * 2, {"tokens": 2}, r"sample 0 has 3 tokens, and a packed sequence 2: pack\(tokens=64"),
    ([GOOD, {"input_ids": [5]}], {}, "sample 1 has no labels, and others have: leave it out"),
    ([{"input_ids": [5]}, GOOD], {}, "sample 0 has no labels, and others have: leave it out"),
    ([GOOD, *[GOOD | {"labels": None}] * 3], {}, "sample 1 and 2 others have no labels: leave"),
    ([GOOD, GOOD | {"input_ids": []}], {}, "sample 1 has no tokens: leave it out before packing"),
    ([GOOD, GOOD | {"input_ids": 5}], {}, "input_ids of sample 1 are no list of whole numbers"),
    ([GOOD | {"input_ids": ["who", "came"]}], {}, "input_ids of sample 0 are no list of whole"),
    ([GOOD | {"input_ids": torch.ones(1, 3)}], {}, "of sample 0 .* without return_tensors"),
    ([[5, 6]], {}, "sample 0 is a list: give a dict with input_ids"),
    ({"input_ids": [[5, 6]]}, {}, "a dict is no list of samples: of columns make one"),
    ([], {}, "the dataset is empty"),
    (iter([GOOD]), {}, "cannot be packed ahead"),
    ([{"text": "a"}], {}, "samples have no input_ids, only text: tokenize them"),
    ([GOOD], {"tokens": 8, "samples": 8}, "either tokens=4096 or samples=32"),
    ([GOOD], {"tokens": None}, "either tokens=4096 or samples=32"),
    ([GOOD], {"tokens": 0}, "tokens is 0: give a whole number"),
    ([GOOD], {"tokens": None, "samples": True}, "samples is True: give a whole number"),
    ([GOOD | {"end_positions": None}], {}, "sample 0 has no end_positions: leave it out"),
    ([GOOD], {"tokens": None, "samples": 2.5}, "samples is 2.5: give a whole number"),
]


@pytest.mark.parametrize(("samples", "options", "said"), UNPACKABLE)
def test_what_cannot_be_packed_is_refused_in_one_line(samples, options, said):
    refused(said, packed, samples, **options)


MISSHAPEN = [
    ([GOOD, {"input_ids": [5]}], "sample 1 of the batch has no labels, and others have"),
    ([GOOD, GOOD | {"token_type_ids": [0] * 3}], "sample 0 of the batch has no token_type_ids"),
    ([GOOD, GOOD | {"input_ids": []}], "sample 1 of the batch is empty"),
    ([GOOD, {"labels": 1}], "sample 1 of the batch has no input_ids, and others have"),
    ([GOOD | {"input_ids": torch.ones(1, 3)}], "input_ids of sample 0 of the batch are no list"),
    ([GOOD, GOOD | {"labels": "yes"}], "labels of sample 1 of the batch are 'yes': give numbers"),
    ([GOOD | {"labels": [0.0, 1.0]}, GOOD | {"labels": [0.0]}], "has 1 labels, and sample 0 has 2"),
    ([], r"PackedCollator got the list \[\]: give a list of samples"),
    (["a"], "sample 0 of the batch is a str: give a dict with input_ids"),
    ([GOOD | {"attention_mask": [1, 1, 0]}], "sample 0 of the batch is padded"),
    (
        [GOOD | {"labels": [1, 2]}],
        "sample 0 of the batch has 2 labels for 3 tokens: give a label for each token; where a "
        "sample has several labels, give them as real numbers, such as 1.0",
    ),
    ([GOOD | {"labels": [1, 2, 0]}, GOOD], "sample 1 of the batch has 1 labels for 3 tokens"),
    ([GOOD | {"token_type_ids": [1]}], "has 1 token_type_ids for 3 tokens"),
    ([GOOD] * 30, "30 samples have 90 tokens, and a packed sequence 64"),
]


@pytest.mark.parametrize(("samples", "said"), MISSHAPEN)
def test_what_cannot_be_collated_is_refused_in_one_line(samples, said):
    refused(said, PackedCollator(tokens=64), samples)


def test_a_collators_length_that_is_none_is_refused():
    refused("tokens is '64': give a whole number, 1 or more", PackedCollator, tokens="64")


def test_a_batch_of_packed_sequences_is_refused():
    rows = packed(drawn_samples("tokens"))
    refused("2 packed sequences in a batch", PackedCollator(), [rows[0], rows[0]])


@pytest.mark.parametrize("size", [None, 1, 2])
def test_a_loader_without_the_collator_says_so(size):
    loader = DataLoader(packed(drawn_samples("tokens")), batch_size=size)
    refused(r"is no batch yet: DataLoader\(rows, batch_size=None, collate_fn=", list, loader)


def test_a_model_that_gets_a_packed_sequence_itself_says_so():
    rows = packed(drawn_samples("tokens"))
    model = speed_up(tiny_model(), say=quiet)
    refused(r"no batch yet: .* collate_fn=PackedCollator\(\)\)", lambda: model(**rows[0]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", HEADS)
def test_a_model_that_was_not_sped_up_does_not_train_on_packed_samples_in_silence(kind, head):
    """Its mask is for other shapes than its tokens."""
    model = tiny_model(kind, head)
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(**PackedCollator()(drawn_samples(head, 5)))


def test_a_model_with_fewer_positions_than_a_sample_has_tokens_says_so():
    model = speed_up(tiny_model(), say=quiet)
    batch = PackedCollator()([{"input_ids": [5] * 65}])
    refused("samples of up to 65 tokens, and the model has 64 positions", model, **batch)


def test_a_packed_sequence_without_its_mask_is_refused():
    model = speed_up(tiny_model(), say=quiet)
    batch = PackedCollator()(drawn_samples("sequences", 3))
    del batch["attention_mask"]
    refused("cu_seqlens without attention_mask and position_ids", model, **batch)


def test_a_tuple_is_refused():
    model = speed_up(tiny_model(head="none"), say=quiet)
    batch = PackedCollator()(drawn_samples("none", 3))
    refused("return_dict=True", model, **batch, return_dict=False)


@pytest.mark.parametrize("labels", [[1, 0.5, 2.5, 0], [0.5, 2, 1, 0]])
def test_labels_are_real_numbers_where_one_of_them_is(labels):
    samples = [{"input_ids": [1, 2, 3], "labels": label} for label in labels]
    assert PackedCollator()(samples)["labels"].tolist() == labels
    rows = pack(samples, samples=1, say=quiet)
    for number in range(4):
        assert PackedCollator()(rows[number])["labels"].dtype == torch.float32


def test_columns_that_are_left_out_are_named():
    said = []
    sample = {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "labels": 0}
    pack([sample] * 8, samples=2, say=said.append)
    assert len(said) == 1
    pack([sample | {"weight": 0.5, "text": "a"}] * 8, samples=2, say=said.append)
    told = "columns that PackedCollator takes by keep=[...] alone: weight, text"
    assert said[-1] == told


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0.5, 2.0, 1.0], torch.float32),
        ([0.5, 2, 1], torch.float32),
        ([3, 1, 2], torch.int64),
        ([True, False, True], torch.bool),
        ([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]], torch.float32),
    ],
)
def test_columns_that_are_named_are_kept_in_the_order_of_the_samples(values, dtype):
    samples = [{"input_ids": [5] * n, "weight": value} for n, value in enumerate(values, 1)]
    collate = PackedCollator(keep=["weight"])
    for batch in (collate(samples), collate(pack(samples, samples=3, say=quiet)[0])):
        order = (batch["cu_seqlens"][1:4] - batch["cu_seqlens"][:3] - 1).tolist()
        assert batch["weight"].dtype == dtype
        assert batch["weight"].tolist() == [values[number] for number in order]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0, None], "sample 1 of the batch is None: keep takes numbers"),
        ([1.0, "heavy"], "sample 1 of the batch is 'heavy': keep takes numbers"),
        ([[1.0], [1.0, 2.0]], "as many for each sample"),
    ],
)
def test_kept_columns_that_are_no_numbers_are_refused(weights, said):
    samples = [{"input_ids": [5, 6], "weight": weight} for weight in weights]
    refused(said, PackedCollator(keep=["weight"]), samples)


def test_names_that_cannot_be_kept_are_refused():
    refused(r"keep=\['weight'\]", PackedCollator, keep="weight")
    refused("keep names labels, which PackedCollator takes anyway", PackedCollator, keep=["labels"])
    samples = [{"input_ids": [5, 6]}]
    refused("remove_unused_columns=False", PackedCollator(keep=["weight"]), samples)


def test_a_dataset_that_makes_its_samples_on_the_fly_is_packed():
    def tokenized(rows):
        ids = [[5] * len(text) for text in rows["text"]]
        return {"input_ids": ids, "labels": rows["label"]}

    stored = Dataset.from_dict({"text": ["abc", "a", "abcde", "ab"], "label": [0, 1, 1, 0]})
    rows = pack(stored.with_transform(tokenized), samples=4, say=quiet)
    batch = PackedCollator()(rows[0])
    lengths = batch["attention_mask"].sum(1).tolist()
    labels = {3: 0, 1: 1, 5: 1, 2: 0}
    assert sorted(lengths) == [1, 2, 3, 5]
    assert batch["labels"].tolist() == [labels[length] for length in lengths]


def test_a_class_that_loses_the_ends_of_samples_says_so():
    class Losing(BertForSequenceClassification):
        def forward(self, **kwargs):
            names = ("input_ids", "attention_mask", "position_ids")
            return self.bert(**{name: kwargs[name] for name in names}).pooler_output

    model = speed_up(Losing(tiny_model().config), say=quiet)
    batch = PackedCollator()(drawn_samples("sequences", 4))
    refused("has to hand its \\*\\*kwargs on to the encoder", model, **batch)
