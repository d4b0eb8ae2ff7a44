"""Write the table of public datasets in docs/datasets.md.

    python studies/datasets.py FOLDER [--check]

Counts are those of dataset/*/*.yaml, which ``recbole-pos data build`` checks. Of a dataset that
lies in FOLDER (ml-100k comes with RecBole) leave-one-out is made, too, and counted: the share of
test targets whose user has another item at the same time, has had the item before, or whose item
has no training interaction. Nothing is trained.
"""

import sys
from pathlib import Path
from typing import Any

from page_parts import ROOT, make_parser, make_table, replace_tables, write_pages

from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.identity import count_dataset
from recbole_pos.experiment.build import read_dataset
from recbole_pos.public.datasets import read_public_datasets
from recbole_pos.yaml_files import read_yaml

PAGE = ROOT / "docs" / "datasets.md"
SHIPPED = "ml-100k"  # in RecBole's wheel
_HEAD = ["dataset", "users", "items", "interactions", "a user", "ties", "repeats", "cold"]


def read_shares(name: str, options: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Return the counts of a dataset, and shares of its test targets as cells of the table.

    Args:
        name: name of the dataset.
        options: options of the run that reads it.

    Returns:
        Numbers of users, items and interactions.
        Shares in percent, as texts: targets at the same time as another item of their user, targets
            that their user has had before, and targets without a training interaction.
    """
    dataset = read_dataset(PosConfig("Pop", name, None, options))
    split = dataset.split.summary
    kinds = ("tied_targets", "repeated_targets", "cold_targets")
    targets = split["targets"]["test"]
    return count_dataset(dataset), [f"{100 * split[kind]['test'] / targets:.0f}%" for kind in kinds]


def tabulate(folder: Path) -> str:
    """Return the table of datasets in markdown: RecBole's ml-100k first, then all that have a yaml.

    Args:
        folder: folder of datasets. One that is not there has its published counts, and no shares.
    """
    lines = []
    public = read_public_datasets()
    for name in [SHIPPED, *public]:
        counts, shares = (public[name].counts if name in public else {}), ["", "", ""]
        if name == SHIPPED:
            counts, shares = read_shares(name, {})
        elif (folder / name / f"{name}.inter").is_file():
            options = read_yaml(public[name].yaml)
            del options["public"]
            counts, shares = read_shares(name, {**options, "data_path": str(folder)})
        if not counts:
            continue
        numbers = [f"{counts[kind]:,}" for kind in ("users", "items", "events")]
        lines.append([name, *numbers, f"{counts['events'] / counts['users']:.0f}", *shares])
    return make_table(_HEAD, lines, "lrrrrrrr")


def main() -> int:
    """Write the table; with ``--check`` nothing is written, and the status is 1 if it differs."""
    parser = make_parser("Write the table of public datasets.")
    parser.add_argument("folder", type=Path, help="where datasets lie")
    args = parser.parse_args()
    text = replace_tables(PAGE, "datasets", lambda: tabulate(args.folder))
    return write_pages({PAGE: text}, args.check)


if __name__ == "__main__":
    sys.exit(main())
