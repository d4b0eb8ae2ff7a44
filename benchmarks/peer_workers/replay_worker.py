"""Time the training of RePlay's SasRec with its ways to less padding."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import lightning
import pandas as pd
import torch
from peer_workers import common
from replay.data import FeatureHint, FeatureSource, FeatureType
from replay.data.nn import ParquetModule, TensorFeatureInfo, TensorFeatureSource, TensorSchema
from replay.nn.lightning import LightningModule
from replay.nn.lightning.optimizer import OptimizerFactory
from replay.nn.loss import CESampled
from replay.nn.sequential import LengthBucketedQueryEncoder, SasRec
from replay.nn.transform import (
    TargetAwareAdaptiveTrimTransform,
    UniformNegativeSamplingTransform,
    UnsqueezeTransform,
)
from replay.nn.transform.template import make_default_sasrec_transforms


def real_targets(batch: dict) -> int:
    """Return the targets with a history: RePlay also learns the first item, from padding."""
    return int((batch["target_padding_mask"].squeeze(-1) & batch["padding_mask"]).sum())


class Timing(lightning.Callback):
    """Counts the targets of each step and stops the training when enough was timed."""

    def __init__(self, job: common.Job, ids: dict[int, int]) -> None:
        self.job, self.ids = job, ids

    def on_train_start(self, trainer, pl_module) -> None:
        module = trainer.datamodule
        batches = map(module.compiled_transforms["train"], trainer.train_dataloader)
        common.check_targets(sum(map(real_targets, batches)), self.job)
        common.set_attention_dropout(pl_module, self.job.attention_dropout)
        model, padding = pl_module.model, len(self.ids)

        def score(histories: torch.Tensor) -> torch.Tensor:
            mask = histories != padding
            return model(feature_tensors={"item_id": histories}, padding_mask=mask)["logits"]

        self.clock = common.make_clock(self.job, self.ids, model, score, padding)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.clock.tick(real_targets(batch))
        trainer.should_stop = self.clock.done


def make_schema(items: int, job: common.Job) -> TensorSchema:
    """Return the schema of sequences of item ids 0 .. items - 1, padded with ``items``."""
    return TensorSchema(
        TensorFeatureInfo(
            "item_id",
            FeatureType.CATEGORICAL,
            is_seq=True,
            feature_hint=FeatureHint.ITEM_ID,
            feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")],
            cardinality=items,
            padding_value=items,
            embedding_dim=job.hidden_size,
        )
    )


def make_transforms(schema: TensorSchema, items: int, negatives: int) -> dict:
    """Return RePlay's template, with its trimming where the masks are still flat."""
    train = make_default_sasrec_transforms(schema)["train"]
    if negatives:
        train.insert(0, UniformNegativeSamplingTransform(items, negatives))
    index = next(i for i, t in enumerate(train) if isinstance(t, UnsqueezeTransform))
    train.insert(index, TargetAwareAdaptiveTrimTransform(["item_id", "positive_labels"]))
    return {"train": train}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("--bucket", type=int, help="encode so many rows of like length together")
    job, given = common.Job.read(), parser.parse_args()
    events = pd.read_csv(job.events).sort_values(["user_id", "timestamp"])
    codes, items = pd.factorize(events["item_id"])
    sequences = events.assign(item_id=codes).groupby("user_id")["item_id"].agg(list)
    schema = make_schema(len(items), job)
    model = SasRec.from_params(
        schema=schema,
        embedding_dim=job.hidden_size,
        num_heads=job.n_heads,
        num_blocks=job.n_layers,
        max_sequence_length=job.length,
        dropout=job.dropout,
        hidden_dim=job.inner_size,
    )
    if given.bucket:
        model.body.encoder = LengthBucketedQueryEncoder(model.body.encoder, given.bucket)
    if job.negatives:
        model.loss = CESampled(ignore_index=len(items))
        model.loss.logits_callback = model.get_logits
    timing = Timing(job, {item: number for number, item in enumerate(items)})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.parquet"
        sequences.str[-job.length - 1 :].reset_index().to_parquet(file)
        data = ParquetModule(
            batch_size=job.batch_size,
            metadata={"train": {"item_id": {"shape": job.length + 1, "padding": len(items)}}},
            transforms=make_transforms(schema, len(items), job.negatives),
            train_path=str(file),
        )
        trainer = lightning.Trainer(
            max_epochs=-1,
            limit_val_batches=0,  # there is no validation part
            accelerator="cpu",
            devices=1,
            callbacks=[timing],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        optimizer = OptimizerFactory(optimizer="adam", learning_rate=job.learning_rate)
        trainer.fit(LightningModule(model, optimizer_factory=optimizer), datamodule=data)
    common.report(timing.clock, len(items), "replay-rec", "lightning")


if __name__ == "__main__":
    main()
