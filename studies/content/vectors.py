"""Make content vectors of items from the attributes in a dataset's ``.item`` file.

Words of titles (token_seq) and values of categories are weighted by TF-IDF (a word that is in few
items says more) and reduced by SVD.

    python studies/content/vectors.py ml-100k vectors/ml-100k.npy
    python studies/content/vectors.py amazon-beauty vectors/beauty.npy --data_path FOLDER
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.sparse import hstack
from scipy.sparse.linalg import svds
from sklearn.feature_extraction.text import TfidfVectorizer

from recbole_pos.config.posconfig import PosConfig

SIZE = 64  # numbers of a vector


def read_items(data_path: str, dataset: str) -> pd.DataFrame:
    """Return the table of items: of ``data_path``, or of the wheel of RecBole for ml-100k."""
    config = PosConfig("Pop", dataset, None, {"data_path": data_path})
    file = Path(config["data_path"]) / f"{dataset}.item"
    table = pd.read_csv(file, sep="\t", dtype=str, keep_default_na=False, quoting=3)
    return table.rename(columns=lambda column: column.partition(":")[0])


def make_vectors(table: pd.DataFrame, fields: list[str]) -> np.ndarray:
    """Return [items, SIZE] float32: TF-IDF of each field, side by side, by SVD."""
    tfidf = TfidfVectorizer(token_pattern=r"[^\s,]+", min_df=2)
    weights = [tfidf.fit_transform(table[field].str.lower()) for field in fields]
    left, spread, _ = svds(hstack(weights).tocsr(), k=SIZE, random_state=0)
    return (left * spread)[:, ::-1].astype(np.float32)  # the largest first


def main() -> None:
    """Write OUT.npy and the names of its rows, OUT.txt."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dataset")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data_path", default="dataset/")
    parser.add_argument("--fields", nargs="+", help="of the items (all but the first)")
    args = parser.parse_args()
    table = read_items(args.data_path, args.dataset)
    vectors = make_vectors(table, args.fields or list(table.columns[1:]))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.save(args.out, vectors)
    np.savetxt(args.out.with_suffix(".txt"), table.iloc[:, 0], fmt="%s", encoding="utf-8")
    print(f"{args.out}: {len(vectors):,} items, {vectors.shape[1]} numbers each")


if __name__ == "__main__":
    main()
