"""The example's text and model are the same in every process."""

from __future__ import annotations

import torch
from model import GPT, Shape, Text, standard_library


def test_the_text_is_bounded_and_always_the_same():
    first, again = standard_library(50_000), standard_library(50_000)
    assert first == again
    assert len(first) == 50_000
    assert standard_library(60_000).startswith(first)


def test_targets_are_the_inputs_one_byte_later():
    text = Text(bytes(range(21)), block=5)
    assert len(text) == 4
    inputs, targets = text[3]
    assert inputs.tolist() == [15, 16, 17, 18, 19]
    assert targets.tolist() == [16, 17, 18, 19, 20]


def test_the_model_has_about_five_million_parameters():
    count = sum(parameter.numel() for parameter in GPT(Shape()).parameters())
    assert 4_500_000 < count < 5_500_000


def test_no_byte_sees_a_later_one():
    torch.manual_seed(0)
    model = GPT(Shape(layers=2, width=16, heads=2, block=8, dropout=0.0)).double()
    inputs = torch.arange(8)[None]

    def losses(changed):
        return torch.stack([model(changed[:, :n], inputs[:, :n]) for n in (3, 8)])

    later = inputs.clone()
    later[0, 5] = 99
    before, after = losses(inputs), losses(later)
    assert before[0] == after[0]
    assert before[1] != after[1]
