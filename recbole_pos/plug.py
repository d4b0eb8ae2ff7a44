"""Everything that this package changes in RecBole 1.2.x.

Each function below is one change; its docstring says what it is for. The import hook at the end of
this file applies it when its module of RecBole is imported, or at once if that was imported before.
Nothing here imports RecBole at the top. There are three kinds of changes:

- Fixes, most of them for today's numpy: the docstring says what breaks without it.
- RecBole finds the plugin: ``run_recbole(model="FPARec", dataset="ml-100k")``. RecBole looks up
  four things by a model's name: its class (``get_model``), ``<name>Dataset`` in
  ``recbole.data.dataset``, ``<name>Trainer`` in ``recbole.trainer``, and its yaml file.
- RecBole's checkpoints, which it would unpickle, load if this process has written them or the user
  trusts them; those of the plugin are for ``recbole_pos.load``.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Patch = Callable[..., None]
PATCHES: dict[str, list[Patch]] = defaultdict(list)  # name of a module -> its patches

# Names that numpy 1.24 or 2.0 lacks and RecBole 1.2 uses -> their names today.
_NUMPY_ALIASES = {
    **{"float": "float64", "float_": "float64", "int": "int64", "object": "object_"},
    **{"complex": "complex128", "complex_": "complex128", "bool": "bool_", "long": "int64"},
    **dict.fromkeys(("str", "unicode_", "unicode"), "str_"),
}


def patch_module(module_name: str) -> Callable[[Patch], Patch]:
    """Decorate a function that changes a module of RecBole, to fix an error in it for example.

    Such a function is a *patch*. It is called with the module as soon as the module has been
    imported. Here it is only noted in ``PATCHES``, the list of each module's patches.

    Args:
        module_name: full name of the module to change, such as ``recbole.trainer``.

    Returns:
        The decorator, which returns the function as it is.
    """

    def register(patch: Patch) -> Patch:
        PATCHES[module_name].append(patch)
        return patch

    return register


def wrap_function(module_name: str, path: str) -> Callable[[Callable], Callable]:
    """Decorate a function that replaces a function of RecBole, which it gets as its first argument.

    Where RecBole would call ``original(a, b=1)``, the decorated function ``around`` is called as
    ``around(original, a, b=1)``, and returns what RecBole gets. The replacement happens once the
    module is imported.

    Args:
        module_name: full name of the module of RecBole that defines the function.
        path: its name in that module, ``function`` or ``Class.method``.

    Returns:
        The decorator, which returns ``around`` as it is.
    """

    def register(around: Callable) -> Callable:
        # called with the module once that is imported
        PATCHES[module_name].append(functools.partial(_replace_function, path=path, around=around))
        return around

    return register


def _replace_function(module: ModuleType, path: str, around: Callable) -> None:
    """Replace a function of a module of RecBole by one that calls another function around it.

    Args:
        module: the module that defines the function.
        path: its name in that module, ``function`` or ``Class.method``.
        around: gets the original function and the arguments of each call, and returns the result.
    """
    class_name, _, name = path.rpartition(".")
    owner = getattr(module, class_name) if class_name else module
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)

    # Modules that ran ``from module import function`` hold the original under its name. (None does
    # so with a method, which is found by its class.)
    for loaded_name, loaded in list(sys.modules.items()):
        if loaded_name.startswith("recbole.") and vars(loaded).get(name) is original:
            setattr(loaded, name, wrapper)


# --- fixes ---


@patch_module("recbole")
def prepare_recbole(module: ModuleType | None = None) -> None:
    """Restore names of numpy and scipy that RecBole uses and newer versions of them have removed.

    Without them RecBole raises an AttributeError: numpy 2 lacks the aliases in ``_NUMPY_ALIASES``,
    such as ``np.float_``, and scipy 1.13 lacks ``dok_matrix._update``, which LightGCN, NGCF and
    others call. Also hide the FutureWarning of pandas 2 for each column that RecBole reads.
    """
    import numpy as np
    import scipy.sparse

    # Names that this numpy still has are left alone.
    for name, target in _NUMPY_ALIASES.items():
        if name not in np.__dict__:
            setattr(np, name, getattr(np, target))

    if not hasattr(scipy.sparse.dok_matrix, "_update"):
        scipy.sparse.dok_matrix._update = lambda self, data: self._dict.update(data)

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"recbole\.")


@wrap_function("recbole.data.dataset.dataset", "Dataset._fill_nan")
def fill_missing_cells(original: Callable[..., None], self: Any) -> None:
    """Fill the missing cells in a RecBole dataset's tables (interactions, users, items), in place.

    It replaces RecBole's own method, which with pandas 3 fills only a copy of each column. By the
    type of the field, a missing number (``float``) becomes the mean of its column, a missing name
    (``token``, by now an id) becomes 0, the id of padding, and a missing sequence (``token_seq``,
    ``float_seq``) becomes an empty array.

    Args:
        original: RecBole's method, which is not called.
        self: the dataset (``recbole.data.dataset.Dataset``).
    """
    import numpy as np
    import pandas as pd

    empty = {"token_seq": np.array([], np.int64), "float_seq": np.array([], np.float64)}
    for table_name in self.feat_name_list:
        table = getattr(self, table_name)
        for field in table:
            column = table[field]
            kind = self.field2type[field].value
            if not column.hasnans:
                continue
            # field2type has the type of each field. Users or items without a row in their file have
            # NaN, a float, in place of a sequence.
            if kind in empty:
                cells = [empty[kind] if isinstance(cell, float) else cell for cell in column]
                table[field] = pd.Series(cells, column.index, dtype=object)
            else:
                table[field] = column.fillna(0 if kind == "token" else column.mean())


@wrap_function("recbole.evaluator.collector", "Collector.get_data_struct")
def keep_plain_values(get_data_struct: Callable[..., Any], self: Any) -> Any:
    """Return what RecBole's Collector has gathered for an evaluation, plain numbers included.

    RecBole 1.2.1 calls ``.cpu()`` on every value to move it off the GPU, and so fails on a plain
    number. Plain numbers are taken out before RecBole's method runs, and put back afterwards.

    Args:
        get_data_struct: RecBole's method, which returns a copy of the gathered values.
        self: the ``recbole.evaluator.collector.Collector``.
    """
    collected = self.data_struct._data_dict  # name -> tensor or number
    plain = {key: value for key, value in collected.items() if not hasattr(value, "cpu")}
    for key in plain:
        del collected[key]

    struct = get_data_struct(self)

    # Both the result for the metrics and the Collector itself get the plain numbers back.
    struct._data_dict.update(plain)
    collected.update(plain)
    return struct


@wrap_function("recbole.model.general_recommender.pop", "Pop.__init__")
def note_label_field(init: Callable[..., None], self: Any, config: Any, dataset: Any) -> None:
    """Build RecBole's model Pop, and keep in ``LABEL`` the field that marks negatives by 0."""
    init(self, config, dataset)
    self.LABEL = config["LABEL_FIELD"]


@wrap_function("recbole.model.general_recommender.pop", "Pop.calculate_loss")
def count_every_interaction(original: Callable[..., Any], self: Any, interaction: Any) -> Any:
    """Count every positive interaction of a batch for RecBole's model Pop, and return a loss of 0.

    RecBole's Pop counts an item only once a batch, and counts negatives, too: with batches of the
    usual size all popular items get the same count, and rankings are close to random.

    Args:
        original: ``Pop.calculate_loss``, which is not called.
        self: the Pop model, whose ``item_cnt`` [items, 1] holds the counts.
        interaction: the batch; its labels are 1 for positive and 0 for negative interactions, and
            without labels all are positive.
    """
    import torch

    items = interaction[self.ITEM_ID]  # [B]
    labels = interaction[self.LABEL] if self.LABEL in interaction else torch.ones_like(items)
    self.item_cnt.index_add_(0, items, labels.to(self.item_cnt.dtype)[:, None])
    self.max_cnt = self.item_cnt.amax(0)
    # The trainer calls ``backward`` on the loss, so it must have a gradient, though there is none.
    return torch.nn.Parameter(torch.zeros(1)).to(self.device)


@wrap_function("recbole.model.layers", "ContextSeqEmbAbstractLayer.embed_float_fields")
def embed_several_numbers(embed: Callable[..., Any], self: Any, values: Any, *args: Any) -> Any:
    """Embed items that have several numerical attributes (the option ``numerical_features``).

    RecBole joins the attributes along the wrong axis and fails where there is more than one.

    Args:
        embed: RecBole's method, which gets the corrected values.
        self: the embedding layer.
        values: [..., 1, 2 * num_fields]; each attribute has two entries, which RecBole expects on
            an axis of their own. None without attributes.
    """
    if values is not None:  # -> [..., num_fields, 2]
        values = values.reshape(*values.shape[:-2], -1, 2)
    return embed(self, values, *args)


# --- RecBole finds the plugin ---


@wrap_function("recbole.utils.utils", "get_model")
def _get_model(get_model: Any, model_name: str) -> type:
    """Return the class of a model by its name, of the plugin's models and of RecBole's.

    It replaces RecBole's function, which knows only its own models.

    Args:
        get_model: RecBole's function.
        model_name: name of the model.
    """
    from recbole_pos.model.models import MODELS

    # MODELS has the plugin's models and those that users have registered.
    return MODELS[model_name] if model_name in MODELS else get_model(model_name)


@patch_module("recbole.data.dataset")
def _add_datasets(module: ModuleType) -> None:
    """Let RecBole find the plugin's data where it looks for a dataset by a model's name."""
    _add_class(module, "Dataset", "recbole_pos.data.recbole_view", "read_view")


@patch_module("recbole.trainer")
def _add_trainers(module: ModuleType) -> None:
    """Let RecBole find the plugin's trainer where it looks for a trainer by a model's name."""
    _add_class(module, "Trainer", "recbole_pos.experiment.trainer", "PosTrainer")


def _add_class(module: ModuleType, suffix: str, home: str, class_name: str) -> None:
    """Let RecBole find a class (or function) of this package in one of RecBole's modules.

    For example RecBole trains the model FPARec by the class ``FPARecTrainer`` in its module
    ``recbole.trainer``. The module has no such class. With ``suffix="Trainer"`` it gets a function
    ``__getattr__``, which Python calls for names that a module lacks (PEP 562), and which returns
    this package's ``PosTrainer`` for FPARec and all other models that this package trains.

    Args:
        module: RecBole's module, such as ``recbole.trainer``.
        suffix: what follows a model's name in the names that RecBole asks for.
        home: full name of the module of this package that has the class.
        class_name: name of the class there, such as ``PosTrainer``.
    """

    def find_class(name: str) -> Any:
        from recbole_pos.model.models import is_served

        # ``is_served`` says whether this package makes the data and the training of a model.
        if name.endswith(suffix) and is_served(name.removesuffix(suffix)):
            return getattr(import_module(home), class_name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = find_class


@wrap_function("recbole.config.configurator", "Config._load_internal_config_dict")
def _add_defaults(load: Any, self: Any, model: str, model_class: type, dataset: str) -> None:
    """Read RecBole's defaults of options, and add those that this package has for the model.

    This function replaces the method of RecBole's class ``Config`` that reads the defaults. RecBole
    calls it while it makes a configuration, after it has read the options that the user gave.

    Args:
        load: RecBole's method, which fills ``self.internal_config_dict`` with its own defaults.
        self: the configuration.
        model: name of the model.
        model_class: its class.
        dataset: name of the dataset.
    """
    from recbole_pos.config.sources import own_defaults
    from recbole_pos.model.models import is_served

    load(self, model, model_class, dataset)
    if is_served(model):  # this package makes the data and the training of the model
        _add_served_defaults(self, model)
    else:
        # A model of RecBole, which gets nothing, or one that a user has registered with defaults.
        self.internal_config_dict.update(own_defaults(model))


def _add_served_defaults(config: Any, model: str) -> None:
    """Add the defaults of this package to a configuration of a model that it trains.

    Args:
        config: a ``Config`` of RecBole. Its ``internal_config_dict`` has RecBole's defaults, and is
            changed in place. Its ``external_config_dict`` has the options that the user gave.
        model: name of the model.
    """
    from recbole.config import Config

    from recbole_pos.config.sources import add_time_field, plugin_defaults

    # The defaults for the model, and for the position schemes and the loss that the user chose.
    all_defaults, options = config.internal_config_dict, config.external_config_dict
    our_defaults = plugin_defaults(model, options.get("position"), options.get("loss_type"))
    all_defaults.update(our_defaults)

    # A ``Config`` made by RecBole, as by its ``run_recbole``, is checked here. ``PosConfig``, the
    # subclass of this package, checks the options of the user itself.
    if type(config) is Config:
        _complete_eval_args(options, our_defaults)
        _check_options(options, our_defaults, model)

    # ``load_col`` lists the columns to read. RecBole's default leaves out the time, which models of
    # this package need, so it is added. An option says what the column of the time is called.
    all_options = {**all_defaults, **options}
    all_defaults["load_col"] = add_time_field(all_defaults.get("load_col"), all_options)


def _complete_eval_args(options: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Add the default keys to the option ``eval_args`` if the user has given some of its keys.

    RecBole would use the given dict in the place of the whole default.

    Args:
        options: options that the user gave to RecBole, changed in place.
        defaults: this package's defaults.
    """
    given = options.get("eval_args")
    if isinstance(given, dict):
        options["eval_args"] = {**defaults["eval_args"], **given}


def _check_options(options: dict[str, Any], defaults: dict[str, Any], model: str) -> None:
    """Raise a UsageError for an option of the plugin that has a wrong value or contradicts another.

    Args:
        options: options that the user gave to RecBole.
        defaults: option -> default of the plugin's options for the model. Other options are
            RecBole's own, and not checked.
        model: name of the model.
    """
    from recbole_pos.config.checks import check_sizes, check_value
    from recbole_pos.config.options import find_option
    from recbole_pos.config.sources import free_options, list_positions

    # Options that only a custom model or position scheme has may have any value.
    schemes = list_positions(options.get("position"), model)
    free = free_options(model, schemes)

    # ``find_option`` returns what the table of options says of one: the values that it may have.
    for key, value in options.items():
        if key in defaults and key not in free:
            check_value("configuration", find_option(key), value)

    # A hidden size must be a multiple of the number of attention heads.
    all_options = {**defaults, **options}
    checked = {key: value for key, value in all_options.items() if key not in free}
    check_sizes(checked, model)


# --- checkpoints ---
# RecBole 1.2 calls a bare ``torch.load``, which in torch 2.6 and later refuses RecBole's own files:
# their pickled configuration could run code. Here such a file loads if this process has written it,
# or if the user trusts it: the functions of RecBole take a further argument ``trust``.

_WRITTEN: set[str] = set()  # absolute paths of the checkpoints that this process has written


@wrap_function("recbole.trainer.trainer", "Trainer._save_checkpoint")
def _save_checkpoint(save: Any, self: Any, *args: Any, **options: Any) -> None:
    """Write a checkpoint as RecBole's trainer does, and remember that this process has written it.

    Such a file may be unpickled later, which could run code if it came from a stranger.

    Args:
        save: RecBole's method.
        self: the trainer.
        args, options: arguments of the method.
    """
    file = options.get("saved_model_file", self.saved_model_file)
    save(self, *args, **options)
    _WRITTEN.add(os.path.realpath(file))  # such files are read without being trusted by the user


@wrap_function("recbole.trainer.trainer", "Trainer.evaluate")
@wrap_function("recbole.trainer.trainer", "Trainer.resume_checkpoint")
@wrap_function("recbole.quick_start.quick_start", "load_data_and_model")
def _unpickle_trusted(original: Any, *args: Any, trust: bool = False, **options: Any) -> Any:
    """Call a function of RecBole that reads a checkpoint, but run no code of strangers.

    The decorators let this function replace three functions of RecBole. While one of them runs,
    :func:`_load_if_trusted` replaces ``torch.load``.

    Args:
        original: RecBole's function.
        args, options: its arguments.
        trust: whether code in the checkpoint may be run.

    Returns:
        What RecBole's function returns.

    Raises:
        CheckpointError: if this process has not written the file, and ``trust`` is False.
    """
    import torch

    torch_load = torch.load
    vars(torch)["load"] = functools.partial(_load_if_trusted, torch_load, trust)
    try:
        return original(*args, **options)
    finally:
        vars(torch)["load"] = torch_load


def _load_if_trusted(torch_load: Any, trust: bool, file: Any, **options: Any) -> Any:
    """Return the content of a checkpoint if its code may be run.

    Args:
        torch_load: the function ``torch.load``.
        trust: whether the user trusts the file.
        file: path of the file; or an open file in memory, from which torch itself reads, such as
            tensors of other processes.
        options: other arguments of ``torch.load``.

    Raises:
        CheckpointError: if this process has not written the file, and the user does not trust it.
    """
    from recbole_pos.errors import CheckpointError

    if not isinstance(file, str | os.PathLike):
        return torch_load(file, **options)
    # ``_WRITTEN`` has the paths of the checkpoints that this process has written. Without
    # ``weights_only`` torch unpickles objects, which may run code.
    if trust or os.path.realpath(file) in _WRITTEN:
        return torch_load(file, weights_only=False, **options)
    raise CheckpointError(
        f"{file} was not written by this process, and loading it may run code; load a file of "
        "recbole-pos with recbole_pos.load, and one of RecBole's that you trust with trust=True"
    )


# --- when a module of RecBole is imported ---

# RecBole imports these wherever it trains, which costs 1.2 s of CPU and 70 MB in each process; only
# three metrics of ratings and RecBole's own trainer call them. Here the first call imports them.
_DEFERRED = {
    "recbole.evaluator.metrics": "sklearn.metrics",
    "recbole.utils.utils": "torch.utils.tensorboard",
}
# Importing it switches autograd's anomaly detection on for the whole process, and every model of
# RecBole imports it: all then train 20-25% slower.
_ANOMALY_MODULE = "recbole.model.sequential_recommender.sine"


class _Hook(MetaPathFinder):
    """Import hook (in ``sys.meta_path``) that changes modules of RecBole once they have run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Tell Python where a module is and how to load it; Python asks this for every import.

        Only the modules of RecBole that this file changes are answered. Such a module is found
        where Python finds it, but is loaded in another way: :func:`_execute_and_patch` runs the
        module's code, in place of the loader's ``exec_module``, and changes the module afterwards.

        Args:
            name: full name of the module that is imported.
            path: the folders to search, from the package that holds the module.
            target: unused, part of Python's interface.

        Returns:
            A spec, which is Python's description of where the module is and of its loader. None for
            any other module, so that Python asks its own finders.
        """
        is_changed = name in PATCHES or name in _DEFERRED or name == _ANOMALY_MODULE
        if not is_changed:
            return None

        spec = PathFinder.find_spec(name, path)  # Python's own answer
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            # Python will call ``exec_module`` with the new module.
            loader.exec_module = functools.partial(_execute_and_patch, loader.exec_module)
        return spec


def _execute_and_patch(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run the code of a module of RecBole that is being imported, then change it by its patches.

    A patch is a function that gets the module and changes it. Two side effects of imports are
    prevented besides: slow libraries that a module hardly uses are not imported (``_DEFERRED``),
    and torch's anomaly detection, which the model SINE switches on for the whole process, is left
    as it was, since it slows training down.

    Args:
        execute: the original ``exec_module`` of the module's loader.
        module: the new module, still empty.
    """
    import torch

    # Some modules of RecBole import functions of a slow library, and hardly ever call them. While
    # such a module runs, a stand-in takes the place of the library: ``from library import name``
    # then gives the module a function that imports the library when it is called. Afterwards the
    # stand-in is removed, so that other modules import the library itself.
    library = _DEFERRED.get(module.__name__, "")
    has_stand_in = library != "" and library not in sys.modules
    if has_stand_in:
        sys.modules[library] = _StandIn(library)
    try:
        # This context manager puts anomaly detection back, at its end, to what it was at its start.
        # Its argument would change it for the block, but is the present value.
        with torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled()):
            execute(module)
    finally:
        if has_stand_in:
            del sys.modules[library]

    for patch in PATCHES[module.__name__]:  # the module's patches; none for most modules
        patch(module)


class _StandIn(ModuleType):
    """An empty module that stands for a library, which is imported when a function is called."""

    def __getattr__(self, function_name: str) -> Callable[..., Any]:
        """Return a function that imports the library and calls its function of this name.

        Python calls this method for each name in ``from library import name``.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            library = import_module(self.__name__)
            return getattr(library, function_name)(*args, **kwargs)

        return call


def install() -> None:
    """Let every patch in this package change its module of RecBole, now or at its import.

    A patch is a function that gets a module and changes it, for example to work with today's numpy.
    ``PATCHES`` has those of each module by its name. Modules that are imported already are changed
    now. For the others an import hook is put first in ``sys.meta_path``, the list of finders that
    Python asks where a module is.
    """
    for name in PATCHES.keys() & sys.modules.keys():
        for patch in PATCHES[name]:
            patch(sys.modules[name])
    # RecBole's model SINE switches anomaly detection on when it is imported, which slows training.
    if _ANOMALY_MODULE in sys.modules:
        sys.modules["torch"].autograd.set_detect_anomaly(False)

    sys.meta_path.insert(0, _Hook())
