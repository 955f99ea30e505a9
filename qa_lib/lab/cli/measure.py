"""The verbs that measure or predict: profile, memory, max-batch.

Each function here returns the parser of one verb, and verbs.py lists them. The `load_main` in it
imports what the verb does, only once its options are known to be right (see `Parser`).
"""

from qa_lib.lab.cli import options, values
from qa_lib.lab.cli.parser import Main, Parser


def profile_parser() -> Parser:
    """Return the parser of `profile`."""

    def load_main() -> Main:
        from qa_lib.lab.tools.profile import main

        return main

    parser = Parser(
        verb="profile",
        summary="tell where a variant's step spends its time and memory",
        examples=[
            "python -m qa_lib profile A1 --preset smoke",
            "python -m qa_lib profile recommended --preset bench --data squad/ \\",
            "    --micro-batch 32 --ncu",
        ],
        load_main=load_main,
    )
    options.add_variant(parser)
    options.add_preset(parser)
    options.add_sources(parser)
    options.add_seed(parser)
    options.add_batch_sizes(parser)
    options.add_runs(parser)
    parser.add_argument(
        "--ncu",
        action="store_true",
        help="also read the GPU's counters, with Nsight Compute",
    )
    return parser


def memory_parser() -> Parser:
    """Return the parser of `memory`."""

    def load_main() -> Main:
        from qa_lib.lab.search.memory import main

        return main

    parser = Parser(
        verb="memory",
        summary="predict a variant's GPU memory, without a GPU",
        examples=[
            "python -m qa_lib memory A1 C1 recommended --preset bench --model bert/ \\",
            "    --micro-batch 32",
            "python -m qa_lib memory L1 L-dropout --preset lm-sizing --max-length 1024 16384",
        ],
        load_main=load_main,
    )
    options.add_variants(parser)
    options.add_preset(parser)
    options.add_sources(parser)
    options.add_sizes(parser, several=True)
    options.add_compute_capability(
        parser, help="compute capability of the GPU (default: 9.0, an H100)"
    )
    return parser


def max_batch_parser() -> Parser:
    """Return the parser of `max-batch`."""

    def load_main() -> Main:
        from qa_lib.lab.search.max_batch import main

        return main

    parser = Parser(
        verb="max-batch",
        summary="find a variant's largest micro-batch under a cap on GPU memory",
        examples=[
            "python -m qa_lib max-batch A3 --limit-gib 14.9 --compute-capability 7.5 --model bert/",
        ],
        load_main=load_main,
    )
    # Without an option for the preset: every search takes the preset sizing, with this cap.
    options.add_variants(parser)
    parser.add_argument(
        "--limit-gib",
        type=values.positive_number,
        required=True,
        metavar="G",
        help="GPU memory to stay within (GiB)",
    )
    options.add_compute_capability(
        parser, help="use the kernels of such a GPU (T4: 7.5; default: 9.0)"
    )
    options.add_sources(parser)
    options.add_runs(parser)
    return parser
