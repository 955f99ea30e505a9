"""A model's folder, which somebody else may have written, is checked before anything loads it.

transformers does what a folder says: an index may name pickles and files elsewhere, a config may
ask for code from the hub, for kernels or for a million layers. Training and answering
therefore get a ModelFolder from `inspect_checkpoint`, and hand that on. Weights must be safetensors
within the folder; loading (model/load.py) checks that they have the names and sizes that the config
says. A folder that this library has saved also holds the digests of its files (SHA256SUMS, in the
format of `sha256sum -c`), which reveal a flipped bit or an added file.

`ModelFolder.files` are the files that decide a model and its tokens; a model is identified by their
hash (run/identity.py). Nothing here imports torch.
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
# The files of a folder that transformers reads beside its weights.
READ_PATTERNS = (
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

# The files that a tokenizer of transformers saves beside tokenizer.json and tokenizer_config.json.
TOKENIZER_FILES = (
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
# All that a saved model's folder may have beside its weights: what save_pretrained writes, and the
# digests.
SAVED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    *TOKENIZER_FILES,
    INDEX,
    SUMS,
)


@dataclass(frozen=True)
class ModelFolder:
    """A model's folder that `inspect_checkpoint` has checked."""

    path: Path
    # The content of config.json.
    config: dict
    # The paths of its safetensors; empty if the folder has a config alone.
    weights: list[Path]

    @property
    def files(self) -> list[Path]:
        """What decides the model and its tokens: the weights, and what is read beside them."""
        files = set(self.weights)
        for pattern in (*READ_PATTERNS, INDEX):
            files.update(file for file in self.path.glob(pattern) if file.is_file())
        return sorted(files)


def find_folder(name: str | Path) -> Path:
    """Return the folder of the model that a path or a name on the hub stands for.

    A run's folder stands for the model/ in it. A model on the hub is downloaded into the hub's
    cache, and has yet to be checked like any other folder. Raises UserError for a name that is
    neither, and if the hub cannot be reached.
    """
    folder = Path(name)
    if folder.exists():
        is_run = (folder / "model").is_dir() and not (folder / "config.json").exists()
        return folder / "model" if is_run else folder
    # Imported here, since a path needs no hub.
    from huggingface_hub import snapshot_download

    try:
        snapshot = snapshot_download(
            str(name),
            allow_patterns=["*.json", "*.txt", "model*.safetensors"],
            ignore_patterns=["*/*"],  # in its folders are other formats of the weights
        )
    except Exception as error:  # whatever the hub, the network or the disk raises
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(
            f"{name}: no such folder, and no model that the hub gives ({reason:.120})"
        ) from None
    return Path(snapshot)


def inspect_source(source: str) -> ModelFolder | None:
    """Check the model's folder that `source` names; return None if it names no folder.

    Other sources are "tiny", a shape (spec/shapes.py) and a name on the hub. Raises UserError as
    `inspect_checkpoint` does.
    """
    if source == "tiny" or find_shape(source) or not Path(source).is_dir():
        return None
    return inspect_checkpoint(Path(source))


def inspect_checkpoint(folder: Path) -> ModelFolder:
    """Check a model's folder, and return what is in it.

    Raises UserError for a folder that has no config, is not what SHA256SUMS says, or asks for
    pickles, code or other folders' files.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    for path in folder.iterdir():  # reading a pipe or a device might never end
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{folder}: {path.name} is neither a file nor a folder")
    if not (folder / "config.json").exists():
        raise UserError(f"{folder}: no config.json, so not a model's folder")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise UserError(f"{folder}: config.json is no JSON object")
    refused = sorted({"quantization_config", "transformers_weights"} & config.keys())
    if refused:
        raise UserError(
            f"{folder}: config.json has {refused[0]}; plain weights in model.safetensors are needed"
        )
    # transformers would load an adapter, and its base model from wherever this file says.
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder}: adapter_config.json; merge the adapter into the weights, "
            "and save those alone"
        )
    found = ModelFolder(folder, config, _weights(folder))
    _check_digests(folder, found.files)
    return found


def _weights(folder: Path) -> list[Path]:
    """Return the paths of a folder's safetensors, one file or those of its index.

    Raises UserError for an index that names other files.
    """
    # One file goes before an index, as in transformers; quantized weights go before both.
    for name in (QUANTIZED, "model.safetensors"):
        if (folder / name).exists():
            return [folder / name]
    if not (folder / INDEX).exists():
        return []
    index = read_json(folder / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise UserError(f"{folder}: {INDEX} has no weight_map, and so names no weights")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not re.fullmatch(r"[\w.-]+\.safetensors", name) or not (folder / name).is_file():
            raise UserError(
                f"{folder}: {INDEX} names {name[:80]!r}, "
                "which is no safetensors file of this folder"
            )
    return [folder / name for name in names]


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write a model into, which then takes the place of `folder`.

    SHA256SUMS is added to it when the block ends. Nothing of the old model stays beside the new
    one, and an error in the block leaves the old one as it was. Raises RecordError for a folder
    that is a link.
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
            folder.rename(Path(work, "old"))  # and it is deleted with `work`
        new.rename(folder)


def write_digests(folder: Path) -> None:
    """Write the digests of a saved model's files into SHA256SUMS."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    lines = [f"{sha256_of(path)}  {path.name}\n" for path in paths]
    (folder / SUMS).write_text("".join(lines))


def _check_digests(folder: Path, model_files: list[Path]) -> None:
    """Raise UserError if a file differs from its digest, or one of `model_files` has none.

    A folder without SHA256SUMS passes. A file that is missing is for its reader to report.
    """
    if not (folder / SUMS).is_file():
        return
    digests = {}
    for line in (folder / SUMS).read_text(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        digests[name] = digest
    for path in sorted(folder.iterdir()):
        if path in model_files and path.name not in digests:
            raise UserError(
                f"{folder}: {path.name} was added after the folder was saved; "
                f"if you added it, delete {SUMS}"
            )
        if path.name in digests and _sha256(path, path.stat().st_ctime_ns) != digests[path.name]:
            raise UserError(
                f"{folder}: {path.name[:80]!r} is not the file that was saved, "
                f"by its digest in {SUMS}; if you changed it on purpose, delete {SUMS}"
            )


@lru_cache(1000)
def _sha256(path: Path, _changed_ns: int) -> str:
    """Return a file's SHA-256.

    A process may check the same folder several times. The time of the file's last change is a
    parameter so that the cache returns no digest of an older content.
    """
    return sha256_of(path)
