"""Steps that run before a world closes, and the tree of its groups."""

import pytest

from echelon.comm.group_tree import GroupTree


def test_steps_of_all_groups_run_once_last_first_and_the_first_error_is_raised() -> None:
    root, child = GroupTree(), GroupTree()
    assert root._with_parent(None) is None
    assert root._with_parent(child) is child
    assert child.root is root
    ran: list[str] = []

    def fail(seconds: float | None) -> None:
        ran.append("fail")
        raise ValueError("unsaved")

    root.before_close(lambda seconds: ran.append(f"first, in {seconds}"))
    forget = child.before_close(lambda seconds: ran.append("forgotten"))
    child.before_close(fail)
    forget()
    forget()
    with pytest.raises(ValueError, match="unsaved"):
        child.prepare_close()
    root.prepare_close(3.0)
    assert ran == ["fail", "first, in None"]
