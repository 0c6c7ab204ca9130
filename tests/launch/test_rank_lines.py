"""Lines of several threads do not mix, and show their rank where that is wanted."""

import io
import threading

from echelon.launch.rank_lines import WholeLines, printing_as


def test_parts_of_a_line_are_kept_until_its_end() -> None:
    below = io.StringIO()
    lines = WholeLines(below, tee=True)
    with printing_as(3):
        lines.write("a ")
        lines.flush()
        assert below.getvalue() == ""
        lines.write("line\nand a rest")
        assert below.getvalue() == "[rank 3] a line\n"
        lines.end()
    assert below.getvalue() == "[rank 3] a line\n[rank 3] and a rest\n"
    lines.write("of nobody\n")
    assert below.getvalue().endswith("\nof nobody\n")


def test_lines_of_threads_do_not_mix() -> None:
    below = io.StringIO()
    lines = WholeLines(below, tee=True)

    def write(rank: int) -> None:
        with printing_as(rank):
            for _ in range(200):
                for char in f"{rank} {rank}\n":
                    lines.write(char)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(below.getvalue().splitlines()) == sorted(
        f"[rank {rank}] {rank} {rank}" for rank in range(4) for _ in range(200)
    )
