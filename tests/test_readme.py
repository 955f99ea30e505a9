"""README.md and docs/ tell people to type what exists: verbs, options, targets, parameters."""

import ast
import re
import shlex
import subprocess

import nbformat
import pytest
import torch
from nbconvert.exporters import get_exporter
from traitlets.config import PyFileConfigLoader
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

from qa_lib.lab.cli.verbs import VERBS, parser_of
from qa_lib.spec.presets import PRESETS, find_preset
from qa_lib.spec.variants import find_family, find_variant
from tests.material import ROOT, python, squad_folder
from tests.own import drawn_samples
from tests.tiny import checkpoint

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "log").glob("*.md"))]
README = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


# A line that ends in a backslash goes on in the next.
BLOCKS = [block.replace("\\\n", "") for block in re.findall(r"```bash\n(.*?)```", README, re.S)]


def commands():
    """Every command line in README's shell blocks and in its inline code."""
    lines = [line for block in BLOCKS for line in block.splitlines()]
    lines += re.findall(r"`((?:make|python -m|papermill|pip|git clone) [^`\n]+)`", README)
    # What comes before a command and where its output goes are the shell's.
    bare = [re.sub(r"^nohup | > [\w.]+( &)?$", "", line) for line in lines]
    return [words for line in bare if (words := shlex.split(line, comments=True))]


def test_the_readme_has_commands_of_every_kind():
    assert {words[0] for words in commands()} == {
        "make",
        "python",
        "papermill",
        "jupyter",
        "pip",
        "git",
        ".",
    }
    assert {words[3] for words in commands() if words[0] == "python"} == set(VERBS)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_the_readme_is_one_that_exists(words):
    whole = {
        "pip install .",
        "pip install .[notebooks,adapters]",
        "pip install -U torchao",
        "pip install git+https://github.com/YOUR-FORK",
        ". .venv/bin/activate",
    }  # the environment that make has made
    known = {"make": make, "python": verb, "papermill": papermill, "jupyter": jupyter}
    if words[0] in known:
        known[words[0]](words)
    else:
        assert words[:2] == ["git", "clone"] or " ".join(words) in whole


def make(words):
    done = subprocess.run([words[0], "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def verb(words):
    assert words[1:3] == ["-m", "qa_lib"]
    args = vars(parser_of(words[3]).parse_args(words[4:]))
    for name, find in (("preset", find_preset), ("family", find_family)):
        if args.get(name):
            find(args[name])
    if words[3] in ("run", "sweep"):
        for name in filter(None, [args.get("variant"), *(args.get("variants") or [])]):
            find_variant(name)


def papermill(words):
    notebook, _, *rest = words[1:]
    cells = nbformat.read(ROOT / notebook, as_version=4).cells
    (source,) = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    known = {line.targets[0].id for line in ast.parse(source).body}
    assert rest[::3] == ["-p"] * (len(rest) // 3) and set(rest[1::3]) <= known


def jupyter(words):
    """Converts what the command before it writes."""
    assert words[1:3] == ["nbconvert", "--config"]
    assert get_exporter(
        PyFileConfigLoader(words[3], str(ROOT)).load_config().NbConvertApp.export_format
    )
    assert any(words[-1] == line[2] for line in commands() if line[0] == "papermill")


def test_the_repository_has_one_address():
    """A fork puts its own in place of it everywhere, see the end of README.md."""
    files = [
        ROOT / "README.md",
        ROOT / "CITATION.cff",
        *ROOT.glob("notebooks/*.ipynb"),
        *ROOT.glob("runs/*.ipynb"),
    ]
    address = re.compile(r"(?:github\.com|colab\.research\.google\.com/github)/([\w./-]+)")
    assert (
        len(
            {
                name.split("/blob/")[0]
                for path in files
                for name in address.findall(path.read_text())
            }
        )
        == 1
    )


def test_the_readme_names_every_preset_and_every_notebook():
    # All but the preset of tests/small.py.
    names = [f"| `{name}` |" for name in set(PRESETS) - {"test"}]
    names += [f"`{path.stem}`" for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert [name for name in names if name not in README] == []


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page):
    for target in re.findall(r"\]\((?!https?:)([^)]+)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        other = page.parent / path if path else page
        assert other.exists() and (not anchor or anchor in anchors(other)), target


def anchors(page):
    """What GitHub calls a page's headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_pages_of_the_docs_are_listed():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert f"({page.name})" in index or page.name == "README.md", page


def test_the_results_in_the_readme_and_the_figures_are_those_of_the_committed_records(
    monkeypatch, typed
):
    monkeypatch.chdir(ROOT)
    typed("report --check")


def python_of(page):
    """The blocks of Python of a page, with a model and data of one's own instead of the hub's."""
    text = page.read_text(encoding="utf-8").replace("bert-base-uncased", "my-bert")
    text = text.replace('"full")', '"local", data="squad/", model="my-bert/", epochs=2)')
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Work in a folder with a model and data of one's own, as if the library were installed.

    The compiler, half a minute here, is left out.
    """
    monkeypatch.chdir(tmp_path)
    checkpoint("bert", tmp_path / "my-bert")
    squad_folder(tmp_path / "squad", "alice came to the harbour at nine", "alice")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def test_the_python_of_the_readme_runs(own_folder, capsys):
    """test_own_code.py runs those of docs/own-code.md; docs/findings.md has lines of loops."""
    first, second = python_of(ROOT / "README.md")
    assert len([line for line in first.splitlines() if line]) == 5
    exec(first, {})
    (card,) = own_folder.glob("runs/*/*/model/README.md")
    assert "A4: " in card.read_text()
    # What is for a GPU alone:
    for own, here in [
        ('"cuda"', '"cpu"'),
        ("(model, optimizer)", "(model, optimizer, capture=False)"),
    ]:
        assert own in second
        second = second.replace(own, here)
    shown = {}
    exec(second, shown)
    before = AutoModelForSequenceClassification.from_pretrained("my-bert").state_dict()
    trained = shown["train"](drawn_samples("sequences", 64)).state_dict()
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(trained[name].float(), before[name])


def test_the_python_of_the_page_on_own_models_runs(own_folder, capsys):
    (block,) = python_of(ROOT / "docs" / "own-model.md")
    assert len(block.strip().splitlines()) <= 10
    exec(block, {})
    assert capsys.readouterr().out.count("ok ") == 1
    exec(block, {})
    said = capsys.readouterr().out
    assert said.count("ok ") == 1 and "finished on " in said and "step " not in said
    assert AutoModelForQuestionAnswering.from_pretrained("my-answers").config.model_type == "bert"
    assert "A4: " in (own_folder / "my-answers" / "README.md").read_text()


def test_the_package_imports_what_is_asked_of_it():
    done = python(
        "-c",
        "import qa_lib, sys; print('torch' in sys.modules, *qa_lib.__all__); qa_lib.lora",
        code=1,
    )
    assert (
        done.stdout
        == "False plan fit ask load_data app speed_up pack PackedCollator MasterAdamW "
        "GraphedStep FastTrainer\n"
        and "it has plan, fit, ask, load" in done.stderr
    )
