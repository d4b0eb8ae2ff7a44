"""Fields of items, users and interactions beside the vectors of items, against loops over cells."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import shop
import torch
from conftest import small
from torch import Tensor

import recbole_pos
from recbole_pos.config.posconfig import PosConfig
from recbole_pos.data.splits import TRAIN
from recbole_pos.data.windows import map_tensors
from recbole_pos.errors import UsageError
from recbole_pos.experiment.build import Experiment, prepare

FEATURES = {
    "item_features": ["brand", "tags", "price"],
    "user_features": ["country", "likes", "age"],
    "event_features": ["channel", "words", "stars"],
}
OPTION = {"item": "item_features", "user": "user_features", "inter": "event_features"}
OF_RELATIONS = ("relation_heads", "relation_size", "top_k")
SIZES = {key: value for key, value in shop.SIZES.items() if key not in OF_RELATIONS}
LOAD = {**shop.LOAD, "inter": [*shop.LOAD["inter"], "words"]}
LOAD["user"] = [*shop.LOAD["user"], "likes"]


def tables() -> dict[str, pd.DataFrame]:
    """Tokens, lists and numbers, each of them missing at times, as are the rows of some users."""
    made, rng = shop.tables(), np.random.default_rng(1)
    for table, column in {"inter": "words:token_seq", "user": "likes:token_seq"}.items():
        lists = [rng.choice(list("abc"), rng.integers(0, 3)) for _ in range(len(made[table]))]
        made[table][column] = [" ".join(tokens) for tokens in lists]
    made["user"] = made["user"][:-2]
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shop.write(tmp_path_factory.mktemp("shop"), tables())


def options(folder: Path, **more: Any) -> dict[str, Any]:
    base = {"data_path": str(folder), "load_col": LOAD, "filter_inter_by_user_or_item": False}
    return {**SIZES, **base, **FEATURES, **more}


def configure(folder: Path, model: str = "PosSASRec", **more: Any) -> PosConfig:
    """A configuration on the shop, with sizes as far as the model has them."""
    given = {key: value for key, value in options(folder).items() if key not in SIZES}
    return small(model, "shop", SIZES, **{**given, **more})


@pytest.fixture(scope="module")
def made(folder: Path) -> Callable[..., Experiment]:
    """An experiment on the shop whose model has large weights, in float64 and evaluation mode."""

    def build(**more: Any) -> Experiment:
        experiment = prepare(configure(folder, **more))
        torch.manual_seed(0)
        model = shop.shaken(experiment)
        for name, table in model.named_parameters():
            if name.endswith(".table"):
                table.data[0] = 0
        return experiment

    return build


def in_float64(batch: Any) -> Any:
    """The batch, or its features, with numbers in the precision of the model."""
    return map_tensors(batch, lambda x: x.double() if x.is_floating_point() else x)


def vector(embed: Any, cell: Any, ids: dict[str, int] | None, column: np.ndarray) -> Tensor:
    """The vector of one cell; ``column`` has the numbers that the embedding was fitted to."""
    size = embed.table.size(1) if hasattr(embed, "table") else embed.linear.out_features
    if cell is None:
        return torch.zeros(size)
    if ids is not None:
        names = cell.split() if embed.is_list else [cell]
        rows = [embed.table[ids[name]] for name in names]
        return sum(rows) / len(rows)
    known = column[np.isfinite(column)]
    z = (float(cell) - known.mean()) / known.std()
    waves = [math.sin(2 * math.pi * c * z) for c in embed.frequency.tolist()]
    waves += [math.cos(2 * math.pi * c * z) for c in embed.frequency.tolist()]
    scale = math.sqrt(len(embed.frequency))
    return embed.linear.weight @ torch.tensor(waves) / scale + embed.linear.bias


@pytest.mark.usefixtures("double")
def test_vectors_of_items_and_of_interactions(made: Callable) -> None:
    experiment = made()
    model, dataset = experiment.model, experiment.dataset
    cells, ids = shop.Cells(dataset, tables()), dataset.field2token_id

    def fitted(table: str, field: str) -> np.ndarray:
        count = {"inter": len(dataset.log), "item": dataset.item_num, "user": dataset.user_num}
        found = [cells.of(table, n, field) for n in range(count[table])]
        used = dataset.part == TRAIN if table == "inter" else np.ones(len(found), dtype=bool)
        kept = [c for c, use in zip(found, used, strict=True) if use and isinstance(c, float)]
        return np.array(kept)

    def compute_vectors(embeds: Any, rows: dict[str, int]) -> list[Tensor]:
        """The vector of each field in the given row of its table."""
        named = [(table, name) for table in rows for name in FEATURES[OPTION[table]]]
        return [
            vector(embed, cells.of(table, rows[table], name), ids.get(name), fitted(table, name))
            for (table, name), embed in zip(named, embeds, strict=True)
        ]

    part, own = model.item_embedding.parts["features"], model.item_embedding.weight
    wanted = [torch.zeros(8)]
    for item in range(1, dataset.item_num):
        wanted.append(own[item] + sum(compute_vectors(part.fields, {"item": item})))
    table = torch.stack(wanted)
    loader = experiment.loaders["train"]
    numbers = np.concatenate(loader._get_batches())
    batch = in_float64(loader.gather(numbers))
    with torch.no_grad():
        items, found = model.item_embedding.vectors(), model.embed(batch)
    torch.testing.assert_close(items[1:], table[1:], rtol=1e-6, atol=1e-6)
    windows, events = loader.windows, model.event_features
    rows = [e for w in numbers for e in range(windows.start[w], windows.end[w])]
    for place, row in enumerate(rows):
        numbers_of = {"inter": row, "user": int(dataset.log.users[row])}
        want = table[batch.items[place]] + sum(compute_vectors(events.fields, numbers_of))
        torch.testing.assert_close(found[place], want, rtol=1e-6, atol=1e-6)


def test_a_state_reads_no_later_interaction_and_no_feature_of_its_target(made: Callable) -> None:
    """By gradient within windows; by changed values in rows of held-out targets."""
    experiment = made()
    model, loader, log = experiment.model, experiment.loaders["train"], experiment.dataset.log
    batch = loader.gather(np.array([int(loader.windows.lengths.argmax())]))
    stars = torch.arange(float(len(batch.items))).double().requires_grad_()
    batch.features.events["stars"] = stars
    states = model.encode(in_float64(batch))
    for k, state in enumerate(states):
        (slope,) = torch.autograd.grad(state.sum(), stars, retain_graph=True)
        assert (slope[: k + 1] != 0).all() and (slope[k + 1 :] == 0).all()
    rows = next(iter(experiment.loaders["test"]))[0]
    places = rows["target_event"]
    with torch.no_grad():
        known = model.compute_states(rows)
        for shift, same in ((0, True), (1, False)):
            before = log.fields["channel"].clone()
            log.fields["channel"][places - shift] = 1 + before[places - shift] % 2
            found = model.compute_states(next(iter(experiment.loaders["test"]))[0])
            log.fields["channel"].copy_(before)
            assert torch.equal(found, known) == same


@pytest.mark.parametrize("augmentation", ["all_positions", "prefix"])
def test_a_history_scores_alike_everywhere(folder: Path, tmp_path: Path, augmentation: str) -> None:
    """Training, validation, test and its ranks, recommending to users and to given histories."""
    given = options(folder, epochs=1)
    given |= {"augmentation": augmentation, "mask_history": False}
    given["position"] = ["rope"]  # a position in a window is the same when the window ends there
    result = recbole_pos.run("PosSASRec", "shop", None, given, tmp_path / "run", verbose=False)
    trained = recbole_pos.Recommender.load(result.run_dir)
    model, dataset, log = trained.model.eval(), trained.dataset, trained.dataset.log
    cells = shop.Cells(dataset, tables())
    item_names = dataset.field2id_token["item_id"][1:]

    def describe(start: int, end: int) -> dict[str, Any]:
        """The interactions ``start`` to ``end`` of the log as a history, from the files."""

        def read(table: str, number: int) -> dict[str, Any]:
            row = {name: cells.of(table, number, name) for name in FEATURES[OPTION[table]]}
            lists = row.keys() & {"words", "likes"}
            return {**row, **{name: (row[name] or "").split() for name in lists}}

        events = pd.DataFrame([read("inter", row) for row in range(start, end)], dtype=object)
        return {
            "items": cells.inter["item_id"][start:end].tolist(),
            "events": events.to_dict("list"),
            "user": read("user", int(log.users[start])),
        }

    def tabulate(**asked: Any) -> np.ndarray:
        """Scores of all items, [histories or users, items]."""
        table = trained.recommend(k=len(item_names), exclude_seen=False, **asked)
        scores = table.pivot(index=table.columns[0], columns="item", values="score")
        return scores.loc[table.iloc[:, 0].unique(), item_names].to_numpy()

    def compare(scores: Tensor, bounds: list[tuple[int, int]]) -> np.ndarray:
        """Compare scores [n, items + 1] with those of given histories, which are returned."""
        want = tabulate(histories=[describe(start, end) for start, end in bounds])
        np.testing.assert_allclose(scores[:, 1:].numpy(), want, rtol=1e-4, atol=1e-5)
        return want

    def find_bounds(rows: Any) -> list[tuple[int, int]]:
        end = rows["target_event"]
        return list(zip((end - rows["item_length"]).tolist(), end.tolist(), strict=True))

    with torch.inference_mode():
        loader, vectors = trained.loaders["train"], model.item_vectors()
        if augmentation == "prefix":
            for rows in loader:
                compare(model.full_sort_predict(rows), find_bounds(rows))
        else:
            for numbers in loader._get_batches():
                windows, batch = loader.windows, loader.gather(numbers)
                states = model.encode(replace(batch, queries=None))
                pairs = zip(windows.start[numbers].tolist(), batch.lengths.tolist(), strict=True)
                bounds = [(start, start + i) for start, n in pairs for i in range(1, n + 1)]
                compare(states @ vectors.T, bounds)
        for phase in ("valid", "test"):
            ranks: list[int] = []
            for rows, _, _, targets in trained.loaders[phase]:
                want = compare(model.full_sort_predict(rows), find_bounds(rows))
                target_scores = np.take_along_axis(want, targets[:, None].numpy() - 1, 1)
                ranks += (want > target_scores).sum(1).tolist()
    kept = pd.read_parquet(tmp_path / "run" / "test_ranks.parquet")
    assert kept["rank"].tolist() == ranks
    bounds = list(zip(log.offsets[1:-1].tolist(), log.offsets[2:].tolist(), strict=True))
    want = tabulate(histories=[describe(start, end) for start, end in bounds])
    users = dataset.field2id_token["user_id"][1:].tolist()
    np.testing.assert_allclose(tabulate(users=users), want, rtol=1e-4, atol=1e-5)

    # What a history does not say, or names that are not known, count as missing.
    items, unknown = item_names[:2].tolist(), {"channel": [None, "x"], "stars": [None, None]}
    histories = [{"items": items}, {"items": items, "events": unknown}]
    one, other = tabulate(histories=histories)
    assert (one == other).all()
    with pytest.raises(UsageError, match="each of 2 items"):
        trained.recommend(histories=[{"items": items, "events": {"channel": ["web"]}}])
    with pytest.raises(UsageError, match="chan"):
        trained.recommend(histories=[{"items": items, "events": {"chan": ["web"] * 2}}])


@pytest.mark.long
def test_an_exported_model_reads_them(folder: Path, tmp_path: Path) -> None:
    """And content vectors of items, which the program needs no more."""
    np.save(tmp_path / "v.npy", np.random.default_rng(0).normal(size=(20, 3)))
    (tmp_path / "v.txt").write_text("".join(f"i{item}\n" for item in range(20)))
    content = {"item_vectors": str(tmp_path / "v.npy"), "item_vectors_use": "add"}
    given = options(folder, epochs=1, **content)
    found = recbole_pos.run("PosSASRec", "shop", None, given, tmp_path / "run", verbose=False)
    out = recbole_pos.export(
        found.run_dir, tmp_path / "out", format="torch_export", k=3
    )  # compared there
    names = json.loads((out / "features.json").read_text())
    fields = "events_channel events_words events_stars user_country user_likes user_age"
    assert [*names] == fields.split()
    assert names["user_age"] is None and set(names["events_channel"][1:]) == {"web", "app"}


WEB = {"channel": ["web"]}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("PosSASRec", {"event_features": ["brand"]}, "item_features"),
    ("PosSASRec", {"normalize_field": ["price"]}, "normalize_field"),
    ("SASRec", {"user_features": None, "event_features": None}, "the plugin's models"),
    ("PosRec", {}, "event_features"),
    ("AttrFormer", {}, "relations"),
    ("AttrFormer", {**dict.fromkeys(FEATURES), "target_events": WEB}, "relates"),
    ("BERT4Rec", {**dict.fromkeys(FEATURES), "target_events": WEB}, "every kind"),
    ("PosSASRec", {"target_events": {"channel": ["webb"]}}, "did you mean web"),
    ("PosSASRec", {"target_events": {"brand": ["A"]}}, "it names channel, stars"),
]


@pytest.mark.parametrize(("model", "given", "named"), REFUSED, ids=str)
def test_meaningless_features(folder: Path, model: str, given: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as error:
        prepare(configure(folder, model, **given))
    assert named in str(error.value)
