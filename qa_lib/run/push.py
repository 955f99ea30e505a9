"""A run's model to the Hugging Face hub, with its card: into a private repository unless it is to be public."""

import argparse
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id

from qa_lib import record
from qa_lib.errors import UserError, first_line
from qa_lib.model.hf_checkpoint import inspect_checkpoint
from qa_lib.run.model_card import CARD, write_card


def push(run_dir: Path, repo: str, public: bool = False, add: bool = False) -> str:
    """Upload the model that a run has kept to `repo`, as in "me/bert-squad", and return its address.

    A repository that exists is left alone unless `add`, and one that is public unless `public`, too. Raises UserError
    for a run without a model or whose model is not the one that it saved, without a token, and for what the hub or the
    network refuses; RunTaken while a process works on the run.
    """
    entry, folder = record.read_record(run_dir), run_dir / "model"
    if not folder.is_dir():
        raise UserError(f"{run_dir}: no model/ in it; a run keeps its model at a preset that measures quality")
    if entry["status"] != "ok":
        raise UserError(f"{run_dir}: it has ended as {entry['status']!r}; its model is not that of a whole run")
    try:
        validate_repo_id(repo)
        _, _ = repo.split("/")
    except ValueError:  # as the hub's own error is, and that of too few parts
        raise UserError(f"{repo!r} is no name of the hub with its owner, as in me/bert-squad") from None
    if not get_token():
        raise UserError("no token for the hub: type `hf auth login`, or set HF_TOKEN to one that may write")
    with record.lock(run_dir):  # or a run that is done again might replace the model meanwhile
        inspect_checkpoint(folder)
        if not (folder / CARD).exists():  # of a run from before there were cards
            write_card(folder, entry)
        try:
            return _upload(folder, repo, public, add, f"Add the model of run {entry['run_id']}")
        except UserError:
            raise
        except Exception as problem:  # of the hub, the network by whichever library, the disk or the card
            raise UserError(f"{repo}: not uploaded: {_reason(problem)}") from None


def _upload(folder: Path, repo: str, public: bool, add: bool, message: str) -> str:
    api = HfApi()
    try:
        api.create_repo(repo, private=not public)
    except HfHubHTTPError as problem:
        if problem.response.status_code != 409:
            raise
        if not add:
            raise UserError(f"{repo} is there already: give another name, or --add to upload into it") from None
        if not public and not api.model_info(repo).private:
            raise UserError(f"{repo} is public: --add --public uploads into it") from None
    api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
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
