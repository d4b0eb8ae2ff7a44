"""Section "several GPUs" of ``gpu.py``: the same run by ``--nproc`` 1, 2, 4, ... processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch
from data import write_atomic
from gpu_data import Size, generated

ROOT = Path(__file__).resolve().parents[1]
EPOCHS = 3  # of which the fastest counts: the first compiles and warms up


def processes(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    doubled = [2**n for n in range(most.bit_length()) if 2**n < most]
    return [*doubled, most]


def several(size: Size, most: int) -> Iterator[list[str]]:
    """Seconds of an epoch by the number of processes, a GPU for each."""
    yield ["GPUs", "s an epoch", "times as fast as one", "loss of the last epoch"]
    fields = generated(size).log.fields
    table = pd.DataFrame({name: values.numpy() for name, values in fields.items()})
    alone = 0.0
    with tempfile.TemporaryDirectory() as folder:
        write_atomic(table, folder, "generated")
        for count in processes(most):
            run = Path(folder) / f"run{count}"
            options = {
                "data_path": folder,
                "MAX_ITEM_LIST_LENGTH": size.length,
                "hidden_size": size.d,
                "inner_size": 4 * size.d,
                "n_layers": size.layers,
                "train_batch_size": size.batch,
                "epochs": EPOCHS,
                "eval_step": 0,
                "use_gpu": torch.cuda.is_available(),
            }
            command = [sys.executable, "-m", "recbole_pos.cli.main", "run"]
            command += ["-m", "PosSASRec", "-d", "generated", "--quiet", "--run_dir", str(run)]
            command += ["--nproc", str(count), *(f"--{k}={v}" for k, v in options.items())]
            subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
            lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
            seconds = min(line["seconds"] for line in lines)
            alone = alone or seconds
            loss = lines[-1]["loss"]
            yield [str(count), f"{seconds:.2f}", f"{alone / seconds:.2f}", f"{loss:.4f}"]
