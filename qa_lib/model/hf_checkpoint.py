"""A model's folder, which somebody else may have written: read as data, and checked before use.

transformers follows what a folder says: an index may name pickles and files elsewhere, a config may
ask for code from the hub, for kernels or for a million layers. Training and answering therefore
take a folder through this one door. Its weights are safetensors within the folder, of the names and
sizes that its config says; a folder that this lab has kept holds the digests of its files as well
(SHA256SUMS, for `sha256sum -c`), by which a flipped bit and an added file are found.
`ModelFolder.files` lists what decides a model and its tokens, which is what identifies it.

Looking needs no torch; loading (model/load.py) does. A folder is looked at once, by
`inspect_checkpoint`, and the ModelFolder that this returns is handed on to whatever reads it.
"""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from qa_lib.data.files import read_json, sha256_of
from qa_lib.errors import UserError, first_line
from qa_lib.records.files import writable_folder
from qa_lib.spec.shapes import find_shape

INDEX = "model.safetensors.index.json"
SUMS = "SHA256SUMS"
QUANTIZED = "quantized.safetensors"  # a name that transformers does not take for plain weights
# What transformers reads of a folder beside its weights.
READ = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",  # tokenizer.json may have a version in its name
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "*.model",
    "tekken.json",
    "chat_template.jinja",
)

# What a tokenizer of transformers saves beside tokenizer.json and tokenizer_config.json.
VOCABULARIES = (
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
)
SAVED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    *VOCABULARIES,
    INDEX,
    SUMS,
)  # with the weights, the names of all that save_pretrained writes, and the digests


@dataclass(frozen=True)
class ModelFolder:
    """A model's folder that `inspect_checkpoint` has looked at."""

    path: Path
    # The content of config.json.
    config: dict
    # The paths of its safetensors; none where it has a config alone.
    weights: list[Path]

    @property
    def files(self) -> list[Path]:
        """The files that decide the model and its tokens: what READ names, and the weights."""
        patterns = (*READ, INDEX)
        named = {file for pattern in patterns for file in self.path.glob(pattern) if file.is_file()}
        return sorted({*named, *self.weights})


def find_folder(name: str | Path) -> Path:
    """Return the folder that a path or a name of the hub means.

    A run's folder means the model/ in it. A model of the hub lies in the hub's cache afterwards,
    and is looked at like any other folder. Raises UserError for a name that is neither, and where
    the hub cannot be reached.
    """
    folder = Path(name)
    if folder.exists():
        is_run = (folder / "model").is_dir() and not (folder / "config.json").exists()
        return folder / "model" if is_run else folder
    from huggingface_hub import snapshot_download

    try:
        snapshot = snapshot_download(
            str(name),
            allow_patterns=["*.json", "*.txt", "model*.safetensors"],
            ignore_patterns=["*/*"],
        )
    except Exception as error:  # of the hub, the network or the disk
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(
            f"{name}: no such folder, and no model that the hub gives ({reason:.120})"
        ) from None
    return Path(snapshot)


def inspect_source(source: str) -> ModelFolder | None:
    """Inspect a model's folder; return None for "tiny", a shape and a name of the hub.

    Raises UserError as `inspect_checkpoint` does.
    """
    if source == "tiny" or find_shape(source) or not Path(source).is_dir():
        return None
    return inspect_checkpoint(Path(source))


def inspect_checkpoint(folder: Path) -> ModelFolder:
    """Return what is in a model's folder, which may be read.

    Raises UserError for a folder that has no config, is not what SHA256SUMS says, or asks for
    pickles, code or other folders' files.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    for path in folder.iterdir():  # pipes and devices never end
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{folder}: {path.name} is neither a file nor a folder")
    if not (folder / "config.json").exists():
        raise UserError(f"{folder}: no config.json, so not a model's folder")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise UserError(f"{folder}: config.json is no JSON object")
    for key in {"quantization_config", "transformers_weights"} & config.keys():
        raise UserError(
            f"{folder}: config.json has {key}; plain weights in model.safetensors are needed"
        )
    # transformers would load an adapter, and its base from wherever it says.
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder}: adapter_config.json; merge the adapter into the weights, "
            "and save those alone"
        )
    found = ModelFolder(folder, config, _weights(folder))
    _check_digests(folder, found.files)
    return found


def _weights(folder: Path) -> list[Path]:
    """Return the paths of a folder's safetensors; UserError for an index that names other files."""
    for name in (QUANTIZED, "model.safetensors"):
        if (folder / name).exists():
            return [folder / name]
    if not (folder / INDEX).exists():
        return []
    index = read_json(folder / INDEX)
    parts = index.get("weight_map") if isinstance(index, dict) else None
    names = sorted(set(map(str, parts.values()))) if isinstance(parts, dict) else ["nothing"]
    for name in names:
        if not re.fullmatch(r"[\w.-]+\.safetensors", name) or not (folder / name).is_file():
            raise UserError(
                f"{folder}: {INDEX} names {name[:80]!r}, "
                "which is no safetensors file of this folder"
            )
    return [folder / name for name in names]


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write a model into.

    It takes the place of `folder` once it is whole, with its digests: nothing of a model that was
    there before stays beside the new one. Raises RecordError for a folder that is a link.
    """
    folder = writable_folder(folder).absolute()
    with tempfile.TemporaryDirectory(
        prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True
    ) as work:
        new = Path(work, "new")
        new.mkdir()
        yield new
        write_digests(new)
        if folder.exists():
            folder.rename(Path(work, "old"))
        new.rename(folder)


def write_digests(folder: Path) -> None:
    """Write SHA256SUMS over the files of a model that was saved."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    lines = [f"{sha256_of(path)}  {path.name}\n" for path in paths]
    (folder / SUMS).write_text("".join(lines))


def _check_digests(folder: Path, read: list[Path]) -> None:
    """Raise UserError where a file is not what SHA256SUMS says, or is `read` and not in that list.

    Without the list there is nothing to check. That a file is missing is for its reader to say.
    """
    if not (folder / SUMS).is_file():
        return
    digests = {}
    for line in (folder / SUMS).read_text(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        digests[name] = digest
    for path in sorted(folder.iterdir()):
        if path in read and path.name not in digests:
            raise UserError(
                f"{folder}: {path.name} was added after the folder was saved; "
                f"whoever did deletes {SUMS}"
            )
        if path.name in digests and _sha256(path, path.stat().st_ctime_ns) != digests[path.name]:
            raise UserError(
                f"{folder}: {path.name[:80]!r} is not the file that was saved, "
                f"by its digest in {SUMS}; whoever changed it on purpose deletes that list"
            )


@lru_cache(1000)
def _sha256(path: Path, _changed_ns: int) -> str:
    """Return a file's SHA-256, computed once for each time that the file was changed.

    A folder is looked at several times.
    """
    return sha256_of(path)
