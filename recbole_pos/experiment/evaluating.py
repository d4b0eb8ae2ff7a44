"""Evaluation by RecBole's trainer: best weights, masked histories, catalogues of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from recbole.trainer.trainer import Trainer

from recbole_pos.data.history import masks_history, past_items
from recbole_pos.data.splits import PHASES
from recbole_pos.data.windows import TARGET_EVENT
from recbole_pos.experiment.state import load_best
from recbole_pos.experiment.streamed import StreamedScores
from recbole_pos.layers.catalogue import PART
from recbole_pos.model.base import PosRecommender
from recbole_pos.screen import Screen, Task


class EvaluatingTrainer(Trainer):
    """The part of a trainer that evaluates.

    Attributes:
        screen: where it is told about; one of its own if None.
        best_weights: those evaluated with, if they are in memory.
        loaded_from: the checkpoint that otherwise has them, of a model that was loaded.
    """

    screen: Screen | None
    best_weights: dict[str, Any] | None
    loaded_from: Path | None = None
    task = Task("evaluation")  # the one that runs

    def evaluate(
        self,
        eval_data: Any,
        load_best_model: bool = True,
        model_file: str | None = None,
        show_progress: bool = False,
    ) -> dict[str, float] | None:
        """RecBole's evaluation; the best weights come from memory or, safely, from a checkpoint."""
        if not eval_data:
            return None
        if load_best_model:
            if model_file is not None or self.best_weights is None:
                load_best(self.model, model_file or self.loaded_from or self.saved_model_file)
            else:
                self.load_weights(self.best_weights)
        self.eval_log = eval_data._dataset.log
        screen, part = self.screen or Screen(show_progress), eval_data._dataset.phase
        self.eval_collector.ranking = part == PHASES[-1]
        with (
            torch.inference_mode(),
            screen.task(f"evaluation ({part})", len(eval_data), show_progress) as self.task,
        ):
            metrics = super().evaluate(eval_data, load_best_model=False)
        return {metric: float(value) for metric, value in metrics.items()}  # GAUC is a numpy float

    @property
    def part(self) -> int | None:
        """How many items are scored at a time, where that is a part of the catalogue."""
        streams = (
            isinstance(self.model, PosRecommender)
            and self.model.scores_by_products
            and self.model.item_embedding.num_embeddings > PART
            and self.eval_collector.takes_streamed
        )
        return PART if streams else None

    def _full_sort_batch_eval(self, batched_data: tuple) -> tuple:
        """RecBole's, with past items masked as ``mask_history`` says."""
        self.task.advance()
        interaction, history, positive_u, positive_i = batched_data
        if not masks_history(self.config):
            history = None
        elif history is None:
            history = past_items(self.eval_log, interaction[TARGET_EVENT], positive_i)
        if self.part and TARGET_EVENT in interaction:
            barred = None if history is None else tuple(part.to(self.device) for part in history)
            states = self.model.states_of(interaction.to(self.device))
            scores = StreamedScores(states, self.model.item_embedding.weight, barred)
            return interaction, scores, positive_u, positive_i
        return super()._full_sort_batch_eval((interaction, history, positive_u, positive_i))
