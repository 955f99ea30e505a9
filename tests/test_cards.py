"""Cards from made-up runs: what fits is recommended, the quickest of it, and nothing else."""

import pandas as pd
import pytest

from qa_lib.report import cards
from qa_lib.report.runs import NotMeasured

COLUMNS = ("group", "spec.variant", "micro_batch", "status", "speed.samples_per_s",
           "memory.peak_alloc_mib", "memory.peak_reserved_mib", "spec.preset.limit_gib")  # fmt: skip


def runs(*rows):
    frame = pd.DataFrame(rows, columns=COLUMNS)
    scale = frame["group"].str.extract(r"gpu-([a-z]+)", expand=False)
    return frame.assign(**{
        "time.started": "", "run_id": frame["spec.variant"], "spec.seed": 0, "quality.f1": None, "task.name": "qa",
        "task.label": "F1", "code.commit": "abcdef123", "code.dirty": False, "spec.hardware": "gpu",
        "spec.preset.name": scale, "spec.search": scale.where(scale == "fit", "").replace("fit", "max-batch"),
        "spec.sm": frame["group"].str.extract(r"sm(\d+)", expand=False).astype(float), "model": "tiny 1", "world": 1,
        "stages": 1, "batch": 32, "precision": "own", "length": 384, "training": "3e-05",
    })  # fmt: skip


def judged(**f1):
    """Runs with these F1 of the rows' seeds."""
    rows = [("gpu-quality", name, 32, "ok", None, None, None, None) for name, seeds in f1.items() for _ in seeds]
    values = [value for seeds in f1.values() for value in seeds]
    numbers = [number for seeds in f1.values() for number in range(len(seeds))]
    return runs(*rows).assign(**{"quality.f1": values, "quality.best_f1": values, "spec.seed": numbers})


BENCH = runs(
    ("gpu-bench", "A1", 8, "ok", 100.0, 4000.0, 4300.0, None),
    ("gpu-bench", "A1", 32, "ok", 300.0, 11000.0, 11500.0, None),
    ("gpu-bench", "E-dropout", 32, "ok", 3000.0, 3300.0, 3700.0, None),
    ("gpu-bench", "E-masters-lora-qv", 32, "ok", 3500.0, 1700.0, 1900.0, None),
    ("gpu-bench", "C2", 32, "oom", None, None, None, None),
)
UNKNOWN = cards.worth(BENCH)  # no F1 in it


def take(runs, f1, gib, sm=90):
    """What is recommended on a card of so much memory and this compute capability."""
    row = cards.quickest_on(cards.best_first(runs, f1), gib, sm)
    return row and f"{row.variant} at {row.size}"


def test_the_quickest_that_fits_with_room_for_the_context():
    assert take(BENCH, UNKNOWN, 2) is None
    assert take(BENCH, UNKNOWN, 3) == "E-masters-lora-qv at 32", "an adapter, where no full fine-tune fits"
    assert take(BENCH, UNKNOWN, 4) == "E-masters-lora-qv at 32", "3,700 MiB and the context are more than 4 GiB"
    assert take(BENCH, UNKNOWN, 6) == "E-dropout at 32", "a full fine-tune, though the adapter is quicker"
    with pytest.raises(NotMeasured):
        cards.generation_table(BENCH[BENCH["status"] == "oom"], UNKNOWN)


def test_a_card_gets_a_row_whose_kernels_it_has():
    """E-dropout and E-masters-lora-qv need bf16 and E-dropout-fp8 8-bit floats, which an A100 and a T4 lack; A1 needs 11,500 MiB and the
    context."""
    more = runs(("gpu-bench", "E-dropout-fp8", 32, "ok", 3400.0, 3300.0, 3700.0, None))
    table = cards.generation_table(pd.concat([BENCH, more]), UNKNOWN).set_index("you have at least")
    assert table.to_dict("index") == {
        "3 GiB": {
            "T4, RTX 20": "–",
            "A100, RTX 30": "E-masters-lora-qv at 32",
            "L4, RTX 40": "E-masters-lora-qv at 32",
            "H100 and newer": "E-masters-lora-qv at 32",
        },
        "6 GiB": {
            "T4, RTX 20": "A1 at 8",
            "A100, RTX 30": "E-dropout at 32",
            "L4, RTX 40": "E-dropout-fp8 at 32",
            "H100 and newer": "E-dropout-fp8 at 32",
        },
        "12 GiB": {
            "T4, RTX 20": "A1 at 32",
            "A100, RTX 30": "E-dropout at 32",
            "L4, RTX 40": "E-dropout-fp8 at 32",
            "H100 and newer": "E-dropout-fp8 at 32",
        },
    }


def test_a_row_that_loses_quality_is_recommended_only_where_no_other_fits():
    worse = cards.worth(judged(A1=(60.0, 60.2, 60.1), E-masters-lora-qv=(50.0, 50.2, 50.1), B1=(48.0, 48.2, 48.1)))
    quicker = pd.concat([BENCH, runs(("gpu-bench", "B1", 32, "ok", 9000.0, 1500.0, 1600.0, None))])
    assert take(quicker, worse, 3) == "E-masters-lora-qv at 32", "the one that loses least"
    assert worse["text"]["E-masters-lora-qv"].startswith("−10.00")
    other = pd.concat([BENCH, runs(("gpu-bench", "E-masters-lora-all", 32, "ok", 90.0, 1500.0, 1600.0, None))])
    assert take(other, worse, 3) == "E-masters-lora-all at 32", "of unknown quality"
    thrice = judged(A1=(60.0, 60.2, 60.1), E-masters-lora-qv=(57.5,), B1=(60.0, 60.2, 60.1))
    slower = pd.concat([BENCH, runs(("gpu-bench", "B1", 32, "ok", 90.0, 1500.0, 1600.0, None))])
    assert take(slower, cards.worth(thrice), 3) == "B1 at 32", "E-masters-lora-qv lost 2.5 in its one run"
    little = judged(A1=(60.0, 60.2, 60.1), E-masters-lora-qv=(58.5,), B1=(60.0, 60.2, 60.1))
    assert take(slower, cards.worth(little), 3) == "E-masters-lora-qv at 32", "the quicker, within the 2 F1 of adapters"
    same = cards.worth(judged(A1=(60.0, 60.2, 60.1), E-masters-lora-qv=(60.1, 60.1, 60.1)))
    assert take(BENCH, same, 3) == "E-masters-lora-qv at 32" and same["text"]["E-masters-lora-qv"].startswith("+0.00 ± 0.1")


def test_of_a_lossy_rows_sizes_the_quicker_is_taken_and_its_worse_threshold_counts():
    f1 = judged(A1=(60.0, 60.2, 60.1), E-masters-lora-qv=(59.9, 60.1, 60.0))
    f1.loc[f1["spec.variant"] == "E-masters-lora-qv", "quality.best_f1"] -= 3
    f1 = cards.worth(f1)
    smaller = pd.concat([runs(("gpu-bench", "E-masters-lora-qv", 8, "ok", 900.0, 1000.0, 1100.0, None)), BENCH])
    assert [take(smaller, f1, 2), take(smaller, f1, 3)] == ["E-masters-lora-qv at 8", "E-masters-lora-qv at 32"]
    assert f1["text"]["E-masters-lora-qv"].startswith("−3.10")


def test_a_row_fits_where_all_its_seeds_do():
    twice = pd.concat([BENCH, runs(("gpu-bench", "E-masters-lora-qv", 32, "ok", 1500.0, 2700.0, 3000.0, None))])
    assert [take(twice, UNKNOWN, 3), take(twice, UNKNOWN, 4)] == [None, "E-masters-lora-qv at 32"]
    assert cards.quickest_on(cards.best_first(twice, UNKNOWN), 4, 90).speed == 2500


def test_the_seeds_protocol_stands_beside_their_numbers():
    ours = runs(
        ("gpu-vram", "A3", 8, "ok", 1.0, 3000.0, 3200.0, None),
        ("gpu-vram", "E-packed", 8, "ok", 1.0, 2400.0, 2500.0, None),
        ("gpu-vram", "C1", 32, "ok", 1.0, 5000.0, 5200.0, None),
    )
    table = cards.vram_table(ours).set_index("row")
    assert list(table.index) == ["A3", "E-packed"]
    assert table.loc["A3", "T4: allocated MiB"] == "3,087" and table.loc["A3", "allocated, ours over theirs"] == "0.97"
    assert table.loc["E-packed", "T4: allocated MiB"] == "–"


def test_which_row_shows_each_search_under_its_limit():
    fits = runs(
        ("gpu-fit-14.9gib-sm75", "A1", 32, "ok", 90.0, 11000.0, 11500.0, 14.9),
        ("gpu-fit-14.9gib-sm75", "A1", 40, "ok", 80.0, 13000.0, 14500.0, 14.9),
        ("gpu-fit-14.9gib-sm75", "A1", 48, "oom", None, None, None, 14.9),
        ("gpu-fit-14.9gib-sm75", "E-bf16", 8, "skipped", None, None, None, 14.9),
    ).assign(**{"error.message": "needs bf16"})
    table = cards.largest_batches(fits, UNKNOWN)
    assert list(table.iloc[1][["row", "largest micro-batch", "note"]]) == ["E-bf16", "–", "needs bf16"]
    table = table.iloc[0]
    assert (table["largest micro-batch"], table["best features/s tried"], table["at micro-batch"]) == (
        "40",
        "90.0",
        "32",
    )
    assert table["too large"] == "48"
    assert table["ΔF1 vs A1"] == "not known"
    said = cards.which_row(pd.concat([BENCH, fits]), "gpu-bench")
    assert "no row is known to keep its F1" in said and "found quickest" not in said
    worse = judged(A1=(60.0, 60.2, 60.1), B3=(50.0, 50.2, 50.1), A2=(60.0, 60.2, 60.1))
    more = runs(("gpu-fit-14.9gib-sm75", "B3", 32, "ok", 900.0, 11000.0, 11500.0, 14.9),
                ("gpu-fit-14.9gib-sm75", "A2", 32, "ok", 200.0, 11000.0, 11500.0, 14.9))  # fmt: skip
    with_f1 = cards.which_row(pd.concat([BENCH, fits, more, worse]), "gpu-bench")
    assert "take `A2`, for a full training at micro-batch 32 or below" in with_f1
    assert "lost no more than 1 F1 in the mean, A2 (200 features/s at micro-batch 32). The speeds are" in with_f1
    assert "at scale full is 32" in with_f1 and "Code abcdef1." in with_f1
    close = runs(("gpu-fit-14.9gib-sm75", "C2", 32, "ok", 190.0, 11000.0, 11500.0, 14.9))
    close = cards.which_row(pd.concat([BENCH, fits, more, close, worse, judged(C2=(60.0, 60.2, 60.1))]), "gpu-bench")
    assert "A2 (200 features/s at micro-batch 32), C2 (190 features/s at micro-batch 32): closer" in close
    assert "within 14.9 GiB" in said and "compute capability 7.5" in said and "not those of such a card" in said
    assert "no run at scale vram" in said and "Not searched: A0, " in said and "E-bf16, " not in said
