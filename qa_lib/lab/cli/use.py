"""The verbs that use a trained model: predict, app, score, quantize, push.

Each function returns the parser of one.
"""

from qa_lib.lab.cli import options, values
from qa_lib.lab.cli.parser import Main, Parser


def predict_parser() -> Parser:
    """Return the parser of `predict`."""

    def load_main() -> Main:
        from qa_lib.lab.tools.predict import main

        return main

    parser = Parser(
        verb="predict",
        summary="answer a file of questions, or one, with a checkpoint",
        examples=[
            'python -m qa_lib predict --model my-bert/ --question "Who?" --context "By Ada."',
            "python -m qa_lib predict --model runs/h200-local/A3-s0-1a2b3c/ dev-v2.0.json \\",
            "    --out answers/",
            "python -m qa_lib predict --model deepset/bert-base-cased-squad2 dev-v2.0.json \\",
            "    --out answers/",
        ],
        load_main=load_main,
    )
    parser.add_argument(
        "data",
        type=values.text,
        nargs="?",
        metavar="DATA.json",
        help="a file or other source of questions to answer",
    )
    parser.add_argument(
        "--model",
        type=values.text,
        required=True,
        metavar="M",
        help="a model's or run's folder, or a hub name",
    )
    parser.add_argument(
        "--out",
        type=values.folder,
        metavar="DIR",
        help="where predictions, spans, n-best lists and null odds go",
    )
    parser.add_argument("--question", metavar="TEXT", help="one question, answered on the terminal")
    parser.add_argument(
        "--context", metavar="TEXT", help="the paragraph that the one question is about"
    )
    options.add_answer_length(parser)
    return parser


def app_parser() -> Parser:
    """Return the parser of `app`."""

    def load_main() -> Main:
        from qa_lib.lab.app.page import main

        return main

    parser = Parser(
        verb="app",
        summary="ask checkpoints in the browser, and read the dashboard",
        examples=[
            "python -m qa_lib app --model my-bert/ --model runs/h200-local/A3-s0-1a2b3c/",
            "python -m qa_lib app --model deepset/minilm-uncased-squad2",
            "Two models are shown side by side. From the hub come safetensors, and no code.",
            "On another machine: ssh -L 8600:localhost:8600 MACHINE, start it there, and open",
            "http://localhost:8600 here. In a notebook and in Colab: from qa_lib import app; app()",
        ],
        load_main=load_main,
    )
    parser.add_argument(
        "--model",
        type=values.text,
        action="append",
        default=[],
        metavar="M",
        help="a folder or a hub name; can be given again",
    )
    options.add_answer_length(parser)
    options.add_runs_to_read(parser)
    parser.add_argument(
        "--figures",
        type=values.path,
        default="figures",
        metavar="DIR",
        help="folder of the reports (default: figures)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="H",
        help="address to listen on (default: 127.0.0.1, this machine alone)",
    )
    parser.add_argument(
        "--port",
        type=values.port,
        default=8600,
        metavar="N",
        help="port to listen on; 0 takes a free one (default: 8600)",
    )
    return parser


def score_parser() -> Parser:
    """Return the parser of `score`."""

    def load_main() -> Main:
        from qa_lib.lab.tools.score import main

        return main

    parser = Parser(
        verb="score",
        summary="score predictions by the official SQuAD v2 rules",
        examples=[
            "python -m qa_lib score validation.json answers/predictions.json",
            "python -m qa_lib score dev.json texts.json --na-prob answers/null_odds.json \\",
            "    --na-threshold 0",
        ],
        load_main=load_main,
    )
    parser.add_argument(
        "data",
        type=values.text,
        metavar="DATA.json",
        help="questions with gold answers, SQuAD v1.1 or v2.0",
    )
    parser.add_argument(
        "predictions",
        type=values.text,
        metavar="PREDICTIONS.json",
        help="question id -> answer, '' for none",
    )
    parser.add_argument(
        "--na-prob",
        type=values.text,
        metavar="FILE",
        help="question id -> how sure the model is that there is no answer",
    )
    parser.add_argument(
        "--na-threshold",
        type=values.number,
        metavar="X",
        help="value of --na-prob above which a question counts as not answered (default: 1.0)",
    )
    return parser


def quantize_parser() -> Parser:
    """Return the parser of `quantize`."""

    def load_main() -> Main:
        from qa_lib.lab.tools.quantize import main

        return main

    parser = Parser(
        verb="quantize",
        summary="round a run's model to 8 or 4 bits: F1, size and time to answer, before and after",
        examples=[
            "python -m qa_lib quantize runs/cpu-smoke/A1-int8-s0-1a2b3c --weights int8",
            "python -m qa_lib predict --model runs/cpu-smoke/A1-int8-s0-1a2b3c/model-int8 ...",
        ],
        load_main=load_main,
    )
    add_run(parser)
    parser.add_argument(
        "--weights",
        choices=["int8", "int4"],
        default="int8",
        help="bits of a weight (default: int8)",
    )
    parser.add_argument(
        "--data",
        type=values.text,
        metavar="D",
        help="questions to score by (default: the run's own)",
    )
    options.add_answer_length(parser)
    return parser


def push_parser() -> Parser:
    """Return the parser of `push`."""

    def load_main() -> Main:
        from qa_lib.lab.tools.push import main

        return main

    parser = Parser(
        verb="push",
        summary="upload a run's model with its card to the Hugging Face hub",
        examples=[
            "python -m qa_lib push runs/h200-local/A3-s0-1a2b3c me/bert-squad   # private",
            "python -m qa_lib push runs/h200-local/A3-s0-1a2b3c me/bert-squad --public",
            "It takes a token that may write: type `hf auth login` once, or set HF_TOKEN.",
        ],
        load_main=load_main,
    )
    add_run(parser)
    parser.add_argument(
        "repo",
        type=values.text,
        metavar="USER/NAME",
        help="the name that the model gets on the hub",
    )
    parser.add_argument("--public", action="store_true", help="for everybody (default: private)")
    parser.add_argument(
        "--add", action="store_true", help="into a repository that is there already"
    )
    return parser


def add_run(parser: Parser) -> None:
    """Add the run whose model is used."""
    parser.add_argument(
        "run", type=values.path, metavar="RUN", help="folder of a run that has its model"
    )
