"""What there is, as tables: models, schemes, options of a model, public datasets.

The sentence on an option is the comment beside its default, ``key: value  # (type) sentence``, in
the plugin's yaml as in RecBole's; what it may be says the table of options.
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
from recbole_pos.model.models import BASELINES, MODELS, OURS, TABLES, runnable
from recbole_pos.position.schemes import FACTS, SCHEMES
from recbole_pos.values import shown, suggest
from recbole_pos.yaml_files import ROOT, overall_defaults, read_yaml

_WIDTHS = 40, 200  # columns of a table at least, and at most
_ENOUGH = 32  # columns that the text must have beside the others


def list_models() -> None:
    """Print what ``run -m`` takes."""
    names = dict.fromkeys([*MODELS, *BASELINES, *OURS])
    sources = {n: next(table.source(n) for table in TABLES if n in table) for n in names}
    rows = [(name, source, summary(OURS, name)) for name, source in sources.items()]
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
        counted = facts.place, facts.needs, f"{facts.parameters:,}"
        rows.append((name, *counted, options, summary(SCHEMES, name)))
    columns = ("scheme", "place", "needs", "parameters", "options", "what it is (source)")
    show(columns, rows, "parameters added to a model of n = 50, d = 64, 1 head, 2 layers")


def list_options(model: str, given: Mapping[str, Any]) -> None:
    """Print the options of a model, those of its own first, with defaults and sentences.

    Of the options ``given``, ``position`` counts, schemes instead of its own, and ``plugins``.
    """
    from recbole_pos.config.options import IGNORED, find_option
    from recbole_pos.config.plugins import import_named, take_model

    take_model(model, import_named(given.get("plugins")))
    if model not in runnable():
        raise UsageError(f"unknown model {shown(model)}{suggest(model, runnable())}")
    seen: set[str] = set()
    for title, options, files in _option_sources(model, given.get("position")):
        texts = {key: text for file in files for key, text in _sentences(file).items()}
        found = [(find_option(key), value) for key, value in options.items() if key not in seen]
        seen.update(options)
        rows = [
            (option.name, _plain(value), option.allowed, texts.get(option.name, ""))
            for option, value in found
            if option.role != IGNORED
        ]
        print(f"\n{title}")
        show(("option", "default", "may be", "what it is for"), rows)


def list_logs(data_path: str) -> None:
    """Print the public datasets, and which of them are in a folder."""
    from recbole_pos.public.described import public_logs

    rows, counted = [], ("users", "items", "events")
    for name, log in public_logs().items():
        here = "yes" if (Path(data_path) / name / f"{name}.inter").is_file() else "no"
        counts = [f"{log.counts[what]:,}" if what in log.counts else "?" for what in counted]
        rows.append((name, *counts, here, f"{log.title} ({', '.join(log.papers)}). {log.source}"))
    show(("name", *counted, "here", "what it is (papers), and where"), rows)


def describe_log(name: str) -> None:
    """Print what is known of a public dataset."""
    from recbole_pos.public.described import public_log

    log = public_log(name)
    counts = ", ".join(f"{count:,} {what}" for what, count in log.counts.items()) or "not known"
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
    place = next((one.places[name] for one in tables if name in one.places), None)
    if place is None:
        return paragraph(table[name].__doc__)
    module, _, described = place.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None  # a module of this package
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return paragraph(ast.get_docstring(classes[described]))


def paragraph(text: str | None) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join((text or "").strip().split("\n\n")[0].replace("``", "").split())


# --- options of a model ---


def _option_sources(model: str, position: Any) -> list[tuple[str, dict[str, Any], list[Path]]]:
    """Return titles, options and the files with their sentences; what wins comes first."""
    from recbole_pos.config.defaults import plugin_defaults

    spec = importlib.util.find_spec("recbole")  # where it is, is known without importing it
    assert spec is not None and spec.submodule_search_locations  # this package requires it
    from_recbole = Path(spec.submodule_search_locations[0]) / "properties"
    general, data = from_recbole / "overall.yaml", from_recbole / "dataset" / "sample.yaml"
    ours = overall_defaults()
    sources = [
        ("options of the plugin", ours, [ROOT / "overall.yaml"]),
        ("options of RecBole: training and evaluation", read_yaml(general), [general]),
        ("options of RecBole: data", read_yaml(data), [data]),
    ]
    own = (from_recbole if model not in OURS else ROOT) / "model" / f"{model}.yaml"
    options = read_yaml(own) if own.is_file() else {}
    if model not in OURS:
        return [(f"options of {model}", options, [own]), *sources]
    added = {k: v for k, v in plugin_defaults(model, position).items() if k not in ours}
    files = [*(ROOT / "position").glob("*.yaml"), *(ROOT / "loss").glob("*.yaml")]
    files += [ROOT / "base.yaml", own]
    return [(f"options of {model} and its position schemes", options | added, files), *sources]


def _sentences(file: Path) -> dict[str, str]:
    """Return the comments of a yaml file by key."""
    if not file.is_file():
        return {}
    comment = re.compile(r"^(\w+):(.*?)#\s*(?:\(.*?\))?\s*(.*)$")
    lines = map(comment.match, file.read_text(encoding="utf-8").splitlines())
    return {line[1]: line[3].strip() for line in lines if line}


def _plain(default: Any) -> str:
    """Return a default as yaml has it, and a mapping without its braces."""
    if default is None:
        return "-"
    if isinstance(default, dict):
        return ", ".join(f"{key}: {_plain(value)}" for key, value in default.items())
    return f"[{', '.join(map(str, default))}]" if isinstance(default, list) else str(default)


# --- tables in the width there is ---


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Print rows in the width there is, nothing cut off; the first column has names, the last text.

    Where the text would have little room, the facts between stand under it.
    """
    console = Console(highlight=False)
    console.width = min(max(console.width, _WIDTHS[0]), _WIDTHS[1])
    # names are kept whole; the columns between may break their lines between words
    cells = list(zip(*[columns, *rows], strict=True))[:-1]
    widths = [max(len(word) for cell in column for word in cell.split()) for column in cells]
    if console.width - sum(widths) - 3 * len(columns) < _ENOUGH:
        first, *between, last = columns
        rows = [
            (name, "\n".join([text, *(f"{k}: {v}" for k, v in zip(between, facts, strict=True))]))
            for name, *facts, text in rows
        ]
        columns = first, last
    table = Table(caption=note or None, show_lines=len(columns) == 2)
    for column in columns:
        table.add_column(column, no_wrap=column == columns[0], overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
