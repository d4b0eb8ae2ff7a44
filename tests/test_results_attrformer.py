"""The tables of ``make results-attrformer`` keep rows whose runs are on another machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def results(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import results_attrformer

    yield results_attrformer
    for name in ("results_attrformer", "study"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("dataset", ["toyshop", "amazon-beauty", "ml-1m"])
def test_rows_without_runs_keep_their_line(results, dataset: str, tmp_path: Path) -> None:
    from study import Study, section, written_rows

    mark = f"{dataset}, small"
    written = written_rows(results.PAGE, mark)
    assert {"Table 2", "AttrFormer, `inference_relations`"} <= set(written)
    plan = results.rows(dataset, results.SIZES["small"], 100)
    study = Study(dataset, tmp_path, {}, 1, 1)
    assert results.tables(study, plan, written, 1) == section(results.PAGE, mark)[1]
    assert results.tables(study, plan, {}, 1) == ""
