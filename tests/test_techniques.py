"""Each change of a variant has a technique: how it works, what to write, where the code is."""

import ast
import re

import pytest

import qa_lib
from qa_lib.lab.report.notebook import technique
from qa_lib.lab.report.techniques import TECHNIQUES, find_technique, source_of
from qa_lib.spec.variants import VARIANTS, Variant
from tests.material import ROOT, refused


def name_of(known):
    return known.code.__name__


@pytest.mark.parametrize("variant", VARIANTS)
def test_exactly_one_technique_explains_a_variant(variant):
    assert len(VARIANTS[variant].change) <= 1
    assert [known for known in TECHNIQUES if known.explains(VARIANTS[variant])] == [
        find_technique(variant)
    ]


def test_each_value_of_a_technique_is_that_of_some_variant():
    """So that a misspelt setting or value, which would explain nothing, is found."""
    changed = {
        (setting, value)
        for variant in VARIANTS.values()
        for setting, value in variant.change.items()
    }
    listed = {(known.setting, value) for known in TECHNIQUES for value in known.values}
    assert listed == changed


def test_each_technique_is_that_of_some_variant():
    explained = {name_of(find_technique(variant)) for variant in VARIANTS}
    assert [name_of(known) for known in TECHNIQUES if name_of(known) not in explained] == []


@pytest.mark.parametrize(
    ("variant", "linked"),
    [
        ("E-plain-bf16", ["plain.train", "plain.PlainStep"]),
        ("L-plain-bf16", ["plain.train", "plain.PlainStep"]),
        ("E-searched", ["step.Step._capture", "plain.SearchedStep"]),
        ("L-searched", ["step.Step._capture", "plain.SearchedStep"]),
        ("A0-compile", ["trainer.train"]),
        ("L0-bf16", ["trainer.train"]),
        ("A0-grouped", ["trainer.train"]),
        ("P0", ["trainer.train"]),
        ("L-searched-nodropout", ["plain.train"]),
        ("E-graph", ["cuda_graph.CapturedStep.__call__", "cuda_graph.CapturedStep._capture"]),
    ],
)
def test_a_change_is_explained_by_the_code_of_its_engine(variant, linked):
    names = []
    for shown in find_technique(variant).code():
        module = shown.__module__.rpartition(".")[2]
        names.append(f"{module}.{shown.__qualname__}")
    assert names == linked


def test_a_value_that_no_technique_explains_is_told(monkeypatch):
    new = Variant("A1-new", parent="A1", why="A new one.", padding="max_length")
    monkeypatch.setitem(VARIANTS, "A1-new", new)
    refused(
        "variant A1-new: 0 techniques explain padding 'max_length' under engine 'loop'",
        find_technique,
        "A1-new",
    )


@pytest.mark.parametrize("known", TECHNIQUES, ids=name_of)
def test_a_technique_says_how_it_works_in_sentences(known):
    assert ". " in known.how
    assert known.how.endswith(".")


@pytest.mark.parametrize("known", TECHNIQUES, ids=name_of)
def test_the_code_of_a_technique_is_shown_from_its_line(known):
    for shown in known.code():
        source = source_of(shown)
        line = (ROOT / source.path).read_text(encoding="utf-8").splitlines()[source.first - 1]
        assert line.strip() == source.code.splitlines()[0].strip()


@pytest.mark.parametrize("known", [known for known in TECHNIQUES if known.gain], ids=name_of)
def test_a_gain_in_the_readme_is_between_variants_that_exist(known):
    assert known.gain.adds in VARIANTS
    assert known.gain.over in VARIANTS
    assert find_technique(known.gain.adds) is known


@pytest.mark.parametrize("known", TECHNIQUES, ids=name_of)
def test_what_one_would_write_oneself_is_python_of_three_lines_at_most(known):
    ast.parse(known.yours)
    assert len(known.yours.splitlines()) <= 3


@pytest.mark.parametrize("known", TECHNIQUES, ids=name_of)
def test_what_one_would_import_from_this_package_is_public(known):
    """The lines name what they take from it in a comment."""
    called = set(re.findall(r"\b(\w+)\(", known.yours))
    public = {"speed_up", "pack", "PackedCollator", "MasterAdamW", "GraphedStep"}
    assert public <= set(qa_lib.__all__)
    assert ("from qa_lib" in known.yours) == bool(called & public)


@pytest.mark.parametrize(
    ("variant", "code"),
    [
        ("A3", "torch.compile(model)"),
        ("P1", "DistributedDataParallel(model)"),
        ("E-packed", "pack(samples, tokens=4096)"),
        ("A1", "scaler.step(optimizer)"),
    ],
)
def test_a_notebook_shows_what_one_would_write_oneself(variant, code):
    assert code in technique(variant)


def test_a_notebook_shows_links_alone_where_it_takes_more_than_a_few_lines():
    assert "```" not in technique("P-overlap-zero1")


def test_a_notebook_links_to_the_line_of_the_code():
    path, line = re.search(r"\]\(\.\./(.+?)#L(\d+)\)", technique("A3")).groups()
    assert path == "qa_lib/train/compile.py"
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    assert lines[int(line) - 1].startswith("def compiled(")
