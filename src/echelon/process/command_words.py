"""The words of a command line as they may be kept and shown: without the secrets among them.

Whoever reads a tracker, a report, a folder of a run or ``echelon ps`` reads command lines. Programs
are given tokens and passwords there, against all advice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "***"

# Parts of a name, between its separators or capitals, whose value is a secret.
_SECRET = {
    *("token", "secret", "secrets", "password", "passwd", "passphrase", "pwd", "pass", "key"),
    *("credential", "credentials", "auth", "authorization", "bearer", "cookie"),
    *("dsn", "pat", "signature", "sig", "jwt", "sas"),
}
_COMPOUNDS = ("password", "passwd", "secret", "apikey", "accesskey", "privatekey", "authtoken")
# Words that a name of a training has beside "token" or "key", whose value is a number or a size.
_HARMLESS = {
    *("num", "max", "min", "per", "count", "size", "len", "length", "dim", "dims", "id", "ids"),
    *("heads", "pad", "eos", "bos", "unk", "value", "values", "layers", "total", "batch"),
}
_ASSIGNMENT = re.compile(
    r"(?P<name>[-+]{0,2}[A-Za-z_][\w.+/-]*)(?P<sign>[=:])(?P<value>.*)", re.DOTALL
)
_OPTION = re.compile(r"--?(?P<name>[A-Za-z_][\w.-]*)")
_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/?#\s]*@")
_QUERY = re.compile(r"(?P<sign>[?&;#])(?P<name>[\w.-]+)=(?P<value>[^&;#\s]*)")
# Values that say by their form what they are, whatever their name.
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{16,}|xox[abpors]-[\w-]{10,}|AKIA[A-Z0-9]{12,}|AIza[\w-]{20,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)


def masked(words: Iterable[str]) -> tuple[str, ...]:
    """``words`` with ``***`` in the place of each secret.

    A secret is the value of an option or of an assignment with a name like ``--api-key``,
    ``password`` or ``HF_TOKEN``, what stands before the ``@`` of a URL, and what has the form of a
    token that well-known services give out. Law: masking twice is masking once.

    Example:
        >>> masked(["train.py", "--hf-token", "abc", "--lr=1", "WANDB_API_KEY=abc"])
        ('train.py', '--hf-token', '***', '--lr=1', 'WANDB_API_KEY=***')
        >>> masked(["https://me:secret@host/data", "--max-tokens", "512"])
        ('https://***@host/data', '--max-tokens', '512')
    """
    shown: list[str] = []
    hides_next = False
    for word in words:
        if hides_next and not (word.startswith("--") and len(word) > 2):
            shown.append(MASK)
            hides_next = False
            continue
        option = _OPTION.fullmatch(word)
        hides_next = option is not None and _is_secret(option["name"])
        shown.append(word if option else masked_text(word))
    return tuple(shown)


def masked_text(text: str) -> str:
    """One word, or the value of an option, with ``***`` in the place of each secret in it."""
    assignment = _ASSIGNMENT.fullmatch(text)
    if assignment is not None and not assignment["value"].startswith("//"):
        name, sign, value = assignment.groups()
        shown = MASK if value and _is_secret(name) else masked_text(value)
        return f"{name}{sign}{shown}"
    text = _USERINFO.sub(rf"\g<scheme>{MASK}@", text)
    text = _QUERY.sub(_masked_parameter, text)
    return _FORMS.sub(MASK, text)


def masked_value(name: str, value: object) -> object:
    """A value of a configuration under its name, also a nested one: secret texts as ``***``.

    Example:
        >>> masked_value("options", {"lr": 0.1, "api_key": "abc", "max_tokens": "512"})
        {'lr': 0.1, 'api_key': '***', 'max_tokens': '512'}
    """
    if isinstance(value, str) and value:
        return MASK if _is_secret(name) else masked_text(value)
    if isinstance(value, Mapping):
        return {key: masked_value(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked_value(name, item) for item in value]
    return value


def _masked_parameter(match: re.Match[str]) -> str:
    value = MASK if _is_secret(match["name"]) else match["value"]
    return f"{match['sign']}{match['name']}={value}"


def _is_secret(name: str) -> bool:
    """Whether the value of a name is a secret, by the parts of the name."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    parts = [part for part in re.split(r"[^A-Za-z0-9]+", spaced.lower()) if part]
    joined = "".join(parts)
    is_named = any(part in _SECRET or part.endswith("token") for part in parts) or any(
        compound in joined for compound in _COMPOUNDS
    )
    return is_named and not any(part in _HARMLESS for part in parts)
