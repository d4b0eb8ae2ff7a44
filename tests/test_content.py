"""Content vectors of items: what is read, how an item is made of it, and what has only content."""

import math
import resource
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.linalg
import torch
from conftest import CROSS_ENTROPY, make_log, small, train, write_atomic

import recbole_pos
from recbole_pos.data.item_vectors import read_new_vectors, read_vectors, to_file
from recbole_pos.errors import RunWarning, UsageError
from recbole_pos.experiment.build import prepare
from recbole_pos.experiment.folder import RunFolder

SIZE = 5
USES = ("add", "replace")
COLD = ["c0", "c1", "c2"]  # items of a test target alone
NAMES = [*(f"i{i}" for i in range(40)), *COLD]
NONE = "i5"  # an item of which no file has a vector


def vectors(names: list[str] = NAMES, size: int = SIZE, seed: int = 3) -> np.ndarray:
    """Correlated content with a mean."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(len(names), size)) @ rng.normal(size=(size, size)) + 2).astype("f4")


def write_npy(folder: Path, names: list[str], values: Any, name: str = "v") -> str:
    """A matrix with the names of its rows."""
    np.save(folder / f"{name}.npy", values)
    (folder / f"{name}.txt").write_text("".join(f"{item}\n" for item in names))
    return str(folder / f"{name}.npy")


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Vectors of all items but one, in an order of their own."""
    order = [i for i in np.random.default_rng(0).permutation(len(NAMES)) if NAMES[i] != NONE]
    return write_npy(tmp_path, [NAMES[i] for i in order], vectors()[order])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of ``tiny`` with three items that are the last of some users, and of no other."""
    log = make_log()
    users = log["user_id"].value_counts().index[: 3 * len(COLD)]
    last = pd.DataFrame({"user_id": users, "item_id": COLD * 3, "timestamp": 1.6e9})
    folder = tmp_path_factory.mktemp("content")
    return write_atomic(pd.concat([log, last], ignore_index=True), folder)


def test_files_of_all_kinds_are_read_by_name(tmp_path: Path) -> None:
    """Rows of names that are wanted, zeros for those of no file and for padding."""
    values, given = vectors(), np.array(["[PAD]", "i7", "nobody", "i0"], dtype=object)
    want = np.stack([np.zeros(SIZE), values[7], np.zeros(SIZE), values[0]])
    lists = pd.DataFrame({"x": NAMES, "v": [*values[:-1].tolist(), None]})
    sources = [
        to_file(lists),
        write_npy(tmp_path, [*NAMES[:-1], "[PAD]"], values.astype("f8")),
        *map(to_file, (pd.DataFrame(values, NAMES), (NAMES, values))),
        to_file((NAMES, torch.nn.Parameter(torch.from_numpy(values)))),
    ]
    for source in sources:
        found, (notice,) = read_vectors(source, given)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, want.astype("f4"))
        assert "2 of 3 items; 1 have none" in notice
    names, new = read_new_vectors(sources[2], dict.fromkeys(NAMES[:-2]))
    assert list(names) == NAMES[-2:]
    np.testing.assert_allclose(new, values[-2:])


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    nan = vectors()
    nan[3, 2] = np.nan
    np.save(tmp_path / "alone.npy", vectors())
    (tmp_path / "v.csv").write_text("i0,1.0\n")
    files = [
        write_npy(tmp_path, NAMES, nan, "nan"),
        write_npy(tmp_path, NAMES, vectors()[:-1], "short"),
        write_npy(tmp_path, ["i0", "i0"], [[1.0], [3.0]], "twice"),
        write_npy(tmp_path, ["x", "y"], [[1.0], [3.0]], "no item"),
        *(str(tmp_path / name) for name in ("alone.npy", "absent.npy", "v.csv")),
    ]
    for file in files:
        with pytest.raises(UsageError, match="^item_vectors: "):
            read_vectors(file, np.array(["[PAD]", *NAMES]))
    ragged = pd.DataFrame({"item_id": ["i0", "i1"], "v": [[1.0, 2.0], [3.0]]})
    for wrong in (ragged, (["i0"], vectors())):
        with pytest.raises(UsageError, match="^item_vectors: .*expected a"):
            to_file(wrong)


def test_a_large_file_is_mapped(tmp_path: Path) -> None:
    """Of 4 GB, most of which no disk holds, one row is in memory."""
    file, rows = tmp_path / "v.npy", 1 << 18
    values = np.lib.format.open_memmap(file, "w+", np.float32, (rows, 4096))
    values[-1] = 2
    del values
    file.with_suffix(".txt").write_text("".join(f"{i}\n" for i in range(rows)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found, _ = read_vectors(str(file), np.array(["[PAD]", str(rows - 1)]))
    assert found.shape == (2, 4096) and (found[1] == 2).all()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def build(data: Path, model: str = "PosSASRec", **options: Any) -> Any:
    """An experiment without dropout, so that what is computed twice is the same."""
    given = {"data_path": str(data), "epochs": 1, **options}
    if model != "FGNN":
        given["hidden_dropout_prob"] = 0.0
    return prepare(small(model, **given))


def expected_items(made: Any, raw: np.ndarray, use: str, whiten: bool = False) -> list[list[Any]]:
    """x of every item as in ``side_information.py``, number by number; e as the model has it."""
    model, names = made.model, made.dataset.field2id_token["item_id"]
    trained = [int(count) > 0 for count in made.dataset.popularity]
    rows = {name: row for row, name in enumerate(NAMES) if name != NONE}
    content = [raw[rows[name]].astype(float) if name in rows else None for name in names]
    counted = [c for c, known in zip(content, trained, strict=True) if known and c is not None]
    mean = sum(counted) / len(counted)
    centred = [c - mean for c in counted]
    covariance = sum(np.outer(c, c) for c in centred) / len(centred)
    variances, axes = np.linalg.eigh(covariance)
    scale = np.eye(SIZE) / np.sqrt(np.trace(covariance) / SIZE)
    if whiten:
        eye = 1e-3 * variances.mean() * np.eye(SIZE)
        scale = np.linalg.inv(scipy.linalg.sqrtm(covariance + eye)).real
    part = model.item_embedding.parts["content"]
    parameters = *part.inner.parameters(), *part.outer.parameters()
    w1, b1, w2, b2 = (x.detach().numpy() for x in parameters)
    found = []
    for item, c in enumerate(content):
        own = np.zeros(16)
        if use != "replace" and trained[item]:
            own = model.item_embedding.weight[item].detach().numpy()
        z = w1 @ (np.zeros(SIZE) if c is None else (c - mean) @ scale) + b1
        mlp = w2 @ np.array([x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in z]) + b2
        found.append([own, mlp])
    return found


@pytest.mark.parametrize(("use", "whiten"), [*((use, False) for use in USES), ("add", True)])
def test_items_by_formula(double: None, data: Path, file: str, use: str, whiten: bool) -> None:
    """In scores and at the input, one by one and all at once; a loss has its gradient at both."""
    made = build(data, item_vectors=file, item_vectors_use=use, item_vectors_whiten=whiten)
    model, tokens = made.model, made.dataset.field2token_id["item_id"]
    cold, none = tokens["c1"], tokens[NONE]
    expected = expected_items(made, vectors(), use, whiten)
    own, mlp = (np.stack(part) for part in zip(*expected, strict=True))
    want = own + mlp
    close = {"rtol": 1e-5, "atol": 1e-6}  # the transformed vectors are float32
    np.testing.assert_allclose(model.item_vectors().detach().numpy(), want, **close)
    assert not own[cold].any() and own[none].any() == (use != "replace")
    ids = torch.tensor([[3, cold], [none, 3]])
    for shared in (nullcontext(), model.shared_items()):
        with shared:
            found = model.item_embedding(ids).detach().numpy()
            np.testing.assert_allclose(found, want[ids], **close)
    rows = next(iter(made.loaders["test"]))[0]
    states = model.compute_states(rows)
    torch.testing.assert_close(model.full_sort_predict(rows), states @ model.item_vectors().T)
    score = model.full_sort_predict(rows)[torch.arange(len(rows)), rows["item_id"]]
    torch.testing.assert_close(model.predict(rows), score)
    batch = next(iter(made.loaders["train"]))
    loss = model.window_loss(batch)
    logits = (model.encode(batch) @ model.item_vectors().T)[:, 1:]
    logits[:, torch.from_numpy(made.dataset.popularity[1:] == 0)] = -torch.inf
    plain = torch.nn.functional.cross_entropy(logits, batch.targets - 1)
    torch.testing.assert_close(loss, plain)


@pytest.mark.parametrize(("size", "whiten"), [(16, False), (16, True), (24, False), (SIZE, True)])
def test_init_is_principal_components(
    double: None, data: Path, tmp_path: Path, size: int, whiten: bool
) -> None:
    """Of the items with a training interaction; vectors of size d are taken as they are."""
    raw = np.random.default_rng(1).normal(size=(len(NAMES), size)) @ np.diag(1.3 ** np.arange(size))
    raw = raw.astype("f4")
    options = {"item_vectors": write_npy(tmp_path, NAMES, raw), "item_vectors_whiten": whiten}
    made = build(data, item_vectors_use="init", **options)
    table, names = made.model.item_embedding, made.dataset.field2id_token["item_id"]
    content = np.stack([raw[NAMES.index(name)].astype(float) for name in names[1:]])
    trained, kept = made.dataset.popularity[1:] > 0, min(size, 16)
    want = content
    if size != 16 or whiten:
        centred = content - content[trained].mean(0)
        _, spread, axes = np.linalg.svd(centred[trained], full_matrices=False)
        variances = spread**2 / trained.sum()
        scale = 1 / np.sqrt(variances + 1e-3 * variances.mean()) if whiten else np.ones(size)
        components = centred @ (axes.T * scale)
        want = components[:, :kept] if size != 16 else components @ axes
        want *= 0.02 / want[trained].std()
    found = table.weight.detach()[1:, :kept].numpy()
    signs = np.sign((found * want).sum(0)) if size != 16 else 1
    np.testing.assert_allclose(found, want * signs, rtol=1e-4, atol=1e-6)
    assert kept == 16 or 0.01 < table.weight[1:, kept:].std() < 0.03


@pytest.mark.parametrize(
    ("model_name", "options"),
    [
        ("PosSASRec", {"item_vectors_use": "add", "loss_type": "sampled_softmax"}),
        ("PosSASRec", {"item_vectors_use": "add", "loss_type": "SCE"}),
        ("AttrFormer", {"item_vectors_use": "add", "relations": []}),
        ("FGNN", {"item_vectors_use": "replace", "train_windows": "prefix"}),
    ],
    ids=str,
)
def test_content_is_learned(
    data: Path, file: str, model_name: str, options: dict[str, Any]
) -> None:
    """And of a loss nothing reaches items without a training interaction."""
    options = {**CROSS_ENTROPY.get(model_name, {}), **options, "item_vectors": file}
    made = build(data, model_name, **options)
    content = made.model.item_embedding.parts["content"].values.requires_grad_()
    made.model.train().window_loss(next(iter(made.loaders["train"]))).backward()
    grad = content.grad
    cold = made.dataset.popularity == 0
    assert cold.sum() == 1 + len(COLD) and not grad[cold].any()
    assert grad[~cold].any(1).sum() > 20


@pytest.mark.parametrize("use", USES)
def test_a_moved_run_takes_new_items(data: Path, file: str, tmp_path: Path, use: str) -> None:
    """New items are scored as items are that were cold in training and have the same content."""
    train(data, tmp_path / "run", "PosSASRec", item_vectors=file, item_vectors_use=use)
    first = recbole_pos.Recommender.load(tmp_path / "run").recommend(["u9"], k=5)
    for name in (file, Path(file).with_suffix(".txt")):
        Path(name).unlink()
    folder = (tmp_path / "run").rename(tmp_path / "moved")
    new = ["new", "i1"], np.stack((vectors()[NAMES.index("c2")], vectors()[0]))
    more = recbole_pos.Recommender.load(folder, histories_only=True, item_vectors=new)
    assert len(more.items) == len(NAMES) + 1
    with pytest.warns(RunWarning, match="1 items of add_items are not saved"):
        more.save(tmp_path / "saved")
    again = recbole_pos.Recommender.load(folder)
    pd.testing.assert_frame_equal(again.recommend(["u9"], k=5), first)
    for history in (["i3", "i4"], ["i3", "new"]):
        found = more.recommend(histories=[history], k=len(more.items), exclude_seen=False)
        score = dict(zip(found["item"], found["score"], strict=True))
        assert score["new"] == pytest.approx(score["c2"], rel=1e-5)
    assert more.similar("new", k=1)["similar"].item() == "c2"
    with pytest.raises(UsageError, match="^item_vectors: "):
        more.add_items((["newer"], np.zeros((1, SIZE + 1))))
    more.add_items((["newer"], new[1][:1]))  # what was refused has changed nothing
    assert more.similar("newer", k=1)["similar"].item() == "c2"  # which has the same content
    (folder / "item_vectors.npy").unlink()
    with pytest.raises(UsageError, match="^item_vectors: "):
        recbole_pos.load(folder)


def test_new_items_without_attributes_are_refused_as_a_whole(tmp_path: Path, file: str) -> None:
    write_atomic(make_log(), tmp_path)
    cats = "".join(f"i{n}\tc{n % 3}\n" for n in range(40))
    (tmp_path / "tiny" / "tiny.item").write_text(f"item_id:token\tcat:token\n{cats}")
    load = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "cat"]}
    options = {"load_col": load, "item_vectors": file, "item_vectors_use": "add"}
    options |= {"position": ["difsr"], "difsr_fields": ["cat"]}
    trained = recbole_pos.load(train(tmp_path, tmp_path / "run", "PosSASRec", **options))
    before = trained.recommend(histories=[["i3", "i4"]])
    with pytest.raises(UsageError, match="^item_vectors: .*cat"):
        trained.add_items((["new"], vectors()[:1]))
    assert "new" not in trained.ids and len(trained.items) == 40
    pd.testing.assert_frame_equal(trained.recommend(histories=[["i3", "i4"]]), before)


def test_a_resumed_run_still_names_its_vectors(data: Path, file: str, tmp_path: Path) -> None:
    """So that its configuration repeats the run."""
    options = {"item_vectors": file, "item_vectors_use": "init"}
    folder = RunFolder(train(data, tmp_path / "run", "PosSASRec", **options))
    begun = folder.read_config()
    assert begun["item_vectors"] == file
    recbole_pos.run(resume=folder.path, epochs=2, verbose=False)
    assert folder.read_config() == {**begun, "epochs": 2}
