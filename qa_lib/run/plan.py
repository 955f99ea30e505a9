"""From names to specs: which data and model a preset means here, and what identifies them."""

import codecs
import contextlib
import dataclasses
import hashlib
import inspect
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from qa_lib.calls import check_names, checked, expect, expect_folder, shown
from qa_lib.data.files import DataError, hash_files, read_json
from qa_lib.data.squad import open_source
from qa_lib.data.synthetic import TINY_CONFIG, vocabulary
from qa_lib.data.text import open_text
from qa_lib.errors import SpecError, UserError
from qa_lib.model.architectures import find_encoder, positions_in
from qa_lib.model.hf_checkpoint import checkpoint_files, inspect_checkpoint
from qa_lib.spec.presets import (
    HEAD,
    QUICKEST,
    Preset,
    find_preset,
    find_shape,
    named_or_own,
    sized,
    whole_number,
)
from qa_lib.spec.spec import Machine, Spec, resolve, sha256_of_json, unshared
from qa_lib.spec.variants import Settings, find_variant, lacking

SOURCES = {"qa": open_source, "lm": open_text}  # task -> what opens its data
ANSWER_S = 5  # seconds in which the hub has to answer
Several = int | Sequence[int] | None  # a size, or several
OF_OWN = [*inspect.signature(sized).parameters][1:]  # what `own` of plan may hold, beside stages


@checked
def plan(
    variants: Sequence[str],
    preset: str | None = None,
    seeds: Sequence[int] = (0,),
    data: str | os.PathLike | None = None,
    model: str | os.PathLike | None = None,
    micro_batch: Several = None,
    machine: Machine | None = None,
    world: Several = None,
    max_length: Several = None,
    batch: Several = None,
    left_out: list[str] | None = None,
    runs: str | os.PathLike = "runs",
    **own,
) -> list[Spec]:
    """The specs of variants x seeds at a preset: all variants with the first seed come first, each once. For instance
    plan(["A1", "E-uncompiled"], "local", [0, 1], data="squad/", model="my-bert/", epochs=2).

    `data` and `model` (paths, or hub names) replace the preset's own, unless they are empty; where both are given,
    `preset` may be left out and is `local`. `machine` is this one unless given. Sizes and what `own` may hold are
    arguments of `resolve`. A list in place of a size gives every variant a spec for each, and several lists their
    product.

    What is left to the machine is chosen by lab/search/recommend.py, by the records below `runs` too, and said in the first
    line of a spec's `adjusted`: `recommended` becomes the variant, and without `micro_batch` the size, that suits it.
    At the presets for one's own training (presets.QUICKEST) all other variants get, without `micro_batch`, the quickest
    size that fits all of them, which divides the `batch`.

    Raises SpecError for a name or number that cannot be, before files and the hub are asked, or a length that the model
    does not take, and UserError for what is not to be had. Where `left_out` is given, it gets a sentence for sizes that
    do not go together, as long as their variant has others.
    """
    check_names("plan", own, [*inspect.signature(plan).parameters, *OF_OWN, "stages"])
    expect_folder("runs", runs)
    expect(
        "machine", machine, Machine | None, "give a qa_lib.spec.spec.Machine, or None for this one"
    )
    expect("left_out", left_out, list | None, "give a list, to which sentences are added")
    preset = named_or_own(preset, data, model)
    size = find_preset(preset)
    variants = _list("variants", variants)
    for variant in variants:
        find_variant(variant, size.task)
    seeds = [whole_number("seed", seed, 0, 2**63 - 1) for seed in _list("seeds", seeds)]
    data, model = _sources(size, data, model)
    if machine is None:
        from qa_lib.measure.hardware import (
            this_machine,
        )  # imports torch, which a driver does without

        machine = this_machine()

    sizes = _product(max_length=max_length, batch=batch, micro_batch=micro_batch, world=world)
    specs, faults = [], {}
    for seed, one, variant in itertools.product(
        dict.fromkeys(seeds), sizes, dict.fromkeys(variants)
    ):
        try:
            specs.append(_resolved(variant, preset, seed, machine, data, model, own | one))
        except SpecError as problem:
            faults[f"{variant}: {problem}"] = variant, problem
    planned = {"recommended" if spec.recommended else spec.variant for spec in specs}
    for said, (variant, problem) in faults.items():
        if left_out is None or variant not in planned:
            raise problem
        left_out.append(said)
    go_offline_without_network(data, model)
    identity, config = _inspect_model(model)
    found = {"model": identity, "data": identify_data(data, size.quality, size.task)}
    if (kind := config.get("model_type", "")) != "":
        find_encoder(kind, model, size.task)
    if (most := positions_in(config)) is not None:
        for spec in specs:
            spec.preset.check_length(model, most)
    # 0, which everything divides, where it does not say, or not by a number: then loading it says so.
    sizes = {"layers": config.get("num_hidden_layers"), "heads": config.get("num_attention_heads")}
    shape = {name: size if type(size) is int else 0 for name, size in sizes.items()}
    specs = [
        dataclasses.replace(
            spec, **found, skip=spec.skip or lacking(spec.settings, kind) or unshared(spec, shape)
        )
        for spec in specs
    ]
    return _chosen(specs, machine, runs, bool(config))


def _resolved(
    variant: str, preset: str, seed: int, machine: Machine, data: str, model: str, own: dict
) -> Spec:
    """A spec by `resolve`, whose `chosen` has "micro_batch" where that is left to the machine. Until it is chosen, the
    spec has the variant's own, or the largest below that divides the work of a step. Raises SpecError."""
    is_open = not own.get("micro_batch") and (variant == "recommended" or preset in QUICKEST)
    sizes = [own.get("micro_batch")]
    if is_open:
        sizes += range(Settings().micro_batch - 1, 0, -1)
    problems = []
    for size in sizes:
        words = own | {"micro_batch": size}
        try:
            spec = resolve(variant, preset, seed, machine, {}, {}, data, model, **words)
        except SpecError as problem:
            problems.append(problem)
            continue
        return dataclasses.replace(
            spec, chosen=[*spec.chosen[:1], "micro_batch"] if is_open else spec.chosen
        )
    raise problems[0]


def _chosen(
    specs: list[Spec], machine: Machine, runs: str | os.PathLike, has_config: bool
) -> list[Spec]:
    """The specs with what was left to the machine, each run once. Where a choice is a run that was named as well, it
    stays a choice: another takes its place if it fails."""
    if not any(spec.chosen for spec in specs):
        return specs
    from qa_lib.lab.search.recommend import choose, with_quickest_size  # imports torch, too

    specs = [choose(spec, machine, runs) if spec.recommended else spec for spec in specs]
    specs = with_quickest_size(specs, machine, runs, has_config)
    found = {}
    for spec in specs:
        if spec.recommended or spec.run_path not in found:
            found[spec.run_path] = spec
    return list(found.values())


def _list(name: str, values: object) -> list:
    if (
        isinstance(values, str | bytes)
        or not isinstance(values, Iterable)
        or not (found := list(values))
    ):
        hint = (
            f": write {name}=[{values!r}]" if isinstance(values, str | int) and values != "" else ""
        )
        raise SpecError(f"{name} is {shown(values)}, and not a list of at least one{hint}")
    return found


def _sources(preset: Preset, data: object, model: object) -> tuple[str, str]:
    """Data and model as texts, each a path or name; without one, the preset's own. Raises SpecError, and UserError for
    all that the preset has none of its own for."""
    given = {"data": data, "model": model}
    for name, value in given.items():
        if value is None or (isinstance(value, str) and not value):
            given[name] = getattr(preset, name)
    absent = [name for name, value in given.items() if isinstance(value, str) and not value]
    if absent:
        options = " and ".join(f"--{name}" for name in absent)
        raise UserError(
            f"preset {preset.name!r} has no {' and no '.join(absent)} of its own: give {options} "
            "(a path, or a name of the hub)"
        )
    return _as_text("data", given["data"]), _as_text("model", given["model"])


def _as_text(name: str, value: object) -> str:
    """Return a path or name as a text. Raises SpecError for what can be neither."""
    expect(name, value, (str, os.PathLike), "give a path, or a name of the hub")
    text = os.fspath(value)
    expect(name, text, str, "give a path, or a name of the hub")  # bytes are a path, too
    try:
        Path(text).exists()
    except (OSError, ValueError):  # it is too long, or has a null byte
        raise SpecError(f"{name} is {text[:40]!r}, and no path or name") from None
    return text


def _product(**sizes: Several) -> list[dict]:
    """Every combination of some sizes, each by its name. Raises SpecError."""
    lists = []
    for name, size in sizes.items():
        several = isinstance(size, Sequence) and not isinstance(size, str | bytes)
        lists.append(dict.fromkeys(_list(name, size)) if several else [size])
    return [dict(zip(sizes, values, strict=True)) for values in itertools.product(*lists)]


def go_offline_without_network(*sources: str) -> None:
    """Where one of the sources is a name of the hub and the hub does not answer, let its library look into its cache
    alone, here and in the processes started from here: it would ask again for half a minute."""
    if all(
        source.startswith(("tiny", "synthetic:", "gpt2:")) or Path(source).exists()
        for source in sources
    ):
        return
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_S)
    except Exception:  # of whichever library it uses
        constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"


def identify_data(source: str, with_validation: bool, task: str = "qa") -> dict:
    """{name, sha256} of the questions, or text, that a run uses; the name is never a machine's path. Raises DataError
    for data that cannot be read or are empty, and UserError where training and validation are the same file, and for a
    file of a kind that nothing here reads."""
    if task == "qa" and os.path.isfile(source):
        _check_kind(Path(source))
    sources = [
        SOURCES[task](source, split)
        for split in (["train", "validation"] if with_validation else ["train"])
    ]
    for one in sources:
        if os.path.isfile(one.name) and not os.path.getsize(one.name):
            raise DataError(f"{one.name}: an empty {'file' if task == 'qa' else 'text'}")
    hashes = [one.sha256 for one in sources]
    if len(hashes) > len(set(hashes)):
        if task == "qa":
            _ = sources[0].examples  # that the file has no questions, or is no JSON, is told first
        raise UserError(
            f"{source}: would be trained on and scored by the same {'questions' if task == 'qa' else 'text'}; "
            "--data takes a folder with train.json and validation.json, or .txt"
        )
    return {"name": without_folders(source), "sha256": _joined(hashes)}


def _check_kind(path: Path) -> None:
    """Raises UserError for a file of questions that is no JSON, by its ending and its first character."""
    with path.open("rb") as stream:
        begin = stream.read(1000).removeprefix(codecs.BOM_UTF8).strip()
    kind = path.suffix.lower()
    if kind != ".json" and begin and (kind == ".jsonl" or begin[:1] not in b"{["):
        named = f"a {kind} file" if kind else "no JSON file"
        raise UserError(
            f"{path}: {named}, and --data takes SQuAD's format: a folder with train.json and "
            "validation.json (docs/own-model.md)"
        )


def _joined(hashes: list[str]) -> str:
    """One hash for those of a run's sources."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def check_planned(spec: Spec, hashes: list[str]) -> None:
    """Hold what was loaded against what a spec was planned with: the hashes of its sources, and the model's files, read
    again. Raises UserError."""
    if not spec.preset.quality and _joined(hashes) != spec.data.get("sha256"):
        with contextlib.suppress(DataError):  # it may have been planned to be scored
            hashes = [*hashes, SOURCES[spec.preset.task](spec.data_source, "validation").sha256]
    changed = {
        spec.data_source: _joined(hashes) != spec.data.get("sha256"),
        spec.model_source: identify_model(spec.model_source) != spec.model,
    }
    for source in (name for name, is_other in changed.items() if is_other):
        files = [path for path in [Path(source), *Path(source).rglob("*")] if path.is_file()]
        last = max(files, key=lambda path: path.stat().st_mtime_ns, default=Path(source)).name
        raise UserError(
            f"{source} is not what the run was planned with (its file that was written last: {last}); "
            "give the command again"
        )


def without_folders(source: str) -> str:
    """How a record names data or text: a file or folder by the last part of its path, all else as it is."""
    return Path(os.path.abspath(source)).name if Path(source).exists() else source


def identify_model(source: str) -> dict:
    """{name, revision}: a folder's files by content, the tiny model and shapes by definition, a hub's name as it is."""
    return _inspect_model(source)[0]


def _inspect_model(source: str) -> tuple[dict, dict]:
    """A model's identity, and what its config.json says; nothing for a model of the hub that cannot be had now."""
    if source == "tiny":
        revision, config = (
            sha256_of_json([TINY_CONFIG, vocabulary()]),
            {"model_type": "bert", **TINY_CONFIG},
        )
    elif shape := find_shape(source):
        revision, heads = sha256_of_json(dataclasses.asdict(shape)), shape.hidden // HEAD
        config = {
            "model_type": "gpt2",
            "num_hidden_layers": shape.layers,
            "num_attention_heads": heads,
        }
    elif Path(source).is_dir():
        config, weights = inspect_checkpoint(Path(source))
        revision = hash_files(checkpoint_files(Path(source), weights))
    else:
        return _inspect_hub(source)
    return {"name": without_folders(source), "revision": revision[:12]}, config


def _inspect_hub(source: str) -> tuple[dict, dict]:
    """The same of a model of the hub. Its revision is the commit that is loaded now, "main" where neither the hub nor
    its cache can say."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if (
        source.startswith((".", "/", "~"))
        or source.endswith("/")
        or source.count("/") > 1
        or os.path.isdir(os.path.dirname(source))
    ):
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
    config = snapshot / "config.json"
    return {"name": source, "revision": snapshot.name}, read_json(config) if config.exists() else {}
