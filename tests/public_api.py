"""What a user of echelon can write, as lines of text: names, signatures, methods, fields, values.

Annotations are left out, because they name internal types. Attributes that an exception sets on
itself are listed, because programs read them where they catch it.

``python -m tests.public_api`` prints the lines; ``tests/golden/public_api.txt`` keeps them.
"""

import ast
import dataclasses
import enum
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

PACKAGE = "echelon"
MODULES = ("errors", "testing", "pipeline", "observe", "events", "c10d", "units")
# A class that defines one of these promises it, as it does a method with a plain name.
OPERATORS = {"__call__", "__enter__", "__exit__", "__iter__", "__len__", "__getitem__", "__next__"}

# Only echelon makes these, so how they are made is no promise; nor that of its exceptions.
MADE_BY_ECHELON = {"AsyncSave", "Group", "Loaded", "Plans", "Window", "Work", "World"}
# Members without an underscore for other packages of echelon, which no page of docs/ names.
FOR_OTHER_PACKAGES = {"before_close", "disown", "explain", "finish", "prepare_close"}
FOR_OTHER_PACKAGES |= {"holdings", "shared_over"}


def public_modules() -> Iterator[tuple[str, Any]]:
    """The public modules, each by the dotted name under which a user reaches it."""
    package = importlib.import_module(PACKAGE)
    yield PACKAGE, package
    for name in MODULES:
        # echelon.c10d is imported where it is needed; the others are names of the package.
        reached = getattr(package, name, None) or importlib.import_module(f"{PACKAGE}.{name}")
        yield f"{PACKAGE}.{name}", reached


def public_names(module: Any) -> list[str]:
    """What ``__all__`` lists, or all functions and classes that the module itself defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )


def default_text(value: object) -> str:
    """How a default or a value is written: without addresses and without places of modules."""
    if isinstance(value, tuple) and type(value) is tuple:
        return f"({', '.join(map(default_text, value))})"
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__qualname__
    if dataclasses.is_dataclass(value) and hasattr(value, "name"):
        return f"{type(value).__name__}:{value.name}"
    return f"<{type(value).__name__}>" if repr(value).startswith("<") else repr(value)


def signature_text(function: Any, *, bound: bool) -> str:
    """The parameters of a function by name, kind and default."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # written in C
        return "(...)"
    plain = [
        parameter.replace(
            annotation=parameter.empty,
            default=parameter.empty if parameter.default is parameter.empty else Default(parameter),
        )
        for parameter in parameters[int(bound) :]
    ]
    return str(inspect.Signature(plain))


class Default:
    """Stands for a default in a signature and is printed as `default_text` says."""

    def __init__(self, parameter: inspect.Parameter) -> None:
        self.text = default_text(parameter.default)

    def __repr__(self) -> str:
        return self.text


def is_ours(cls: type) -> bool:
    """Whether a class is defined in echelon."""
    return cls.__module__.split(".")[0] == PACKAGE


def member_lines(cls: type) -> Iterator[str]:
    """Methods, properties and class attributes that echelon gives a class, inherited or not."""
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if is_ours(base):
            members.update(vars(base))
    fields = (
        {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    )
    for name, member in sorted(members.items()):
        if (name.startswith("_") and name not in OPERATORS) or name in fields:
            continue
        if name in FOR_OTHER_PACKAGES:
            continue
        if isinstance(member, property) or inspect.isdatadescriptor(member):
            yield f".{name} property"
        elif isinstance(member, staticmethod | classmethod):
            bound = isinstance(member, classmethod)
            yield f".{name}{signature_text(member.__func__, bound=bound)} {type(member).__name__}"
        elif inspect.isfunction(member):
            yield f".{name}{signature_text(member, bound=True)}"
        elif isinstance(member, enum.Enum):
            # The value of most is a sentence for the reader; of some it is what a file holds.
            yield f".{name} = {member.value!r}" if isinstance(member, str) else f".{name} member"
        else:
            yield f".{name} attribute"


def attributes_set(cls: type) -> set[str]:
    """The public attributes that the methods of a class of echelon assign on ``self``."""
    names = set()
    methods = [m for base in filter(is_ours, cls.__mro__) for m in vars(base).values()]
    for method in filter(inspect.isfunction, methods):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                if owner == "self" and not node.attr.startswith("_"):
                    names.add(node.attr)
    return names


def class_lines(cls: type, public: set[str]) -> Iterator[str]:
    """A class: what it is a kind of, how it is made, its members, its fields."""
    bases = [
        base.__name__
        for base in cls.__mro__[1:]
        if base is not object and (base.__name__ in public if is_ours(base) else True)
    ]
    yield f" is {' '.join(bases)}" if bases else " is object"
    if issubclass(cls, BaseException):
        yield from (f".{name} set" for name in sorted(attributes_set(cls)))
        return
    initializer = inspect.getattr_static(cls, "__init__")
    is_made = cls.__name__ not in MADE_BY_ECHELON and not issubclass(cls, enum.Enum)
    if is_made and inspect.isfunction(initializer):
        yield signature_text(initializer, bound=True)
    if dataclasses.is_dataclass(cls):
        yield from (f".{field.name} field" for field in dataclasses.fields(cls))
    yield from member_lines(cls)


def lines() -> list[str]:
    """Every promise of the public modules, one a line."""
    public = {name for _, module in public_modules() for name in public_names(module)}
    written, homes = [], dict[type, str]()
    for module_name, module in public_modules():
        for name in public_names(module):
            value, where = getattr(module, name), f"{module_name}.{name}"
            is_type = inspect.isclass(value)
            if is_type and homes.setdefault(value, where) != where:
                written.append(f"{where} is {homes[value]}")
            elif is_type:
                written += [where + line for line in class_lines(value, public)]
            elif inspect.isroutine(value):
                written.append(where + signature_text(value, bound=False))
            elif isinstance(value, ModuleType):
                written.append(f"{where} module")
            elif isinstance(value, str | int | tuple) and name != "__version__":
                written.append(f"{where} = {default_text(value)}")
            else:  # the type of something, or the version
                written.append(f"{where} value")
    return written


if __name__ == "__main__":
    print("\n".join(lines()))
