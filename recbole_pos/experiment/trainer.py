"""PosTrainer: RecBole's Trainer with exact resume, safe checkpoints and a report per epoch."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from recbole_pos.experiment import checkpoint
from recbole_pos.experiment.callbacks import Callback, call
from recbole_pos.experiment.checkpoint import CheckpointWriter, Progress
from recbole_pos.experiment.device import Precision
from recbole_pos.experiment.diagnosis import LossWatch, log_notices
from recbole_pos.experiment.evaluation import EvaluatingTrainer, TargetCollector
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.layers.item_table import KeptGradient, kept_gradient
from recbole_pos.model.training import make_adapter
from recbole_pos.reporter import Reporter
from recbole_pos.tables.storage import trim_heap
from recbole_pos.values import Options

PER_STEP = ("cosine", "linear")  # schedules that need the number of steps of the whole training


def _without_dynamo(optimizer: type[torch.optim.Adam]) -> type[torch.optim.Adam]:
    """Return a class like an optimiser of torch, which does not import ``torch._dynamo``.

    That module is the compiler of ``torch.compile``. torch wraps some methods of optimisers in
    functions that import it, so that the compiler leaves these methods alone. The import takes
    1.3 s at the start of every training, and optimisers are not compiled here.
    """
    names = "add_param_group", "load_state_dict", "state_dict", "step", "zero_grad"
    methods = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    methods["step"] = torch.no_grad()(methods["step"])  # which its wrapper did, too
    return type(optimizer.__name__, (optimizer,), methods)


_FUSED = {"adam": _without_dynamo(torch.optim.Adam), "adamw": _without_dynamo(torch.optim.AdamW)}


class PosTrainer(EvaluatingTrainer):
    """Trains plugin models and RecBole's general, sequential and traditional ones.

    If several processes train the same model, each has a trainer for its part of every batch. All
    keep the same weights, and only the first one writes files. Every process computes metrics from
    all rows, so all of them stop in the same epoch.

    Attributes that hold an option of the configuration have its name, such as ``learning_rate``.

    Attributes:
        precision: the precision of products in a step, such as bf16.
        adapter: knows which batches the model reads, and its loss of such a batch.
        shard: this process's part of every batch; all of it in a single process.
        shared_loss: of several processes, the loss whose gradients are summed over all of them.
        optimizer: updates the weights after each step.
        kept_gradient: gradient of a large item table, which stays allocated within an epoch.
        steps: number of steps taken so far, in all epochs.
        progress: how far the training has come, and its best metrics.
        best_weights: the weights of the best epoch; None before the first validation.
        identity: digests (hashes) of the training data, which a checkpoint keeps.
        run: the run folder; without one, checkpoints are written where RecBole would write them.
        saved_model_file: the checkpoint.
        writer: writes the checkpoint.
        reporter: prints how far the training is.
        callbacks: called after steps, validations and epochs.
    """

    shared_loss: distributed.SharedLoss | None = None
    kept_gradient: KeptGradient | None = None
    steps = 0
    best_weights: dict[str, Any] | None = None
    run: RunFolder | None = None
    reporter: Reporter | None = None
    callbacks: Sequence[Callback] = ()

    def __init__(self, config: Options, model: Any) -> None:
        """Set the attributes of RecBole's trainer, and those of this class.

        Args:
            config: configuration of the run.
            model: the model, on its device.
        """
        # Not Trainer.__init__, which would open a tensorboard writer in the working directory.
        AbstractTrainer.__init__(self, config, model)
        self._set_recbole_attributes(config, model)

        # How a step is computed. ``adapter`` knows which batches the model reads, and its loss of
        # a batch. ``shard`` is the part of a batch that this process computes.
        self.precision = Precision.from_config(config)
        self.adapter = make_adapter(config, model)
        self.shard = distributed.current_shard()
        if not self.shard.is_alone:
            _prepare_sharing(config, model, self.shard)
        self.optimizer: Any = self._build_optimizer()

        # How far the training is. ``identity`` are digests (hashes) of the training data, set by
        # ``fit``. A checkpoint has them, so that it is not resumed on other data.
        self.progress = Progress()
        self.identity: dict[str, Any] = {"data": None, "fields": {}}

        # The checkpoint: the file that RecBole would write, unless the run has a folder.
        file = f"{config['model']}-{get_local_time()}.pth"
        self.saved_model_file = os.path.join(config["checkpoint_dir"], file)

    def _set_recbole_attributes(self, config: Options, model: Any) -> None:
        """Set the attributes that RecBole's methods read; most are options of the configuration."""
        self.logger = getLogger()
        self.device = config["device"]
        self.gpu_available = torch.cuda.is_available() and config["use_gpu"]
        self.learner = config["learner"]
        self.learning_rate = config["learning_rate"]
        self.weight_decay = config["weight_decay"]
        self.clip_grad_norm = config["clip_grad_norm"]
        # RecBole's traditional models, such as EASE, are computed in a single epoch.
        self.epochs = 1 if model.type == ModelType.TRADITIONAL else config["epochs"]
        self.eval_step = min(config["eval_step"], self.epochs)
        self.valid_metric = config["valid_metric"].lower()
        self.test_batch_size = config["eval_batch_size"]
        self.eval_collector = TargetCollector(config)
        self.evaluator = Evaluator(config)
        self.wandblogger = WandbLogger(config)
        self.item_tensor = self.tot_item_num = None  # RecBole's ``evaluate`` sets them

    @property
    def is_finished(self) -> bool:
        """Whether training has stopped, or no epoch with a validation is left."""
        # A validation is due after every ``interval`` epochs. With an interval of 2 and 3 epochs
        # trained, the next one is after 4 epochs, which may be more than ``epochs``.
        interval = max(self.eval_step, 1)
        num_validated = self.progress.next_epoch // interval
        epochs_at_next_validation = (num_validated + 1) * interval
        return self.progress.stopped or epochs_at_next_validation > self.epochs

    def _build_optimizer(self) -> torch.optim.Optimizer:
        """Build the optimiser of the parameters that are trained (that require a gradient).

        Adam and AdamW (``_FUSED``) are fused: one call updates all parameters, which is faster.
        Others are built by RecBole.
        """
        name = self.learner.lower()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if name not in _FUSED:
            return super()._build_optimizer(params=trained)
        return _FUSED[name](
            trained,
            lr=self.learning_rate,
            betas=tuple(self.config["adam_betas"]),
            weight_decay=self.weight_decay,
            fused=True,
        )

    def training_loader(self, train_data: Any) -> Any:
        """Return the loader to train with, which makes the batches that the model can read.

        Args:
            train_data: the loader that ``fit`` was given. One of RecBole is replaced by a new one
                of this package for the same dataset.

        Returns:
            The loader. Of several processes, each gets only its part of every batch.
        """
        loader = train_data
        if not isinstance(loader, (RowLoader, WindowLoader)):  # the loaders of this package
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

        The weights of the best epoch by ``valid_metric`` (of the last epoch without validation
        data) are kept for :meth:`evaluate`. After :meth:`resume_checkpoint`, training continues
        with the next epoch.

        Args:
            train_data: loader of the training data; one of RecBole is replaced by one of ours.
            valid_data: loader of the validation data; without it every epoch is trained.
            verbose: whether epochs are printed, unless the trainer has a reporter.
            saved: whether checkpoints are written.
            show_progress: whether progress is shown within an epoch.
            callback_fn: called with the epoch and its ``valid_metric`` after each validation.

        Returns:
            The best score and the metrics of its epoch; both None without validation.
        """
        self._prepare_data(train_data)
        self.writer = self._make_writer(saved)
        self.reporter = self.reporter or Reporter(verbose)

        # Train and validate the epochs. ``line`` has the facts of one: its loss and, if a
        # validation was due, its metrics. ``trim_heap`` returns freed memory to the system.
        progress = self.progress
        try:
            while progress.next_epoch < self.epochs and not progress.stopped:
                epoch = progress.next_epoch
                line = self._train_epoch(self.loader, epoch, show_progress=show_progress)
                trim_heap()
                has_improved = self._validate(valid_data, line, show_progress)
                trim_heap()

                # The checkpoint is written at once after the first epoch, and if ``callback_fn``
                # is called after it; otherwise it may be written later.
                is_reported = callback_fn is not None and line["valid"] is not None
                self._finish_epoch(line, keep_now=epoch == 0 or is_reported)
                self.reporter.show_epoch(line, self.valid_metric, has_improved)
                if callback_fn is not None and is_reported:
                    callback_fn(epoch, line["valid"][self.valid_metric])
        finally:
            self.writer.flush()  # writes the checkpoint of the last epoch, if that is still due
        return progress.best_score, progress.best_result

    def _prepare_data(self, train_data: Any) -> None:
        """Make the loader of training batches from that of ``fit``, and check the model."""
        self.eval_collector.data_collect(train_data)  # for metrics of popularity
        self.loader = self.training_loader(train_data)
        if self.config["train_neg_sample_args"].get("dynamic", False):
            self.loader.get_model(self.model)  # RecBole's dynamic sampler scores negatives with it
        # Digests (hashes) of the data, which checkpoints keep; RecBole's own datasets have none.
        self.identity = getattr(train_data._dataset, "identity", self.identity)

        # Log warnings about the model; a resumed training has logged them before. Some depend on
        # whether every position of a history is trained to predict the next item. So it is in
        # packed batches, but for ``train_windows: prefix``, which trains the last position only.
        if self.progress.next_epoch == 0:
            trains_every_position = self.loader.packed and self.config["train_windows"] != "prefix"
            log_notices(self.model, trains_every_position)

    def _make_writer(self, saved: bool) -> CheckpointWriter:
        """Return the writer of checkpoints, which saves the state of this trainer into a file.

        It writes nothing if ``saved`` is False, or if this process is not the first one.
        """
        file = Path(self.saved_model_file)
        # Without a run folder, the file is in RecBole's folder of checkpoints, which may not exist.
        if saved and self.run is None:
            file.parent.mkdir(parents=True, exist_ok=True)
        capture = functools.partial(checkpoint.capture_state, self)  # returns the state
        writes = saved and self.shard.rank == 0
        return CheckpointWriter(file if writes else None, capture)

    def _finish_epoch(self, line: dict[str, Any], keep_now: bool) -> None:
        """Call the callbacks after an epoch, and keep its checkpoint and its line of metrics.

        Args:
            line: the epoch's line for metrics.jsonl; ``valid`` is None if no validation was due.
            keep_now: whether the checkpoint is written at once, and not when the writer finds time.
        """
        progress = self.progress
        epoch, valid = line["epoch"], line["valid"]
        progress.history.append(line)
        progress.next_epoch += 1
        if valid:
            progress.stopped |= call(self.callbacks, "on_validation", epoch, valid)
        progress.stopped |= call(self.callbacks, "on_epoch", line)
        self.writer.keep()  # writes a checkpoint or, soon after another, holds it in memory
        if keep_now:
            self.writer.flush()  # before the line of metrics, so that the run can be resumed
        if self.run:
            self.run.add_metrics(line)

    def _train_epoch(
        self, train_data: Any, epoch: int, show_progress: bool = False
    ) -> dict[str, Any]:
        """Train one epoch, and return its line for metrics.jsonl, with no validation metrics yet.

        Args:
            train_data: the loader of the training data.
            epoch: number of the epoch, from 0.
            show_progress: whether progress is shown.

        Returns:
            ``epoch``, mean ``loss`` of a target, ``valid`` (None), ``seconds`` and
            ``targets_per_second``.
        """
        started = time.perf_counter()
        self.model.train()
        num_steps = self._count_all_steps(train_data)
        train_data.set_epoch(epoch)  # which decides the order of batches
        # ``choose_loss`` returns the model's loss of a batch of rows or, packed, of histories.
        loss_func = self.adapter.choose_loss(train_data.packed)

        if not self.shard.is_alone:  # one of several processes, each with a part of every batch
            self._seed_process(epoch)
            # A SharedLoss sums gradients over the processes; it is made in the first epoch.
            self.shared_loss = self.shared_loss or distributed.SharedLoss(self.model, loss_func)
            loss_func = self.shared_loss

        mean_loss = self._take_steps(loss_func, train_data, epoch, num_steps, show_progress)

        # Buffers, such as running means, are not summed: all get those of the first process.
        if self.shared_loss is not None:
            self.shared_loss.broadcast_buffers()

        seconds = time.perf_counter() - started
        self.progress.training_seconds += seconds
        self.progress.trained_targets += train_data.num_targets
        return {
            "epoch": epoch,
            "loss": mean_loss,
            "valid": None,
            "seconds": round(seconds, 3),
            "targets_per_second": round(train_data.num_targets / seconds, 1),
        }

    def _take_steps(
        self, loss_func: Any, train_data: Any, epoch: int, num_steps: int, show_progress: bool
    ) -> float:
        """Take a step with each batch of an epoch, and return the mean loss of a target.

        Args:
            loss_func: returns the loss of a batch.
            train_data: the loader of the batches.
            epoch: number of the epoch, from 0.
            num_steps: number of steps of all epochs, by which the learning rate may fall.
            show_progress: whether progress is shown.
        """
        # A GPU rounds products as the precision says. The gradient of a large item table is kept
        # from step to step. The watch adds up the losses, and stops at one that is not finite.
        watch = LossWatch(epoch, self.learning_rate)
        reporter = self.reporter or Reporter(enabled=False)
        with (
            self.precision.rounded_products(),
            self.keep_item_gradient() as self.kept_gradient,
            reporter.task(f"epoch {epoch}/{self.epochs}", len(train_data), show_progress) as task,
        ):
            batches = train_data.iterate_batches(self.device)
            for step, batch in enumerate(batches):
                rate = compute_learning_rate(self.config, epoch, self.steps, num_steps)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                loss = self._step(loss_func, batch, watch, step)
                self.steps += 1  # of all epochs
                for callback in self.callbacks:
                    callback.on_step(self.steps, loss)
                task.advance(self._count_targets(batch))
            mean_loss = watch.compute_mean()
        self.kept_gradient = None
        return mean_loss

    def _count_all_steps(self, train_data: Any) -> int:
        """Return the number of steps of all epochs, which the schedules cosine and linear need.

        Epochs may differ in their number of batches. Each counts here as the first one, so that a
        resumed run gets the same number. The return value is 0 for other schedules.
        """
        if self.config["lr_scheduler"] not in PER_STEP:
            return 0
        train_data.set_epoch(0)
        return self.epochs * len(train_data)

    def _seed_process(self, epoch: int) -> None:
        """Seed the random numbers of one of several processes for the epoch of a number, from 0.

        Each process has its own dropout and negatives in each epoch. The seed does not depend on
        earlier epochs, so that a resumed run samples the same.
        """
        offset = 7919 * self.shard.rank + 104729 * epoch  # two primes, so that seeds differ
        init_seed((self.config["seed"] + offset) % 2**32, self.config["reproducibility"])

    def _count_targets(self, batch: Any) -> int:
        """Return the number of targets of a batch; of several processes, in all their parts."""
        return len(batch) if self.shard.is_alone else self.shard.num_batch_targets

    def _step(self, loss_func: Any, batch: Any, watch: LossWatch, step: int) -> Tensor:
        """Take one step: compute the loss of a batch and its gradient, and update the weights.

        Args:
            loss_func: returns the loss of a batch, or a tuple of parts whose sum is the loss.
            batch: the batch.
            watch: adds up the losses of the epoch; it raises an error if one is not finite.
            step: number of the step in its epoch, for that error.

        Returns:
            The loss, a scalar on the model's device. It is not copied to the CPU, which would wait.
        """
        # Gradients start at 0. ``zero_grad`` removes them; that of a large item table is put back,
        # with zeros in the rows that the last step has touched.
        self.optimizer.zero_grad()
        if self.kept_gradient is not None:
            self.kept_gradient.clear()

        # The loss to report is that of the whole batch. Of several processes each has the mean loss
        # of its own targets: multiplied by its share of the targets, these add up to the mean over
        # all. NaN in one process makes the sum NaN in all, so all stop.
        loss = self._compute_loss(loss_func, batch)
        reported_loss = loss.detach()
        if not self.shard.is_alone:
            loss = loss * self.shard.weight
            reported_loss = distributed.sum_over_processes(loss)
        self._watch_loss(reported_loss, self._count_targets(batch), watch, step)

        loss.backward()
        if self.clip_grad_norm:
            clip_grad_norm_(self.model.parameters(), **self.clip_grad_norm)
        self.optimizer.step()
        return reported_loss

    def _compute_loss(self, loss_func: Any, batch: Any) -> Tensor:
        """Return the loss of a batch, a scalar; a UsageError if a custom model gives anything else.

        Args:
            loss_func: returns the loss of a batch, or a tuple of parts whose sum is the loss.
            batch: the batch.
        """
        with self.precision.autocast():
            losses: Tensor | tuple[Tensor, ...] = loss_func(batch)
        loss = sum(losses[1:], losses[0]) if isinstance(losses, tuple) else losses
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(
                f"{type(self.model).__name__}: expected as loss of a batch a tensor with one "
                f"number that requires a gradient, found {found}"
            )
        return loss

    def _watch_loss(self, loss: Any, num_targets: int, watch: LossWatch, step: int) -> None:
        """Give the loss of a step to the watch, which raises an error if it is not finite.

        Args:
            loss: the mean over the targets of the batch, a scalar.
            num_targets: number of these targets.
            watch: adds up the losses of the epoch.
            step: number of the step in its epoch, for the error.
        """
        if loss.device.type == "cpu" or not self.optimizer.defaults.get("fused"):
            watch.add(float(loss), step, num_targets)  # a number is checked at once
            return
        # To read the loss now would mean to wait for the GPU. So the watch reads it some steps
        # later, and raises the error then. Until then no bad loss may get into the weights: torch's
        # fused optimisers skip a step if their attribute ``found_inf``, set for each step, is 1.
        self.optimizer.found_inf = (~loss.isfinite()).any().float()
        watch.add(loss, step, num_targets)

    def keep_item_gradient(self) -> AbstractContextManager[KeptGradient | None]:
        """Keep the gradient of a large item table between steps, in a ``with`` block.

        A step touches few rows of such a table. A gradient that stays allocated needs zeros in
        these rows only, where a new one would be a whole table of zeros in each step.

        Returns:
            A context manager that gives the kept gradient; None if the model has no large table, or
            if several processes train it, which send each other the whole gradient anyway.
        """
        table = self.adapter.find_kept_table() if self.shard.is_alone else None
        return nullcontext() if table is None else kept_gradient(table)

    def _validate(self, valid_data: Any, line: dict[str, Any], show_progress: bool = False) -> bool:
        """Validate after an epoch if that is due, and keep the weights of the best epoch.

        Without validation data, and with ``eval_step: 0``, the newest epoch counts as the best one.

        Args:
            valid_data: loader of the validation data, or None.
            line: the epoch's line for metrics.jsonl; ``valid`` gets the metrics.
            show_progress: whether progress is shown.

        Returns:
            Whether the metrics of this epoch are the best so far; False if there are none.
        """
        progress = self.progress
        if not valid_data or self.eval_step <= 0:
            progress.best_epoch = line["epoch"]
            self.best_weights = copy.deepcopy(checkpoint.extract_weights(self.model))
            return False
        # A validation is due after every ``eval_step`` epochs, which are numbered from 0.
        if (line["epoch"] + 1) % self.eval_step:
            return False

        started = time.perf_counter()
        metrics = self.evaluate(valid_data, load_best_model=False, show_progress=show_progress)
        assert metrics is not None  # there are validation data
        score = calculate_valid_score(metrics, self.valid_metric)
        if not math.isfinite(score):
            raise TrainingError(f"{self.valid_metric} is {score} on validation data")

        # Early stopping: RecBole counts the validations without gain, and stops when they are more
        # than ``stopping_step``. Before the first there is no best score, so any is better.
        best_score, is_higher_better = progress.best_score, self.config["valid_metric_bigger"]
        if best_score is None:
            best_score = -math.inf if is_higher_better else math.inf
        outcome = early_stopping(
            score,
            best_score,
            cur_step=progress.steps_without_gain,
            max_step=self.config["stopping_step"],
            bigger=is_higher_better,
        )
        progress.best_score, progress.steps_without_gain, progress.stopped, has_improved = outcome

        if has_improved:
            progress.best_epoch = line["epoch"]
            progress.best_result = metrics
            self.best_weights = copy.deepcopy(checkpoint.extract_weights(self.model))
        progress.evaluation_seconds += time.perf_counter() - started
        line["valid"] = {name: float(value) for name, value in metrics.items()}
        return has_improved

    def resume_checkpoint(self, resume_file: str, train_data: Any = None) -> None:
        """Restore the state of a training in a checkpoint, so that ``fit`` continues with it.

        Args:
            resume_file: the checkpoint, into which the training then goes on to write.
            train_data: the loader that ``fit`` will get, whose random state is restored, too.
        """
        checkpoint.restore(self, resume_file, train_data)
        self.saved_model_file = str(resume_file)
        if self.run:
            self.run.write_metrics(self.progress.history)
        if not self.shard.is_alone:
            torch.distributed.barrier()  # all processes read the file before one writes it


def _prepare_sharing(config: Options, model: Any, shard: distributed.Shard) -> None:
    """Prepare a model for training by several processes, or raise a UsageError.

    Each process gets a part of every batch. A loss that compares the targets of a batch with each
    other is replaced by one that gathers the targets of all processes, one for each position.
    Refused are models without gradients, models that compare the histories of a batch, and such a
    loss with several targets for each position (``target_window``).

    Args:
        config: configuration, which names the model.
        model: the model; those of RecBole lack the attributes ``needs_events`` and the like.
        shard: the part of this process.
    """
    # such a model, for example AttrFormer, relates interactions of one history to another's
    compares_sequences = getattr(model, "needs_events", False)
    compares_targets = getattr(model, "targets_meet", False)
    problem = ""
    if model.type == ModelType.TRADITIONAL:
        problem = "has no gradients to share"
    elif compares_sequences:
        problem = "compares the sequences of a batch, of which a process would have a part"
    elif compares_targets and model.later_targets is not None:  # a position has several targets
        problem = "with target_window and this loss_type compares the targets of a batch"
    if problem:
        raise UsageError(f"nproc: {config['model']} {problem}; use one process")
    if compares_targets:
        model.loss = functools.partial(distributed.compute_global_loss, model.loss, shard)


def compute_learning_rate(config: Options, epoch: int, step: int, num_steps: int) -> float:
    """Return the learning rate of a step; a resumed run has the same rates, to the bit.

    Args:
        config: configuration of the run.
        epoch: number of the epoch, from 0.
        step: number of steps before this one, in all epochs.
        num_steps: number of steps of all epochs; read by the schedules cosine and linear.
    """
    # The rate rises in a straight line during the warm-up; then it falls with every step (cosine,
    # linear), or is multiplied by ``lr_decay_rate`` every ``lr_decay_step`` epochs.
    schedule = config["lr_scheduler"]
    warmup = config["warmup_steps"]
    highest = config["learning_rate"]
    if step < warmup:
        return highest * ((step + 1) / (warmup + 1))
    if schedule in PER_STEP:  # cosine or linear
        progress = min((step - warmup) / max(num_steps - warmup, 1), 1.0)
        if schedule == "cosine":
            return highest * ((1 + math.cos(math.pi * progress)) / 2)
        return highest * (1 - progress)
    decay_epochs = config["lr_decay_step"]
    num_decays = epoch // decay_epochs if decay_epochs else 0
    return highest * float(config["lr_decay_rate"] ** num_decays)
