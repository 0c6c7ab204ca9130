"""What the documents name exists: files, modules, classes, public names, targets of links."""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import echelon
from tests.hosts import HOSTS

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "echelon"
CODE = ("src", "tests", "benchmarks", "examples", "scripts")
PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    ]
)
# Files that a user or a run has, and that are not in the repository.
OTHERS_FILES = {
    "test_counts.py",
    "test_device_mesh.py",
    "test_it.py",
    "test_mean.py",
    "evaluate.py",
    "pretrain_gpt.py",
    "zero_to_fp32.py",
    "train.py",
    "trace.json",
    "report.html",
    "gpu.md",
}
# Names of other projects, and of docstrings, that no code here uses.
FOREIGN = {
    "Ahead",
    "Args",
    "DistributedSampler",
    "BatchNorm",
    "BatchNorm2d",
    "DefaultContext",
    "Failed",
    "GraceTime",
    "KillWait",
    "PyTorchJob",
    "PytestUnhandledThreadExceptionWarning",
    "Raises",
    "Returns",
    "SignalChildrenProcesses",
    "Timeout",
}


def page_id(page: Path) -> str:
    """The path of a page as its test shows it."""
    return str(page.relative_to(ROOT))


def fenced(text: str) -> tuple[str, str]:
    """The text of a page without its blocks of code, and these blocks."""
    prose, blocks = [], []
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        else:
            (blocks if inside else prose).append(line)
    return "\n".join(prose), "\n".join(blocks)


def inline_code(prose: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`\n]+)`", prose)


def python_files() -> list[Path]:
    """All Python files of the repository."""
    paths = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    return [path for path in paths if path != Path(__file__).resolve()]


def names_of(tree: ast.AST) -> Iterator[str]:
    """What code defines, uses and imports, and its strings of one word."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "asname", "arg", "module"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield from name.split(".")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from node.value.split(".") if re.fullmatch(r"[\w.]+", node.value) else ()


@cache
def identifiers() -> set[str]:
    """Each name in the code of the repository."""
    return {name for path in python_files() for name in names_of(ast.parse(path.read_text()))}


def names_defined(node: ast.ClassDef) -> set[str]:
    """The methods and attributes that a class defines itself."""
    return {getattr(child, "name", "") for child in node.body} | {
        target.id
        for child in node.body
        for target in (*getattr(child, "targets", ()), getattr(child, "target", None))
        if isinstance(target, ast.Name)
    }


@cache
def classes() -> dict[str, set[str]]:
    """Each class of the package, and what it defines itself."""
    return {
        node.name: names_defined(node)
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }


@cache
def file_names() -> set[str]:
    """The name of each file in the repository."""
    paths = (path for folder in (*CODE, "docs") for path in (ROOT / folder).rglob("*.*"))
    return {path.name for path in (*paths, *ROOT.iterdir())}


ROOMS = {path.stem for path in SRC.iterdir() if not path.name.startswith("_")}


def exists(page: Path, name: str) -> bool:
    """Whether ``name``, as a page writes it, is a file or folder of the repository."""
    if "/" not in name:
        return name in file_names() or name in OTHERS_FILES
    return any((folder / name).exists() for folder in (ROOT, SRC, ROOT / "tests", page.parent))


def resolves(dotted: str) -> bool:
    """Whether ``echelon.a.b`` is a module, or an attribute of one."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            item: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if error.name in HOSTS:
                return True  # the name is looked up where this trainer is installed
            continue
        for name in parts[end:]:
            fields = getattr(item, "__dataclass_fields__", {})
            if not hasattr(item, name) and name not in fields:
                return False
            item = getattr(item, name, None)
        return True
    return False


def missing_files(page: Path, text: str) -> list[str]:
    """Paths of Python files, and of files and folders of the repository, that do not exist."""
    prose, blocks = fenced(text)
    names = set(re.findall(r"[\w./-]*\w\.py\b", prose + "\n" + blocks))
    for code in inline_code(prose):
        names |= set(re.findall(r"^(?:docs|tests|src|benchmarks|examples|scripts)/[\w./-]*", code))
    names = {name for name in names if not name.startswith("benchmarks/results/")}
    return [f"{name} does not exist" for name in sorted(names) if not exists(page, name)]


def without_their_names(text: str) -> str:
    """The text of a page without the first column of its tables, the names of another library."""
    return re.sub(r"^\| .*? \| ", "| | ", text, flags=re.MULTILINE)


def missing_names(text: str) -> list[str]:
    """Dotted names of this package, and classes, that are nowhere defined."""
    prose, blocks = fenced(text)
    sentences = []
    dotted = set(re.findall(r"\b(?:ec|echelon)(?:\.[A-Za-z_]\w*)+\b(?!\.py|=)", prose + blocks))
    for code in inline_code(prose):
        head = code.split(".")[0]
        is_dotted = re.fullmatch(r"\w+(\.[A-Za-z_]\w*)+", code) and not code.endswith(".py")
        if head in ROOMS and is_dotted:
            dotted.add(f"echelon.{code}")
    for name in sorted(dotted):
        full = re.sub(r"^ec\.", "echelon.", name)
        if not resolves(full) and not full.endswith((".init_", ".py")):
            sentences.append(f"{name} does not exist")
    spans = inline_code(prose)
    for word in sorted(
        {word for code in spans for word in re.findall(r"\b[A-Z]\w*[a-z]\w*", code)}
    ):
        if word not in identifiers() | FOREIGN:
            sentences.append(f"no code has the name {word}")
    return sentences


def anchor_of(heading: str) -> str:
    """The anchor that a heading gets where pages are shown."""
    plain = re.sub(r"[`*]", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links to files or headings that do not exist."""
    prose, _ = fenced(text)
    sentences = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        if not other.exists():
            sentences.append(f"{target} does not exist")
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", fenced(other.read_text())[0], re.MULTILINE)
            if anchor not in map(anchor_of, headings):
                sentences.append(f"{target}: there is no such heading")
    return sentences


def unknown_in_drawings(text: str) -> list[str]:
    """What the drawings of the architecture name and ``src/echelon`` does not define."""
    _, blocks = fenced(text)
    sentences = []
    for line in blocks.splitlines():
        for name, method in re.findall(r"\b([A-Z][A-Za-z]*[a-z])(?:\.(\w+))?\b", line):
            if method and method not in classes().get(name, ()):
                sentences.append(f"{name}.{method} does not exist")
            elif not method and re.search(r"[a-z][A-Z]", name) and name not in classes():
                sentences.append(f"there is no class {name}")
        for path, name in re.findall(r"(\w+/[\w/]+\.py) +([A-Za-z]\w+)", line):
            if name not in names_of(ast.parse((SRC / path).read_text())):
                sentences.append(f"{path} has no {name}")
    return sentences


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    if page.parent.name == "coming-from":
        text = without_their_names(text)
    problems = [*missing_files(page, text), *missing_names(text), *broken_links(page, text)]
    assert problems == []


@pytest.mark.slow
def test_the_drawings_of_the_architecture_name_what_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert unknown_in_drawings(text) == []


def test_the_reading_order_has_every_package() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().split("## Reading order")[1].split("\n## ")[0]
    named = {
        code
        for line in table.splitlines()
        if line.startswith("|")
        for code in inline_code(line.split("|")[1])
    }
    assert ROOMS - {"py", "version"} - {name.split(".")[0] for name in named} == set()
    assert [name for name in sorted(named) if not resolves(f"echelon.{name}")] == []


def test_every_page_is_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            links = re.findall(r"\]\(([^)#\s]+)", fenced(page.read_text())[0])
            waiting += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert [page_id(page) for page in PAGES if page not in seen] == []


def test_missing_names_are_found() -> None:
    page = ROOT / "docs" / "page.md"
    text = "See `fsdp/nothing.py`, `ec.NoThing`, `fsdp.nothing`, `NoThingHere` and [x](no.md)."
    assert missing_files(page, text) == ["fsdp/nothing.py does not exist"]
    assert missing_names(text) == [
        "ec.NoThing does not exist",
        "echelon.fsdp.nothing does not exist",
        "no code has the name NoThing",
        "no code has the name NoThingHere",
    ]
    assert broken_links(page, text) == ["no.md does not exist"]


def test_missing_names_in_drawings_are_found() -> None:
    text = "```\n ddp/buckets.py Bucket.nothing\n ddp/buckets.py Reducer NoClass\n```"
    assert unknown_in_drawings(text) == [
        "Bucket.nothing does not exist",
        "there is no class NoClass",
        "ddp/buckets.py has no Reducer",
    ]


def test_public_names_are_found() -> None:
    assert resolves("echelon.pipeline.split")
    assert resolves(echelon.DDP.__module__)
