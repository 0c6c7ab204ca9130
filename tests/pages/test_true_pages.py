"""Pages that list what the code has: errors, and defaults beside those of libraries for Rust."""

import inspect
import re
from enum import Enum

import pytest

import echelon as ec
from echelon import errors
from tests.pages.code_blocks import ROOT
from tests.pages.rows import FOLDER, names_in_rows

ERRORS_PAGE, RUST_PAGE = ROOT / "docs" / "errors.md", FOLDER / "rust-libraries.md"

ERROR_CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.EchelonError)
}

# The names of libraries for Rust, as their seeds and users have them.
RUST_NAMES = {
    *("SimulatedBackend", "create_group", "set_grad", "init_process_group", "BackendType"),
    *("ProcessGroup", "to_device", "gather_parameters", "get_shard_info", "sharding_strategy"),
    *("mixed_precision", "memory_config", "MultiGpuContext", "no_grad", "named_parameters"),
    "eval",
}


def test_every_error_has_its_row_with_its_bases() -> None:
    rows = {
        line.split("`")[1]: line
        for line in ERRORS_PAGE.read_text().splitlines()
        if line[:3] == "| `"
    }
    assert set(rows) == set(ERROR_CLASSES) - {"EchelonError"}
    for name, row in rows.items():
        bases = {base.__name__ for base in ERROR_CLASSES[name].__bases__} - {"EchelonError"}
        assert bases == set(re.findall(r"`(\w+)`", row.split(" | ")[1])), name


def test_every_name_of_a_rust_library_has_its_row() -> None:
    shown = {re.split(r"[(:]", name)[0] for name in names_in_rows(RUST_PAGE)}
    assert RUST_NAMES - shown == set()


DEFAULTS = re.findall(r"\| `(\w+)=([^`]+)`", RUST_PAGE.read_text().split("## Defaults")[1])


@pytest.mark.parametrize(("name", "text"), DEFAULTS)
def test_a_default_on_the_page_is_that_of_the_signature(name: str, text: str) -> None:
    found = [
        parameter.default
        for owner in (ec.DDP, ec.FSDP, ec.Pipeline)
        if (parameter := inspect.signature(owner).parameters.get(name)) is not None
    ]
    assert found
    for default in found:
        assert text == (default.name if isinstance(default, Enum) else repr(default))


def test_1f1b_keeps_one_microbatch_more_than_there_are_stages_after_a_rank() -> None:
    assert "min(m, p - r)" in RUST_PAGE.read_text()
    for ranks, microbatches in ((4, 8), (4, 2), (1, 3)):
        plan = ec.pipeline.schedule("1f1b", ranks, microbatches, ranks)
        peaks = ec.pipeline.simulate(plan, costs={"F": 1, "B": 2}).peak
        assert list(peaks) == [min(microbatches, ranks - rank) for rank in range(ranks)]
