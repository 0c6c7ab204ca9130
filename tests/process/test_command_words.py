"""Secrets of a command line are kept and shown nowhere."""

import pytest

from echelon.process.command_words import MASK, masked, masked_value

SECRET = "s3cr3t-Value"
HIDDEN = [  # words, of which one has the secret
    ["--token", SECRET],
    ["--hf-token", SECRET],
    ["--hf_token=" + SECRET],
    ["--hfToken", SECRET],
    ["-token", "-" + SECRET],
    ["--api-key=" + SECRET],
    ["--wandb_key", SECRET],
    ["--password", SECRET],
    ["--db.password=" + SECRET],
    ["trainer.logger.api_key=" + SECRET],
    ["+hub.token=" + SECRET],
    ["WANDB_API_KEY=" + SECRET],
    ["AWS_SECRET_ACCESS_KEY=" + SECRET],
    ["--env", "HF_TOKEN=" + SECRET],
    ["--env=HF_TOKEN=" + SECRET],
    ["--db", f"postgres://me:{SECRET}@host/db"],
    [f"--url=https://{SECRET}@host/x"],
    [f"s3://{SECRET}:{SECRET}@bucket/x"],
    [f"https://host/x?sig={SECRET}&a=1"],
    ["--header", f"Authorization: Bearer {SECRET}"],
    ["hf_" + "a" * 20 + SECRET.replace("-", "")],
    ["--resume", "ghp_" + "b" * 30 + SECRET.replace("-", "")],
]
SHOWN = [
    ["train.py", "--lr", "1e-3", "--steps=10", "-x"],
    ["--tokenizer", "gpt2", "--num-tokens", "512", "--max_new_tokens=5", "--pad-token-id", "0"],
    ["--tokens-per-batch=4096", "--monkey", "x", "--keyboard=1", "--passes", "3"],
    ["https://host/path?a=1", "runs/a@b", "me@host", "a=b", "lr:0.1", "--", "-m", "a.b"],
    ["--key-value-heads", "8", "--token-dim=3"],
]


@pytest.mark.parametrize("words", HIDDEN, ids=" ".join)
def test_a_secret_is_masked_and_nothing_else(words: list[str]) -> None:
    shown = masked(["train.py", *words, "--lr", "1"])
    text = " ".join(shown)
    assert SECRET not in text
    assert SECRET.replace("-", "") not in text
    assert MASK in text
    assert (shown[0], shown[-2:], len(shown)) == ("train.py", ("--lr", "1"), len(words) + 3)
    assert masked(shown) == shown


@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_what_is_no_secret_stays(words: list[str]) -> None:
    assert masked(words) == tuple(words)


def test_options_are_masked_by_their_names_however_deep_they_stand() -> None:
    options = {"lr": 0.1, "hub": {"token": SECRET, "names": ["a", f"x://{SECRET}@h"]}, "key": None}
    assert masked_value("config", options) == {
        "lr": 0.1,
        "hub": {"token": MASK, "names": ["a", f"x://{MASK}@h"]},
        "key": None,
    }
