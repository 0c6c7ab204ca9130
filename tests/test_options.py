"""An option is declared once, in a frozen dataclass; what users call says the same and explains it.

Constructors keep explicit arguments, for readers, editors and type checkers. These tests compare
them with the dataclass that checks the values, field by field.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

import pytest

import echelon as ec
from echelon import c10d, errors, events, observe, pipeline, testing
from echelon.ddp.options import DDPOptions
from echelon.fsdp.policy import FSDPOptions
from echelon.pipeline.arguments import PipelineOptions

OPTIONS: dict[type, type] = {
    ec.DDP: DDPOptions,
    ec.FSDP: FSDPOptions,
    ec.Pipeline: PipelineOptions,
}

# Arguments that are no options, with who they are about.
NO_OPTIONS = {
    ec.DDP: {"module", "group", "ignored"},
    ec.FSDP: {"module", "group", "units", "ignored", "replicate", "materialize"},
    ec.Pipeline: {
        *("stages", "group", "microbatches", "schedule", "loss_fn", "replicate"),
        *("args_chunk_spec", "kwargs_chunk_spec", "target_chunk_spec"),
        "schedule_options",
    },
}

# The constructor takes None for the dataclass's own default.
OR_NONE = {(ec.FSDP, "precision")}


def default_of(option: Field[Any]) -> object:
    return inspect.Parameter.empty if option.default is MISSING else option.default


@pytest.mark.parametrize("made", OPTIONS, ids=lambda made: made.__name__)
def test_a_constructor_has_the_names_types_and_defaults_of_its_options(made: type) -> None:
    parameters = dict(inspect.signature(made).parameters)
    options = {option.name: option for option in fields(OPTIONS[made])}
    assert set(parameters) - set(options) == NO_OPTIONS[made]
    hints, types = get_type_hints(made.__init__), get_type_hints(OPTIONS[made])
    for name, option in options.items():
        kind, default = types[name], default_of(option)
        if (made, name) in OR_NONE:
            kind, default = kind | None, None
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY, name
        assert (hints[name], parameters[name].default) == (kind, default), name


# Docstrings --------------------------------------------------------------------------------------


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions and classes that a user can import, and the public methods of the classes."""
    for module in (ec, errors, testing, pipeline, observe, events, c10d):
        for name in module.__all__:
            item = getattr(module, name)
            if not inspect.isclass(item) and not inspect.isfunction(item):
                continue
            if not item.__module__.startswith("echelon"):
                continue
            yield f"{module.__name__}.{name}", item
            for attribute, member in vars(item).items() if inspect.isclass(item) else ():
                if inspect.isfunction(member) and not attribute.startswith("_"):
                    yield f"{module.__name__}.{name}.{attribute}", member


def documented(item: Callable[..., Any], block: str) -> list[str]:
    """The names in a block of a docstring, such as ``Args:``."""
    text = inspect.cleandoc(item.__doc__ or "")
    match = re.search(rf"^{block}:\n((?:    .*\n|\n)+)", text + "\n", re.MULTILINE)
    return re.findall(r"^    (\w+):", match.group(1), re.MULTILINE) if match else []


def undocumented(name: str, item: Callable[..., Any]) -> list[str]:
    """Names in ``Args:`` that are no parameters, and fields that ``Attributes:`` does not have."""
    block = "Attributes" if is_dataclass(item) else "Args"
    try:
        parameters = list(inspect.signature(item).parameters)
    except ValueError:
        return []
    said = documented(item, block)
    wrong = [
        f"{name} has no {other}, which {block} names"
        for other in said
        if block == "Args" and other not in parameters
    ]
    if is_dataclass(item) and said:
        wrong += [
            f"Attributes of {name} lacks {field.name}"
            for field in fields(item)
            if field.name not in said and not field.name.startswith("_")
        ]
    return wrong


@pytest.mark.parametrize("made", [*OPTIONS, *OPTIONS.values()], ids=lambda made: made.__name__)
def test_every_option_is_documented(made: type) -> None:
    block = "Attributes" if is_dataclass(made) else "Args"
    assert [*inspect.signature(made).parameters] == documented(made, block)


def test_docstrings_name_what_there_is() -> None:
    assert [line for name, item in public() for line in undocumented(name, item)] == []
