"""Devices as tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from multimesh.errors import UsageError
from multimesh_planner.hardware import kernels
from multimesh_planner.hardware.devices import EXAMPLE, PRECISIONS, device, device_names


def test_every_device_says_where_its_numbers_are_from():
    for name in device_names():
        card = device(name)
        assert card.sources
        assert 0 < card.matmul_rate("bf16") < card.bf16 < 1e17
        assert card.network < card.link <= card.bandwidth


def test_every_precision_of_a_device_has_a_rate(tmp_path: Path):
    file = tmp_path / "ours.toml"
    file.write_text(
        '[mine]\nlike = "b200"\n[mine.rates]\nmatmul_bf16 = 0.6\nattention = 0.5\nmemory = 0.8\nlink = 0.8\n'
        'network = 0.8\n[old]\nlike = "a100"\nfp8 = 624e12\n',
        encoding="utf-8",
    )
    devices = [device(name) for name in device_names()] + [device("mine", file), device("old", file)]
    for card in devices:
        for precision in PRECISIONS:
            if getattr(card, precision):
                seconds = kernels.matmul(card, 8192, 8192, 8192, precision)
                assert 0 < seconds <= kernels.matmul(card, 8192, 8192, 8192) * 1.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x]\nlike = 'h100'\nnetwork = 0\n", "device x: network must be a number above 0, got 0"),
        ("[x]\nlike = 'h100'\nfp8 = 'fast'\n", "device x: fp8 must be a number above 0, got 'fast'"),
        ("[x]\nlike = 'y'\n", "device x: like = 'y' names no device"),
        ("[x]\nmemory = 1\n", "device x: generation must be one of ampere, hopper, blackwell"),
        ("[x]\nlike = 'h100'\nspeed = 1\n", "device x: .*unexpected keyword argument 'speed'"),
        ("[x\n", "cannot be read"),
    ],
)
def test_a_wrong_file_is_named(text: str, message: str, tmp_path: Path):
    file = tmp_path / "ours.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        device("x", file)


def test_a_group_within_a_domain_uses_the_link():
    h100 = device("h100")
    assert kernels.ring(h100, 8) == h100.link * h100.rates.link
    assert kernels.ring(h100, 2, within=8) == h100.network * h100.rates.network  # one rank of a domain
    assert kernels.ring(h100, 16) > kernels.ring(h100, 2, within=8)  # eight ranks share eight adapters


def test_flash_attention_2_is_slower_only_where_a_later_one_is_known():
    for name, slower in (("h100", True), ("a100", False)):
        one, two = (kernels.attention(device(name), 1e12, flash2=flash2) for flash2 in (False, True))
        assert (two > one) == slower
        assert two >= one


def test_cards_that_people_own_are_there_and_an_example_of_a_table_is_printed(tmp_path: Path):
    for name in ("rtx-4090", "rtx-3090", "a10g", "l4", "l40s"):
        assert device(name).memory < 50e9
    with pytest.raises(UsageError, match=r"there is no 'rtx-5060'.*suggest --help has an example"):
        device("rtx-5060")
    file = tmp_path / "own.toml"
    file.write_text(EXAMPLE, encoding="utf-8")
    card, h100 = device("my-machine", file), device("h100")
    assert (card.network, card.bandwidth, card.rates) == (25e9, h100.bandwidth, h100.rates)
