"""The nightly comparison of steps on two JAXes."""

import json
import sys

import newer_jax
import pytest


def run(jax, ratios):
    rows = [{"size": "small", "pp": 2, "schedule": str(n), "ratio": ratio} for n, ratio in enumerate(ratios)]
    return {"jax": jax, "tables": {"CPU time of a step": rows}}


@pytest.mark.parametrize(
    ("ratios", "code", "said"),
    [
        ((0.8, 0.7, 1.4), 0, "on jax 0.13 the ratio is 1.00 of that on jax 0.12, by the median of 3 rows\n"),
        (
            (1.0, 0.9, 0.6),
            1,
            "error: on jax 0.13 the ratio is 1.25 of that on jax 0.12, by the median of 3 rows, above 1.1",
        ),
    ],
    ids=["one row of three is slower", "slower"],
)
def test_the_median_of_the_rows_decides(tmp_path, monkeypatch, capsys, ratios, code, said):
    files = [tmp_path / name for name in ("old.json", "new.json")]
    for file, found in zip(files, (run("0.12", (0.8, 0.7, 0.7)), run("0.13", ratios)), strict=True):
        file.write_text(json.dumps(found))
    monkeypatch.setattr(sys, "argv", ["newer_jax.py", *map(str, files)])
    assert newer_jax.main() == code
    assert said in capsys.readouterr().out
