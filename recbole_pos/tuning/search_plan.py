"""From the arguments of a search, or from its folder, to a checked :class:`Search`.

A search is described by its facts (``search.json``): the options of all trials, the space of
searched options, and how trials are sampled and stopped. :func:`plan_search` makes them from
arguments, :func:`resume_search` reads them from the folder of an earlier call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recbole_pos.config.arguments import SearchArguments, list_changed
from recbole_pos.config.posconfig import EXTRA_KEYS, STARTS, PosConfig
from recbole_pos.config.sources import find_parts_by_scheme, merge_options
from recbole_pos.errors import UsageError
from recbole_pos.experiment.folder import SEARCH, RunFolder
from recbole_pos.files import digest_file
from recbole_pos.study.configs import digest_run, make_row_config
from recbole_pos.study.study_folder import read_json
from recbole_pos.tuning.space import Space, check_space, find_space_file, parse_space, read_space
from recbole_pos.values import check_choice, shown, to_plain

SEARCHERS = ("optuna", "random", "grid")
SCHEDULERS = ("asha", "none")
_TRIALS = 60  # number of trials by default, as in the kernel attention paper
# What may be given together with --resume: arguments, and paths among the options.
_RESUME_ARGUMENTS = ("address", "num_samples", "max_concurrent", "cpus_per_trial", "gpus_per_trial")
_RESUME_PATHS = ("data_path", "item_vectors", "init_from", "plugins")


@dataclass
class SearchFacts:
    """The content of ``search.json``: what decides the trials of a search.

    Attributes:
        options: model, dataset and options of all trials.
        space: the searched options, as in a space file.
        num_samples: number of trials.
        searcher: how options are sampled: ``optuna``, ``random`` or ``grid``.
        seed: seed from which they are sampled.
        scheduler: how trials are stopped early: ``asha`` or ``none``.
        grace_epochs: epochs before ASHA may stop a trial.
        inputs: hash of the data, the code of the model, and the weights that trials start from.
    """

    options: dict[str, Any]
    space: dict[str, Any]
    num_samples: int
    searcher: str
    seed: int
    scheduler: str
    grace_epochs: int
    inputs: str = ""


class Search:
    """A checked search: its facts, its space, and the configurations of its trials.

    Attributes:
        facts: what decides the trials, as in ``search.json``.
        space: the searched options, and how each is sampled.
        config: configuration of a trial without the searched options.
        metric: validation metric of early stopping, by which trials are compared.
        mode: ``max`` or ``min``, whichever is better.

    Raises:
        UsageError: naming the file and line of a wrong option.
    """

    def __init__(self, facts: SearchFacts, space: Space) -> None:
        """Check every searched option together with the options of all trials."""
        self.facts, self.space = facts, space
        if facts.searcher == "grid":  # no more trials than points, the combinations of all values
            facts.num_samples = min(facts.num_samples, len(space.list_points()))
        check_space(space, self.make_config)
        self.config = self.make_config({})
        self.metric = str(self.config["valid_metric"]).lower()
        self.mode = "max" if self.config["valid_metric_bigger"] else "min"

    @property
    def title(self) -> str:
        """Model and dataset."""
        return f"{self.config['model']} on {self.config['dataset']}"

    def make_config(self, sampled: dict[str, Any]) -> PosConfig:
        """Return the configuration of a trial: the options of all trials, and the sampled ones."""
        return make_row_config({**self.facts.options, **sampled})

    def note_inputs(self, identity: dict[str, Any]) -> None:
        """Keep a hash of everything that trials read, and refuse to resume with other inputs.

        The hash covers the data, the code of a custom model, and the weights that trials start
        from. It is kept in ``facts.inputs``, and so in ``search.json``.

        Args:
            identity: hashes of the data and its split.

        Raises:
            UsageError: if the search was started with other inputs.
        """
        # The options STARTS (init_from and update_from) name a trained run from whose weights
        # trials start. The path of the run may change until a search is resumed, so its weights
        # are hashed. ``plain`` is a dict of all options of the configuration.
        starts = [self.config.plain[key] for key in STARTS if self.config.plain.get(key)]
        weight_digests = [digest_file(RunFolder(path).checkpoint) for path in starts]

        # digest_run also hashes the options of all trials and the code of a custom model.
        inputs = digest_run(self.config, identity, *weight_digests)
        if self.facts.inputs not in ("", inputs):  # empty for a new search
            raise UsageError(
                "--resume: the data, the code of the model, or the weights that trials start from "
                "are not those that the search began with; if they have moved, name their places "
                "by --data_path and --init_from, else start a new search"
            )
        self.facts.inputs = inputs


def plan_search(
    model: str | type | None,
    dataset: str | None,
    space: str | Path | Mapping[str, Any] | None,
    config_file_list: list[str] | None,
    config_dict: dict[str, Any],
    args: SearchArguments,
) -> Search:
    """Return a new, checked search: its space, and the options that all its trials have.

    A space says for each searched option how it is sampled, and may set further options to one
    value. Options that the user gives win over the space: they are the same in all trials.

    Args:
        model: name or class of the model; None if the files name it.
        dataset: name of the dataset; None if the files name it.
        space: the searched options, as a file or as the mapping in it; None for the model's own.
        config_file_list: yaml files with options of all trials.
        config_dict: options over these files.
        args: the other arguments of the search, such as searcher and number of trials.

    Raises:
        UsageError: naming the option, or the file and line, that is wrong.
    """
    check_choice("--searcher", args.searcher, SEARCHERS)
    check_choice("--scheduler", args.scheduler, SCHEDULERS)

    # ``config`` has all options of a trial, with defaults; ``given`` only those of the user, from
    # files and arguments. Not strict: an option without effect here may have one in a trial.
    config = PosConfig(model, dataset, config_file_list, config_dict, strict=False)
    given = config.external_config_dict
    if isinstance(space, Mapping):
        whole_space = parse_space(space, {})
    else:
        whole_space = read_space(find_space_file(space, config["model"]))

    # A file may give options of single position schemes, which depend on the schemes of the model.
    # If the space decides the schemes, it has to give their options, too.
    # find_parts_by_scheme returns the places of such options in a file.
    names = {*whole_space.names, *whole_space.fixed}  # options that the space samples, or sets
    for file, content in config.files if "position" in names else ():
        if parts := find_parts_by_scheme(content, config["model"], file):
            raise UsageError(
                f"{parts[0]}: a search that tries or sets position does not take options of "
                "one scheme from there; write them into the space, with `when: {position: ..}`"
            )

    # Given options are not searched.
    searched = whole_space.without(given)  # a copy without these options
    if not searched.parameters:
        raise UsageError(
            "nothing is left to search: the options that the space samples, such as "
            "`learning_rate: {loguniform: [1e-4, 1e-2]}`, are given or missing"
        )

    # The number of trials where none is asked for: all points of a grid, else _TRIALS.
    default_samples = len(searched.list_points()) if args.searcher == "grid" else _TRIALS

    # The options of all trials: those that the space sets (``fixed``), with given ones above them.
    # Paths are taken from ``config.plain``, the dict of all options, where they are absolute, since
    # trials run in other folders. STARTS are the options that name a trained run to start from;
    # EXTRA_KEYS are model and dataset, which come from ``config``.
    options = to_plain({key: given[key] for key in given if key not in EXTRA_KEYS})
    for key in {"data_path", "item_vectors", *STARTS} - names:
        if config.plain[key]:
            options[key] = config.plain[key]
    run = {"model": config["model"], "dataset": config["dataset"]}
    facts = SearchFacts(
        options={**run, **merge_options(whole_space.fixed, options)},
        space=searched.content,
        num_samples=args.num_samples or default_samples,
        searcher=args.searcher,
        seed=args.seed,
        scheduler=args.scheduler,
        grace_epochs=args.grace_epochs,
    )
    return Search(facts, searched)


def resume_search(
    folder: Path, args: SearchArguments, config_dict: dict[str, Any], subject: dict[str, Any]
) -> Search:
    """Return the search of a folder, to be resumed.

    Everything is taken from the folder, since its trials so far were made with that. Only three
    things may change: the number of trials, the machines that train them, and the paths of files.

    Args:
        folder: folder of the search.
        args: arguments of the call.
        config_dict: options of the configuration that the call gives.
        subject: what the call says to search: model, dataset, space and config_file_list. The
            folder has them, so each must be None or empty.

    Raises:
        UsageError: for an argument that may not change, or a folder without a search.
    """
    # SEARCH is the file with the facts of a search: its space and the options of all trials.
    if not (content := read_json(folder / SEARCH)):
        raise UsageError(f"--resume: {folder} is not the folder of a search")
    facts = SearchFacts(**content)

    # Refuse all arguments but _RESUME_ARGUMENTS, on the number of trials and the machines. (What is
    # printed may change, too.) list_changed returns those that are not at their default.
    given = [*list_changed(args), *(name for name, value in subject.items() if value)]
    refused = [name for name in given if name not in (*_RESUME_ARGUMENTS, "resume", "verbose")]

    # Refuse all options but paths of files that may have moved (_RESUME_PATHS). A search may have
    # no item vectors or weights to start from; their paths are then refused as well.
    for name in config_dict:
        is_known = name in facts.options or name in ("data_path", "plugins")
        if name not in _RESUME_PATHS or not is_known:
            refused.append(name)
    if refused:
        names = ", ".join(f"--{name}" for name in (*_RESUME_ARGUMENTS, *_RESUME_PATHS))
        raise UsageError(
            f"--resume takes everything from its folder but {names}; leave out "
            f"{', '.join(map(shown, refused))}"
        )

    # Take over the new paths (config_dict) and the number of trials, unless it is lower.
    facts.num_samples = max(facts.num_samples, args.num_samples or 0)
    facts.options |= config_dict
    # {}: the lines of the file are not known any more
    return Search(facts, parse_space(facts.space, {}))
