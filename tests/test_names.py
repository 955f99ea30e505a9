"""Names in backticks name things that exist: in docstrings, comments and messages of the package.

A docstring that says `regions` where the setting is `regional` misleads whoever reads it. Every
word in backticks must therefore be one of these:

- a name or a word of a string in the code of the same module: a parameter, a column, a message;
- what another module of the package defines: a module, function, class, method, field, constant;
- a value that a setting may have, a string of one word in the package's modules about specs and
  records;
- a file or a folder of the repository, a target of its Makefile, or a package that it needs;
- a name of Python, PyTorch or transformers, or a command of the shell.

A name with `*` beside it stands for all names that begin or end so.
"""

import ast
import builtins
import io
import keyword
import re
import sys
import tokenize
import typing
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
import transformers

from qa_lib.spec.spec import Spec
from tests.material import ROOT

PACKAGE = ROOT / "qa_lib"
MODULES = {str(path.relative_to(ROOT)): path for path in sorted(PACKAGE.rglob("*.py"))}
IN_BACKTICKS = re.compile(r"`([^`\n]+)`")
# A name, or several that are joined by hyphens.
WORD = re.compile(r"\w+(?:-\w+)*")
FILE_NAME = re.compile(r"[\w.-]*\.\w+")
NO_NAME = re.compile(r"\d+|[a-z]")  # a number, or a short option such as -m
# In a command, words in capitals stand for what is to be typed: `python -m qa_lib VERB`.
PLACEHOLDERS = re.compile(r"(?<= )[A-Z]+\b")

COMMANDS = {"flock", "make", "nohup", "python", "sbatch", "sha256sum", "srun"}
# Words that exist outside of all this, and where.
ELSEWHERE = {
    "auth": "hf auth login, a command of the Hugging Face hub",
    "best_f1": "a score of the task qa",
    "compute": "a method of metrics of the package evaluate",
    "Dataset": "a class of the package datasets",
    "fragmentation": "a column of profiles, whose name ends in _mib",
    "gelu_new": "the approximation of GELU by tanh, in configurations of transformers",
    "hf": "the command line of the Hugging Face hub",
    "In": "the cells that IPython has run",
    "login": "hf auth login, a command of the Hugging Face hub",
    "L12H768": "the shape of GPT-2 small, in the name of a model",
    "model_type": "a value of a transformers configuration",
    "model-index": "the results in a model card of the Hugging Face hub",
    "nargs": "an argument of argparse",
    "nnodes": "an option of torchrun",
    "target_modules": "an argument of peft's LoraConfig",
    "model_init": "an argument of transformers' Trainer",
    "per_device_train_batch_size": "a value of transformers' TrainingArguments",
    "push_to_hub": "a method of transformers' models and Trainer",
    "save_pretrained": "a method of transformers' models",
    "state_dict": "a method of PyTorch's modules and optimizers",
    "vram": "a preset",
    "workspace": "a column of profiles, whose name ends in _mib",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def docstrings_of(tree: ast.Module) -> list[ast.Constant]:
    """Return the nodes of all strings that are statements: docstrings, those of fields included."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    values = [statement.value for statement in statements]
    return [
        value
        for value in values
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    ]


@cache
def strings_of(tree: ast.Module) -> list[ast.Constant]:
    """Return the nodes of all strings that are no docstrings, parts of f-strings included."""
    docstrings = {id(node) for node in docstrings_of(tree)}
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ]


def comments_of(path: Path) -> list[tuple[int, str]]:
    """Return the line and the text of each comment."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def with_parts(words: list[str]) -> set[str]:
    """Return words, and the parts of those that hyphens join."""
    parts = [part for word in words for part in word.split("-")]
    return {*words, *parts}


def names_in(tree: ast.Module) -> set[str]:
    """Return all names in the code of a module, and all words in its strings but docstrings."""
    names = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                names.update(value.split("."))
        if isinstance(node, ast.Global):
            names.update(node.names)
    for node in strings_of(tree):
        # What a message has in backticks is looked up and proves nothing.
        names |= with_parts(WORD.findall(IN_BACKTICKS.sub("", node.value)))
    return names


def is_assigned(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def definitions_in(tree: ast.Module) -> set[str]:
    """Return what a module defines: functions, classes, constants, methods and fields."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Module | ast.ClassDef):
            assignments = [s for s in node.body if isinstance(s, ast.Assign | ast.AnnAssign)]
            for assignment in assignments:
                names |= {name.id for name in ast.walk(assignment) if is_assigned(name)}
    return names


@cache
def names_of_the_package() -> frozenset[str]:
    """Return what all modules define, the values of settings, and words of specs and tables."""
    names = set()
    for path in MODULES.values():
        tree = tree_of(path)
        names |= definitions_in(tree)
        for node in strings_of(tree):
            if FILE_NAME.fullmatch(node.value):
                names.update(WORD.findall(node.value))
    settings = get_type_hints(Spec)["settings"]
    for hint in get_type_hints(settings).values():
        names |= with_parts([str(value) for value in get_args(hint)])
    for path in [*(PACKAGE / "spec").glob("*.py"), *(PACKAGE / "records").glob("*.py")]:
        strings = [node.value for node in strings_of(tree_of(path))]
        names |= {string for string in strings if WORD.fullmatch(string)}
    return frozenset(names)


@cache
def names_elsewhere() -> frozenset[str]:
    """Return names of files, targets and packages, of Python, PyTorch and transformers."""
    names = {*keyword.kwlist, *dir(builtins), *dir(typing), *sys.stdlib_module_names}
    for module in (torch, torch.nn, torch.nn.functional, torch.optim, torch.Tensor):
        names.update(dir(module))
    names.update(dir(transformers))
    names.update(re.findall(r'"([\w-]+)>=', (ROOT / "pyproject.toml").read_text()))
    names.update(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in [*ROOT.iterdir(), *PACKAGE.rglob("*"), *(ROOT / "notebooks").iterdir()]:
        names |= with_parts(WORD.findall(path.name))
    return frozenset(names)


def quoted_in(path: Path) -> list[tuple[int, str]]:
    """Return the line and the text of all that is in backticks in a module."""
    tree = tree_of(path)
    texts = [(node.lineno, node.value) for node in docstrings_of(tree) + strings_of(tree)]
    return [
        (line, quoted)
        for line, text in texts + comments_of(path)
        for quoted in IN_BACKTICKS.findall(text)
    ]


def unknown_in(path: Path) -> list[str]:
    """Return what a module has in backticks and does not exist, with its line."""
    known = names_in(tree_of(path)) | names_of_the_package() | names_elsewhere()
    known |= COMMANDS | ELSEWHERE.keys()
    unknown = []
    for line, quoted in quoted_in(path):
        text = PLACEHOLDERS.sub("", quoted) if quoted.startswith("python -m ") else quoted
        for word in WORD.findall(text):
            if f"{word}*" in quoted:
                exists = any(name.startswith(word) for name in known)
            elif f"*{word}" in quoted:
                exists = any(name.endswith(word) for name in known)
            else:
                # A verb or an option is named after a module or a parameter.
                exists = word in known or word.replace("-", "_") in known
            if not exists and not NO_NAME.fullmatch(word):
                unknown.append(f"line {line}: {word} in `{quoted}`")
    return unknown


@pytest.mark.parametrize("module", MODULES)
def test_names_in_backticks_exist(module):
    assert unknown_in(MODULES[module]) == []


def test_a_name_that_does_not_exist_is_found(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""What `regions_of` returns, and `regional`."""\n'
        "from qa_lib.model.packed import regions_of\n"
        "# As `no_such_comment`, by `torch.cat`.\n"
        'MESSAGE = "type `no-such-verb` or `tune`"\n'
    )
    assert unknown_in(path) == [
        "line 4: no-such-verb in `no-such-verb`",
        "line 3: no_such_comment in `no_such_comment`",
    ]
