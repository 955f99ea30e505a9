"""A run's model on its way to the Hugging Face hub: its card, and the upload.

The card is README.md beside a kept model's weights, all of it from the record. Its metadata names base model and data
where these are of the hub, and has the scores as `model-index`. For data of the hub they stand in .eval_results/ as
well, the hub's evaluation results, by which it lists models at a data set. Every kept model has a card; the verb `push`
uploads both, into a private repository unless it is to be public, and nothing else that lies in the folder.
"""

import argparse
import os
import re
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    EvalResult,
    EvalResultEntry,
    HfApi,
    ModelCard,
    ModelCardData,
    eval_result_entries_to_yaml,
)
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import get_token, validate_repo_id, yaml_dump

from qa_lib.errors import UserError, first_line, printable
from qa_lib.model.hf_checkpoint import SAVED, SUMS, inspect_checkpoint
from qa_lib.records import record
from qa_lib.records.files import writable_folder, write_atomically
from qa_lib.spec.tasks import TASKS
from qa_lib.spec.variants import VARIANTS

RESULTS = ".eval_results"  # folder of the hub's evaluation results
CARD = "README.md"  # not in SHA256SUMS: its owner may well write more into it
TEMPLATE = Path(__file__).with_name("model_card.md")


def check_own(folder: Path, run_id: str) -> None:
    """Raises UserError where saving the run's model into `folder` would replace what does not say that it is that
    run's."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    card = folder / CARD  # models of an older version have none
    if not (folder / SUMS).is_file() or (
        card.is_file() and run_id not in card.read_text(encoding="utf-8", errors="replace")
    ):
        raise UserError(
            f"{folder} does not name run {run_id}, and would be replaced by what it saves: move it elsewhere"
        )


def write_card(folder: Path, entry: dict) -> None:
    """Write into a model's folder its card and, for data of the hub, the evaluation results. Raises RecordError when
    the disk is full."""
    write_atomically(folder / CARD, f"{model_card(entry, eval_results(entry))}\n")
    for name, content in results_files(entry).items():
        writable_folder(folder / RESULTS)
        write_atomically(folder / name, content)


def results_files(entry: dict) -> dict[str, bytes]:
    """The file of a run's evaluation results, by its path in the model's folder; none for data that is not of the
    hub."""
    _, data = hub_names(entry)
    if not data:
        return {}
    name, _, config = data.partition(":")
    about = {
        "dataset_id": name,
        "task_id": config or "default",
        "date": entry["time"]["started"][:10],
    }
    entries = [
        EvalResultEntry(**about, value=one.metric_value, notes=one.metric_name)
        for one in eval_results(entry)
    ]
    # A data set's name has letters, digits and "-_." but in a record that somebody else has written.
    file = re.sub(r"[^\w.-]", "-", name.rpartition("/")[2])[:96]
    return {f"{RESULTS}/{file}.yaml": yaml_dump(eval_result_entries_to_yaml(entries)).encode()}


def hub_names(entry: dict) -> tuple[str | None, str | None]:
    """The names of a run's base model and of its data on the hub, None for what is from elsewhere. A record says it so:
    folders go by the last part of their path, and a model's revision has 12 digits unless it is a commit of the hub."""
    model, data = entry["model"], entry["data"]["name"]
    of_hub = "/" in data or (
        data == entry["spec"]["preset"]["data"] and not data.startswith("synthetic:")
    )
    base = model["name"] if model["revision"] == "main" or len(model["revision"]) == 40 else None
    return base, data if of_hub else None


def eval_results(entry: dict) -> list[EvalResult]:
    """The scores that the hub has names for."""
    card, data = TASKS[entry["task"]["name"]].card, entry["data"]["name"]
    about = {
        "task_type": card.pipeline_tag,
        "dataset_type": data,
        "dataset_name": data,
        "dataset_split": "validation",
    }
    return [
        EvalResult(**about, metric_type=kind, metric_name=name, metric_value=round(value, 4))
        for name, kind in card.metrics.items()
        if (value := entry["quality"][name]) is not None
    ]


def model_card(entry: dict, results: list[EvalResult]) -> ModelCard:
    """The card of the model that a run has kept, by its record and these scores."""
    card, (model, data) = TASKS[entry["task"]["name"]].card, hub_names(entry)
    metadata = ModelCardData(
        base_model=model,
        datasets=data and [data.partition(":")[0]],
        pipeline_tag=card.pipeline_tag,
        library_name="transformers",
        model_name=entry["run_id"],
        eval_results=results,
    )
    variant = VARIANTS.get(entry["spec"]["variant"])
    names = {
        "entry": entry,
        "base": entry["model"]["name"],
        "data": entry["data"]["name"],
        **vars(card),
    }
    names |= {"why": variant.why if variant else "of another version"}
    return ModelCard.from_template(
        metadata, template_str=TEMPLATE.read_text(encoding="utf-8"), **names
    )


def push(run_dir: Path, repo: str, public: bool = False, add: bool = False, say=print) -> str:
    """Upload the model that a run has kept to `repo`, as in "me/bert-squad", and return its address.

    What goes there are the files of a checkpoint, by their names, and the card; `say` is told what else is in the
    folder. A repository that exists is left alone unless `add`, and one that is public unless `public`, too. Raises
    UserError for a run without a model or whose model is not the one that it saved, without a token, and for what the
    hub or the network refuses; RunTaken while a process works on the run.
    """
    entry, folder = record.read_record(run_dir), run_dir / "model"
    if not folder.is_dir():
        raise UserError(
            f"{run_dir}: no model/ in it; a run keeps its model at a preset that measures quality"
        )
    if entry["status"] != "ok":
        raise UserError(
            f"{run_dir}: it has ended as {entry['status']!r}; its model is not that of a whole run"
        )
    try:
        validate_repo_id(repo)
        _, _ = repo.split("/")
    except ValueError:  # as the hub's own error is, and that of too few parts
        raise UserError(
            f"{repo!r} is no name of the hub with its owner, as in me/bert-squad"
        ) from None
    if not get_token():
        raise UserError(
            "no token for the hub: type `hf auth login`, or set HF_TOKEN to one that may write"
        )
    with record.lock(run_dir):  # or a run that is done again might replace the model meanwhile
        writable_folder(folder)
        _, weights = inspect_checkpoint(folder)
        if not os.path.lexists(folder / CARD):  # of a run from before there were cards
            write_card(folder, entry)
        paths, others = files_to_push(folder, weights)
        if others:
            names = ", ".join(path.name for path in others)
            say(printable(f"not uploaded, since no files of a checkpoint: {names:.200}"))
        try:
            files = {path.name: path for path in paths} | results_files(entry)
            return _upload(files, repo, public, add, f"Add the model of run {entry['run_id']}")
        except UserError:
            raise
        except (
            Exception
        ) as problem:  # of the hub, the network by whichever library, the disk or the card
            raise UserError(f"{repo}: not uploaded: {_reason(problem)}") from None


def files_to_push(folder: Path, weights: list[Path]) -> tuple[list[Path], list[Path]]:
    """The files of a model's folder that a checkpoint with such weights has, the card among them; and what else is in
    it: links, folders, and files of other names. Raises UserError where a file of the checkpoint is a link, without
    which it would not be whole."""
    own = {*(path.name for path in weights), *SAVED}
    files, others = [], []
    for path in sorted(folder.iterdir()):
        is_file = path.is_file() and not path.is_symlink()
        if path.name in own and path.is_symlink():
            raise UserError(
                f"{path} is a link, and links are not uploaded: put a copy of the file in its place"
            )
        if is_file and path.name in {*own, CARD}:
            files.append(path)
        elif path.name != RESULTS:  # made anew of the record
            others.append(path)
    return files, others


def _upload(
    files: dict[str, Path | bytes], repo: str, public: bool, add: bool, message: str
) -> str:
    api = HfApi()
    try:
        api.create_repo(repo, private=not public)
    except HfHubHTTPError as problem:
        if problem.response.status_code != 409:
            raise
        if not add:
            raise UserError(
                f"{repo} is there already: give another name, or --add to upload into it"
            ) from None
        if not public and not api.model_info(repo).private:
            raise UserError(f"{repo} is public: --add --public uploads into it") from None
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    api.create_commit(repo, operations, commit_message=message)
    return f"{api.endpoint}/{repo}"


def _reason(problem: Exception) -> str:
    """Why an upload has failed, and what to do."""
    if isinstance(problem, HfHubHTTPError) and problem.response.status_code in (401, 403):
        return "the hub refuses the token: type `hf auth login`, with one that may write there"
    return f"{type(problem).__name__}: {first_line(problem):.160} (give it again with --add where it has begun)"


def main(args: argparse.Namespace) -> int:
    """Upload one run's model, and say where it is."""
    print(push(args.run, args.repo, args.public, args.add))
    return 0
