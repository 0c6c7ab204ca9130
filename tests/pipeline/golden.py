"""The texts in tests/golden: every schedule for 2, 3 and 4 ranks.

After a change that is meant to change a schedule, write them again and read the difference::

    python -m tests.pipeline.golden
    git diff tests/golden
"""

from pathlib import Path

from tests.pipeline.sizes import VARIANTS, make

FOLDER = Path(__file__).resolve().parent.parent / "golden"


def text(variant: str) -> str:
    """What the file of a variant holds: 2p + 1 microbatches, so that no number divides another."""
    parts = []
    for ranks in (2, 3, 4):
        found = make(variant, ranks, 2 * ranks + 1)
        parts.append(f"# {ranks} ranks, {found.num_microbatches} microbatches\n{found.to_csv()}")
    return "\n".join(parts)


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for variant in VARIANTS:
        (FOLDER / f"{variant}.csv").write_text(text(variant))


if __name__ == "__main__":
    main()
