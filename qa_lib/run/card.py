"""The card of a kept model, and its scores in the hub's format of evaluation results.

A run writes both beside the weights when it keeps its model (fit.py), and the verb `push` writes
them anew. All that they say comes from the run's record, which is `entry` here.

The card is README.md. Its metadata has the scores as `model-index`, and names the base model and
the data if these are on the Hugging Face hub. For data on the hub, the scores are in .eval_results/
as well: the hub reads them there when it lists models on the page of a data set.
"""

import re
from pathlib import Path

from huggingface_hub import (
    EvalResult,
    EvalResultEntry,
    ModelCard,
    ModelCardData,
    eval_result_entries_to_yaml,
)
from huggingface_hub.utils import yaml_dump

from qa_lib.errors import UserError
from qa_lib.model.hf_checkpoint import SUMS
from qa_lib.records.files import writable_folder, write_atomically
from qa_lib.spec.tasks import TASKS
from qa_lib.spec.variants import VARIANTS

RESULTS = ".eval_results"  # folder of the hub's evaluation results
CARD = "README.md"  # has no digest in SHA256SUMS, so that its owner can add to it
COMMIT_DIGITS = 40  # of a revision that is a commit of the hub; another revision has fewer
TEMPLATE = Path(__file__).with_name("model_card.md")


def check_own(folder: Path, run_id: str) -> None:
    """Check that `folder`, which the run will replace by its model, has nothing of anybody else.

    Raises UserError for a folder with files, unless it is a saved model (it has digests) whose card
    names the run.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    is_saved_model = (folder / SUMS).is_file()
    card = folder / CARD
    # Older versions saved no card, so that a model without one may be this run's.
    names_run = True
    if card.is_file():
        names_run = run_id in card.read_text(encoding="utf-8", errors="replace")
    if not is_saved_model or not names_run:
        raise UserError(
            f"{folder} does not name run {run_id}, and would be replaced by what it saves: "
            "move it elsewhere"
        )


def write_card(folder: Path, entry: dict) -> None:
    """Write a model's card into its folder and, for data on the hub, the evaluation results.

    Raises RecordError when the disk is full.
    """
    write_atomically(folder / CARD, f"{model_card(entry)}\n")
    for path, content in results_files(entry).items():
        writable_folder(folder / RESULTS)
        write_atomically(folder / path, content)


def results_files(entry: dict) -> dict[str, bytes]:
    """Return the evaluation results of a run as {path in the model's folder: content}.

    This is one file, or none for data that is not on the hub.
    """
    _, data = hub_names(entry)
    if not data:
        return {}
    # For example Salesforce/wikitext:wikitext-2-v1.
    name, _, config = data.partition(":")
    entries = []
    for result in eval_results(entry):
        entries.append(
            EvalResultEntry(
                dataset_id=name,
                task_id=config or "default",
                date=entry["time"]["started"][:10],
                value=result.metric_value,
                notes=result.metric_name,
            )
        )
    # The name becomes a file's. It may be of any length and characters in a record that somebody
    # else has written.
    stem = re.sub(r"[^\w.-]", "-", name.rpartition("/")[2])[:96]
    content = yaml_dump(eval_result_entries_to_yaml(entries))
    return {f"{RESULTS}/{stem}.yaml": content.encode()}


def hub_names(entry: dict) -> tuple[str | None, str | None]:
    """Return the hub's names of a run's base model and of its data, each None if not on the hub.

    A record has names without places; the form of its entries tells where they are from.
    """
    model = entry["model"]
    # The revision is "main" when the hub could not be reached. Models of other places have a hash.
    is_hub_model = model["revision"] == "main" or len(model["revision"]) == COMMIT_DIGITS
    model_name = model["name"] if is_hub_model else None

    data = entry["data"]["name"]
    # A folder is recorded by the last part of its path, so that a slash is that of OWNER/NAME. A
    # preset names only data that is generated or on the hub, perhaps without an owner.
    is_of_preset = data == entry["spec"]["preset"]["data"]
    is_hub_data = "/" in data or (is_of_preset and not data.startswith("synthetic:"))
    data_name = data if is_hub_data else None

    return model_name, data_name


def eval_results(entry: dict) -> list[EvalResult]:
    """Return the scores of a run that the hub has names for."""
    hub_card = TASKS[entry["task"]["name"]].card
    data = entry["data"]["name"]
    results = []
    for name, hub_metric in hub_card.metrics.items():
        value = entry["quality"][name]
        if value is None:
            continue
        results.append(
            EvalResult(
                task_type=hub_card.pipeline_tag,
                dataset_type=data,
                dataset_name=data,
                dataset_split="validation",
                metric_type=hub_metric,
                metric_name=name,
                metric_value=round(value, 4),
            )
        )
    return results


def model_card(entry: dict) -> ModelCard:
    """Return the card of the model that a run has kept."""
    hub_card = TASKS[entry["task"]["name"]].card
    hub_model, hub_data = hub_names(entry)
    metadata = ModelCardData(
        base_model=hub_model,
        datasets=[hub_data.partition(":")[0]] if hub_data else None,
        pipeline_tag=hub_card.pipeline_tag,
        library_name="transformers",
        model_name=entry["run_id"],
        eval_results=eval_results(entry),
    )
    # A record of another version may have a variant that is not in this one.
    variant = VARIANTS.get(entry["spec"]["variant"])
    return ModelCard.from_template(
        metadata,
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        entry=entry,
        base=entry["model"]["name"],
        data=entry["data"]["name"],
        why=variant.why if variant else "of another version",
        purpose=hub_card.purpose,
        loader=hub_card.loader,
    )
