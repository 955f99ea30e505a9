"""The demo: ask a checkpoint about a paragraph, compare two, and read the reports of one's runs. For one's own machine.

`python -m qa_lib app` serves it to a browser; `app()` shows it in a notebook, Colab's too.
"""

import argparse
import base64
import math
import os
import re
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from html import escape
from pathlib import Path
from types import NoneType

import pandas as pd
from starlette.applications import Starlette
from tqdm import tqdm

from qa_lib.calls import checked
from qa_lib.data.squad import open_source
from qa_lib.errors import UserError, first_line, printable
from qa_lib.lab.app.choices import Choices, named
from qa_lib.lab.app.serving import Page, guards, listen, names, past_proxies, serve
from qa_lib.lab.report.evidence import as_frame, select
from qa_lib.lab.report.style import figures_of
from qa_lib.lab.report.summary import result_table, summary
from qa_lib.lab.report.variants_table import source
from qa_lib.lab.sweep import progress_of
from qa_lib.paths import PACKAGE
from qa_lib.records.archive import Run, own_groups, read_runs
from qa_lib.records.files import RecordError, regular
from qa_lib.records.record import read_record, run_files
from qa_lib.spec.presets import whole_number

# Gradio makes a client of its own when it is imported, and httpx lacks a package for some proxies.
with past_proxies(share=False):
    import gradio as gr

MAX_CONTEXT = 100_000  # characters of a paragraph, which a CPU reads in a minute or so
MAX_QUESTION = 1_000  # characters
WAITING = 256  # events that may wait; the next is told that the queue is full
SESSIONS = 256  # pages whose state is kept
UNFINISHED = (b'"starting"', b'"waiting"', b'"running"')
# Of a group's table; and the axes, where a group varies them.
COLUMNS = ("variant", "change", "model", "world", "batch", "length", "training", "micro_batch",
           "samples_per_s", "tokens_per_s", "ratio", "step", "mfu", "peak_mib", "score", "delta",
           "n", "status", "note")  # fmt: skip
FONTS = {"font": ("system-ui", "sans-serif"), "font_mono": ("ui-monospace", "monospace")}
LOOK = {
    "theme": gr.themes.Default(primary_hue="blue", text_size="sm", spacing_size="sm", **FONTS),
    "css": Path(__file__).with_name("page.css").read_text(encoding="utf-8"),
    "footer_links": [],
} | dict.fromkeys(("run_history", "ssr_mode", "mcp_server", "enable_monitoring"), False)
QUIET = {"show_progress": "hidden", "api_visibility": "private"}
# What the page sends as the value of a component that is an event's input; all else is refused.
# None: nothing is chosen, or the number's box is empty.
SENDS = {
    gr.Textbox: (str,),
    gr.Dropdown: (str, NoneType),
    gr.Number: (int, float, NoneType),
    gr.Slider: (int, float, NoneType),
}
# One thread for all models: two that are compared would take each other's cores, and each thread that calls torch keeps
# memory of its own. It imports torch, too, while the page is being read.
WORKER = ThreadPoolExecutor(1)
NOTHING_KEPT = ["", None, None, None]  # see `kept`


def answer(choice, question: str, context: str, max_answer_length: int | None = None) -> dict:
    """What score.predict.ask gives, and the question's `context`. Raises UserError, which says what is wrong."""
    for name, text, most in (
        ("paragraph", context, MAX_CONTEXT),
        ("question", question, MAX_QUESTION),
    ):
        if not text.strip():
            raise UserError(f"Write or paste a {name}.")
        if len(text) > most:
            raise UserError(f"The {name} is longer than {most:,} characters, the limit.")
        if re.search("[\ud800-\udfff]", text):
            raise UserError(f"The {name} holds half a character, which no tokenizer takes.")
    if max_answer_length is not None:
        max_answer_length = whole_number("The longest answer", max_answer_length, 1)
    if not choice:
        raise UserError("There is no such model, or no longer; load the page again.")
    try:
        asked = WORKER.submit(_ask, choice.folder, question, context, max_answer_length)
        return asked.result() | {"context": context}
    except (UserError, OSError) as problem:
        reason = (
            str(problem).removeprefix(f"{choice.folder}: ").replace(str(choice.folder), choice.name)
        )
        raise UserError(without_paths(f"{choice.name} cannot be asked: {reason}")) from None


def typed_number(text: str | None) -> object:
    """The whole number that somebody typed, None where nothing was, else the text, which `answer` refuses."""
    text = (text or "").strip()
    return int(text) if text.isdecimal() and len(text) < 20 else text or None


def _ask(folder: Path, question: str, context: str, max_answer_length: int | None = None) -> dict:
    from qa_lib.score.predict import ask

    return ask(folder, question, context, max_answer_length)


def kept(found: dict) -> tuple[str, int | None, int | None, float | None]:
    """What the page keeps of what was found: the paragraph, where the best answer begins and ends,
    and the margin of "no answer" over it; None where no part of the paragraph can be the answer."""
    best = next((entry for entry in found["nbest"] if entry["text"]), {})
    return found["context"], best.get("begin"), best.get("end"), found["margin"]


def decided(
    context: str, begin: int | None, end: int | None, margin: float | None, threshold: float
) -> tuple[str, str]:
    """The answer that a threshold for "no answer" leaves of what was `kept`, and the paragraph as
    HTML with the answer marked."""
    if begin is None or end is None or margin is None or margin > threshold:
        return "No answer", f'<div class="text">{escape(context)}</div>'
    before, text, after = context[:begin], context[begin:end], context[end:]
    marked = f"{escape(before)}<mark>{escape(text)}</mark>{escape(after)}"
    return text, f'<div class="text">{marked}</div>'


def decided_again(
    context: str,
    begin: float | None,
    end: float | None,
    margin: float | None,
    threshold: float | None,
) -> tuple[str, str]:
    """What `decided` makes of the values that the page has sent."""
    if threshold is None:  # the number's box is empty
        return gr.skip(), gr.skip()
    begin, end = (None if place is None else int(place) for place in (begin, end))
    return decided(context, begin, end, margin, threshold)


def details(found: dict) -> str:
    """The margin of "no answer", the list of the best answers and the milliseconds, as HTML."""
    margin = found["margin"]
    said = "No part of the paragraph can be the answer."
    if margin is not None:
        said = f"“No answer” scores {abs(margin):.2f} {'above' if margin > 0 else 'below'} the best answer."
    best = pd.DataFrame({
        "answer": [entry["text"] or "no answer" for entry in found["nbest"]],
        "score": [f"{entry['score']:.2f}" for entry in found["nbest"]],
        "probability": [f"{entry['probability']:.1%}" for entry in found["nbest"]],
    })  # fmt: skip
    times = " · ".join(f"{part} {value:.1f} ms" for part, value in found["ms"].items())
    if found["windows"] > 1:
        times += f" · {found['windows']} windows of up to {found['window_tokens']} tokens"
    return f"<p>{said}</p>{html_table(best, 'few')}<p>{times}</p>"


def html_table(table: pd.DataFrame, style: str = "") -> str:
    """A table of text as HTML that scrolls."""
    with pd.option_context("display.max_colwidth", None):
        return f'<div class="wide {style}">{table.to_html(index=False, border=0)}</div>'


def without_paths(text: str) -> str:
    """Text with each absolute path cut down to its last part: where things lie on this machine is nobody's business."""
    return re.sub(r"(?<![\w/:.<])/(?:[\w.+@~-]+/)+([\w.+@~-]*)", r"…/\1", text)


def build(
    models: Choices, runs: Path, figures: Path, max_answer_length: int | None = None
) -> gr.Blocks:
    """The page. Whatever comes from a record, a model or an asker is shown as text. Answers have at most
    `max_answer_length` tokens until the asker says otherwise, by default as each model's in training."""
    # Gradio counts events, and keeps and averages 10,000 of them, for a page that is switched off here.
    os.environ |= {
        "GRADIO_ANALYTICS_MAX_EVENTS": "1",
        "GRADIO_ANALYTICS_CACHE_FREQUENCY": str(10**9),
    }
    with gr.Blocks(title="BERT on SQuAD v2", analytics_enabled=False) as demo:
        with gr.Tab("Ask"):
            _ask_tab(demo, models, max_answer_length)
        with gr.Tab("Dashboard"):
            _dashboard_tab(demo, runs, figures)
    demo.state_session_capacity = SESSIONS
    return demo.queue(max_size=WAITING, default_concurrency_limit=1, api_open=False)


def page_of(demo: gr.Blocks) -> Page:
    """What the page can send, for the guards of its server."""
    events = {
        number: [SENDS[type(block)] for block in event.inputs] for number, event in demo.fns.items()
    }
    return Page(events, demo._queue.pending_messages_per_session)


def _ask_tab(demo: gr.Blocks, models: Choices, max_answer_length: int | None) -> None:
    listed = models.listed()
    if not listed:
        gr.Markdown(
            "There is no checkpoint to ask yet: `make quickstart` trains small ones on a CPU in minutes."
        )
    examples = _examples()
    _, context, question = examples[-1 if listed and listed[0].synthetic else 0]
    with gr.Row():
        first, second = (
            gr.Dropdown(min_width=280, interactive=True, **menu) for menu in _menus(models)
        )
    context = gr.Textbox(context, label="Paragraph", lines=4, max_lines=12)
    with gr.Row():
        question = gr.Textbox(question, label="Question", scale=4, min_width=200)
        longest = gr.Textbox(  # gr.Number cannot be empty: it sends 0
            str(max_answer_length or ""),
            label="Longest answer",
            placeholder="tokens",
            min_width=110,
        )
    button = gr.Button("Ask", variant="primary", elem_id="ask")
    with gr.Row():
        for label, *example in examples:  # gr.Examples would need a route of its own
            gr.Button(label, size="sm").click(
                partial(list, example), None, [context, question], **QUIET
            )
    with gr.Row():
        cards = [_card(), _card()]

    def asked(
        first: str | None, second: str | None, context: str, question: str, longest: str
    ) -> list:
        other = (
            _answered(models, second, context, question, longest)
            if second
            else [gr.update(visible=False)] * 5 + NOTHING_KEPT
        )
        return [*_answered(models, first or "", context, question, longest), *other]

    demo.load(
        lambda: [gr.update(choices=menu["choices"]) for menu in _menus(models)],
        None,
        [first, second],
        **QUIET,
    )
    gr.on(
        [button.click, question.submit], asked, [first, second, context, question, longest], [*cards[0], *cards[1]],
        show_progress_on=question, api_visibility="private",
    )  # fmt: skip


def _menus(models: Choices) -> list[dict]:
    """What the two menus of models hold: all that there are now, and in the second one nothing, too."""
    pairs = [(choice.name, choice.key) for choice in models.listed()]
    keys = [key for _, key in pairs]
    second = "model 2" if "model 2" in keys else ""  # of two that were named
    return [
        {"label": "Model", "choices": pairs, "value": keys[0] if keys else None},
        {"label": "Compare with", "choices": [("nothing", ""), *pairs], "value": second},
    ]


def _examples() -> list[tuple[str, str, str]]:
    """(label, paragraph, question): two about real English, one of the text that a smoke model knows."""
    english = open_source(PACKAGE / "data" / "english.json", "validation").examples
    generated = open_source("synthetic:200", "validation").examples
    short = min(
        (example for example in generated if example.answers),
        key=lambda example: len(example.context),
    )
    found = [(english[0], ""), (english[-1], " (no answer)"), (short, " (generated)")]
    return [(example.question + note, example.context, example.question) for example, note in found]


def _card() -> list:
    """The components that show one model's answer: their column, the answer, the paragraph, the threshold, the list of
    the best, and four for what is `kept`, which stays with the page."""
    with gr.Column(visible=False) as column:
        answer = gr.Textbox(label="Answer", interactive=False, elem_classes="answer")
        paragraph = gr.HTML(elem_classes="shown paragraph")
        slider = gr.Slider(
            -10, 10, precision=3, label="Threshold for “no answer”", buttons=[], interactive=True
        )
        best = gr.HTML(elem_classes="shown")
        # Not as one JSON value: a dict from a request could name a file (see serving.py).
        held = [gr.Textbox(visible=False), *(gr.Number(visible=False) for _ in range(3))]
    # Not pre-processed: Gradio takes no empty number for a slider.
    slider.input(
        decided_again, [*held, slider], [answer, paragraph], preprocess=False,
        trigger_mode="always_last", **QUIET,
    )  # fmt: skip
    return [column, answer, paragraph, slider, best, *held]


def _answered(models: Choices, key: str, context: str, question: str, longest: str) -> list:
    """What a card shows when the model called `key` has been asked; or what is wrong, in place of the answer."""
    choice = models.find(key)
    try:
        found = answer(choice, question, context, typed_number(longest))
    except UserError as problem:
        told = gr.update(value=str(problem), label=choice.name if choice else "Model")
        return [gr.update(visible=True), told, *[gr.update(visible=False)] * 3, *NOTHING_KEPT]
    own = 0.0 if math.isnan(choice.threshold) else round(choice.threshold, 3)
    text, paragraph = decided(*kept(found), own)
    reach = math.ceil(max(10, abs(own) + 1, abs(found["margin"] or 0) + 1))
    return [
        gr.update(visible=True),
        gr.update(value=text, label=choice.name),
        gr.update(value=paragraph, visible=True),
        gr.update(value=own, minimum=-reach, maximum=reach, visible=True),
        gr.update(value=details(found), visible=True),
        *kept(found),
    ]


def _dashboard_tab(demo: gr.Blocks, runs: Path, figures: Path) -> None:
    active = gr.HTML(visible=False, elem_classes="shown")
    group = gr.Dropdown(label="Group", interactive=True)
    report = gr.HTML(elem_classes="shown")

    def shown(wanted: str | None) -> list:
        names, name, page = dashboard(runs, figures, wanted or "")
        return [gr.update(choices=names, value=name), page]

    def shown_running() -> dict:
        value = running(runs)
        return gr.update(value=value, visible=bool(value))

    demo.load(shown, group, [group, report], **QUIET)
    group.input(shown, group, [group, report], **QUIET)
    gr.on([demo.load, gr.Timer(5).tick], shown_running, None, active, **QUIET)


def dashboard(
    runs_dir: Path, figures_dir: Path, wanted: str = ""
) -> tuple[list[str], str | None, str]:
    """The groups that there are, the `wanted` one or else the first, and its report as HTML.

    One's own groups come first, the newest of them before the others. What cannot be read costs a
    sentence, and what cannot be shown its own group's table alone.
    """
    broken = defaultdict(list)

    def left_out(group: str, problem: RecordError) -> None:
        # Names of files may hold bytes that are no text, which no page can be sent.
        broken[printable(group)].append(str(problem))

    found = read_runs(runs_dir, left_out=left_out)
    own = own_groups(found) | {group for group in broken if (runs_dir / group).is_dir()}
    groups = groups_of(found, own, set(broken))
    name = wanted if wanted in groups else next(iter(groups), None)
    chosen = [run for run in found if run.record["group"] == name]
    bad = broken.get(name, [])
    said = [f"Cannot be read: {text.removeprefix(f'{runs_dir}/')}." for text in bad]
    shown = []
    try:
        if chosen:
            sentences, shown = shown_group(chosen, name, figures_dir)
            said += sentences
        elif not groups:
            said = ["There are no records yet: make quickstart makes some in minutes."]
    except Exception as problem:  # whatever a spoilt record leads to: the page is to be seen
        said.append(f"This cannot be shown: {first_line(problem)}.")
    paragraphs = [f"<p>{escape(without_paths(printable(text)))}</p>" for text in said]
    return groups, name, "".join(paragraphs + shown)


def groups_of(found: list[Run], own: set[str], broken: set[str]) -> list[str]:
    """The groups of runs and of broken records: one's own first, then the others, each by age, the
    newest first.

    Groups of tries (see `evidence.search_groups`) are left out.
    """
    began = dict.fromkeys(broken, "")
    for run in found:
        group, started = run.record["group"], run.record["time"]["started"] or ""
        began[group] = max(started, began.get(group, ""))
    tries = {run.record["group"] for run in found if run.record["spec"]["search"]}
    by_name = sorted(began.keys() - tries)
    return sorted(by_name, key=lambda name: (name in own, began[name]), reverse=True)


def shown_group(found: list[Run], name: str, figures_dir: Path) -> tuple[list[str], list[str]]:
    """What is said of a group's runs, and its table and figures as HTML."""
    chosen = select(as_frame(found), name)
    table = result_table(summary(chosen), COLUMNS).astype(str).map(without_paths)
    figures = [picture(*figure) for figure in figures_of(figures_dir / name)]
    said = [source(chosen)]
    if not figures:
        said.append(f"No figures yet: python -m qa_lib report --group {name} draws them.")
    return said, [html_table(table), *figures]


def picture(title: str, png: bytes) -> str:
    """A figure as HTML that needs no file."""
    return (
        f'<img alt="{escape(title)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    )


def running(runs: Path) -> str:
    """The runs that have not ended, as HTML: how far they are, and since when nothing was written."""
    found = []
    for path in run_files(runs, "record.json"):
        try:
            if not any(status in regular(path).read_bytes() for status in UNFINISHED):
                continue
            record = read_record(path.parent)
            written = max(file.stat().st_mtime for file in [path, *path.parent.glob("steps.jsonl")])
        except (OSError, RecordError):  # it is gone by now, or the dashboard says what is wrong
            continue
        step, planned = progress_of(path.parent)
        bar = (
            f'<progress value="{step}" max="{planned}"></progress>step {step} of {planned}'
            if planned
            else ""
        )
        since = tqdm.format_interval(max(0, time.time() - written))
        name = escape(printable(f"{record['group']}/{record['run_id']} is {record['status']}"))
        found.append(f"<p>{name} {bar}, last written {since} ago</p>")
    return "".join(found)


@checked
def app(
    *models: str, runs: str | Path = "runs", figures: str | Path = "figures", share: bool = False
) -> gr.Blocks:
    """Show the demo in a notebook, in Colab as well: of `models` (folders, names of the hub), then of those of `runs`.

    `share` makes a public link through Gradio's servers. Raises UserError for a name that leads to
    no model, and with `share` for a proxy variable with which nothing can be asked.
    """
    # Colab's proxy and public links call it by other names.
    hosts = ["*"] if share or gr.utils.colab_check() else names("127.0.0.1", "127.0.0.1")
    demo = build(Choices(named(list(models)), Path(runs)), Path(runs), Path(figures))
    with past_proxies(share):
        demo.launch(
            inline=True, share=share, quiet=True, server_name="127.0.0.1", height=900, show_error=False,
            app_kwargs={"middleware": guards(hosts, page_of(demo), "*")}, **LOOK,
        )  # fmt: skip
    return demo


def main(args: argparse.Namespace) -> int:
    """Serve the page until a signal comes.

    Raises UserError for a name that leads to no such model, and for a port that is taken.
    """
    models = Choices(named(args.model), args.runs)
    listener = listen(args.host, args.port)
    address, port = listener.getsockname()[:2]
    demo = build(models, args.runs, args.figures, args.max_answer_length)
    hosts = names(args.host, address)
    frames = "*" if "*" in hosts else "'none'"
    parent = Starlette(middleware=guards(hosts, page_of(demo), frames))
    gr.mount_gradio_app(parent, demo, "/", show_error=False, **LOOK)
    for choice in models.listed()[:1]:
        WORKER.submit(
            _ask, choice.folder, "who", "it was she"
        )  # loaded while the page is being read
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(f"http://{host}:{port}  (Ctrl-C stops it)", flush=True)
    serve(parent, listener)
    return 0
