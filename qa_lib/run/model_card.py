"""The card of a kept model: README.md beside its weights, as the Hugging Face hub shows it, all of it from the record.

Its metadata names base model and data where these are of the hub, and has the scores as `model-index`. For data of the
hub they stand in .eval_results/ as well, the hub's evaluation results, by which it lists models at a data set.
"""

from pathlib import Path

from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.utils import yaml_dump

from qa_lib.errors import UserError
from qa_lib.model.hf_checkpoint import SUMS
from qa_lib.record import write_atomically
from qa_lib.variants import TASKS, VARIANTS

CARD = "README.md"  # not in SHA256SUMS: its owner may well write more into it
TEMPLATE = Path(__file__).with_suffix(".md")


def check_own(folder: Path, run_id: str) -> None:
    """Raises UserError where saving the run's model into `folder` would replace what does not say that it is that
    run's."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    card = folder / CARD  # models of an older version have none
    if not (folder / SUMS).is_file() or (card.is_file() and run_id not in card.read_text(errors="replace")):
        raise UserError(
            f"{folder} does not name run {run_id}, and would be replaced by what it saves: move it elsewhere"
        )


def write_card(folder: Path, entry: dict) -> None:
    """Write into a model's folder its card and, for data of the hub, the evaluation results. Raises RecordError when
    the disk is full."""
    results, (_, data) = eval_results(entry), hub_names(entry)
    write_atomically(folder / CARD, f"{model_card(entry, results)}\n")
    if data:
        name, _, config = data.partition(":")
        about = {"dataset_id": name, "task_id": config or "default", "date": entry["time"]["started"][:10]}
        entries = [EvalResultEntry(**about, value=one.metric_value, notes=one.metric_name) for one in results]
        path = folder / ".eval_results" / f"{name.rpartition('/')[2]}.yaml"
        write_atomically(path, yaml_dump(eval_result_entries_to_yaml(entries)))


def hub_names(entry: dict) -> tuple[str | None, str | None]:
    """The names of a run's base model and of its data on the hub, None for what is from elsewhere. A record says it so:
    folders go by the last part of their path, and a model's revision has 12 digits unless it is a commit of the hub."""
    model, data = entry["model"], entry["data"]["name"]
    of_hub = "/" in data or (data == entry["spec"]["preset"]["data"] and not data.startswith("synthetic:"))
    base = model["name"] if model["revision"] == "main" or len(model["revision"]) == 40 else None
    return base, data if of_hub else None


def eval_results(entry: dict) -> list[EvalResult]:
    """The scores that the hub has names for."""
    card, data = TASKS[entry["task"]["name"]]["card"], entry["data"]["name"]
    about = {
        "task_type": card["pipeline_tag"],
        "dataset_type": data,
        "dataset_name": data,
        "dataset_split": "validation",
    }
    return [
        EvalResult(**about, metric_type=kind, metric_name=name, metric_value=round(value, 4))
        for name, kind in card["metrics"].items()
        if (value := entry["quality"][name]) is not None
    ]


def model_card(entry: dict, results: list[EvalResult]) -> ModelCard:
    """The card of the model that a run has kept, by its record and these scores."""
    card, (model, data) = TASKS[entry["task"]["name"]]["card"], hub_names(entry)
    metadata = ModelCardData(
        base_model=model,
        datasets=data and [data.partition(":")[0]],
        pipeline_tag=card["pipeline_tag"],
        library_name="transformers",
        model_name=entry["run_id"],
        eval_results=results,
    )
    variant = VARIANTS.get(entry["spec"]["variant"])
    names = {"entry": entry, "base": entry["model"]["name"], "data": entry["data"]["name"], **card}
    names |= {"why": variant.why if variant else "of another version"}
    return ModelCard.from_template(metadata, template_str=TEMPLATE.read_text(encoding="utf-8"), **names)
