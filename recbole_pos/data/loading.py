"""A dataset's atomic files as RecBole's tables: read, filtered by its options, and numbered."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pandas.api.types import union_categoricals
from pyarrow import compute
from recbole.data.dataset import Dataset
from recbole.utils import FeatureSource, FeatureType

from recbole_pos.data.atomic_files import AtomicFile, open_file, read_rows
from recbole_pos.data.attributes import is_strict
from recbole_pos.data.location import (
    UNWRITABLE,
    find_atomic_file,
    list_interaction_files,
    require_dataset,
)
from recbole_pos.data.splits import TEST, TRAIN, VALID, filter_sessions, read_session_filter
from recbole_pos.errors import UsageError
from recbole_pos.tables.limits import read_limit
from recbole_pos.tables.storage import Storage
from recbole_pos.values import Options, listed, shown, suggest

# Options that name fields, and of which type these must be; of any if empty.
NAMING_FIELDS: dict[str, tuple[str, ...]] = {
    "numerical_features": ("float",),
    "normalize_field": ("float", "float_seq"),
    **dict.fromkeys(("discretization", "val_interval"), ("float",)),
    "seq_len": ("token_seq", "float_seq"),
    **dict.fromkeys(("alias_of_user_id", "alias_of_item_id"), ("token", "token_seq")),
    **dict.fromkeys(("threshold", "unused_col"), ()),
}


# What RecBole makes of an option such as "[5,inf);(0,2]": bracket, low, high, bracket.
Intervals = list[tuple[str, float, float, str]]


class AtomicTables(Dataset):
    """RecBole's Dataset with an own reader; filters keep the same rows, in the file's order."""

    given_part: np.ndarray | None = None  # [interactions] int8, if there is a file for each part
    storage = Storage()  # of the columns of interactions
    inter_feat: Any  # a DataFrame until ids stand for tokens, then an Interaction
    field2seqlen: dict[str, int]

    def _get_preset(self) -> None:
        """Set defaults as RecBole does, but filter and split given parts as any other data."""
        super()._get_preset()
        self.benchmark_filename_list = None

    def _list_files(self) -> list[Path]:
        """Return the atomic files of the dataset, some of which may not be there."""
        return [*self._list_interaction_files(), self._find_file("user"), self._find_file("item")]

    def _list_interaction_files(self) -> list[Path]:
        parts = self.config["benchmark_filename"]
        return list_interaction_files(Path(self.dataset_path), self.dataset_name, parts)

    def _find_file(self, suffix: str) -> Path:
        return find_atomic_file(Path(self.dataset_path), self.dataset_name, suffix)

    def _load_data(self, token: str, dataset_path: str) -> None:
        """Load all tables of a dataset; check that they and the options fit together."""
        parts = self.config["benchmark_filename"]
        require_dataset(token, Path(dataset_path), ["user", "item"], parts)
        for table in ("user", "item"):
            file = self._find_file(table)
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
        self._require_common_tokens()
        self._require_distinct_columns()
        for option, kinds in NAMING_FIELDS.items():
            self._require_loaded(option, kinds)

    def _require_common_tokens(self) -> None:
        """Refuse a table of users or items that has no token of the interactions."""
        for table, id_field in (("user", self.uid_field), ("item", self.iid_field)):
            if (feat := getattr(self, f"{table}_feat")) is None:
                continue
            in_table = feat[id_field].cat.categories
            in_interactions = self.inter_feat[id_field].cat.categories
            is_empty = not (len(in_table) and len(in_interactions))
            if not (is_empty or in_interactions.isin(in_table).any()):
                file = self._find_file(table)
                raise UsageError(
                    f"{file}: no {id_field} of it has an interaction: it has such as "
                    f"{shown(in_table[0])}, the interactions {shown(in_interactions[0])}; write "
                    f"both in one way, or leave {table} out of load_col"
                )

    def _require_distinct_columns(self) -> None:
        """Refuse a field, except ids, of two tables: RecBole knows fields by their names only."""
        columns = {}
        for table in ("inter", "user", "item"):
            if (feat := getattr(self, f"{table}_feat")) is not None:
                columns[table] = set(feat) - {self.uid_field, self.iid_field}
        name = self.dataset_name
        for table, second_table in itertools.combinations(columns, 2):
            if repeated := ", ".join(sorted(columns[table] & columns[second_table])):
                files = f"{name}.{table} and from {name}.{second_table}"
                raise UsageError(
                    f"{repeated}: is loaded from {files}. Take one of "
                    "them by load_col, or give the columns different names"
                )

    def _require_loaded(self, option: str, kinds: tuple[str, ...]) -> None:
        """Require that every field that an option names is loaded, and of one of ``kinds``."""
        value = self.config[option] or {}
        if option == "seq_len" and not is_strict(self.config):
            return
        fields = list(value)
        if option == "unused_col":  # lists of fields, by table
            fields = list(itertools.chain(*value.values()))
        for field in fields:
            kind = self.field2type.get(field)
            if kind is None:
                hint = suggest(field, self.field2type)
                raise UsageError(
                    f"{option}: field {shown(field)} is not loaded{hint}; loaded are "
                    f"{listed(self.field2type)}; see load_col"
                )
            if kinds and kind.value not in kinds:
                raise UsageError(
                    f"{option}: field {shown(field)} is of type {kind.value}; "
                    f"{' or '.join(kinds)} is needed"
                )

    def _load_inter_feat(self, token: str, dataset_path: str) -> None:
        """Load the interactions: one file, or the files of given parts one below the other."""
        files = [open_file(path, self.config) for path in self._list_interaction_files()]
        first, *others = (self._select_columns(file, FeatureSource.INTERACTION) for file in files)
        for file, kinds in zip(files[1:], others, strict=True):
            if kinds != first:
                raise UsageError(
                    f"{file.path}: loaded are {_list_kinds(kinds)}, but of the file before it "
                    f"{_list_kinds(first)}; name columns that both have in load_col, and give each "
                    "one type"
                )
        num_cells = sum(file.num_rows for file in files) * len(first)
        self.storage = Storage(num_cells, read_limit(self.config["memory_limit"]))
        table, sizes = read_rows(files, first, self.storage)
        if missing := int((~np.isfinite(table[self.time_field])).sum()):
            names = listed(file.path.name for file in files)
            raise UsageError(
                f"{names}: {missing} of {len(table)} interactions have no finite "
                f"{shown(self.time_field)}; without a time they have no place in a sequence"
            )
        for key in (self.uid_field, self.iid_field):
            _require_writable(files[0], table, key)
        self._register_columns(table, first, FeatureSource.INTERACTION)
        self.inter_feat = table
        if self.config["benchmark_filename"]:
            parts = np.array((TRAIN, TEST) if len(files) == 2 else (TRAIN, VALID, TEST), np.int8)
            self._part_by_row = np.repeat(parts, sizes)

    def _reset_index(self) -> None:
        """Set ``given_part`` of the remaining interactions, by their rows in all files."""
        if self.config["benchmark_filename"]:
            self.given_part = self._part_by_row[self.inter_feat.index]
        super()._reset_index()

    def _load_user_or_item_feat(
        self, token: str, dataset_path: str, source: FeatureSource, field_name: str
    ) -> pd.DataFrame | None:
        """Load the table of users or items; None if there is no such file."""
        file, field = self._find_file(source.value), getattr(self, field_name)
        feat = self._load_feat(file, source) if file.is_file() else None
        if feat is not None:
            feat.drop_duplicates(subset=[field], keep="first", inplace=True)
        if field in self.field2source:
            self.field2source[field] = FeatureSource(f"{source.value}_id")
        return feat

    def _select_columns(self, file: AtomicFile, source: FeatureSource | str) -> dict[str, str]:
        """Return the columns of a file to load, with their types; check that ids are among them."""
        load_col, unload_col = self._get_load_and_unload_col(source)
        selected = set(file.kinds if load_col is None else load_col) - set(unload_col or ())
        kinds = {name: kind for name, kind in file.kinds.items() if name in selected}
        self._require_ids_and_times(file, source, kinds)
        _require_columns(file, self.config, load_col=load_col, unload_col=unload_col)
        return kinds

    def _load_feat(self, filepath: str | Path, source: FeatureSource | str) -> pd.DataFrame | None:
        """Return the columns to load of a table besides interactions, or None without any."""
        if self._get_load_and_unload_col(source)[0] == set():
            return None
        file = open_file(filepath, self.config)
        if not (kinds := self._select_columns(file, source)):
            self.logger.warning(f"No columns has been loaded from [{source}]")
            return None
        table = file.read(kinds)
        id_fields = {FeatureSource.USER: self.uid_field, FeatureSource.ITEM: self.iid_field}
        if source in id_fields:
            _require_writable(file, table, id_fields[source])
            _require_consistent(file, table, id_fields[source])
        self._register_columns(table, kinds, source)
        return table

    def _register_columns(
        self, table: pd.DataFrame, kinds: dict[str, str], source: FeatureSource | str
    ) -> None:
        """Cut lists to the option ``seq_len``; note each column's table, type and list length."""
        max_lengths = self.config["seq_len"] or {}
        for name, kind in kinds.items():
            seqlen = 1
            if kind.endswith("seq"):
                if (max_length := max_lengths.get(name)) is not None:
                    table[name] = [cell[:max_length] for cell in table[name]]
                seqlen = int(table[name].map(len).max())
            self.field2source[name] = source
            self.field2type[name] = FeatureType(kind)
            self.field2seqlen[name] = seqlen
            if "float" in kind:
                self.field2bucketnum[name] = 2  # RecBole's number where it discretizes none

    def _require_ids_and_times(
        self, file: AtomicFile, source: FeatureSource | str, kinds: dict[str, str]
    ) -> None:
        """Require that the loaded ``kinds`` of a file have ids as tokens and times as numbers."""
        is_inter = source == FeatureSource.INTERACTION
        roles = {
            "USER_ID_FIELD": (self.uid_field, "token", is_inter or source == FeatureSource.USER),
            "ITEM_ID_FIELD": (self.iid_field, "token", is_inter or source == FeatureSource.ITEM),
        }
        if is_inter:
            roles["TIME_FIELD"] = (self.time_field, "float", True)
        for key, (field, expected, is_needed) in roles.items():
            actual = kinds.get(field)
            if actual is None and is_needed:
                columns = listed(f"{name}:{kind}" for name, kind in file.kinds.items())
                if key == "TIME_FIELD" and "float" not in file.kinds.values():
                    raise UsageError(
                        f"{file.path} has no times, its columns are {columns}; if the rows of a "
                        "user are in order, copy it as FILE.tsv, and number them by `recbole-pos "
                        f"convert FILE.tsv --name NAME --user {self.uid_field}:token --item "
                        f"{self.iid_field}:token --time row_order`"
                    )
                raise UsageError(
                    f"field {shown(field)} ({key}) was not loaded from {file.path}, whose columns "
                    f"are {columns}; it needs user, item and time of an interaction in each row. "
                    f"Set {key} or load_col (now {shown(self.config['load_col'])}) accordingly"
                )
            if actual not in (None, expected):
                raise UsageError(
                    f"field {shown(field)} ({key}) in {file.path} has type {actual}, expected "
                    f"{expected}: name its column {field}:{expected}"
                )

    def _data_filtering(self) -> None:
        """Filter as RecBole does; raise a UsageError that names the options if it fails."""
        try:
            super()._data_filtering()
        except UsageError:
            raise
        except ValueError as error:  # "Some feat is empty", or an interval that cannot be read
            raise UsageError(
                f"filtering {shown(self.dataset_name)} failed or left no interaction: {error} See "
                "session_filter, user_inter_num_interval, item_inter_num_interval and val_interval"
            ) from error

    def _keep(self, table: str, mask: np.ndarray) -> None:
        """Keep the rows of a table (``inter``, ``user``, ``item``) where ``mask`` is true."""
        if not mask.all():
            feat = getattr(self, f"{table}_feat")
            kept = _take(feat, mask, self.storage if table == "inter" else Storage())
            setattr(self, f"{table}_feat", kept)

    def _filter_nan_user_or_item(self) -> None:
        """Leave out rows without a user or item, with a warning."""
        for field, own_table in ((self.uid_field, "user"), (self.iid_field, "item")):
            for table in (own_table, "inter"):
                feat = getattr(self, f"{table}_feat")
                if feat is not None and feat[field].hasnans:
                    is_nameless = feat[field].isna().to_numpy()
                    files = [self._find_file(table)]
                    if table == "inter":
                        files = self._list_interaction_files()
                    self.logger.warning(
                        f"{listed(file.name for file in files)}: {is_nameless.sum():,} rows have "
                        f"no {field} and are left out; of the rows of data, counted from 1: "
                        f"{listed(feat.index[is_nameless] + 1)}"
                    )
                    self._keep(table, ~is_nameless)

    def _remove_duplication(self) -> None:
        """Leave out exact copies (``rm_copies``) and repeated pairs (RecBole's ``rm_dup_inter``).

        RecBole may reorder interactions with equal times; here they keep their order.
        """
        pair = [self.uid_field, self.iid_field]
        if self.config["rm_copies"]:
            self._keep("inter", ~self.inter_feat.duplicated([*pair, self.time_field]).to_numpy())
        if (keep := self.config["rm_dup_inter"]) is not None:
            order = np.argsort(self.inter_feat[self.time_field].to_numpy(), kind="stable")
            is_kept = np.empty(len(order), dtype=bool)
            is_kept[order] = ~self.inter_feat[pair].iloc[order].duplicated(keep=keep).to_numpy()
            self._keep("inter", is_kept)

    def _filter_inter_by_user_or_item(self) -> None:
        if self.config["filter_inter_by_user_or_item"] is not True:
            return
        for field, feat in ((self.uid_field, self.user_feat), (self.iid_field, self.item_feat)):
            if feat is not None:
                self._keep("inter", self.inter_feat[field].isin(feat[field]).to_numpy())

    def _filter_by_inter_num(self) -> None:
        """Apply ``session_filter``, then RecBole's intervals of numbers of interactions.

        Names get their ids later, so that dropped ones get none.
        """
        minimums = read_session_filter(self.config["session_filter"])
        interactions = self.inter_feat
        if max(minimums) > 1:
            fields = self.uid_field, self.iid_field
            self.inter_feat = filter_sessions(interactions, *fields, *minimums)
            for table, field in zip(("user", "item"), fields, strict=True):
                feat = getattr(self, f"{table}_feat")
                if feat is not None:
                    kept = self.inter_feat[field].unique()
                    dropped = set(interactions[field].unique()) - set(kept)
                    self._keep(table, ~feat[field].isin(dropped).to_numpy())
        self._filter_by_count()

    def _filter_by_count(self) -> None:
        """Leave out users and items with too few or too many interactions.

        Each round lowers the counts of the others, so it repeats until nothing is left out.
        """
        tables, fields = ("user", "item"), (self.uid_field, self.iid_field)
        options = [self.config[f"{table}_inter_num_interval"] for table in tables]
        allowed = list(map(self._parse_intervals_str, options))
        if allowed == [None, None]:
            return
        # of users, and of items: number of the name in each interaction and in each row of their
        # table, and whether a name stands in the table and is not dropped
        codes, table_codes, is_listed = [], [], []
        for table, field, intervals in zip(tables, fields, allowed, strict=True):
            if intervals and len(intervals) > 1:
                self.logger.warning("More than one interval of interaction number are given!")
            feat = getattr(self, f"{table}_feat")
            columns = [self.inter_feat[field], *([] if feat is None else [feat[field]])]
            names = union_categoricals(columns)
            in_interactions, in_table = np.split(names.codes, [len(columns[0])])
            codes.append(in_interactions)
            table_codes.append(in_table)
            is_listed.append(np.isin(np.arange(len(names.categories)), in_table))
        is_kept = np.ones(len(self.inter_feat), dtype=bool)
        has_changed = True
        while has_changed:
            is_dropped, has_changed = np.zeros(len(codes[0]), dtype=bool), False
            for code, is_left, intervals in zip(codes, is_listed, allowed, strict=True):
                counts = np.bincount(code, minlength=len(is_left))
                is_wrong = (counts > 0) & ~_is_within(counts, intervals)
                if intervals:  # RecBole applies the lower bound also without interactions
                    is_wrong |= is_left & (counts < intervals[0][1])
                is_left &= ~is_wrong
                is_dropped |= is_wrong[code]
                has_changed |= bool(is_wrong.any())
            is_kept[is_kept] = ~is_dropped
            codes = [code[~is_dropped] for code in codes]
        self._keep("inter", is_kept)
        for table, is_left, in_table in zip(tables, is_listed, table_codes, strict=True):
            if len(in_table):
                self._keep(table, is_left[in_table])


def _require_columns(
    file: AtomicFile, config: Options, **names_by_option: Iterable[str] | None
) -> None:
    """Refuse a name in ``load_col`` or ``unload_col`` that is not a column of a file."""
    for option, names in names_by_option.items():
        for name in sorted(set(names or ()) - set(file.kinds)):
            raise UsageError(
                f"{option}: {file.path} has no column {shown(name)}"
                f"{suggest(name, file.kinds)}; it has {listed(file.kinds)}"
            )


def _require_writable(file: AtomicFile, table: pd.DataFrame, key: str) -> None:
    """Refuse names of users or items, in ``key``, that the files of a run could not hold."""
    names = table[key].cat.categories
    is_wrong = compute.match_substring_regex(pa.array(names, pa.large_string()), UNWRITABLE)
    codes = np.flatnonzero(is_wrong.to_numpy(zero_copy_only=False))
    if len(codes) and len(used := codes[np.isin(codes, table[key].cat.codes)]):
        raise UsageError(
            f"{file.path}: {key}: found {shown(names[used[0]])}, expected a name without a line "
            "break and other than [PAD], which stands for padding; rename it"
        )


def _require_consistent(file: AtomicFile, table: pd.DataFrame, key: str) -> None:
    """Refuse rows that contradict each other about a user or item, whose name is in ``key``."""
    repeated = table[table[key].duplicated(keep=False) & table[key].notna()].astype(str)
    different = repeated.drop_duplicates()
    contradicting = different[different[key].duplicated(keep=False)]
    if contradicting.empty:
        return
    name = contradicting[key].iloc[0]
    rows = contradicting[contradicting[key] == name]
    field = next(field for field in rows if rows[field].nunique() > 1)
    one, other = rows[field].unique()[:2]
    raise UsageError(
        f"{file.path}: {(repeated[key] == name).sum()} lines are about {key} {shown(name)}, and "
        f"{field} is {one[:40]!r} in one and {other[:40]!r} in another; keep one line "
        "(`recbole-pos convert` takes the first value that is not missing)"
    )


def spell_out(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose columns of categories hold the names as text."""
    return table.astype(dict.fromkeys(table.select_dtypes("category"), object))


def _list_kinds(kinds: dict[str, str]) -> str:
    return listed(f"{name}:{kind}" for name, kind in kinds.items())


def _take(table: pd.DataFrame, mask: np.ndarray, storage: Storage) -> pd.DataFrame:
    """Return the rows of a table where ``mask`` ([rows] bool) is true, with their index."""
    columns: dict[str, Any] = {}
    for name, column in table.items():
        if column.dtype == "category":
            codes = storage.store(column.cat.codes.to_numpy()[mask])
            columns[name] = pd.Categorical.from_codes(codes, dtype=column.dtype, validate=False)
        else:
            columns[name] = storage.store(column.to_numpy()[mask])
    return pd.DataFrame(columns, index=table.index[mask], copy=False)


def _is_within(numbers: np.ndarray, intervals: Intervals | None) -> np.ndarray:
    """Return [n] bool: whether each number lies in an interval; all do if there is none."""
    is_within = np.full(len(numbers), not intervals)
    for left, low, high, right in intervals or ():
        is_above = numbers >= low if left == "[" else numbers > low
        is_within |= is_above & (numbers <= high if right == "]" else numbers < high)
    return is_within


class NameIds(Mapping[str, int]):
    """Ids by name, a dict that is made when the first id is looked up, which training never does.

    Args:
        names: [ids] names by id, each once.
    """

    def __init__(self, names: np.ndarray) -> None:
        self._names = names

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self._names.tolist())}

    def __getitem__(self, name: str) -> int:
        return self._ids[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._names)


def number_names(
    columns: list[pd.Series], storage: Storage | None = None
) -> tuple[np.ndarray, list[np.ndarray | list[np.ndarray]]]:
    """Number the names of columns that share ids: 1 for the first name that appears, 2, ...

    Columns are [rows] names (nan for none), as categories or objects, or arrays of names. Returned
    are names by id, padding first; and for each column its ids, [rows] int64 or arrays of int64.
    """
    ids: dict[str, int] = {}
    numbered = [_number_column(column, ids, storage or Storage()) for column in columns]
    return np.array(["[PAD]", *ids]), numbered


def _number_column(
    column: pd.Series, ids: dict[str, int], storage: Storage
) -> np.ndarray | list[np.ndarray]:
    """Return the ids of one column, [rows] or of each list, and add its new names to ``ids``."""
    has_lists = column.dtype == object and len(column) and isinstance(column.iloc[0], np.ndarray)
    if column.dtype == "category":
        codes, names = column.cat.codes.to_numpy(), column.cat.categories.to_numpy()
    else:
        cells = np.concatenate(column.to_list()).astype(object) if has_lists else column
        codes, names = pd.factorize(cells)
        names = np.asarray(names, dtype=object)
    appeared = pd.unique(codes)
    appeared = appeared[appeared >= 0]
    id_by_code = np.zeros(len(names) + 1, dtype=np.int64)  # code -1, no name, reads the last 0
    id_by_code[appeared] = [ids.setdefault(name, len(ids) + 1) for name in names[appeared]]
    if has_lists:
        return np.split(id_by_code[codes], np.cumsum(column.map(len))[:-1])
    column_ids = storage.empty(len(codes), np.int64)
    np.take(id_by_code, codes, out=column_ids, mode="wrap")  # -1 is the last
    return column_ids
