"""What identifies the data and the model of a run: a name, and a hash of the contents.

The name has no folders of a machine. Both are part of a run's hash, so that the same run has the
same id on every machine. `plan` takes them, and a run compares what it has loaded with them
(`check_planned`).
"""

import codecs
import contextlib
import dataclasses
import hashlib
import os
from pathlib import Path

from qa_lib.data.files import DataError, hash_files, read_json
from qa_lib.data.synthetic import TINY_CONFIG, vocabulary
from qa_lib.errors import UserError
from qa_lib.model.hf_checkpoint import ModelFolder, inspect_source
from qa_lib.run.tasks import WORKFLOWS
from qa_lib.spec.shapes import find_shape
from qa_lib.spec.spec import Spec, sha256_of_json

ANSWER_S = 5  # seconds in which the hub has to answer
REVISION_DIGITS = 12  # of a model's hash; a commit of the hub has 40


def go_offline_without_network(*sources: str) -> None:
    """Have the hub's library look into its cache alone, if the hub does not answer.

    The hub is asked only where one of the sources is of the hub. What is found holds in this
    process and in those that it starts. Else the library would ask the hub again and again, for
    half a minute, before it looks into its cache.
    """
    if not any(_is_of_hub(source) for source in sources):
        return
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_S)
    except Exception:  # of whichever library it uses
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"


def _is_of_hub(source: str) -> bool:
    """Return whether data or a model has to come from the hub, or from its library's cache."""
    is_made_here = source == "tiny" or source.startswith(("synthetic:", "gpt2:"))
    return not is_made_here and not Path(source).exists()


def without_folders(source: str) -> str:
    """Return the name of data or a model in a record: of a path its last part, else the source."""
    return Path(os.path.abspath(source)).name if Path(source).exists() else source


# Data.


def identify_data(source: str, with_validation: bool, task: str = "qa") -> dict:
    """Return {name, sha256} of the questions, or text, that a run uses.

    Raises DataError for data that cannot be read or are empty, and UserError where training and
    validation are the same, and for a file of a kind that nothing here reads.
    """
    if task == "qa" and os.path.isfile(source):
        _check_is_json(Path(source))
    splits = ["train", "validation"] if with_validation else ["train"]
    opened = [WORKFLOWS[task].open_source(source, split) for split in splits]
    for part in opened:
        if os.path.isfile(part.name) and not os.path.getsize(part.name):
            raise DataError(f"{part.name}: an empty {'file' if task == 'qa' else 'text'}")
    hashes = [part.sha256 for part in opened]
    if len(hashes) > len(set(hashes)):
        if task == "qa":
            # This raises DataError, which is to be told first, for what is no JSON or no questions.
            _ = opened[0].examples
        content = "questions" if task == "qa" else "text"
        raise UserError(
            f"{source}: would be trained on and scored by the same {content}; "
            "--data takes a folder with train.json and validation.json, or .txt"
        )
    return {"name": without_folders(source), "sha256": _joined(hashes)}


def _check_is_json(path: Path) -> None:
    """Raise UserError for a file of questions that looks like another format than JSON.

    It does by the ending .jsonl, or by its first character. One that is called .json passes, and so
    does an empty one: what is wrong with their content is told where that is read.
    """
    with path.open("rb") as stream:
        begin = stream.read(1000).removeprefix(codecs.BOM_UTF8).strip()
    ending = path.suffix.lower()
    if ending == ".json" or not begin:
        return
    if ending == ".jsonl" or begin[:1] not in b"{[":
        what = f"a {ending} file" if ending else "no JSON file"
        raise UserError(
            f"{path}: {what}, and --data takes SQuAD's format: a folder with train.json and "
            "validation.json (docs/own-model.md)"
        )


def _joined(hashes: list[str]) -> str:
    """Return one hash for those of a run's sources, of training before validation."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


# Models.


def identify_model(source: str) -> dict:
    """Return {name, revision} of a model; see `inspect_model`."""
    identity, _ = inspect_model(source)
    return identity


def inspect_model(source: str) -> tuple[dict, dict]:
    """Return a model's identity, and what its config.json says.

    The identity is {name, revision}: of a folder by the contents of its files, of the tiny model
    and a shape by their definition, of a model of the hub its commit. The config is empty for a
    model of the hub that cannot be had now. Raises UserError for what is none of these, and for a
    folder that must not be read.
    """
    if source == "tiny":
        revision = sha256_of_json([TINY_CONFIG, vocabulary()])[:REVISION_DIGITS]
        return {"name": source, "revision": revision}, {"model_type": "bert", **TINY_CONFIG}
    shape = find_shape(source)
    if shape:
        revision = sha256_of_json(dataclasses.asdict(shape))[:REVISION_DIGITS]
        config = {
            "model_type": "gpt2",
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
        }
        return {"name": source, "revision": revision}, config
    folder = inspect_source(source)
    if folder:
        return identity_of(folder), folder.config
    return _inspect_hub(source)


def identity_of(folder: ModelFolder) -> dict:
    """Return {name, revision} of a model's folder, whose files are read."""
    name = without_folders(str(folder.path))
    return {"name": name, "revision": hash_files(folder.files)[:REVISION_DIGITS]}


def _inspect_hub(source: str) -> tuple[dict, dict]:
    """Return the identity and config of a model of the hub.

    Its revision is the commit that is loaded now, "main" where neither the hub nor its cache can
    say. Raises UserError for what is a path, or no name that the hub could have.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    is_path = (
        source.startswith((".", "/", "~"))
        or source.endswith("/")
        or source.count("/") > 1
        or os.path.isdir(os.path.dirname(source))
    )
    if is_path:
        raise UserError(f"model folder {source} does not exist")
    try:
        validate_repo_id(source)
    except HFValidationError as error:
        raise UserError(
            f"model {source!r} is neither a folder nor a name of the hub: {error}"
        ) from None
    try:
        snapshot = Path(snapshot_download(source, allow_patterns=["config.json"]))
    except Exception:  # of the hub, the network or the disk
        return {"name": source, "revision": "main"}, {}
    file = snapshot / "config.json"
    config = read_json(file) if file.exists() else {}
    return {"name": source, "revision": snapshot.name}, config


def check_planned(spec: Spec, hashes: list[str], folder: ModelFolder | None) -> None:
    """Compare what was loaded with what a spec was planned with.

    `hashes` are those of the loaded sources; `folder` is the model's, whose files are read again,
    or None for a model that is in no folder. Raises UserError, which names the file that was
    written last, where they differ.
    """
    if not spec.preset.quality and _joined(hashes) != spec.data.get("sha256"):
        # The preset scores nothing, but the data may have been identified with their validation.
        with contextlib.suppress(DataError):
            open_source = WORKFLOWS[spec.preset.task].open_source
            hashes = [*hashes, open_source(spec.data_source, "validation").sha256]
    if _joined(hashes) != spec.data.get("sha256"):
        raise UserError(_other_than_planned(spec.data_source))
    model = identity_of(folder) if folder else identify_model(spec.model_source)
    if model != spec.model:
        raise UserError(_other_than_planned(spec.model_source))


def _other_than_planned(source: str) -> str:
    """Return the message for data or a model that has changed since the plan."""
    paths = [Path(source), *Path(source).rglob("*")]
    files = [path for path in paths if path.is_file()]
    last = max(files, key=lambda path: path.stat().st_mtime_ns, default=Path(source)).name
    return (
        f"{source} is not what the run was planned with (its file that was written last: {last}); "
        "give the command again"
    )
