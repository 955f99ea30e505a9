"""How well kernels use the card: the block of hardware counters, from made-up profiles."""

import pandas as pd
import pytest

from qa_lib.lab.report import counters
from qa_lib.lab.report.counters import SHOWN
from qa_lib.lab.report.evidence import load_runs
from qa_lib.lab.tools import profile as profiling
from qa_lib.records.schema import PROFILE_SCHEMA
from tests.material import change_record, refused, write
from tests.report_runs import make
from tests.tiny import H200

STACK = SHOWN[-1]
FP8_GEMM = "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_bias_TNT"
GEMM = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
# A name by Nsight Compute, and the same by the profiler.
ADD = "void at::<unnamed>::elementwise_kernel<128, 4, at::CUDAFunctor_add<float>>(int)"
PROFILED_ADD = (
    "void at::native::(anonymous namespace)::elementwise_kernel<128, 4, "
    "at::native::gpu_kernel_impl<at::native::CUDAFunctor_add<float> >(at::TensorIteratorBase&)>"
)


def kernel(name, us, warps, sm, dram, count=12):
    """What a profile has of a kernel's counters."""
    return {
        "name": name,
        "count": count,
        "us": us,
        "dram_bytes": 1.0,
        "warps_active_percent": warps,
        "sm_percent": sm,
        "dram_percent": dram,
    }


def timed(name, phase, part):
    """What a profile has of a kernel's time."""
    return {"name": name, "phase": phase, "part": part, "ms": 1.0, "count": 12.0}


COUNTED = [
    kernel(FP8_GEMM, 600.0, 14.0, 70.0, 30.0),
    kernel(ADD, 300.0, 80.0, 20.0, 61.0),
    kernel("adamw", 100.0, 50.0, 60.0, None),
]
TIMED = [
    timed(FP8_GEMM, "forward", "feed-forward"),
    timed(FP8_GEMM, "forward", "attention"),
    timed(FP8_GEMM, "backward", "attention"),
    timed(PROFILED_ADD, "backward", "norms and elementwise"),
    timed("adamw", "optimizer", "optimizer"),
]


def profile_of(counted, step_ms=1.25):
    """A profile with these counters."""
    return {
        "schema": PROFILE_SCHEMA,
        "code": {"commit": "abcdef0123"},
        "time": {"step_ms": step_ms, "kernels": TIMED},
        "ncu": counted,
    }


def leave(runs, variant, counted, started="2026-12-01", **more):
    """Leave a run with a profile that has these counters beside it."""
    folder = make(runs, variant, machine=H200, preset="bench", model="bert-base", **more)
    change_record(folder, time={"started": started}, env={"gpu": "NVIDIA H200"})
    write(folder / "profile.json", profile_of(counted))


def chosen(runs):
    """The variants and seeds that the block is of."""
    counted = counters.counted_runs(load_runs(runs))
    return list(zip(counted["spec.variant"], counted["spec.seed"], strict=True))


# Kernels.


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (GEMM, "GEMM 256x128_64x4_1x2 NNT"),
        (FP8_GEMM, "8-bit GEMM 256x128_128x4_1x2 bias_TNT"),
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_nn", "GEMM 128x128 nn"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>(int)", "splitKreduce_kernel"),
        (ADD, "elementwise CUDAFunctor_add"),
        (PROFILED_ADD, "elementwise CUDAFunctor_add"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, "
            "float, float, at::native::binary_internal::MulFunctor<float> > >(int)",
            "elementwise MulFunctor",
        ),
        ("void at::native::vectorized_elementwise_kernel<4, x>", "vectorized_elementwise_kernel"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 9>", "softmax_warp_forward"),
        ("adamw", "adamw"),
    ],
)
def test_a_kernel_is_named_without_namespaces_and_types(kernel, name):
    assert counters.plain_name(kernel) == name


def test_a_long_name_keeps_its_beginning_and_its_end():
    name = "triton_per_fused__to_copy_add_native_dropout_native_layer_norm_backward_view_17"
    table = counters.kernel_table(profile_of([kernel(name, 1.0, 1.0, 1.0, 1.0)]))
    (short,) = table["kernel"]
    assert len(short) == counters.LETTERS
    assert short.startswith("triton_per_fused__")
    assert short.endswith("backward_view_17")


def test_the_heaviest_kernel_comes_first_with_its_parts_of_the_step():
    table = counters.kernel_table(profile_of(COUNTED[::-1]))
    assert list(table["part"]) == [
        "forward: feed-forward, attention; backward: attention",
        "backward: norms and elementwise",
        "optimizer",
    ]
    assert list(table["share"]) == pytest.approx([0.6, 0.3, 0.1])
    assert pd.isna(table["dram_percent"].iloc[2])


def test_a_kernel_of_which_the_profiler_has_no_time_has_no_part():
    table = counters.kernel_table(profile_of([kernel("unknown", 1.0, 1.0, 1.0, 1.0)]))
    assert list(table["part"]) == ["–"]


def test_the_percentages_are_those_that_a_profile_has():
    assert set(counters.PERCENTAGES) == set(profiling.PERCENTAGES)


# Which profiles.


def test_the_profiles_are_of_one_size_and_of_the_most_variants(tmp_path):
    leave(tmp_path, "A1", COUNTED, micro_batch=32)
    leave(tmp_path, STACK, COUNTED, micro_batch=32)
    leave(tmp_path, "A1", COUNTED, started="2026-12-02")
    leave(tmp_path, "A2", COUNTED, micro_batch=32)
    assert chosen(tmp_path) == [("A1", 0), (STACK, 0)]


def test_the_newest_profile_of_a_variant_counts(tmp_path):
    leave(tmp_path, "A1", COUNTED, seed=1, started="2026-12-03")
    leave(tmp_path, "A1", COUNTED, seed=2, started="2026-12-02")
    leave(tmp_path, "A3", COUNTED, seed=6)
    assert chosen(tmp_path) == [("A1", 1), ("A3", 6)]


def test_of_as_many_variants_the_newest_count(tmp_path):
    leave(tmp_path, "A1", COUNTED, micro_batch=32, started="2026-12-01")
    leave(tmp_path, "A3", COUNTED, micro_batch=16, started="2026-12-02")
    assert chosen(tmp_path) == [("A3", 0)]


# Counters of a profile of November 22, 2026, one that could not read any, and one without.
OLDER = [{"name": "gemm", "count": 1, "us": 1.0, "sm_share": 70.5, "occupancy": 14.4}]
UNREAD = [kernel("gemm", 1.0, None, None, None)]


@pytest.mark.parametrize("counted", [OLDER, UNREAD, None])
def test_without_percentages_of_peaks_nothing_was_measured(tmp_path, counted):
    leave(tmp_path, "A1", counted)
    make(tmp_path, "A3", machine=H200, preset="bench")
    said = f"no profile of A1, A3, {STACK} has hardware counters"
    refused(said, counters.kernel_use, load_runs(tmp_path))


# What is said.


def test_the_block_says_how_much_of_the_kernel_time_is_near_a_peak(tmp_path):
    leave(tmp_path, "A1", COUNTED)
    leave(tmp_path, STACK, [kernel(GEMM, 800.0, 14.0, 70.0, 30.0), *COUNTED[2:]])
    text = counters.kernel_use(load_runs(tmp_path))
    assert "Kernels that reach more than 60 % of the SMs' or the DRAM's peak take" in text
    shares = "90.0 % in the unoptimized loop (A1), 88.9 % in the full stack in 8 bits"
    assert f"of the kernel time: {shares} ({STACK}).**" in text
    assert "on one H200, 8 samples of synthetic:1600 in a forward pass, BERT-base" in text
    assert "group h200-bench, code abcdef0." in text
    assert "of the 3 kernels that take longest" in text


def test_the_block_has_means_by_time_and_the_heaviest_kernels(tmp_path):
    more = [kernel(f"small_{n}", 1.0, 1.0, 1.0, 1.0) for n in range(counters.HEAVIEST)]
    leave(tmp_path, "A1", [*COUNTED, *more])
    rows = counters.kernel_use(load_runs(tmp_path)).replace("\u00a0", " ").splitlines()
    means = "| the unoptimized loop (A1) | 1.25 | 1.01 | 37.2 | 53.7 | 40.1 |"
    assert means in rows
    gemm = "| 8-bit GEMM 256x128_128x4_1x2 bias_TNT | forward: feed-forward, attention; "
    gemm += "backward: attention | 12 | 600 | 59.6 % | 14.0 | 70.0 | 30.0 |"
    assert gemm in rows
    assert sum(row.startswith("| small_") for row in rows) == counters.HEAVIEST - 3
    assert "| adamw | optimizer | 12 | 100 | 9.94 % | 50.0 | 60.0 | – |" in rows
