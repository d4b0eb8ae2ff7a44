"""From data to a trained model in one call.

:func:`fit` trains a model and ``load``, which is :meth:`~recbole_pos.Recommender.load`, loads one;
both return a :class:`~recbole_pos.Recommender`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recbole_pos.config.arguments import RunArguments, split_keywords
from recbole_pos.conversion.convert import Dataset
from recbole_pos.experiment.callbacks import Callback
from recbole_pos.experiment.checkpoint import load_weights
from recbole_pos.experiment.folder import RunFolder
from recbole_pos.experiment.run import run
from recbole_pos.files import TemporaryFolder
from recbole_pos.serve.recommender import Recommender


class _ExperimentKeeper(Callback):
    """Keeps the experiment of a finished run, so that its dataset is not read again."""

    experiment: Any = None

    def on_end(self, experiment: Any, result: Any) -> None:
        # Training calls this at its end, with the experiment: model, dataset, trainer and so on.
        self.experiment = experiment


def fit(
    model: str | type,
    data: Dataset | str | Path,
    config_files: Sequence[str | Path] = (),
    *,
    callbacks: Sequence[Callback] = (),
    run_dir: str | Path | None = None,
    **keywords: Any,
) -> Recommender:
    """Train a model to early stopping as :func:`run` does, test its best epoch, and return it.

    Examples:
        >>> trained = recbole_pos.fit("FPARec", "ml-100k", epochs=1, MAX_ITEM_LIST_LENGTH=20)
        >>> trained.evaluate("NDCG", topk=10).columns.tolist()
        ['test']
        >>> len(trained.recommend(histories=[["242", "302"]], k=3))
        3

    Args:
        model: a name (``recbole-pos models`` lists them), or a custom class.
        data: a dataset, its name or its folder.
        config_files: yaml files of options, later ones winning.
        callbacks: objects whose hooks are called during the training.
        run_dir: folder of the run; by default a temporary one, which is removed with the last
            object that needs it: :meth:`Recommender.save` copies it. A given one stays, so its
            dataset should not be temporary, see :meth:`Dataset.from_frame`.
        keywords: options, such as ``epochs``, ``learning_rate``, ``position``; or the other
            arguments of :func:`run` by name, such as ``verbose``.

    Raises:
        UsageError: if an argument is wrong, see :func:`run`.
    """
    # ``keywords`` are arguments of run, such as verbose, or options, such as epochs. The first go
    # into ``args``.
    args, options = split_keywords(RunArguments(), keywords)

    # ``resources`` are the dataset and the folder of the run, of which both may be temporary. The
    # returned object refers to them, so that they exist as long as it does.
    resources: list[Any] = [data] if isinstance(data, Dataset) else []
    if run_dir is None:
        temporary = TemporaryFolder()
        resources.append(temporary)
        run_dir = temporary.path / "run"
        # Given a temporary Dataset, `run` warns that it may be removed before the run is. Here both
        # are removed together, so pass only the path of the dataset.
        data = os.fspath(data)
    files = list(map(str, config_files))

    # Several processes train the model outside of this one, so it is loaded from its folder.
    if args.nproc > 1:
        run(model, data, files, options, run_dir, callbacks=callbacks, settings=args)
        trained = load(run_dir)
        trained.resources = resources
        return trained

    # Training in this process leaves its experiment (model, dataset and trainer) with the keeper,
    # a callback, so that nothing is read again.
    keeper = _ExperimentKeeper()
    run(model, data, files, options, run_dir, callbacks=[*callbacks, keeper], settings=args)
    experiment = keeper.experiment

    # Without a test, the model still has the weights of the last epoch, not of the best one.
    load_weights(experiment.model, experiment.trainer.best_weights)
    experiment.model.eval()  # scores must not depend on dropout
    return Recommender(experiment, RunFolder(run_dir), resources)


load = Recommender.load  # recbole_pos.load
