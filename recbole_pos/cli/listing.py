"""Tables of models, schemes, options of a model, and public datasets, printed on the terminal.

The sentence on an option, and the values that it may have, stand in its row of the table of
options (``recbole_pos.config.options``). RecBole's own sentences are the comments of its yaml
files: ``key: value  # (type) sentence``.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recbole_pos.errors import UsageError
from recbole_pos.model import models
from recbole_pos.model.models import MODELS
from recbole_pos.position.schemes import SCHEMES
from recbole_pos.registry import US, Registry
from recbole_pos.yaml_files import (
    ROOT,
    find_recbole_properties,
    read_overall_defaults,
    read_properties,
    read_yaml,
)


def list_models() -> None:
    """Print a table of the models that ``recbole-pos run -m`` takes: name, package, what each is.

    First come the models of this package that take position schemes, then its other ones, custom
    models, and RecBole's.
    """
    # MODELS has the classes of this package (``shipped``), and custom ones (``added``). A model
    # that takes position schemes has the option ``position``.
    with_schemes = [name for name in MODELS.shipped if "position" in MODELS.defaults(name)]
    others = [name for name in MODELS.shipped if name not in with_schemes]
    # ``read_summary`` returns the first paragraph of the docstring of a class.
    rows = [(name, US, read_summary(MODELS, name)) for name in (*with_schemes, *others)]
    for name, registration in MODELS.added.items():
        rows.append((name, registration.cls.__module__, read_summary(MODELS, name)))
    # Of RecBole's models there is a table, with a sentence about each.
    rows += [(name, "RecBole", facts["text"]) for name, facts in models.RECBOLE.items()]
    print_table(("model", "from", "what it is"), rows)


def list_schemes() -> None:
    """Print the position schemes that the option ``position`` may name.

    The table says of each scheme what it changes in a model (its place), what it needs, and which
    options it has. Schemes of this package that change the same are together, custom ones last.
    """
    # place and needs are in the yaml files of the package's schemes, since to import them takes
    # seconds
    about = {name: read_properties("position", name).about for name in SCHEMES.shipped}
    names = [*sorted(about, key=lambda name: about[name]["place"]), *SCHEMES.added]
    rows = []
    for name in names:
        facts = about.get(name, {"place": "custom", "needs": "-"})
        options = ", ".join(SCHEMES.defaults(name)) or "-"
        rows.append((name, facts["place"], facts["needs"], options, read_summary(SCHEMES, name)))
    print_table(("scheme", "place", "needs", "options", "what it is (source)"), rows)


def list_options(model: str, overrides: Mapping[str, Any]) -> None:
    """Print the options of a model with their defaults: its own first, then those of all models.

    Args:
        model: name of the model.
        overrides: options of the command line. Two have an effect: ``position`` replaces the
            position schemes of the model, and ``plugins`` are modules to import.

    Raises:
        UsageError: if there is no such model.
    """
    from recbole_pos.config.options import find_option
    from recbole_pos.config.plugins import import_named, register_class

    # Import the modules of the user, one of which may have the class of the model.
    register_class(model, import_named(overrides.get("plugins")))
    if model not in models.list_runnable():
        raise UsageError(models.explain_unknown(model))

    # A table for each source of options: the model, this package, RecBole. An option of several
    # sources is only in the first.
    listed: set[str] = set()
    for title, defaults, file in _list_option_sources(model, overrides.get("position")):
        comments = _read_comments(file)
        rows = []
        for key, default in defaults.items():
            option = find_option(key)  # its row in the table of all options
            if key not in listed and not option.refused:  # refused: one that has no effect here
                # The comment in the yaml file, if any, says more than the table of options.
                text = comments.get(key, option.text)
                allowed = option.allowed or option.type.removesuffix(" or none")
                rows.append((key, "-" if default is None else str(default), allowed, text))
        listed.update(defaults)
        print(f"\n{title}")
        print_table(("option", "default", "may be", "what it is for"), rows)


def list_datasets(data_path: str) -> None:
    """Print a table of the public datasets that this package can build from their raw files.

    A row has the numbers of users, items and interactions, whether the dataset is built already,
    the papers that report on it, and where to get its files.

    Args:
        data_path: the folder in which built datasets are looked for.
    """
    from recbole_pos.public.datasets import read_public_datasets

    # A dataset is here if its file of interactions is; an unknown count is shown as "?".
    rows = []
    columns = ("users", "items", "events")
    for name, dataset in read_public_datasets().items():
        is_here = (Path(data_path) / name / f"{name}.inter").is_file()
        counts = [f"{dataset.counts[key]:,}" if key in dataset.counts else "?" for key in columns]
        description = f"{dataset.title} ({', '.join(dataset.papers)}). {dataset.source}"
        rows.append((name, *counts, "yes" if is_here else "no", description))
    print_table(("name", *columns, "here", "what it is (papers), and where"), rows)


def print_dataset(name: str) -> None:
    """Print what is known of a public dataset, as yaml, and the command that builds it.

    Args:
        name: name of the dataset; a UsageError names the known ones if it is none of them.
    """
    from recbole_pos.public.datasets import find_public_dataset

    dataset = find_public_dataset(name)
    print(yaml.safe_dump(asdict(dataset), sort_keys=False), end="")
    print(f"options: {dataset.yaml}")
    print(f"build: recbole-pos data build {dataset.name} {' '.join(dataset.files)}")


# --- models and schemes ---


def read_summary(registry: Registry, name: str) -> str:
    """Return the first paragraph of a class's docstring, as plain text.

    The classes of this package are not imported, since that takes seconds: their files are read as
    text instead.

    Args:
        registry: the registry of models or of position schemes.
        name: name of the class in it.
    """
    if name not in registry.shipped:  # a custom class, which is imported already
        return get_first_paragraph(registry[name].__doc__)

    # Find the file of the module, and the class in its text; a path is "package.module:Class".
    module, _, class_name = registry.find_path(name).partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None  # a module of this package
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return get_first_paragraph(ast.get_docstring(classes[class_name]))


def get_first_paragraph(text: str | None) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join((text or "").strip().split("\n\n")[0].replace("``", "").split())


# --- options of a model ---


def _list_option_sources(model: str, position: Any) -> list[tuple[str, dict[str, Any], Path]]:
    """Return the sources of a model's options, each with the defaults it gives.

    Args:
        model: name of the model.
        position: position schemes that replace those of the model; None for its own.

    Returns:
        One tuple per source: title, option -> default, and the yaml file of the source. The file
        may have comments on the options, and may not exist.
    """
    from recbole_pos.config.sources import plugin_defaults

    shared = read_overall_defaults()  # the options that this package gives to all models
    recbole_folder = find_recbole_properties()
    training_file = recbole_folder / "overall.yaml"
    data_file = recbole_folder / "dataset" / "sample.yaml"

    if model in MODELS:  # a model of this package or a custom one, which may take position schemes
        title = f"options of {model} and its position schemes"
        model_file = ROOT / "model" / f"{model}.yaml"
        # First the options of the model, then those that only its schemes or its loss have. The
        # defaults for a whole run (``plugin_defaults``) have these and the shared ones.
        for_run = plugin_defaults(model, position)
        not_shared = {key: value for key, value in for_run.items() if key not in shared}
        defaults = MODELS.defaults(model) | not_shared
    else:
        title = f"options of {model}"
        model_file = recbole_folder / "model" / f"{model}.yaml"
        defaults = read_yaml(model_file) if model_file.is_file() else {}
    return [
        (title, defaults, model_file),
        ("options of the plugin", shared, ROOT / "options.yaml"),
        ("options of RecBole: training and evaluation", read_yaml(training_file), training_file),
        ("options of RecBole: data", read_yaml(data_file), data_file),
    ]


def _read_comments(file: Path) -> dict[str, str]:
    """Return the comments beside the defaults in a yaml file.

    Args:
        file: the file; without it, there are no comments.

    Returns:
        Option -> its comment, without the type in brackets with which RecBole's begin.
    """
    if not file.is_file():
        return {}
    # For a line such as `epochs: 300   # (int) The number of training epochs.`, "epochs" and the
    # sentence are found.
    comment = re.compile(r"^(\w+):.*?# *(?:\(.*?\))? *(.*)$", re.MULTILINE)
    return {key: text.strip() for key, text in comment.findall(file.read_text(encoding="utf-8"))}


# --- tables that fit the screen ---


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of two columns, a name and a text, at any width of the terminal.

    What a row has beside name and text is written under the text. For columns scheme, place, needs
    and text, the row ``("kernel", "attention", "times", "A kernel.")`` becomes ``kernel`` and a
    cell of the lines ``A kernel.`` and ``place: attention; needs: times``.

    Args:
        columns: names of the columns; the first has names, the last sentences.
        rows: cells, row by row.
    """
    console = Console(highlight=False)
    table = Table(show_lines=True)
    table.add_column(columns[0], no_wrap=True)
    table.add_column(columns[-1], overflow="fold")  # no text is cut off; long lines are broken
    for name, *facts, text in rows:
        titles = columns[1:-1]
        line = "; ".join(f"{title}: {fact}" for title, fact in zip(titles, facts, strict=True))
        table.add_row(escape(name), escape(f"{text}\n{line}"))  # escape: brackets are no markup
    console.print(table)
