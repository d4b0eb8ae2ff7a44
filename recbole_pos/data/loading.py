"""Reading a dataset's atomic files into RecBole's tables, with errors that advise."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from recbole.data.dataset import Dataset
from recbole.utils import FeatureSource, FeatureType

from recbole_pos.data.attributes import is_strict
from recbole_pos.data.location import atomic_file, interaction_files, require_dataset
from recbole_pos.data.naming import spell_out, stack_tables
from recbole_pos.data.scratch import Scratch
from recbole_pos.data.splits import TEST, TRAIN, VALID
from recbole_pos.data.tables import Table, open_table
from recbole_pos.errors import UsageError
from recbole_pos.values import listed, shown, suggest

# Options that name fields, and of which type these must be; of any if empty.
NAMING_FIELDS: dict[str, tuple[str, ...]] = {
    "numerical_features": ("float",),
    "normalize_field": ("float", "float_seq"),
    "discretization": ("float",),
    "seq_len": ("token_seq", "float_seq"),
    **dict.fromkeys(("alias_of_user_id", "alias_of_item_id"), ("token", "token_seq")),
    **dict.fromkeys(("val_interval", "threshold", "unused_col", "preload_weight"), ()),
}


class AtomicTables(Dataset):
    """RecBole's Dataset, with a reader of its own that checks files and advises on errors."""

    given: np.ndarray | None = None  # [interactions] int8 given part of each, if files give parts
    scratch: Scratch | None = None  # disk space for interactions that do not fit into memory
    inter_feat: Any  # a DataFrame until ids stand for tokens, then an Interaction
    field2seqlen: dict[str, int]

    def _get_preset(self) -> None:
        """Set defaults as RecBole does, but filter and split given parts as any other data."""
        super()._get_preset()
        self.benchmark_filename_list = None

    def _files(self) -> list[Path]:
        """Return the atomic files of the dataset, some of which may not be there."""
        suffixes = ["user", "item", *(self.config["additional_feat_suffix"] or [])]
        return self._interaction_files() + [self._file(suffix) for suffix in suffixes]

    def _interaction_files(self) -> list[Path]:
        parts = self.config["benchmark_filename"]
        return interaction_files(Path(self.dataset_path), self.dataset_name, parts)

    def _file(self, suffix: str) -> Path:
        return atomic_file(Path(self.dataset_path), self.dataset_name, suffix)

    def _load_data(self, token: str, dataset_path: str) -> None:
        """Load all tables, and check that they and the options fit together.

        Args:
            token: name of the dataset.
            dataset_path: its folder.

        Raises:
            UsageError: if a file is missing or wrong, or an option names a field that is not there.
        """
        suffixes = self.config["additional_feat_suffix"] or []
        require_dataset(token, Path(dataset_path), ["user", "item", *suffixes], self.config)
        for table in ("user", "item"):
            file = self._file(table)
            if (self.config["load_col"] or {}).get(table) and not file.is_file():
                raise UsageError(
                    f"load_col: {table}: found no file {file}; add it, or leave {table} out of "
                    "load_col"
                )
        try:
            super()._load_data(token, dataset_path)
        except UsageError:
            raise
        except ValueError as error:  # how RecBole refuses files or options about them
            raise UsageError(f"data: {error}") from error
        self._require_common_names()
        self._require_distinct_columns(token)
        self._require_named()

    def _require_common_names(self) -> None:
        """Refuse a table of users or items without a name that has an interaction."""
        for table, key in (("user", self.uid_field), ("item", self.iid_field)):
            if (feat := getattr(self, f"{table}_feat")) is None:
                continue
            names, ours = feat[key].cat.categories, self.inter_feat[key].cat.categories
            if len(names) and len(ours) and not ours.isin(names).any():
                raise UsageError(
                    f"{self._file(table)}: no {key} of it has an interaction: it has such as "
                    f"{shown(names[0])}, the interactions {shown(ours[0])}; write both in one way, "
                    f"or leave {table} out of load_col"
                )

    def _require_distinct_columns(self, token: str) -> None:
        """Refuse a field, except ids, that is loaded from two tables of the dataset ``token``."""
        ids = {"inter": {self.uid_field, self.iid_field}}
        ids |= {"user": {self.uid_field}, "item": {self.iid_field}}
        tables = {table: getattr(self, f"{table}_feat") for table in ids}
        columns = {
            table: set(feat) - ids[table] for table, feat in tables.items() if feat is not None
        }
        for one, other in itertools.combinations(columns, 2):
            twice = ", ".join(sorted(columns[one] & columns[other]))
            if twice:  # RecBole knows fields by their names alone, and would mix the two
                raise UsageError(
                    f"{twice}: is loaded from {token}.{one} and from {token}.{other}. Take one of "
                    "them by load_col, or give the columns different names"
                )

    def _require_named(self) -> None:
        """Require that every field that an option names is loaded, and of a type it can have.

        Raises:
            UsageError: if one is not.
        """
        for option, needed in NAMING_FIELDS.items():
            value = self.config[option] or ()
            if option == "seq_len" and not is_strict(self.config):
                continue
            names = value
            if option == "unused_col":  # lists of fields, by table
                names = itertools.chain(*value.values()) if value else ()
            elif option == "preload_weight":  # a field of ids and one of vectors
                names = itertools.chain(*value.items()) if value else ()
            for name in names:
                kind = self.field2type.get(name)
                if kind is None:
                    raise UsageError(
                        f"{option}: field {shown(name)} is not "
                        f"loaded{suggest(name, self.field2type)}; "
                        f"loaded are {listed(self.field2type)}; see load_col"
                    )
                if needed and kind.value not in needed:
                    raise UsageError(
                        f"{option}: field {shown(name)} is of type {kind.value}; "
                        f"{' or '.join(needed)} is needed"
                    )

        for pair in (self.config["preload_weight"] or {}).items():
            ids_source, vectors_source = (self.field2source[name] for name in pair)
            if ids_source != vectors_source:
                raise UsageError(
                    f"preload_weight: {' and '.join(map(shown, pair))} are not in one table of "
                    "additional_feat_suffix, which has names of its own and their vectors"
                )

    def _load_inter_feat(self, token: str, dataset_path: str) -> None:
        """Load the interactions: one file, or the files of given parts one below the other.

        Raises:
            UsageError: if an interaction has no finite time, or the files have other columns.
        """
        tables: list[pd.DataFrame] = []
        lengths: list[dict[str, int]] = []
        self.scratch = Scratch.where_needed(self.config, self._interaction_files())
        for file in self._interaction_files():
            table = self._load_feat(file, FeatureSource.INTERACTION)
            assert table is not None  # ids are required
            missing = 0
            if self.time_field in table:
                missing = int((~np.isfinite(table[self.time_field])).sum())
            if missing:
                raise UsageError(
                    f"{file}: {missing} of {len(table)} interactions have no finite "
                    f"{shown(self.time_field)}; without a time they have no place in a sequence"
                )
            if tables and set(table) != set(tables[0]):
                raise UsageError(
                    f"{file}: columns {', '.join(table)} are loaded, but of the file before it "
                    f"{', '.join(tables[0])}; name columns that both have in load_col"
                )
            tables.append(table)
            lengths.append(dict(self.field2seqlen))
        self.inter_feat = tables[0]
        if len(tables) > 1:
            self.inter_feat = stack_tables(tables)
            self.field2seqlen |= {f: max(sizes[f] for sizes in lengths) for f in lengths[0]}
            phases = (TRAIN, VALID, TEST) if len(tables) == 3 else (TRAIN, TEST)
            rows = [len(table) for table in tables]
            self._phases = np.repeat(np.array(phases, dtype=np.int8), rows)

    def _reset_index(self) -> None:
        """Take the given parts of the remaining interactions, by their row in the files."""
        if self.config["benchmark_filename"]:
            self.given = self._phases[self.inter_feat.index]
        super()._reset_index()

    def _load_user_or_item_feat(
        self, token: str, dataset_path: str, source: FeatureSource, field_name: str
    ) -> pd.DataFrame | None:
        """Load the table of users or items, text or parquet; None if there is no such file."""
        file, field = self._file(source.value), getattr(self, field_name)
        feat = self._load_feat(file, source) if file.is_file() else None
        if feat is not None:
            feat.drop_duplicates(subset=[field], keep="first", inplace=True)
        if field in self.field2source:
            self.field2source[field] = FeatureSource(f"{source.value}_id")
        return feat

    def _load_feat(self, filepath: str | Path, source: FeatureSource | str) -> pd.DataFrame | None:
        """Read the columns to load of a table, and note their types for RecBole.

        Args:
            filepath: text, or parquet.
            source: table of the fields, or a suffix of ``additional_feat_suffix``.

        Returns:
            the columns, see ``Table.read``; None if none are loaded.

        Raises:
            UsageError: if ids or times are not loaded, an option names a column that is not there,
                or the file cannot be read.
        """
        load_col, unload_col = self._get_load_and_unload_col(source)
        if load_col == set() and source != FeatureSource.INTERACTION:
            return None
        file = open_table(filepath, self.config)
        wanted = {
            name: kind
            for name, kind in file.columns.items()
            if (load_col is None or name in load_col) and name not in (unload_col or ())
        }
        self._require_fields(file, source, wanted)
        for option, names in (("load_col", load_col), ("unload_col", unload_col)):
            for name in sorted(set(names or ()) - set(file.columns)):
                raise UsageError(
                    f"{option}: {file.path} has no column {shown(name)}"
                    f"{suggest(name, file.columns)}; it has {listed(file.columns)}"
                )
        if not wanted:
            self.logger.warning(f"No columns has been loaded from [{source}]")
            return None
        table = file.read(wanted, self.scratch if source == FeatureSource.INTERACTION else None)
        if not isinstance(source, FeatureSource):  # RecBole leaves names there as they are
            table = spell_out(table)
        ids = {FeatureSource.USER: self.uid_field, FeatureSource.ITEM: self.iid_field}
        if source in ids:
            self._require_one_line_each(file, table, ids[source])
        lengths = self.config["seq_len"] or {}
        for name, kind in wanted.items():
            seqlen = 1
            if kind.endswith("seq"):
                if name in lengths:
                    table[name] = table[name].map(lambda cell, most=lengths[name]: cell[:most])
                seqlen = int(table[name].map(len).max())
            if source != "link":
                self.field2source[name] = source
                self.field2type[name] = FeatureType(kind)
                self.field2seqlen[name] = seqlen
                if "float" in kind:
                    self.field2bucketnum[name] = 2
        return table

    def _require_one_line_each(self, file: Table, table: pd.DataFrame, key: str) -> None:
        """Refuse users or items whose lines contradict each other; RecBole keeps the first line.

        Raises:
            UsageError: if two lines of a name have different values of a field.
        """
        repeated = table[table[key].duplicated(keep=False)]
        for name, lines in repeated.groupby(key, sort=False, observed=True):
            for field in table.columns:
                values = list(dict.fromkeys(str(value) for value in lines[field]))
                if len(values) > 1:
                    raise UsageError(
                        f"{file.path}: {len(lines)} lines are about {key} {shown(name)}, and "
                        f"{field} is "
                        f"{values[0][:40]!r} in one and {values[1][:40]!r} in another; keep one "
                        "line (`recbole-pos convert` takes the first value that is not missing)"
                    )

    def _require_fields(
        self, file: Table, source: FeatureSource | str, wanted: dict[str, str]
    ) -> None:
        """Refuse a file whose ids or times are not loaded, or are of another type.

        Args:
            file: the table.
            source: which table it is.
            wanted: types of the columns to load, by name.

        Raises:
            UsageError: if an id or the time is not loaded, or has another type.
        """
        ids = {
            "USER_ID_FIELD": (self.uid_field, "token", FeatureSource.USER),
            "ITEM_ID_FIELD": (self.iid_field, "token", FeatureSource.ITEM),
        }
        is_inter = source == FeatureSource.INTERACTION
        roles = ids | ({"TIME_FIELD": (self.time_field, "float", source)} if is_inter else {})
        for key, (field, kind, table) in roles.items():
            actual = wanted.get(field)
            if actual is None and (is_inter or table == source):
                raise UsageError(
                    f"field {shown(field)} ({key}) was not loaded from {file.path}, whose "
                    f"columns are "
                    f"{listed(f'{name}:{kind}' for name, kind in file.columns.items())}; set "
                    f"{key} or load_col (now {shown(self.config['load_col'])}) accordingly"
                )
            if actual not in (None, kind):
                raise UsageError(
                    f"field {shown(field)} ({key}) in {file.path} has type {actual}, expected "
                    f"{kind}: "
                    f"{file.head} must name it {field}:{kind}"
                )
