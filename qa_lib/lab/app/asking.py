"""The tab "Ask": put a question about a paragraph to a checkpoint, or to two side by side.

The model is asked once. What the page keeps of its answer decides anew when the threshold for
"no answer" is moved.
"""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from qa_lib.data.english import pretrained_questions, smoke_question
from qa_lib.data.synthetic import vocabulary
from qa_lib.errors import UserError
from qa_lib.lab.app.choices import Choice, Choices
from qa_lib.lab.app.markup import table_html, without_paths
from qa_lib.lab.app.proxies import gr
from qa_lib.spec.presets import whole_number

MAX_CONTEXT = 100_000  # characters of a paragraph, which a CPU reads in a minute or so
MAX_QUESTION = 1_000  # characters
MAX_DIGITS = 19  # of a longest answer; Python refuses to read numbers of very many
SURROGATE = re.compile("[\ud800-\udfff]")
INTRODUCTION = (
    "**Fine-tuned models answer questions about a paragraph**, or say that it has no answer."
)
# Added where the first model is one of preset smoke.
OF_SMOKE_MODELS = f" The first one knows {len(vocabulary())} words."
# One thread for all models: two that are compared would take each other's cores, and each thread
# that calls torch keeps memory of its own. It imports torch, too, while the page is being read.
WORKER = ThreadPoolExecutor(1)


# Asking a model


def load_ahead(choice: Choice) -> None:
    """Begin to load a checkpoint by a question of no interest, and do not wait for it."""
    WORKER.submit(_ask, choice.folder, "who", "it was she")


def answer(
    choice: Choice | None, question: str, context: str, max_answer_length: int | None = None
) -> dict:
    """Ask a checkpoint a question about the paragraph `context`.

    Returns what `qa_lib.score.predict.ask` returns, and the `context`. Raises UserError for what
    cannot be asked, with words for the page: they name no place on this machine.
    """
    _check_text("paragraph", context, MAX_CONTEXT)
    _check_text("question", question, MAX_QUESTION)
    if max_answer_length is not None:
        max_answer_length = whole_number("The longest answer", max_answer_length, 1)
    if choice is None:
        raise UserError("There is no such model, or no longer; load the page again.")
    try:
        result = WORKER.submit(_ask, choice.folder, question, context, max_answer_length).result()
    except (UserError, OSError) as problem:
        reason = str(problem).removeprefix(f"{choice.folder}: ")
        reason = reason.replace(str(choice.folder), choice.name)
        raise UserError(without_paths(f"{choice.name} cannot be asked: {reason}")) from None
    return {**result, "context": context}


def _ask(folder: Path, question: str, context: str, max_answer_length: int | None = None) -> dict:
    """Run `qa_lib.score.predict.ask`, whose module imports torch."""
    from qa_lib.score.predict import ask

    return ask(folder, question, context, max_answer_length)


def _check_text(name: str, text: str, most: int) -> None:
    """Raise UserError for a text that is empty, longer than `most` characters, or half a one."""
    if not text.strip():
        raise UserError(f"Write or paste a {name}.")
    if len(text) > most:
        raise UserError(f"The {name} is longer than {most:,} characters, the limit.")
    if SURROGATE.search(text):
        raise UserError(f"The {name} holds half a character, which no tokenizer takes.")


def typed_number(text: str | None) -> int | str | None:
    """Return the whole number that was typed, or None for an empty text.

    Any other text is returned as it is, for `answer` to refuse.
    """
    text = (text or "").strip()
    if not text:
        return None
    if text.isdecimal() and len(text) <= MAX_DIGITS:
        return int(text)
    return text


# What is shown of an answer


class Kept(NamedTuple):
    """What the page keeps of an answer, by which a moved threshold decides without the model."""

    # The paragraph; "" where nothing was answered.
    context: str = ""
    # Where the best answer begins and ends in it (characters); None where there is none.
    begin: int | None = None
    end: int | None = None
    # The score of "no answer" above that of the best answer; None where there is none.
    margin: float | None = None


def keep(result: dict) -> Kept:
    """Return what the page keeps of what `answer` has returned."""
    context = result["context"]
    margin = result["margin"]
    for entry in result["nbest"]:
        if entry["text"]:
            return Kept(context, entry.get("begin"), entry.get("end"), margin)
    return Kept(context, margin=margin)


def decided(kept: Kept, threshold: float) -> tuple[str, str]:
    """Return the answer that a threshold for "no answer" leaves, and the paragraph as HTML.

    The answer is marked in the paragraph.
    """
    context, begin, end, margin = kept
    has_answer = begin is not None and end is not None and margin is not None
    if not has_answer or margin > threshold:
        return "No answer", f'<div class="text">{escape(context)}</div>'
    text = context[begin:end]
    before = escape(context[:begin])
    after = escape(context[end:])
    return text, f'<div class="text">{before}<mark>{escape(text)}</mark>{after}</div>'


def decided_again(
    context: str,
    begin: float | None,
    end: float | None,
    margin: float | None,
    threshold: float | None,
) -> tuple[Any, Any]:
    """Return what `decided` makes of values as the page sends them: any number may be a float."""
    if threshold is None:  # the number's box is empty
        return gr.skip(), gr.skip()
    kept = Kept(
        context=context,
        begin=None if begin is None else int(begin),
        end=None if end is None else int(end),
        margin=margin,
    )
    return decided(kept, threshold)


def details(result: dict) -> str:
    """Return the margin of "no answer", the best answers and the milliseconds, as HTML."""
    nbest = pd.DataFrame({
        "answer": [entry["text"] or "no answer" for entry in result["nbest"]],
        "score": [f"{entry['score']:.2f}" for entry in result["nbest"]],
        "probability": [f"{entry['probability']:.1%}" for entry in result["nbest"]],
    })  # fmt: skip
    margin = _margin_sentence(result["margin"])
    times = " · ".join(
        f"{part} {milliseconds:.1f} ms" for part, milliseconds in result["ms"].items()
    )
    if result["windows"] > 1:
        times += f" · {result['windows']} windows of up to {result['window_tokens']} tokens"
    return f"<p>{margin}</p>{table_html(nbest, 'few')}<p>{times}</p>"


def _margin_sentence(margin: float | None) -> str:
    if margin is None:
        return "No part of the paragraph can be the answer."
    side = "above" if margin > 0 else "below"
    return f"“No answer” scores {abs(margin):.2f} {side} the best answer."


# The tab


class Card(NamedTuple):
    """What shows one model's answer: components in the page, and their values after a question.

    The last four stay with the page, hidden: they are `Kept`. They are not one value of JSON, since
    a dict in a request could name a file (see gate.py).
    """

    column: Any
    answer: Any
    paragraph: Any
    threshold: Any
    details: Any
    context: Any
    begin: Any
    end: Any
    margin: Any


class ExampleQuestion(NamedTuple):
    """A question that a button fills in."""

    label: str
    context: str
    question: str


def ask_tab(demo: gr.Blocks, models: Choices, max_answer_length: int | None) -> None:
    """Build the tab. Answers have at most so many tokens until the asker says otherwise."""
    listed = models.listed()
    examples = _examples()
    prefilled = examples[0]
    if not listed:
        gr.Markdown(
            "There is no checkpoint to ask yet: "
            "`make quickstart` trains small ones on a CPU in minutes."
        )
    elif listed[0].synthetic:
        prefilled = examples[-1]
        gr.Markdown(INTRODUCTION + OF_SMOKE_MODELS)
    else:
        gr.Markdown(INTRODUCTION)

    first_menu, second_menu = _menus(models)
    with gr.Row():
        first = gr.Dropdown(min_width=280, interactive=True, **first_menu)
        second = gr.Dropdown(min_width=280, interactive=True, **second_menu)
    context = gr.Textbox(prefilled.context, label="Paragraph", lines=4, max_lines=12)
    with gr.Row():
        question = gr.Textbox(prefilled.question, label="Question", scale=4, min_width=200)
        longest = gr.Textbox(  # gr.Number cannot be empty: it sends 0
            str(max_answer_length or ""),
            label="Longest answer",
            placeholder="tokens",
            min_width=110,
        )
    button = gr.Button("Ask", variant="primary", elem_id="ask")
    with gr.Row():
        for example in examples:  # gr.Examples would need a route of its own
            gr.Button(example.label, size="sm").click(
                partial(_texts, example),
                inputs=None,
                outputs=[context, question],
                show_progress="hidden",
                api_visibility="private",
            )
    with gr.Row():
        first_card = _card()
        second_card = _card()

    def on_load() -> list:
        return [gr.update(choices=menu["choices"]) for menu in _menus(models)]

    def on_ask(
        first: str | None, second: str | None, context: str, question: str, longest: str
    ) -> list:
        first_answer = _card_of_answer(models, first or "", context, question, longest)
        second_answer = _hidden_card()
        if second:
            second_answer = _card_of_answer(models, second, context, question, longest)
        return [*first_answer, *second_answer]

    demo.load(
        on_load,
        inputs=None,
        outputs=[first, second],
        show_progress="hidden",
        api_visibility="private",
    )
    asked_by = [button.click, question.submit]
    if listed:
        asked_by.append(demo.load)  # the example is answered before anybody has clicked
    gr.on(
        asked_by,
        on_ask,
        inputs=[first, second, context, question, longest],
        outputs=[*first_card, *second_card],
        # What is asked while the example is being answered is asked afterwards, and not dropped.
        trigger_mode="always_last",
        show_progress_on=question,
        api_visibility="private",
    )


def _menus(models: Choices) -> tuple[dict, dict]:
    """Return what the two menus of models hold now; the second may choose nothing, too."""
    choices = [(choice.name, choice.key) for choice in models.listed()]
    keys = [key for _, key in choices]
    first = {"label": "Model", "choices": choices, "value": keys[0] if keys else None}
    second = {
        "label": "Compare with",
        "choices": [("nothing", ""), *choices],
        "value": "model 2" if "model 2" in keys else "",  # the second that was named
    }
    return first, second


def _examples() -> list[ExampleQuestion]:
    """Return two questions for a pretrained model, then one of words that a smoke model knows."""
    pretrained = pretrained_questions()
    labelled = [
        (pretrained[0], ""),
        (pretrained[-1], " (no answer)"),
        (smoke_question(), " (for smoke models)"),
    ]
    return [
        ExampleQuestion(example.question + note, example.context, example.question)
        for example, note in labelled
    ]


def _texts(example: ExampleQuestion) -> list[str]:
    """Return what the button of an example fills in: the paragraph and the question."""
    return [example.context, example.question]


def _card() -> Card:
    """Build the components of one model's answer, and the event of its slider."""
    with gr.Column(visible=False) as column:
        card = Card(
            column=column,
            answer=gr.Textbox(label="Answer", interactive=False, elem_classes="answer"),
            paragraph=gr.HTML(elem_classes="shown paragraph"),
            threshold=gr.Slider(
                minimum=-10,
                maximum=10,
                precision=3,
                label="Threshold for “no answer”",
                buttons=[],
                interactive=True,
            ),
            details=gr.HTML(elem_classes="shown"),
            context=gr.Textbox(visible=False),
            begin=gr.Number(visible=False),
            end=gr.Number(visible=False),
            margin=gr.Number(visible=False),
        )
    card.threshold.input(
        decided_again,
        inputs=[card.context, card.begin, card.end, card.margin, card.threshold],
        outputs=[card.answer, card.paragraph],
        preprocess=False,  # Gradio takes no empty number for a slider
        trigger_mode="always_last",
        show_progress="hidden",
        api_visibility="private",
    )
    return card


def _card_of_answer(models: Choices, key: str, context: str, question: str, longest: str) -> Card:
    """Ask the model with this key, and return its card: the answer, or instead what is wrong."""
    choice = models.find(key)
    try:
        result = answer(choice, question, context, typed_number(longest))
    except UserError as problem:
        return _card_of_problem(problem, label=choice.name if choice else "Model")
    milliseconds = sum(result["ms"].values())
    threshold = 0.0 if math.isnan(choice.threshold) else round(choice.threshold, 3)
    kept = keep(result)
    text, paragraph = decided(kept, threshold)
    # The slider reaches beyond the threshold and the margin, so that either side can be tried.
    reach = math.ceil(max(10, abs(threshold) + 1, abs(result["margin"] or 0) + 1))
    return Card(
        gr.update(visible=True),
        gr.update(value=text, label=f"{choice.name} · {milliseconds:.0f} ms"),
        gr.update(value=paragraph, visible=True),
        gr.update(value=threshold, minimum=-reach, maximum=reach, visible=True),
        gr.update(value=details(result), visible=True),
        *kept,
    )


def _card_of_problem(problem: UserError, label: str) -> Card:
    """Return the card that says why there is no answer, and shows nothing else."""
    return Card(
        gr.update(visible=True),
        gr.update(value=str(problem), label=label),
        gr.update(visible=False),
        gr.update(visible=False),
        gr.update(visible=False),
        *Kept(),
    )


def _hidden_card() -> Card:
    """Return the card of a model that is not asked."""
    hidden = gr.update(visible=False)
    return Card(hidden, hidden, hidden, hidden, hidden, *Kept())
