"""Every hang of a rank, in every way to run it: what is told of it, and how soon all has ended."""

import re
from pathlib import Path

import pytest

from tests.comm.faults import DOES, HANGS, is_stopped
from tests.long.failing_jobs import WAYS, Ended, end_of

TIMEOUT_S = 10.0
MOST_S = 20.0  # from the beginning of the hang to the end of the last process
MOST_LINES = 25  # of echelon run


def check_told(ended: Ended, hang: str) -> None:
    """That rank 1 is named, with its last call and its stack."""
    text = "\n".join(ended.told)
    assert re.search(r"  its last call: all_reduce\(mean\) .* at .*job\.py:\d+ in main\n", text)
    if hang == "stopped":
        assert "its stack is not known: a process that is stopped cannot tell it\n" in text
    else:
        stack = text.partition("its stack:\n")[2]
        assert re.match(r"(    \S+:\d+ in \S+\n)*    \S+job\.py:\d+ in meet\n", stack)
        assert re.search(rf"^    \S+faults\.py:\d+ in {HANGS[hang].__name__}$", stack, re.M)


def check_stacks(text: str, hang: str) -> None:
    """That the stacks of all ranks are there that can tell theirs."""
    stacks = text.partition("The Python stacks of the ranks of this host:\n")[2]
    ranks = ["0"] if HANGS[hang] is is_stopped else ["0", "1"]
    assert re.findall(r"-- rank (\d), the innermost line last --", stacks) == ranks
    assert len(re.findall(r"job\.py:\d+ in main", stacks)) == len(ranks)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("hang", DOES)
@pytest.mark.parametrize("way", WAYS)
def test_a_hang_ends_the_job_and_is_told(way: str, hang: str, tmp_path: Path) -> None:
    ended = end_of(tmp_path, way, hang, "step", TIMEOUT_S)
    print(f"{way} | {hang} | {ended.seconds:.1f} s | {len(ended.told)} lines")
    assert ended.code not in (0, 75)
    what = f"rank 1 at step 3 {DOES[hang]}"
    if "echelon run" in way:
        assert re.fullmatch(rf"{what}; rank 0 waited 10\.\d s for it", ended.told[0])
        assert len(ended.lines) <= MOST_LINES
        check_stacks(ended.stacks, hang)
    else:
        assert re.match(r"CommTimeout: .* waited 10\.\d s for rank 1 in vain", ended.told[0])
        assert f"  {what}" in ended.told
        check_stacks("\n".join(ended.told), hang)
    check_told(ended, hang)
    assert ended.seconds <= MOST_S
