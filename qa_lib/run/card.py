"""The card of a kept model, which a run writes beside the weights: the model says what it is.

The card is README.md, all of it from the record. Its metadata names base model and data where these
are of the Hugging Face hub, and has the scores as `model-index`. For data of the hub they stand in
.eval_results/ as well, the hub's evaluation results, by which it lists models at a data set.
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
CARD = "README.md"  # not in SHA256SUMS: its owner may well write more into it
TEMPLATE = Path(__file__).with_name("model_card.md")


def check_own(folder: Path, run_id: str) -> None:
    """Check that saving the run's model into `folder` replaces no other model.

    Raises UserError for a folder with files that does not say that it is that run's.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    card = folder / CARD  # models of an older version have none
    names_run = True
    if card.is_file():
        names_run = run_id in card.read_text(encoding="utf-8", errors="replace")
    if not (folder / SUMS).is_file() or not names_run:
        raise UserError(
            f"{folder} does not name run {run_id}, and would be replaced by what it saves: "
            "move it elsewhere"
        )


def write_card(folder: Path, entry: dict) -> None:
    """Write into a model's folder its card and, for data of the hub, the evaluation results.

    Raises RecordError when the disk is full.
    """
    card = model_card(entry, eval_results(entry))
    write_atomically(folder / CARD, f"{card}\n")
    for name, content in results_files(entry).items():
        writable_folder(folder / RESULTS)
        write_atomically(folder / name, content)


def results_files(entry: dict) -> dict[str, bytes]:
    """Return the file of a run's evaluation results, by its path in the model's folder.

    There is none for data that is not of the hub.
    """
    _, data = hub_names(entry)
    if not data:
        return {}
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
    # Others than letters, digits and "-_." are in a record that somebody else has written.
    file = re.sub(r"[^\w.-]", "-", name.rpartition("/")[2])[:96]
    return {f"{RESULTS}/{file}.yaml": yaml_dump(eval_result_entries_to_yaml(entries)).encode()}


def hub_names(entry: dict) -> tuple[str | None, str | None]:
    """Return the names on the hub of a run's base model and data; None for what is not there.

    A record shows that: folders go by the last part of their path, and a model's revision has 12
    digits unless it is a commit of the hub.
    """
    model = entry["model"]
    is_hub_model = model["revision"] == "main" or len(model["revision"]) == 40
    data = entry["data"]["name"]
    is_presets_own = data == entry["spec"]["preset"]["data"]
    is_hub_data = "/" in data or (is_presets_own and not data.startswith("synthetic:"))
    return model["name"] if is_hub_model else None, data if is_hub_data else None


def eval_results(entry: dict) -> list[EvalResult]:
    """Return the scores of a run that the hub has names for."""
    card = TASKS[entry["task"]["name"]].card
    data = entry["data"]["name"]
    results = []
    for name, kind in card.metrics.items():
        value = entry["quality"][name]
        if value is None:
            continue
        results.append(
            EvalResult(
                task_type=card.pipeline_tag,
                dataset_type=data,
                dataset_name=data,
                dataset_split="validation",
                metric_type=kind,
                metric_name=name,
                metric_value=round(value, 4),
            )
        )
    return results


def model_card(entry: dict, results: list[EvalResult]) -> ModelCard:
    """Return the card of the model that a run has kept, by its record and these scores."""
    card = TASKS[entry["task"]["name"]].card
    base, data = hub_names(entry)
    metadata = ModelCardData(
        base_model=base,
        datasets=[data.partition(":")[0]] if data else data,
        pipeline_tag=card.pipeline_tag,
        library_name="transformers",
        model_name=entry["run_id"],
        eval_results=results,
    )
    variant = VARIANTS.get(entry["spec"]["variant"])
    return ModelCard.from_template(
        metadata,
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        entry=entry,
        base=entry["model"]["name"],
        data=entry["data"]["name"],
        why=variant.why if variant else "of another version",
        **vars(card),
    )
