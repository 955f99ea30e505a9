"""The table of quantized models, from records and quantized.json whose numbers are written here."""

import json

import pytest
from qa_lib.report.runs import NotMeasured, ReportError, load_runs

from qa_lib import record
from qa_lib.report import quantized
from tests.test_report import GPU, make

GROUP = "h200-quality"
SPEEDS = {"A1-fp32": 200.0, "A1-int8": 120.0, "A1-int4": 100.0}
BITS = {"int8": (8e6, 25.0), "int4": (6e6, 60.0)}  # bytes, and milliseconds, where full precision has 20e6 and 50
LOSS = {"A1-fp32": {"int8": 0.5, "int4": 4.0}, "A1-int8": {"int8": 0.1}, "A1-int4": {"int4": 1.0}}


def quantize(run, width, before, after, **own):
    """A quantized.json as `quantize` writes it, beside a run; `own` replaces what it says."""
    entry = record.read_record(run)
    size, ms = BITS[width]
    found = {
        "schema": record.QUANTIZED_SCHEMA, "run_id": entry["run_id"], "group": entry["group"], "width": width,
        "code": entry["code"], "env": {"cpu": "A CPU", "gpu": None},
        "data": {"name": "squad", "sha256": "cd" * 32, "n": 6078},
        "before": {"f1": before, "best_f1": before, "best_f1_threshold": 0.1, "weights_bytes": 20_000_000,
                   "latency_ms": 50.0},
        "after": {"f1": after, "best_f1": after, "best_f1_threshold": 0.1, "weights_bytes": int(size),
                  "latency_ms": ms},
    } | own  # fmt: skip
    path = run / f"model-{width}" / "quantized.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found))
    return path


def group(folder, seeds=3, rows=tuple(LOSS), speed=SPEEDS, **own):
    """Runs of some rows whose F1 differs by a point a seed, and what quantizing each came to."""
    for row in rows:
        for seed in range(seeds):
            run = make(folder, row, seed, machine=GPU, preset="quality", speed=speed[row])
            for width, loss in LOSS[row].items():
                quantize(run, width, 60.0 + seed, 60.0 + seed - loss, **own)
    return load_runs(folder)


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    return group(tmp_path_factory.mktemp("runs"))


def test_both_ways_stand_beside_full_precision(every):
    table = quantized.quantized_table(every, quantized.measured(every, GROUP)).set_index("what it is")
    assert list(table.index) == [
        "full precision fp32", "post-training int8", "post-training int4", "quantization-aware int8",
        "quantization-aware int4",
    ]  # fmt: skip
    assert dict(table.loc["full precision fp32"]) == {
        "row": "A1-fp32", "n": "3", "F1": "61.00 ± 1.69", "ΔF1": "–", "ΔF1 at 0": "–", "MB on disk": "20.0",
        "ms a question": "50.0 ± 0.0", "× as quick": "–", "× training speed": "1.00",
    }  # fmt: skip
    aware = table.loc["quantization-aware int4"]
    assert (aware["row"], aware["ΔF1"], aware["MB on disk"]) == ("A1-int4", "−1.00 ± 0.00", "6.00")
    assert (aware["× as quick"], aware["× training speed"]) == ("0.83 ± 0.00", "0.50")
    assert table.loc["post-training int4", ["row", "ΔF1"]].to_list() == ["A1-fp32", "−4.00 ± 0.00"]


def test_what_is_lost_at_threshold_0_stands_beside_it(tmp_path):
    """Rounding moves the threshold, too: as the model answers it may lose more than at the best one."""
    for seed in range(3):
        run = make(tmp_path, "A1-fp32", seed, machine=GPU, preset="quality")
        path = quantize(run, "int4", 60.0, 59.5)
        entry = json.loads(path.read_text())
        entry["before"]["f1"], entry["after"]["f1"] = 55.0, 53.0 + seed
        path.write_text(json.dumps(entry))
    every = load_runs(tmp_path)
    line = quantized.quantized_table(every, quantized.measured(every, GROUP)).iloc[1]
    assert (line["ΔF1"], line["ΔF1 at 0"]) == ("−0.50 ± 0.00", "−1.00 ± 1.69")


def test_the_caption_says_where_it_comes_from(every):
    table, said = quantized.shown(every, GROUP)
    assert "| post-training int8 | A1-fp32 |" in table.data
    for words in ("6,078 questions", "one thread of A CPU", "against A1-fp32: group h200-quality", "90 % interval"):
        assert words in said.data


def test_one_seed_has_no_interval_and_a_width_that_was_not_trained_for_is_no_line(tmp_path):
    run = make(tmp_path, "A1-int8", machine=GPU, preset="quality")
    quantize(run, "int4", 60.0, 10.0)
    every = group(tmp_path, seeds=1, rows=["A1-fp32"])
    table = quantized.quantized_table(every, quantized.measured(every, GROUP))
    assert list(table["F1"]) == ["60.00", "59.50", "56.00"]


def test_full_precision_may_be_mixed_and_speed_of_scale_bench(tmp_path):
    every = group(tmp_path, rows=["A1-int8"])
    with pytest.raises(NotMeasured, match=r"no run of full precision \(A1-fp32 or A1\) in group h200-quality"):
        quantized.measured(every, GROUP)
    quantize(make(tmp_path, "A1", machine=GPU, preset="quality", speed=300.0), "int8", 62.0, 61.0)
    make(tmp_path, "A1", machine=GPU, preset="bench", speed=400.0)
    make(tmp_path, "A1-int8", machine=GPU, preset="bench", speed=100.0)
    every = load_runs(tmp_path)
    every.loc[every["group"] == GROUP, quantized.SPEED] = None  # they shared a GPU
    found = quantized.measured(every, GROUP)
    table = quantized.quantized_table(every, found)
    assert list(table["row"]) == ["A1", "A1", "A1-int8"] and list(table["× training speed"]) == ["1.00", "1.00", "0.25"]
    assert "against A1: group h200-bench" in quantized.caption(every, found)
    alone = every[every["group"] == GROUP]
    assert "× training speed" not in quantized.quantized_table(alone, quantized.measured(alone, GROUP))
    assert "Training speed was not measured" in quantized.caption(alone, found)


def put(entry, path, value):
    """The entry with another value at a path like 'before.f1'."""
    *sections, name = path.split(".")
    section = entry
    for key in sections:
        section = section[key]
    section[name] = value


@pytest.mark.parametrize(("path", "value", "said"), [
    ("before.f1", None, "before.f1 is 'None'"), ("after.latency_ms", "fast", "after.latency_ms is 'fast'"),
    ("after", [], "after is '[]'"), ("run_id", "A1-s9-abcdef", "it is of h200-quality/A1-s9-abcdef"),
    ("schema", "other/9", "schema 'other/9' is not known"), ("width", None, "width is 'None'"),
])  # fmt: skip
def test_a_spoilt_file_is_named_and_the_others_are_shown(tmp_path, path, value, said):
    run = make(tmp_path, "A1-fp32", 7, machine=GPU, preset="quality")
    file = quantize(run, "int8", 60.0, 50.0)
    (lacking,) = quantized.shown(load_runs(tmp_path), "h200-bench")
    assert "group 'h200-bench' has no records" in lacking.data
    entry = json.loads(file.read_text())
    put(entry, path, value)
    file.write_text(json.dumps(entry))
    (alone,) = quantized.shown(load_runs(tmp_path), GROUP)
    assert "was quantized; left out" in alone.data and said in alone.data and file.name in alone.data
    table, _, left = quantized.shown(group(tmp_path, seeds=1, rows=["A1-fp32"]), GROUP)
    assert "59.50" in table.data and str(file) in left.data and said in left.data


def test_a_file_that_is_no_json_is_named(tmp_path):
    run = make(tmp_path, "A1-fp32", machine=GPU, preset="quality")
    quantize(run, "int8", 60.0, 50.0).write_text('{"schema": NaN')
    with pytest.raises(record.RecordError, match=r"model-int8/quantized.json: not readable as JSON"):
        record.read_quantized(run / "model-int8")


def test_other_questions_are_not_compared(tmp_path):
    group(tmp_path, rows=["A1-fp32"], seeds=1)
    group(tmp_path, rows=["A1-int8"], seeds=1, data={"name": "mine", "sha256": "ee" * 32, "n": 5})
    with pytest.raises(ReportError, match=r"A1-fp32.*quantized.json and .*A1-int8.* are of different questions"):
        quantized.measured(load_runs(tmp_path), GROUP)
