"""A model's folder, which somebody else may have written: read as data, and checked before it is believed.

transformers follows what a folder says: an index may name pickles and files elsewhere, a config may ask for code from
the hub, for kernels or for a million layers. Training and answering therefore take a folder through this one door. Its
weights are safetensors within the folder, of the names and sizes that its config says; a folder that this lab has kept
holds the digests of its files as well (SHA256SUMS, for `sha256sum -c`), by which a flipped bit and an added file are
found. `opened` lists what decides a model and its tokens, which is what identifies it.

Looking needs no torch; loading does.
"""

import contextlib
import logging
import re
import shutil
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from qa_lib.data.squad import read_json, sha256_of
from qa_lib.errors import UserError, first_line
from qa_lib.model.encoders import encoder_of, find_encoder

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SUMS = "SHA256SUMS"
QUANTIZED = "quantized.safetensors"  # a name that transformers does not take for plain weights
# What transformers reads of a folder beside its weights. tokenizer.json may have a version in its name.
READ = (
    "config.json generation_config.json tokenizer*.json special_tokens_map.json added_tokens.json vocab.txt vocab.json "
    "merges.txt chat_template.jinja"
).split()
# Parts of a checkpoint that pretraining has left, and which no answer depends on.
PRETRAINING = ("cls", "lm_head", "pooler", "discriminator_predictions", "generator_predictions", "generator_lm_head")
one_at_a_time = threading.Lock()  # while it loads, transformers changes its classes; two threads may leave them so


def find_folder(name: str | Path) -> Path:
    """The folder that is meant by a path, where a run's means the model/ in it, or by a name of the hub: what has to be
    known of that model lies in the hub's cache afterwards, and is looked at like any other folder.

    Raises UserError for a name that is neither, and where the hub cannot be reached; a path that leads nowhere is for
    `look` to tell.
    """
    folder = Path(name)
    if folder.exists():
        run = (folder / "model").is_dir() and not (folder / "config.json").exists()
        return folder / "model" if run else folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    files = {"allow_patterns": ["*.json", "*.txt", "model*.safetensors"], "ignore_patterns": ["*/*"]}
    try:
        return Path(snapshot_download(str(name), **files))
    except HFValidationError:  # so it is a path
        return folder
    except Exception as error:  # of the hub, the network or the disk
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{name}: no such folder, and no model that the hub gives ({reason:.120})") from None


def look(folder: Path) -> tuple[dict, list[Path]]:
    """The folder's config, and its safetensors: none where it has no weights. Raises UserError for a folder that has no
    config, is not what SHA256SUMS says, or asks for pickles, code or other folders' files."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    files = {path.name for path in folder.iterdir() if path.is_file()}  # no pipes and devices, which never end
    if "config.json" not in files:
        raise UserError(f"{folder}: no config.json, so not a model's folder")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise UserError(f"{folder}: config.json is no JSON object")
    for key in {"quantization_config", "transformers_weights"} & config.keys():
        raise UserError(f"{folder}: config.json has {key}; plain weights in model.safetensors are needed")
    if "adapter_config.json" in files:  # transformers would load it, and its base from wherever it says
        raise UserError(f"{folder}: adapter_config.json; merge the adapter into the weights, and save those alone")
    weights = _weights(folder, files)
    for path in folder.iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{folder}: {path.name} is neither a file nor a folder")
    _check_digests(folder, {path.name for path in opened(folder, weights)})
    return config, weights


def opened(folder: Path, weights: list[Path]) -> list[Path]:
    """The files of a folder that decide a model and its tokens: what READ names, and `weights` as `look` gives them."""
    found = {path for pattern in (*READ, INDEX) for path in folder.glob(pattern) if path.is_file()}
    return sorted({*found, *weights})


def _weights(folder: Path, files: set[str]) -> list[Path]:
    if QUANTIZED in files:
        return [folder / QUANTIZED]
    if "model.safetensors" in files:
        return [folder / "model.safetensors"]
    if INDEX not in files:
        return []
    index = read_json(folder / INDEX)
    parts = index.get("weight_map") if isinstance(index, dict) else None
    names = sorted(set(map(str, parts.values()))) if isinstance(parts, dict) else ["nothing"]
    for name in names:
        linked = name in files and (folder / name).resolve().parent != folder.resolve()
        if not re.fullmatch(r"[\w.-]+\.safetensors", name) or name not in files or linked:
            raise UserError(f"{folder}: {INDEX} names {name[:80]!r}, which is no safetensors file of this folder")
    return [folder / name for name in names]


def pickle_in(folder: Path) -> str | None:
    """The name of weights that nobody should load, where a folder has such."""
    names = sorted(path.name for path in folder.iterdir())
    return next((name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))), None)


@contextlib.contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """An empty folder to write a model into. It takes the place of `folder` once it is whole, with its digests: nothing
    of a model that was there before stays beside the new one."""
    work = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
        write_digests(work)
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_digests(folder: Path) -> None:
    """Write SHA256SUMS over the files of a model that was saved."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    (folder / SUMS).write_text("".join(f"{sha256_of(path)}  {path.name}\n" for path in paths))


def _check_digests(folder: Path, files: set[str]) -> None:
    """Raises UserError where one of `files` is not what SHA256SUMS says, or not in it; without that list, nothing."""
    if not (folder / SUMS).is_file():
        return
    lines = (folder / SUMS).read_text(errors="replace").splitlines()
    listed = dict(reversed(line.partition("  ")[::2]) for line in lines)
    # A name is compared, and never a path to follow. That a file is missing is for its reader to say.
    for name in sorted({*files, *(name for name in listed if Path(name).name != name or (folder / name).is_file())}):
        if name not in listed:
            raise UserError(f"{folder}: {name} was added after the folder was saved; whoever did deletes {SUMS}")
        if Path(name).name != name or _known(folder / name) != listed[name]:
            raise UserError(
                f"{folder}: {name[:80]!r} is not the file that was saved, by its digest in {SUMS}; "
                "whoever changed it on purpose deletes that list"
            )


def _known(path: Path) -> str:
    """A file's SHA-256, computed once for each time that it was written: a folder is looked at several times."""
    status = path.stat()
    return _sha256(path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache(1000)
def _sha256(path: Path, *_state: int) -> str:
    return sha256_of(path)


@contextlib.contextmanager
def in_one_line(folder: Path):
    """Whatever the libraries make of a damaged folder, as a UserError of one line that names it."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{folder}: cannot be loaded: {first_line(error)}") from None
    finally:
        logging.set_verbosity(verbosity)


def read_config(folder: Path, task: str = "qa"):
    """The configuration of a model's folder, as transformers reads it. Raises UserError for one that it cannot read, of
    an architecture that is not known for the task, or that asks for what is not built here."""
    from transformers import AutoConfig

    look(folder)
    with in_one_line(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        encoder = find_encoder(config.model_type, str(folder), task)
        # How results are returned and computed is for the caller to say. Neither changes a number.
        config.return_dict, config.chunk_size_feed_forward = True, 0
        positions = getattr(config, "position_embedding_type", None) or "absolute"
        if positions != "absolute":
            raise UserError(f"{folder}: position_embedding_type {str(positions)[:40]!r} in config.json, not absolute")
        if not encoder.causal and config.pad_token_id is None:
            raise UserError(
                f"{folder}: pad_token_id in config.json is null; it is the number of the tokenizer's padding"
            )
        if not encoder.causal and getattr(config, "is_decoder", False):
            raise UserError(f"{folder}: is_decoder is set in config.json; an encoder's tokens see those on both sides")
    return config


def load(folder: Path, head: type, attention: str, new_head: bool = False, task: str = "qa", **options):
    """The model of a folder that has weights, by a class of transformers like AutoModelForQuestionAnswering.

    `attention` is ours: a config may name one that transformers would download. `new_head` allows weights without the
    head's, which are then random. Quantized weights (model/quantize.py) come back as they were saved, and cannot be
    trained. Raises UserError where config and weights do not belong together.
    """
    found, files = look(folder)
    quantized = _are_quantized(files)
    if quantized and new_head:
        raise UserError(f"{folder}: its weights are quantized, and train no more")
    config = read_config(folder, task)
    safe = {"local_files_only": True, "trust_remote_code": False, "attn_implementation": attention}
    with in_one_line(folder), one_at_a_time:
        _check_sizes(folder, config, head, _sizes(files, found))
        if quantized:
            from qa_lib.model.quantize import fill_quantized, quantize

            model = head.from_config(config, attn_implementation=attention)
            quantize(model, found.get("quantized"))
            fill_quantized(model, folder)
            return model
        model, loading = head.from_pretrained(
            folder, config=config, use_safetensors=True, output_loading_info=True, **safe, **options
        )
    lacking = sorted(loading["missing_keys"])
    if new_head:
        lacking = [name for name in lacking if name.startswith(f"{model.base_model_prefix}.")]
    if lacking:
        raise UserError(f"{folder}: the weights lack {lacking[0]}, which would be left random")
    _tell_surplus(folder, model, sorted(loading["unexpected_keys"]))
    return model


def _tell_surplus(folder: Path, model, names: list[str]) -> None:
    """Say which weights no part of the model takes. Raises UserError for those of its own layers: an adapter's, say,
    which would change what it computes."""
    parts = dict(model.named_children())
    names = [name for name in names if not {*name.split(".")[:2]} & {*PRETRAINING}]
    own = [name for name in names if name.split(".")[0] in parts or "lora_" in name]
    if own:
        raise UserError(f"{folder}: the weights have {own[0][:80]}, for which a {type(model).__name__} has no place")
    if names:
        log.warning("%s: %d weights are of no use here and are left out, such as %.80s", folder, len(names), names[0])


def _are_quantized(files: list[Path]) -> bool:
    return [file.name for file in files] == [QUANTIZED]


def _sizes(files: list[Path], config: dict) -> dict[str, tuple]:
    """{name: (shape, type)} by the headers of these weights, as if plain where they are quantized."""
    from safetensors import safe_open

    stored = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                stored[name] = (part.get_shape(), part.get_dtype())
    if _are_quantized(files):
        from qa_lib.model.quantize import plain_sizes

        return plain_sizes(stored, config.get("quantized"))
    return stored


def _check_sizes(folder: Path, config, head: type, stored: dict[str, tuple]) -> None:
    """Hold the config against the headers of the weights before anything of its sizes is built. Raises UserError."""
    import torch

    layers = len(set(re.findall(r"\b(?:layers?|h)\.(\d+)\.", " ".join(stored))))
    if config.num_hidden_layers != layers:
        raise UserError(f"{folder}: {config.num_hidden_layers} layers in config.json, {layers} in the weights")
    with torch.device("meta"):  # shapes without memory
        model = head.from_config(config, attn_implementation="sdpa")
    if hasattr(model, "qa_outputs") and config.num_labels != 2:
        raise UserError(f"{folder}: {config.num_labels} labels in config.json; an answer has a start and an end")
    for name, parameter in model.named_parameters():
        # An encoder that was saved without a head does without its prefix, too.
        found = stored.get(name) or stored.get(name.removeprefix(f"{model.base_model_prefix}."))
        if found is None:
            continue  # said after loading, which knows older names as well
        shape, kind = found
        if shape != list(parameter.shape):
            raise UserError(f"{folder}: {name} is {shape} in the weights, {list(parameter.shape)} by config.json")
        if kind not in ("F64", "F32", "F16", "BF16"):
            raise UserError(f"{folder}: {name} holds {kind}, no floating-point numbers")


def check_tokenizer(folder: str | Path, tokenizer, model) -> None:
    """Whether a tokenizer's tokens and inputs are those of a model. Raises UserError."""
    config = model.config
    tokens = max(tokenizer.get_vocab().values(), default=-1) + 1
    if tokens > config.vocab_size:
        raise UserError(f"{folder}: {tokens} tokens in the tokenizer, {config.vocab_size} in the model")
    if "token_type_ids" in tokenizer.model_input_names and getattr(config, "type_vocab_size", 2) < 2:
        raise UserError(f"{folder}: the tokenizer tells question and paragraph apart, the model has one token type")
    # RoBERTa counts positions by it, and BERT never trains its embedding. GPT-2, which has none, never pads.
    own, padding = tokenizer.pad_token_id, getattr(config, "pad_token_id", None)
    if own != padding and not encoder_of(model).causal:
        raise UserError(f"{folder}: the tokenizer pads with token {own}, pad_token_id in config.json is {padding}")
