"""The configuration file: what it may hold, and what is said of what it may not."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from pipelines.fleet.config import ConfigError, load

MINIMAL = '[scan]\npaths = ["bucket"]\n[output]\nfolder = "out"\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "nightly.toml"
    path.write_text(text, "utf-8")
    return path


def test_a_small_one(tmp_path: Path) -> None:
    config = load(written(tmp_path, MINIMAL))
    assert config.scan.paths == ["bucket"]
    assert config.state == Path("out/state.sqlite")
    assert config.team_of("anything") is None


def test_the_whole_of_it(tmp_path: Path) -> None:
    text = (
        MINIMAL.replace("bucket", "s3://traces/{night}")
        + """
keep_nights = 7
[price]
gpu_hour = 2
[[owners]]
jobs = "nlp-*"
team = "language"
[[owners]]
jobs = "*"
team = "platform"
[[suppressions]]
fingerprint = "0123456789abcdef"
until = 2027-01-31
reason = "mended in the next release"
[[webhooks]]
url_env = "SLACK"
form = "slack"
on = ["new"]
"""
    )
    config = load(written(tmp_path, text))
    assert config.output.keep_nights == 7
    assert [config.team_of(job) for job in ("nlp-7", "vision")] == ["language", "platform"]
    assert config.suppressions[0].until == dt.date(2027, 1, 31)
    assert config.suppressions[0].covers("0123456789abcdef", "cycle", "any")
    assert not config.suppressions[0].covers("0123456700000000", "cycle", "any")
    assert config.webhooks[0].on == ("new",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[scan]", "[scan"), "expected TOML"),
        (('paths = ["bucket"]', ""), "scan: Object missing required field `paths`"),
        (('["bucket"]', "[]"), "scan.paths: expected one path or more"),
        (('["bucket"]', '"bucket"'), "scan.paths: Expected `array`, got `str`"),
        (('"bucket"', '"s3://x/{date}"'), "scan.paths: expected {night}"),
        (("[output]", 'jobs = 3\n[output]'), "scan: Object contains unknown field `jobs`"),
        (("[output]", 'engine = "tpu"\n[output]'), "scan.engine: Invalid enum value 'tpu'"),
        (("[output]", 'job_pattern = "("\n[output]'), "scan.job_pattern: expected a regular"),
        (("[output]", 'job_pattern = "a"\n[output]'), "scan.job_pattern: expected a named group"),
        (("[output]", "workers = 0\n[output]"), "scan.workers: expected 1 or more"),
        (('"out"', '"out"\nkeep_nights = 0'), "output.keep_nights: expected 1 or more"),
        (('"out"', '"out"\n[price]\ngpu_hour = -1'), "price.gpu_hour: expected 0 or more"),
        (('"out"', '"out"\n[price]\ngpu_hour = nan'), "price.gpu_hour: expected 0 or more"),
        (('"out"', '"out"\n[[webhooks]]\nurl_env = "https://hush.example"'), "webhooks[0].url_env"),
        (('"out"', '"out"\n[[suppressions]]\nuntil = 2027-01-01\nreason = "x"'),
         "suppressions[0]: expected a fingerprint, a kind or a pattern"),
        (('"out"', '"out"\n[[suppressions]]\nkind = "cycle"\nuntil = 2027-01-01\nreason = " "'),
         "suppressions[0].reason: expected a reason"),
        (('"out"', '"out"\n[[suppressions]]\nkind = "cycle"\nreason = "x"'),
         "suppressions[0]: Object missing required field `until`"),
        (('"out"', '"out"\n[[suppressions]]\nfingerprint = "12"\nuntil = 2027-01-01\nreason="x"'),
         "suppressions[0].fingerprint: expected 16 hexadecimal digits"),
    ],
)  # fmt: skip
def test_mistakes_are_told(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = written(tmp_path, MINIMAL.replace(*change))
    with pytest.raises(ConfigError) as e:
        load(path)
    assert str(e.value).startswith(f"{path}: ")
    assert message in str(e.value)
    assert "hush" not in str(e.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml: cannot be read"):
        load(tmp_path / "gone.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="expected UTF-8"):
        load(tmp_path / "bytes.toml")
