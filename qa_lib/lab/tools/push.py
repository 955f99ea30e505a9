"""The model of a run on its way to the Hugging Face hub.

The verb `push` uploads the files of the checkpoint and its card (run/card.py) into a private
repository, unless that is to be public, and nothing else that lies in the folder.
"""

import argparse
import os
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import get_token, validate_repo_id

from qa_lib.errors import UserError, first_line, printable
from qa_lib.model.hf_checkpoint import SAVED, inspect_checkpoint
from qa_lib.records import record
from qa_lib.records.files import writable_folder
from qa_lib.run.card import CARD, RESULTS, results_files, write_card


def push(run_dir: Path, repo: str, public: bool = False, add: bool = False, say=print) -> str:
    """Upload the model that a run has kept to `repo`, as in "me/bert-squad"; return its address.

    The repository is made, private unless `public`. One that exists already is uploaded into with
    `add` alone, and if it is public with `public` as well. `say` gets a line with the names of what
    else lies in the folder, which is not uploaded.

    Raises UserError for a run that has kept no model, or another one than it saved, for want of a
    token, and for what the hub or the network refuses; RunTaken while a process works on the run.
    """
    entry = record.read_record(run_dir)
    _check_run(run_dir, entry)
    _check_repo(repo)
    _check_token()
    with record.lock(run_dir):  # or a run that is done again might replace the model meanwhile
        paths = _paths_to_push(run_dir / "model", entry, say)
        try:
            files = {path.name: path for path in paths} | results_files(entry)
            message = f"Add the model of run {entry['run_id']}"
            return _upload(files, repo, public=public, add=add, message=message)
        except UserError:
            raise
        except Exception as problem:  # of the hub, whichever network library, the disk or the card
            raise UserError(f"{repo}: not uploaded: {_reason(problem)}") from None


def _check_run(run_dir: Path, entry: dict) -> None:
    """Raise UserError where a run has kept no model, or not that of a whole run."""
    if not (run_dir / "model").is_dir():
        raise UserError(
            f"{run_dir}: no model/ in it; a run keeps its model at a preset that measures quality"
        )
    if entry["status"] != "ok":
        raise UserError(
            f"{run_dir}: it has ended as {entry['status']!r}; its model is not that of a whole run"
        )


def _check_repo(repo: str) -> None:
    """Raise UserError for what is no OWNER/NAME of the hub."""
    try:
        validate_repo_id(repo)
        is_owned = repo.count("/") == 1
    except ValueError:  # as the hub's own error is
        is_owned = False
    if not is_owned:
        raise UserError(f"{repo!r} is no name of the hub with its owner, as in me/bert-squad")


def _check_token() -> None:
    """Raise UserError where this user has no token for the hub."""
    if not get_token():
        raise UserError(
            "no token for the hub: type `hf auth login`, or set HF_TOKEN to one that may write"
        )


def _paths_to_push(folder: Path, entry: dict, say) -> list[Path]:
    """Return the files of a run's model that are uploaded, after writing its card if it has none.

    `say` gets the names of what else is in the folder. Raises UserError for a folder that is no
    whole checkpoint, is not what its SHA256SUMS say, or is a link or has one in the checkpoint.
    """
    writable_folder(folder)
    weights = inspect_checkpoint(folder).weights
    if not os.path.lexists(folder / CARD):  # of a run from before there were cards
        write_card(folder, entry)
    paths, others = _sorted_out(folder, weights)
    if others:
        names = ", ".join(path.name for path in others)
        say(printable(f"not uploaded, since no files of a checkpoint: {names:.200}"))
    return paths


def _sorted_out(folder: Path, weights: list[Path]) -> tuple[list[Path], list[Path]]:
    """Return the files of a model's folder that are uploaded, and what else is in it.

    The former are the card and the files that a checkpoint with these `weights` may have; the
    latter are links, folders, and files of other names. Raises UserError where a file of the
    checkpoint is a link, without which it would not be whole.
    """
    checkpoint = {*(path.name for path in weights), *SAVED}
    files = []
    others = []
    for path in sorted(folder.iterdir()):
        if path.name in checkpoint and path.is_symlink():
            raise UserError(
                f"{path} is a link, and links are not uploaded: put a copy of the file in its place"
            )
        is_file = path.is_file() and not path.is_symlink()
        if is_file and path.name in {*checkpoint, CARD}:
            files.append(path)
        elif path.name != RESULTS:  # `results_files` makes it anew
            others.append(path)
    return files, others


def _upload(
    files: dict[str, Path | bytes], repo: str, public: bool, add: bool, message: str
) -> str:
    """Commit files to a repository, which is made if need be, and return its address.

    `files` are paths, or contents, by their paths in the repository. Raises UserError for a
    repository that exists and that `add` and `public` do not ask for.
    """
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
    """Return in words why the hub or the network failed, and what to do."""
    if isinstance(problem, HfHubHTTPError) and problem.response.status_code in (401, 403):
        return "the hub refuses the token: type `hf auth login`, with one that may write there"
    said = f"{type(problem).__name__}: {first_line(problem):.160}"
    return f"{said} (to try again where the repository has been made by now, give --add)"


def main(args: argparse.Namespace) -> int:
    """Upload one run's model, and say where it is."""
    print(push(args.run, args.repo, args.public, args.add))
    return 0
