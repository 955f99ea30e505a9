"""The pictures that explain a technique and show no record."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from qa_lib.lab.report import cli, schematics, style
from tests.material import ROOT

every_picture = pytest.mark.parametrize("name", schematics.PICTURES)
PAGES = sorted((ROOT / "docs").glob("*.md"))


@every_picture
def test_the_committed_picture_is_what_is_drawn_today(name):
    with Image.open(cli.PICTURES / f"{name}.png") as image:
        assert image.text["Title"] == style.title_of(schematics.PICTURES[name]())


@every_picture
def test_a_page_shows_the_picture_and_says_what_it_shows(name):
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    (said,) = re.findall(rf"!\[(.+)\]\(pictures/{name}\.png\)", text)
    assert said == style.title_of(schematics.PICTURES[name]())


def test_all_pictures_are_drawn_into_a_folder(tmp_path):
    schematics.draw(tmp_path / "new")
    names = sorted(path.stem for path in (tmp_path / "new").iterdir())
    assert names == sorted(schematics.PICTURES)


def test_the_made_up_samples_fit_their_sequence():
    assert schematics.LENGTHS.sum() <= schematics.PACKED
    assert schematics.LENGTHS.max() <= schematics.LIMIT


def test_a_kernel_starts_once_it_is_launched_and_the_one_before_has_ended():
    starts = schematics._starts(np.array([1.0, 2.0, 3.0]), np.array([0.5, 2.0, 1.0]))
    assert starts.tolist() == [1.0, 2.0, 4.0]


def test_numbers_are_rounded_to_bf16_as_pytorch_does():
    values = np.float32([0.7, 0.69999, -1.001953125, 1.005859375, 3e-5])
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    assert schematics.bf16(values).tolist() == expected.tolist()
