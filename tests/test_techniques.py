"""Each change of a variant has a technique: how it works, what to write, where the code is."""

import ast
import re

import pytest

import qa_lib
from qa_lib.lab.report.notebook import technique
from qa_lib.lab.report.techniques import TECHNIQUES, find_technique, source_of
from qa_lib.spec.variants import VARIANTS
from tests.material import ROOT


def name_of(known):
    return known.code.__name__


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_has_a_technique(variant):
    find_technique(variant)


def test_each_technique_is_that_of_some_variant():
    """So that a misspelt setting or value, which would explain nothing, is found."""
    explained = {name_of(find_technique(variant)) for variant in VARIANTS}
    assert [name_of(known) for known in TECHNIQUES if name_of(known) not in explained] == []


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
