"""The memory of BERT-base on a T4, predicted for machines that have no GPU to measure it on."""

from collections.abc import Sequence

from qa_lib.lab.search.memory_estimate import estimate
from qa_lib.lab.search.plan import plan
from qa_lib.lab.search.squad_lengths import SquadLengths
from qa_lib.spec.machine import gpu_of

CAPABILITY = 75  # compute capability x 10


def peaks_on_a_t4(variants: Sequence[str], micro_batch: int) -> dict[str, float]:
    """Return the predicted peak in MiB of training BERT-base on SQuAD v2, by variant."""
    specs = plan(
        variants,
        "bench",
        data="synthetic:1",  # `lengths` stand for the data, and nothing has to be fetched
        micro_batch=micro_batch,
        machine=gpu_of(CAPABILITY),
    )
    lengths = SquadLengths(specs[0].preset.max_length, specs[0].preset.stride)
    return {spec.variant: estimate(spec, lengths)["peak_mib"] for spec in specs}
