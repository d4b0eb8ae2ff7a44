"""Time the training of RePlay's SasRec with its ways to less padding."""

import tempfile
from pathlib import Path

import lightning
import pandas as pd
from peer_workers import common
from peer_workers.lists import QUIET
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

    def __init__(self, job: common.Job) -> None:
        self.job = job

    def on_train_start(self, trainer, pl_module) -> None:
        module = trainer.datamodule
        batches = map(module.compiled_transforms["train"], trainer.train_dataloader)
        common.check(self.job, targets=sum(map(real_targets, batches)))
        common.set_attention_dropout(pl_module, self.job.attention_dropout)
        self.clock = common.Clock(self.job)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.clock.tick(real_targets(batch))
        trainer.should_stop = self.clock.done


def make_schema(items: int, size: int) -> TensorSchema:
    """Return the schema of sequences of item ids 0 .. items - 1, padded with ``items``.

    Args:
        items: number of items.
        size: size of their vectors.
    """
    return TensorSchema(
        TensorFeatureInfo(
            "item_id",
            FeatureType.CATEGORICAL,
            is_seq=True,
            feature_hint=FeatureHint.ITEM_ID,
            feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")],
            cardinality=items,
            padding_value=items,
            embedding_dim=size,
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


def fit(
    module: LightningModule,
    schema: TensorSchema,
    sequences: pd.Series,
    callback: lightning.Callback,
    length: int,
    batch_size: int,
    negatives: int = 0,
    max_epochs: int = -1,
) -> None:
    """Train a model until a callback stops it; there is no validation part.

    Args:
        module: the model with its optimiser.
        schema: of :func:`make_schema`.
        sequences: lists of item numbers, oldest first.
        callback: is told of batches and epochs.
        length: newest items of a sequence that are predicted.
        batch_size: sequences of a batch.
        negatives: items that a target is compared with; 0 for all.
        max_epochs: most epochs; -1 for any number.
    """
    items = schema["item_id"].cardinality
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.parquet"
        sequences.str[-length - 1 :].to_frame("item_id").to_parquet(file, index=False)
        data = ParquetModule(
            batch_size=batch_size,
            metadata={"train": {"item_id": {"shape": length + 1, "padding": items}}},
            transforms=make_transforms(schema, items, negatives),
            train_path=str(file),
        )
        limits = {"max_epochs": max_epochs, "limit_val_batches": 0}
        trainer = lightning.Trainer(callbacks=[callback], **limits, **QUIET)
        trainer.fit(module, datamodule=data)


def main() -> None:
    job = common.Job.read()
    events = pd.read_csv(job.events).sort_values(["user_id", "timestamp"])
    codes, items = pd.factorize(events["item_id"])
    common.check(job, items=len(items))
    sequences = events.assign(item_id=codes).groupby("user_id")["item_id"].agg(list)
    schema = make_schema(len(items), job.hidden_size)
    model = SasRec.from_params(
        schema=schema,
        embedding_dim=job.hidden_size,
        num_heads=job.n_heads,
        num_blocks=job.n_layers,
        max_sequence_length=job.length,
        dropout=job.dropout,
        hidden_dim=job.inner_size,
    )
    if job.bucket:
        model.body.encoder = LengthBucketedQueryEncoder(model.body.encoder, job.bucket)
    if job.negatives:
        model.loss = CESampled(ignore_index=len(items))
        model.loss.logits_callback = model.get_logits
    timing = Timing(job)
    optimizer = OptimizerFactory(optimizer="adam", learning_rate=job.learning_rate)
    module = LightningModule(model, optimizer_factory=optimizer)
    fit(module, schema, sequences, timing, job.length, job.batch_size, job.negatives)
    timing.clock.report()


if __name__ == "__main__":
    main()
