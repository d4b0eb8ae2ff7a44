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
from recbole_pos.data.naming import spelled_out, stacked
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
    """RecBole's Dataset, reading files in its own way."""

    given: np.ndarray | None = None  # [interactions] int8 part of each, of given parts
    scratch: Scratch | None = None  # where interactions are kept that do not fit into memory
    inter_feat: Any  # a DataFrame until ids stand for tokens, then an Interaction
    field2seqlen: dict[str, int]

    def _get_preset(self) -> None:
        """RecBole's; a given split is filtered and divided as any other is."""
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
        more = self.config["additional_feat_suffix"] or []
        require_dataset(token, Path(dataset_path), ["user", "item", *more], self.config)
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
        self._require_named()

    def _require_named(self) -> None:
        """Every field that an option names must be loaded, and of the type that is needed."""
        for option, needed in NAMING_FIELDS.items():
            given = self.config[option] or ()
            if option == "seq_len" and not is_strict(self.config):
                continue
            names = given
            if option == "unused_col":  # lists of fields, by table
                names = itertools.chain(*given.values()) if given else ()
            elif option == "preload_weight":  # a field of ids and one of vectors
                names = itertools.chain(*given.items()) if given else ()
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
            one, other = (self.field2source[name] for name in pair)
            if one != other:
                raise UsageError(
                    f"preload_weight: {' and '.join(map(shown, pair))} are not in one table of "
                    "additional_feat_suffix, which has names of its own and their vectors"
                )

    def _load_inter_feat(self, token: str, dataset_path: str) -> None:
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
            self.inter_feat = stacked(tables)
            self.field2seqlen |= {f: max(each[f] for each in lengths) for f in lengths[0]}
            phases = (TRAIN, VALID, TEST) if len(tables) == 3 else (TRAIN, TEST)
            rows = [len(table) for table in tables]
            self._phases = np.repeat(np.array(phases, dtype=np.int8), rows)

    def _reset_index(self) -> None:
        """RecBole's; until then the index of the interactions says where they stood in files."""
        if self.config["benchmark_filename"]:
            self.given = self._phases[self.inter_feat.index]
        super()._reset_index()

    def _load_user_or_item_feat(
        self, token: str, dataset_path: str, source: FeatureSource, field_name: str
    ) -> pd.DataFrame | None:
        """RecBole's, of a table that may be parquet."""
        file, field = self._file(source.value), getattr(self, field_name)
        feat = self._load_feat(file, source) if file.is_file() else None
        if feat is not None:
            feat.drop_duplicates(subset=[field], keep="first", inplace=True)
        if field in self.field2source:
            self.field2source[field] = FeatureSource(f"{source.value}_id")
        return feat

    def _load_feat(self, filepath: str | Path, source: FeatureSource | str) -> pd.DataFrame | None:
        """RecBole's, by a reader that takes no line for something else than it is.

        Returns:
            columns to load, see ``Table.read``; None if there are none.
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
            table = spelled_out(table)
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
        """RecBole keeps the first line of a user or item, whatever the others hold."""
        twice = table[table[key].duplicated(keep=False)]
        for name, lines in twice.groupby(key, sort=False, observed=True):
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
        """Refuse a file of which ids or times are not loaded, or are of another type."""
        ids = {
            "USER_ID_FIELD": (self.uid_field, "token", FeatureSource.USER),
            "ITEM_ID_FIELD": (self.iid_field, "token", FeatureSource.ITEM),
        }
        inter = source == FeatureSource.INTERACTION
        roles = ids | ({"TIME_FIELD": (self.time_field, "float", source)} if inter else {})
        for key, (field, kind, table) in roles.items():
            actual = wanted.get(field)
            if actual is None and (inter or table == source):
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
