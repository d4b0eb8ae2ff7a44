"""Tables of models, schemes, options of a model, and public datasets.

The sentence on an option, and the values that it may have, stand in its row of the table of
options; RecBole's sentences are the comments of its yaml, ``key: value  # (type) sentence``.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recbole_pos.errors import UsageError
from recbole_pos.model import recbole_models
from recbole_pos.model.models import (
    ADDED,
    BASELINES,
    MODELS,
    OURS,
    UNTRAINED,
    explain_unknown,
    list_runnable,
)
from recbole_pos.position.schemes import FACTS, SCHEMES
from recbole_pos.registry import US
from recbole_pos.yaml_files import ROOT, find_recbole_properties, read_overall_defaults, read_yaml

_MIN_WIDTH, _MAX_WIDTH = 40, 200  # columns of a table
_MIN_TEXT_WIDTH = 32  # columns of the text beside the others


def list_models() -> None:
    """Print the models that ``run -m`` takes: name, package, and what each is."""
    rows = []
    for name in dict.fromkeys([*MODELS, *BASELINES, *OURS]):
        source = ADDED.added[name].cls.__module__ if name in ADDED else US
        rows.append((name, source, read_summary(OURS, name)))
    from_recbole = {**recbole_models.SEQUENTIAL, **recbole_models.GENERAL}
    rows += [(name, "RecBole", text) for name, text in from_recbole.items()]
    print_table(("model", "from", "what it is"), rows)


def list_schemes() -> None:
    """Print the schemes that ``position`` may name, with what they change, need and add."""
    rows = []
    for name in SCHEMES:
        facts = FACTS.get(name)
        if facts is None:  # a custom scheme, which has to be built
            from recbole_pos.position.build import describe

            facts = describe(name)
        options = ", ".join(SCHEMES.defaults(name)) or "-"
        num_parameters = f"{facts.parameters:,}"
        text = read_summary(SCHEMES, name)
        rows.append((name, facts.place, facts.needs, num_parameters, options, text))
    columns = ("scheme", "place", "needs", "parameters", "options", "what it is (source)")
    print_table(columns, rows, "parameters added to a model of n = 50, d = 64, 1 head, 2 layers")


def list_options(model: str, overrides: Mapping[str, Any]) -> None:
    """Print the options of a model, its own first, with defaults and sentences.

    Two ``overrides`` have an effect: ``position`` replaces the model's schemes, and ``plugins``
    are imported.
    """
    from recbole_pos.config.options import find_option
    from recbole_pos.config.plugins import import_named, take_model

    take_model(model, import_named(overrides.get("plugins")))
    if model not in list_runnable():
        raise UsageError(explain_unknown(model))

    listed: set[str] = set()
    counts_only = model in UNTRAINED  # and reads no option of training by gradients
    for title, defaults, file in _list_option_sources(model, overrides.get("position")):
        comments = _read_comments(file)
        rows = []
        for key, default in defaults.items():
            option = find_option(key)
            is_unread = counts_only and "by models trained by gradients" in option.only
            if key not in listed and not option.refused and not is_unread:
                text = comments.get(key, option.text)
                allowed = option.allowed or option.type.removesuffix(" or none")
                rows.append((key, _show_default(default), allowed, text))
        listed.update(defaults)
        print(f"\n{title}")
        print_table(("option", "default", "may be", "what it is for"), rows)


def list_datasets(data_path: str) -> None:
    """Print the public datasets, and which of them are in a folder."""
    from recbole_pos.public.described import read_public_datasets

    rows = []
    columns = ("users", "items", "events")
    for name, dataset in read_public_datasets().items():
        is_here = (Path(data_path) / name / f"{name}.inter").is_file()
        counts = [f"{dataset.counts[key]:,}" if key in dataset.counts else "?" for key in columns]
        description = f"{dataset.title} ({', '.join(dataset.papers)}). {dataset.source}"
        rows.append((name, *counts, "yes" if is_here else "no", description))
    print_table(("name", *columns, "here", "what it is (papers), and where"), rows)


def print_dataset(name: str) -> None:
    """Print what is known of a public dataset."""
    from recbole_pos.public.described import find_public_dataset

    dataset = find_public_dataset(name)
    counts = ", ".join(f"{count:,} {key}" for key, count in dataset.counts.items())
    print(f"{dataset.title}: {counts or 'not known'}")
    print(f"source:  {dataset.source}")
    print(f"licence: {dataset.licence}")
    if dataset.note:
        print(f"note:    {dataset.note}")
    print(f"papers:  {', '.join(dataset.papers)}")
    print(f"files:   {', '.join(dataset.files)}")
    for file, md5 in dataset.md5.items():
        print(f"md5:     {md5}  {file}")
    print(f"build:   recbole-pos data build {dataset.name} {' '.join(dataset.files)}")
    print(f"yaml:    {dataset.yaml}")


# --- models and schemes ---


def read_summary(registry: Mapping[str, type], name: str) -> str:
    """Return the first paragraph of a class's docstring, as plain text.

    The plugin's own classes are read as text, since importing one costs seconds. ``registry`` may
    be a ChainMap of registries.
    """
    registries = getattr(registry, "maps", [registry])
    class_path = next((part.paths[name] for part in registries if name in part.paths), None)
    if class_path is None:
        return get_first_paragraph(registry[name].__doc__)
    module, _, class_name = class_path.partition(":")
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
    """Return (title, option -> default, yaml file that may have comments) by source."""
    from recbole_pos.config.sources import plugin_defaults

    recbole_folder = find_recbole_properties()
    training_file = recbole_folder / "overall.yaml"
    data_file = recbole_folder / "dataset" / "sample.yaml"
    overall = read_overall_defaults()
    model_file = (ROOT if model in OURS else recbole_folder) / "model" / f"{model}.yaml"
    title, defaults = f"options of {model}", read_yaml(model_file) if model_file.is_file() else {}
    if model in OURS:
        title += " and its position schemes"
        own_defaults = plugin_defaults(model, position)
        defaults |= {key: own_defaults[key] for key in own_defaults if key not in overall}
    return [
        (title, defaults, model_file),
        ("options of the plugin", overall, ROOT / "options.yaml"),
        ("options of RecBole: training and evaluation", read_yaml(training_file), training_file),
        ("options of RecBole: data", read_yaml(data_file), data_file),
    ]


def _read_comments(file: Path) -> dict[str, str]:
    """Return option -> the comment beside its default: RecBole's, or of a model in particular."""
    if not file.is_file():
        return {}
    comment = re.compile(r"^(\w+):.*?# *(?:\(.*?\))? *(.*)$", re.MULTILINE)
    return {key: text.strip() for key, text in comment.findall(file.read_text(encoding="utf-8"))}


def _show_default(default: Any) -> str:
    """Return a default as yaml writes it, a mapping without its braces."""
    if default is None:
        return "-"
    if isinstance(default, dict):
        return ", ".join(f"{key}: {_show_default(value)}" for key, value in default.items())
    if isinstance(default, list):
        return f"[{', '.join(map(str, default))}]"
    return str(default)


# --- tables that fit the screen ---


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Print a table that fits the screen; the first column has names, the last text.

    Nothing is cut off. Where the text has little room, the columns between are written under it.
    A ``note`` stands below the table.
    """
    console = Console(highlight=False)
    console.width = min(max(console.width, _MIN_WIDTH), _MAX_WIDTH)
    # a column is as wide as its longest word, since lines break between words only
    *fact_columns, _ = zip(*[columns, *rows], strict=True)
    widths = [max(map(len, " ".join(cells).split())) for cells in fact_columns]
    if console.width - sum(widths) - 3 * len(columns) < _MIN_TEXT_WIDTH:
        columns, rows = _fold_columns(columns, rows)

    table = Table(caption=note or None, show_lines=len(columns) == 2)
    for column in columns:
        table.add_column(column, no_wrap=column == columns[0], overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def _fold_columns(
    columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[Sequence[str], list[tuple[str, str]]]:
    """Return a table of two columns, with the cells between the first and the last as lines."""
    first, *middle, last = columns
    folded_rows = []
    for name, *facts, text in rows:
        lines = [f"{column}: {fact}" for column, fact in zip(middle, facts, strict=True)]
        folded_rows.append((name, "\n".join([text, *lines])))
    return (first, last), folded_rows
