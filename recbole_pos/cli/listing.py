"""Tables of models, schemes, options of a model, and public datasets.

The sentence on an option is the comment beside its default, ``key: value  # (type) sentence``, in
the plugin's yaml as in RecBole's; the table of options has the values that it may have.
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
from recbole_pos.model.models import ADDED, BASELINES, MODELS, OURS, list_runnable
from recbole_pos.position.schemes import FACTS, SCHEMES
from recbole_pos.registry import US
from recbole_pos.values import shown, suggest
from recbole_pos.yaml_files import ROOT, read_overall_defaults, read_yaml

_MIN_WIDTH, _MAX_WIDTH = 40, 200  # columns of a table
_MIN_TEXT_WIDTH = 32  # columns of the text beside the others


def list_models() -> None:
    """Print what ``run -m`` takes."""
    rows = []
    for name in dict.fromkeys([*MODELS, *BASELINES, *OURS]):
        source = ADDED.added[name].cls.__module__ if name in ADDED else US
        rows.append((name, source, summary(OURS, name)))
    from_recbole = {**recbole_models.SEQUENTIAL, **recbole_models.GENERAL}
    rows += [(name, "RecBole", text) for name, text in from_recbole.items()]
    show(("model", "from", "what it is"), rows)


def list_schemes() -> None:
    """Print what ``position`` may name."""
    rows = []
    for name in SCHEMES:
        facts = FACTS.get(name)
        if facts is None:  # a custom scheme, which has to be built
            from recbole_pos.position.build import describe

            facts = describe(name)
        options = ", ".join(SCHEMES.defaults(name)) or "-"
        description = options, summary(SCHEMES, name)
        rows.append((name, facts.place, facts.needs, f"{facts.parameters:,}", *description))
    columns = ("scheme", "place", "needs", "parameters", "options", "what it is (source)")
    show(columns, rows, "parameters added to a model of n = 50, d = 64, 1 head, 2 layers")


def list_options(model: str, overrides: Mapping[str, Any]) -> None:
    """Print the options of a model, its own first, with defaults and sentences.

    Of the ``overrides``, ``position`` replaces the model's schemes, and ``plugins`` are imported.
    """
    from recbole_pos.config.options import IGNORED, find_option
    from recbole_pos.config.plugins import import_named, take_model

    take_model(model, import_named(overrides.get("plugins")))
    if model not in list_runnable():
        raise UsageError(f"unknown model {shown(model)}{suggest(model, list_runnable())}")
    listed: set[str] = set()
    for title, options, files in _option_sources(model, overrides.get("position")):
        sentences = {key: text for file in files for key, text in _read_sentences(file).items()}
        rows = []
        for key, default in options.items():
            option = find_option(key)
            if key not in listed and option.role != IGNORED:
                sentence = sentences.get(option.name, "")
                rows.append((option.name, _show_default(default), option.allowed, sentence))
        listed.update(options)
        print(f"\n{title}")
        show(("option", "default", "may be", "what it is for"), rows)


def list_logs(data_path: str) -> None:
    """Print the public datasets, and which of them are in a folder."""
    from recbole_pos.public.described import read_public_datasets

    rows, columns = [], ("users", "items", "events")
    for name, log in read_public_datasets().items():
        is_here = (Path(data_path) / name / f"{name}.inter").is_file()
        counts = [f"{log.counts[column]:,}" if column in log.counts else "?" for column in columns]
        description = f"{log.title} ({', '.join(log.papers)}). {log.source}"
        rows.append((name, *counts, "yes" if is_here else "no", description))
    show(("name", *columns, "here", "what it is (papers), and where"), rows)


def describe_log(name: str) -> None:
    """Print what is known of a public dataset."""
    from recbole_pos.public.described import find_public_dataset

    log = find_public_dataset(name)
    counts = (
        ", ".join(f"{count:,} {counted}" for counted, count in log.counts.items()) or "not known"
    )
    for line in (
        f"{log.title}: {counts}",
        f"source:  {log.source}",
        f"licence: {log.licence}",
        *([f"note:    {log.note}"] if log.note else []),
        f"papers:  {', '.join(log.papers)}",
        f"files:   {', '.join(log.files)}",
        *(f"md5:     {md5}  {file}" for file, md5 in log.md5.items()),
        f"build:   recbole-pos data build {log.name} {' '.join(log.files)}",
        f"yaml:    {log.yaml}",
    ):
        print(line)


# --- models and schemes ---


def summary(table: Mapping[str, type], name: str) -> str:
    """Return the first paragraph of a class's docstring, as plain text.

    The plugin's own classes are read as text, since importing one costs seconds.
    """
    tables = getattr(table, "maps", [table])
    path = next((registry.paths[name] for registry in tables if name in registry.paths), None)
    if path is None:
        return paragraph(table[name].__doc__)
    module, _, class_name = path.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None  # a module of this package
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return paragraph(ast.get_docstring(classes[class_name]))


def paragraph(text: str | None) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join((text or "").strip().split("\n\n")[0].replace("``", "").split())


# --- options of a model ---


def _option_sources(model: str, position: Any) -> list[tuple[str, dict[str, Any], list[Path]]]:
    """Return titles, options and the files with their sentences, in the order of precedence."""
    from recbole_pos.config.defaults import plugin_defaults

    spec = importlib.util.find_spec("recbole")  # its folder is known without importing it
    assert spec is not None and spec.submodule_search_locations  # this package requires it
    recbole_folder = Path(spec.submodule_search_locations[0]) / "properties"
    training = recbole_folder / "overall.yaml"
    data = recbole_folder / "dataset" / "sample.yaml"
    overall = read_overall_defaults()
    sources = [
        ("options of the plugin", overall, [ROOT / "overall.yaml"]),
        ("options of RecBole: training and evaluation", read_yaml(training), [training]),
        ("options of RecBole: data", read_yaml(data), [data]),
    ]
    file = (ROOT if model in OURS else recbole_folder) / "model" / f"{model}.yaml"
    options = read_yaml(file) if file.is_file() else {}
    if model not in OURS:
        return [(f"options of {model}", options, [file]), *sources]
    options |= {k: v for k, v in plugin_defaults(model, position).items() if k not in overall}
    files = [*(ROOT / "position").glob("*.yaml"), *(ROOT / "loss").glob("*.yaml")]
    files += [ROOT / "base.yaml", file]
    return [(f"options of {model} and its position schemes", options, files), *sources]


def _read_sentences(file: Path) -> dict[str, str]:
    """Return the comments of a yaml file by key; none of a file that is not there."""
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
    return f"[{', '.join(map(str, default))}]" if isinstance(default, list) else str(default)


# --- tables that fit the screen ---


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Print a table that fits the screen; the first column has names, the last text.

    Nothing is cut off. Where the text has little room, the columns between are written under it.
    """
    console = Console(highlight=False)
    console.width = min(max(console.width, _MIN_WIDTH), _MAX_WIDTH)
    # lines may break between words only, in names nowhere
    cells = list(zip(*[columns, *rows], strict=True))[:-1]
    widths = [max(len(word) for cell in column for word in cell.split()) for column in cells]
    if console.width - sum(widths) - 3 * len(columns) < _MIN_TEXT_WIDTH:
        first, *between, last = columns
        narrow_rows = []
        for name, *facts, text in rows:
            facts = [f"{column}: {fact}" for column, fact in zip(between, facts, strict=True)]
            narrow_rows.append((name, "\n".join([text, *facts])))
        columns, rows = (first, last), narrow_rows
    table = Table(caption=note or None, show_lines=len(columns) == 2)
    for column in columns:
        table.add_column(column, no_wrap=column == columns[0], overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
