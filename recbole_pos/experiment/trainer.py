"""PosTrainer: RecBole's Trainer with exact resume, safe checkpoints and a report per epoch."""

from __future__ import annotations

import copy
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from recbole.evaluator import Evaluator
from recbole.trainer.trainer import AbstractTrainer
from recbole.utils import ModelType, WandbLogger, calculate_valid_score, early_stopping, init_seed
from recbole.utils.utils import get_local_time
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from recbole_pos import distributed
from recbole_pos.data.loaders import RowLoader, WindowLoader, make_training_loader
from recbole_pos.errors import TrainingError, UsageError
from recbole_pos.experiment.callbacks import Callback, call
from recbole_pos.experiment.checkpoint import CheckpointWriter, Progress
from recbole_pos.experiment.device import Precision
from recbole_pos.experiment.diagnosis import explain_loss, log_notices
from recbole_pos.experiment.evaluation import EvaluatingTrainer, TargetCollector
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.loss_watch import LossWatch
from recbole_pos.experiment.memory import trim_heap
from recbole_pos.experiment.schedule import PER_STEP, WeightAverage, learning_rate
from recbole_pos.experiment.state import capture, extract_weights, load_weights, restore
from recbole_pos.layers.row_gradients import KeptGradient, kept_gradient
from recbole_pos.model.training import make_adapter
from recbole_pos.reporter import Reporter
from recbole_pos.values import Options

_FUSED = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


class PosTrainer(EvaluatingTrainer):
    """Trains plugin models and RecBole's general, sequential and traditional ones.

    Of several processes that train the same model each has a trainer, for its part of every batch;
    all keep the same weights, and only the first writes. Metrics are computed from all rows in
    every process, so all of them stop in the same epoch.

    Args:
        config: RecBole configuration.
        model: the model, on its device.

    Attributes:
        run: the run folder, if any; without one, checkpoints are where RecBole would write them.
    """

    def __init__(self, config: Options, model: Any) -> None:
        # Trainer.__init__ would open a tensorboard writer in the working directory
        AbstractTrainer.__init__(self, config, model)
        starts = ("init_from", "train_only", "update_from")
        if not hasattr(config, "plain") and any(config[key] for key in starts):
            raise UsageError(f"{', '.join(starts)}: start by recbole_pos.run, attach or update")
        # options, and what RecBole's trainer reads
        self.logger = getLogger()
        self.device = config["device"]
        self.learner, self.learning_rate = config["learner"], config["learning_rate"]
        self.weight_decay = config["weight_decay"]
        self.epochs = 1 if model.type == ModelType.TRADITIONAL else config["epochs"]
        self.eval_step = min(config["eval_step"], self.epochs)
        self.stopping_step, self.clip_grad_norm = config["stopping_step"], config["clip_grad_norm"]
        self.valid_metric = config["valid_metric"].lower()
        self.valid_metric_bigger = config["valid_metric_bigger"]
        # how a step is computed
        self.precision = Precision.from_config(config)
        self.scaler = self.precision.scaler()
        self.adapter = make_adapter(config, model)
        self.shard = distributed.current_shard()
        self.shared_loss: distributed.SharedLoss | None = None  # of several processes
        if not self.shard.is_alone:
            _require_shareable(config, model)
            if getattr(model, "targets_meet", False):
                model.loss = distributed.make_global_loss(model.loss, self.shard)
        self.optimizer: Any = self._build_optimizer()
        self.kept: KeptGradient | None = None  # while an epoch is trained
        self.steps = 0  # that were taken, in all epochs
        self.all_steps = 0  # of all epochs, once a schedule asks for them
        decay = config["ema_decay"]
        self.average = WeightAverage(model, decay) if decay else None
        # attributes that Trainer.evaluate reads
        self.gpu_available = torch.cuda.is_available() and config["use_gpu"]
        self.test_batch_size = config["eval_batch_size"]
        self.eval_type = config["eval_type"]
        self.eval_collector, self.evaluator = TargetCollector(config), Evaluator(config)
        self.wandblogger = WandbLogger(config)
        self.item_tensor = self.tot_item_num = None
        # state, and where it is kept and reported
        self.progress = Progress()
        self.best_weights: dict[str, Any] | None = None
        self.identity: dict[str, Any] = {"data": None}  # of the data of training
        self.vocabulary_digest: str | None = None  # of the vocabulary in the run folder
        self.writer = CheckpointWriter(None, dict)  # of the checkpoints of a fit
        self.reporter: Reporter | None = None
        self.callbacks: Sequence[Callback] = ()
        file = f"{config['model']}-{get_local_time()}.pth"
        self.saved_model_file = os.path.join(config["checkpoint_dir"], file)
        self.run: RunFolder | None = None

    @property
    def finished(self) -> bool:
        """Whether training has stopped, or no epoch with a validation is left."""
        step = max(self.eval_step, 1)
        return self.progress.stopped or self.progress.next_epoch + step > self.epochs

    def _build_optimizer(self, **kwargs: Any) -> torch.optim.Optimizer:
        """Build the optimiser of the trained parameters; Adam and AdamW are fused."""
        name = self.learner.lower()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if name not in _FUSED:
            return super()._build_optimizer(**{"params": trained, **kwargs})
        return _FUSED[name](
            trained,
            lr=self.learning_rate,
            betas=tuple(self.config["adam_betas"]),
            weight_decay=self.weight_decay,
            fused=True,
        )

    def training_loader(self, train_data: Any) -> Any:
        """Return the loader to train with, in place of the one that RecBole's quick start makes."""
        loader = train_data
        if not isinstance(loader, (RowLoader, WindowLoader)):
            requirements = self.adapter.requirements()
            loader = make_training_loader(self.config, train_data._dataset, requirements)
        if not self.shard.is_alone:
            loader.divide(self.shard)
        return loader

    def fit(
        self,
        train_data: Any,
        valid_data: Any = None,
        verbose: bool = True,
        saved: bool = True,
        show_progress: bool = False,
        callback_fn: Callable[[int, float], None] | None = None,
    ) -> tuple[float | None, dict[str, float] | None]:
        """Train until early stopping or the last epoch; RecBole's arguments and return value.

        The best epoch by ``valid_metric`` (the last one without validation data) is kept for
        :meth:`evaluate`. After :meth:`resume_checkpoint`, continues with the next epoch.

        Args:
            train_data, valid_data: loaders; without validation every epoch is trained.
            verbose: whether epochs are printed, unless the trainer has a reporter.
            saved: whether checkpoints are written.
            show_progress: whether the progress of epochs is shown.
            callback_fn: called with the epoch and its ``valid_metric`` after each validation.

        Returns:
            The best score, and the metrics of its epoch; None without validation.
        """
        self.eval_collector.data_collect(train_data)
        self.loader = self.training_loader(train_data)
        if self.config["train_neg_sample_args"].get("dynamic", False):
            self.loader.get_model(self.model)
        self.identity = getattr(train_data._dataset, "identity", self.identity)
        self.reporter = self.reporter or Reporter(verbose)
        progress = self.progress
        if progress.next_epoch == 0:
            every_position = self.loader.packed and self.config["train_windows"] != "prefix"
            log_notices(self.model, every_position)
        file = Path(self.saved_model_file)
        if saved and self.run is None:  # RecBole's folder may not exist yet; that of a run does
            file.parent.mkdir(parents=True, exist_ok=True)
        writes = saved and self.shard.rank == 0
        self.writer = CheckpointWriter(file if writes else None, functools.partial(capture, self))
        try:
            while progress.next_epoch < self.epochs and not progress.stopped:
                epoch = progress.next_epoch
                line = self._train_epoch(self.loader, epoch, show_progress=show_progress)
                trim_heap()
                with nullcontext() if self.average is None else self.average.used():
                    improved = self._validate(valid_data, line, show_progress)
                trim_heap()
                self._finish_epoch(line, keep_now=epoch == 0 or callback_fn is not None)
                self.reporter.show_epoch(line, self.valid_metric, improved)
                if callback_fn and line["valid"]:
                    callback_fn(epoch, line["valid"][self.valid_metric])
        finally:
            self.writer.flush()
        return progress.best_score, progress.best_result

    def _finish_epoch(self, line: dict[str, Any], keep_now: bool) -> None:
        """Call the callbacks after an epoch, and keep its checkpoint and its line of metrics."""
        progress, epoch, valid = self.progress, line["epoch"], line["valid"]
        progress.history.append(line)
        progress.next_epoch += 1
        if valid:
            progress.stopped |= call(self.callbacks, "on_validation", epoch, valid)
        progress.stopped |= call(self.callbacks, "on_epoch", line)
        self.writer.keep()
        if keep_now:
            self.writer.flush()  # nothing is published of a run that cannot be resumed
        if self.run:
            self.run.add_metrics(line)
        scalars = {"epoch": epoch, "train/loss": line["loss"], **(valid or {})}
        self.wandblogger.log_metrics(scalars, head="train")

    def _train_epoch(
        self, train_data: Any, epoch_idx: int, loss_func: Any = None, show_progress: bool = False
    ) -> dict[str, Any]:
        """Train one epoch; RecBole's arguments.

        Returns:
            The epoch's line for metrics.jsonl, without validation metrics yet.
        """
        started = time.perf_counter()
        self.model.train()
        if self.config["lr_scheduler"] in PER_STEP and not self.all_steps:
            train_data.set_epoch(0)  # other epochs may have a few batches more or less
            self.all_steps = self.epochs * len(train_data)
        loss_func = loss_func or self.adapter.choose_loss(train_data.packed)
        if not self.shard.is_alone:
            loss_func = self._share_loss(loss_func, epoch_idx)
        train_data.set_epoch(epoch_idx)
        reporter = self.reporter or Reporter(False)
        watch = LossWatch(functools.partial(self._refuse, epoch_idx))
        title = f"epoch {epoch_idx}/{self.epochs}"
        with (
            self.precision.steps(),
            self.steps_in_rows(),
            reporter.task(title, len(train_data), show_progress) as task,
        ):
            batches = train_data.iterate_batches(self.device, self.config["data_on_device"])
            for number, batch in enumerate(batches):
                rate = learning_rate(self.config, epoch_idx, self.steps, self.all_steps)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                loss = self._step(loss_func, batch, watch, number)
                for callback in self.callbacks:
                    callback.on_step(self.steps, loss)
                task.advance(len(batch) if self.shard.is_alone else self.shard.num_batch_targets)
            mean_loss = watch.compute_mean()
        if self.shared_loss is not None:
            self.shared_loss.broadcast_buffers()
        seconds = time.perf_counter() - started
        self.progress.training_seconds += seconds
        self.progress.trained_targets += train_data.num_targets
        return {
            "epoch": epoch_idx,
            "loss": mean_loss,
            "valid": None,
            "seconds": round(seconds, 3),
            "targets_per_second": round(train_data.num_targets / seconds, 1),
        }

    def _share_loss(self, loss_func: Any, epoch: int) -> Any:
        """Seed this process for an epoch; return the loss with gradients summed over all."""
        # dropout and negatives of each process, by two primes; they depend on the epoch only, so a
        # resumed run samples the same
        offset = 7919 * self.shard.rank + 104729 * epoch
        init_seed((self.config["seed"] + offset) % 2**32, self.config["reproducibility"])
        self.shared_loss = self.shared_loss or distributed.SharedLoss(self.model, loss_func)
        return self.shared_loss

    def _step(self, loss_func: Any, batch: Any, watch: LossWatch, number: int) -> Tensor:
        """Take one optimiser step; return the loss to report, a scalar on the device, unread."""
        self.optimizer.zero_grad()
        if self.kept:
            self.kept.clear()
        with self.precision.forward():
            losses: Tensor | tuple[Tensor, ...] = loss_func(batch)
        loss = sum(losses[1:], losses[0]) if isinstance(losses, tuple) else losses
        targets, reported = len(batch), loss.detach()
        if not self.shard.is_alone:  # the mean loss of the whole batch, NaN in all if it is in one
            loss = loss * self.shard.weight
            targets, reported = self.shard.num_batch_targets, distributed.sum_over_processes(loss)
        is_fused = any(group.get("fused") for group in self.optimizer.param_groups)
        if is_fused and reported.device.type != "cpu":
            # a loss that is not finite is read too late to stop this step: the optimiser skips it
            self.optimizer.found_inf = (~reported.isfinite()).any().float()
            watch.add(reported, number, batch, targets)
        else:
            watch.add(float(reported), number, batch, targets)
        self.scaler.scale(loss).backward()
        if self.clip_grad_norm:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), **self.clip_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps += 1
        if self.average is not None:
            self.average.update(self.steps)
        return reported

    @contextmanager
    def steps_in_rows(self) -> Iterator[None]:
        """Keep the gradient of a large item table by rows in a ``with`` block, if few are used."""
        # a gradient that is sent between processes is dense
        table = self.adapter.find_kept_table() if self.shard.is_alone else None
        if table is None:
            yield
            return
        try:
            with kept_gradient(table, bool(self.clip_grad_norm)) as self.kept:
                yield
        finally:
            self.kept = None

    def _refuse(self, epoch: int, number: int, batch: Any, loss: float) -> None:
        """Raise a TrainingError about a loss that is not finite, with its likely cause."""
        cause = explain_loss(batch, self.model, self.learning_rate)
        raise TrainingError(
            f"loss is {loss} in epoch {epoch}, batch {number}. Likely cause: {cause}"
        )

    def _validate(self, valid_data: Any, line: dict[str, Any], show_progress: bool = False) -> bool:
        """Validate an epoch, if it is due, into its line; return whether it is the best so far."""
        progress = self.progress
        if not valid_data or self.eval_step <= 0:
            progress.best_epoch = line["epoch"]
            self.best_weights = copy.deepcopy(extract_weights(self.model))
            return False
        if (line["epoch"] + 1) % self.eval_step:
            return False
        started = time.perf_counter()
        metrics = (
            self.evaluate(valid_data, load_best_model=False, show_progress=show_progress) or {}
        )
        score = calculate_valid_score(metrics, self.valid_metric)
        if not math.isfinite(score):
            raise TrainingError(f"{self.valid_metric} is {score} on validation data")
        best_score = progress.best_score
        if best_score is None:
            best_score = -math.inf if self.valid_metric_bigger else math.inf
        progress.best_score, progress.steps_without_gain, progress.stopped, improved = (
            early_stopping(
                score,
                best_score,
                progress.steps_without_gain,
                self.stopping_step,
                self.valid_metric_bigger,
            )
        )
        if improved:
            progress.best_epoch, progress.best_result = line["epoch"], metrics
            self.best_weights = copy.deepcopy(extract_weights(self.model))
        progress.evaluation_seconds += time.perf_counter() - started
        line["valid"] = {name: float(value) for name, value in metrics.items()}
        return improved

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Put the weights of a checkpoint into the model."""
        load_weights(self.model, weights)

    def resume_checkpoint(self, resume_file: str, train_data: Any = None) -> None:
        """Restore the training in a checkpoint; ``train_data`` is the loader ``fit`` will get."""
        restore(self, resume_file, train_data)
        self.saved_model_file = str(resume_file)
        if self.run:
            self.run.write_metrics(self.progress.history)
        if not self.shard.is_alone:
            torch.distributed.barrier()  # every process reads it before any writes


def _require_shareable(config: Options, model: Any) -> None:
    """Refuse a model that several processes cannot train; a UsageError says why."""
    if model.type == ModelType.TRADITIONAL:
        raise UsageError(f"nproc: {config['model']} has no gradients to share; use one process")
    if getattr(model, "needs_events", False):
        raise UsageError(
            f"nproc: the sequences of a batch of {config['model']} read each other, and a process "
            "would have a part of them; use one process, with threads or a GPU"
        )
    if getattr(model, "targets_meet", False) and model.later_targets is not None:
        raise UsageError(
            f"nproc: target_window: {config['target_window']} is for one process where targets of "
            "a batch meet (SCE, in_batch); use target_window: 1 or another loss_type"
        )
