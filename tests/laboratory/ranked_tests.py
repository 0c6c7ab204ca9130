"""Runs tests of many ranks in a session of pytest of their own, as a user would."""

import pytest
import torch._dynamo  # a session forgets what it has imported, and torch cannot
import torch.distributed  # noqa: F401

import echelon.laboratory.rank_test
import echelon.testing  # noqa: F401

PLUGIN = "echelon.laboratory.pytest_plugin"


def run_tests(
    pytester: pytest.Pytester, source: str, *arguments: str, **options: bool
) -> pytest.RunResult:
    """The result of a session with one file of tests, which need not import the usual."""
    imports = "import logging, sys, time, unittest\nimport pytest, torch\nimport echelon as ec\n"
    pytester.makepyfile(test_it=imports + source)
    return pytester.runpytest_inprocess(
        "-p", PLUGIN, "-p", "no:cacheprovider", *arguments, **options
    )


def is_in_order(result: pytest.RunResult, *lines: str) -> None:
    """Expect these lines of the output, which may contain ``*``."""
    result.stdout.fnmatch_lines([*lines])
