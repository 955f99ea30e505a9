"""The app: ask a checkpoint about a paragraph, compare two, and read the reports of one's runs.

`python -m qa_lib app` serves its page to a browser; `app()` shows it in a notebook, Colab's too. It
is made for the user's own machine.
"""

import argparse
import os
from pathlib import Path
from types import NoneType

from starlette.applications import Starlette

from qa_lib.calls import checked
from qa_lib.lab.app.asking import ask_tab, load_ahead
from qa_lib.lab.app.choices import Choices, choices_of_user
from qa_lib.lab.app.dashboard import dashboard_tab
from qa_lib.lab.app.gate import Page, allowed_hosts, guards
from qa_lib.lab.app.proxies import gr, past_proxies
from qa_lib.lab.app.serving import listen, serve

MAX_WAITING = 256  # events in the queue; the next one is told that it is full
MAX_SESSIONS = 256  # pages whose state is kept
# How the page looks, and what of Gradio's it does without: arguments of both ways to serve it.
LOOK = {
    "theme": gr.themes.Default(
        primary_hue="blue",
        text_size="sm",
        spacing_size="sm",
        font=("system-ui", "sans-serif"),
        font_mono=("ui-monospace", "monospace"),
    ),
    "css": Path(__file__).with_name("page.css").read_text(encoding="utf-8"),
    "footer_links": [],
    "run_history": False,
    "ssr_mode": False,
    "mcp_server": False,
    "enable_monitoring": False,
}
# The types of what the page sends for a component that is an event's input; all else is refused.
# None: nothing is chosen, or the number's box is empty.
SENT_TYPES = {
    gr.Textbox: (str,),
    gr.Dropdown: (str, NoneType),
    gr.Number: (int, float, NoneType),
    gr.Slider: (int, float, NoneType),
}


@checked
def app(
    *models: str, runs: str | Path = "runs", figures: str | Path = "figures", share: bool = False
) -> gr.Blocks:
    """Show the app in a notebook, in Colab as well, and return it.

    It offers `models` (folders, or names of the hub), then those of the folder `runs`; `figures` is
    the folder of the reports' pictures. `share` makes a public link through Gradio's servers.

    Raises UserError for a name that leads to no model, and with `share` for a proxy variable with
    which nothing can be asked.
    """
    if share or gr.utils.colab_check():
        hosts = ["*"]  # public links and Colab's proxy call it by other names
    else:
        hosts = allowed_hosts("127.0.0.1", "127.0.0.1")
    demo = build(Choices(choices_of_user(list(models)), Path(runs)), Path(runs), Path(figures))
    with past_proxies(share):
        demo.launch(
            inline=True,
            share=share,
            quiet=True,
            server_name="127.0.0.1",
            height=900,
            show_error=False,
            app_kwargs={"middleware": guards(hosts, page_of(demo), frames="*")},
            **LOOK,
        )
    return demo


def main(args: argparse.Namespace) -> int:
    """Serve the page until a signal comes, and return the exit code.

    Raises UserError for a name that leads to no such model, and for a port that is taken.
    """
    models = Choices(choices_of_user(args.model), args.runs)
    listener = listen(args.host, args.port)
    address, port = listener.getsockname()[:2]
    demo = build(models, args.runs, args.figures, args.max_answer_length)
    hosts = allowed_hosts(args.host, address)
    frames = "*" if "*" in hosts else "'none'"
    parent = Starlette(middleware=guards(hosts, page_of(demo), frames))
    gr.mount_gradio_app(parent, demo, "/", show_error=False, **LOOK)
    for choice in models.listed()[:1]:
        load_ahead(choice)  # while the page is being read
    host = f"[{args.host}]" if ":" in args.host else args.host  # IPv6
    print(f"http://{host}:{port}  (Ctrl-C stops it)", flush=True)
    serve(parent, listener)
    return 0


def build(
    models: Choices, runs: Path, figures: Path, max_answer_length: int | None = None
) -> gr.Blocks:
    """Build the page. Whatever comes from a record, a model or an asker is shown as text.

    Answers have at most `max_answer_length` tokens until the asker says otherwise, by default as
    many as each model's in training.
    """
    # Gradio counts events, and keeps and averages 10,000 of them, for a page that is switched off.
    os.environ["GRADIO_ANALYTICS_MAX_EVENTS"] = "1"
    os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(10**9)
    with gr.Blocks(title="BERT on SQuAD v2", analytics_enabled=False) as demo:
        with gr.Tab("Ask"):
            ask_tab(demo, models, max_answer_length)
        with gr.Tab("Dashboard"):
            dashboard_tab(demo, runs, figures)
    demo.state_session_capacity = MAX_SESSIONS
    return demo.queue(max_size=MAX_WAITING, default_concurrency_limit=1, api_open=False)


def page_of(demo: gr.Blocks) -> Page:
    """Return what the page can send, for the guards of its server."""
    events = {}
    for number, event in demo.fns.items():
        events[number] = [SENT_TYPES[type(component)] for component in event.inputs]
    return Page(events=events, sessions=demo._queue.pending_messages_per_session)
