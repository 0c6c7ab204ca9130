from pathlib import Path

from echelon.observe import Tracker
from echelon.observe.trackers.tracker import TrackedRun


def test_any_object_with_the_three_methods_is_a_tracker() -> None:
    class Prints:
        def config(self, values: object) -> None: ...
        def log(self, values: object, step: int) -> None: ...
        def close(self) -> None: ...

    assert isinstance(Prints(), Tracker)
    assert not isinstance("wandb", Tracker)


def test_a_run_of_one_rank_has_the_rank_in_its_title() -> None:
    run = TrackedRun(folder=Path("runs/gpt"), name="gpt")
    assert run.title == "gpt"
    assert TrackedRun(folder=run.folder, name="gpt", rank=3).title == "gpt-rank-3"
